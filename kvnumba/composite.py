"""`CompositeCache`: several memories that hold the same tokens and act as one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from kvnumba.admission import checked_batch, with_positions
from kvnumba.batch import Batch
from kvnumba.cells import Cells, is_whole
from kvnumba.errors import (
    ConfigError,
    DamagedError,
    NoSlotError,
    SequenceError,
    StepError,
)
from kvnumba.guard import Guard
from kvnumba.memory import Memory
from kvnumba.splitting import Ubatch
from kvnumba.status import Extent
from kvnumba.steps import Step, Steps, tried

log = logging.getLogger(__name__)


class CompositeStep(Step):
    """One ubatch in all parts. Layers are numbered as in the model.

    Attributes
    ----------
    parts : tuple of Step or None
        The same ubatch in each part; None in a part that has none of its tokens.
    """

    plan: tuple[Step | None, ...]

    @property
    def parts(self) -> tuple[Step | None, ...]:
        """The same ubatch in each part."""
        return self.plan

    @property
    def involved(self) -> list[Step]:
        """The parts' steps that have tokens of this ubatch."""
        return [part for part in self.plan if part is not None]

    def of_layer(self, il: int) -> tuple[Any, int]:
        """Return the part's step that has layer `il` of the model, and its number there."""
        part, local = self._steps.cache.route(il)
        return self.plan[part], local

    def write(self, il: int, *rows: Any) -> None:
        """Store K and V, or r and s, of layer `il`; as the part's step."""
        self._expect("applied", "write")
        step, local = self.of_layer(il)
        try:
            step.write(local, *rows)
        except ConfigError as error:
            raise ConfigError(f"layer {il} is layer {local} of its part: {error}") from None

    def attend(self, il: int, q: np.ndarray, *args: Any, **options: Any) -> np.ndarray:
        """Attend in layer `il`; as the part's step."""
        self._expect("applied", "attend")
        step, local = self.of_layer(il)
        if not hasattr(step, "attend"):
            raise ConfigError(f"layer {il} is recurrent: read its state instead")
        out: np.ndarray = step.attend(local, q, *args, **options)
        return out

    def read(self, il: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the states r and s of recurrent layer `il`; as the part's step."""
        self._expect("applied", "read")
        step, local = self.of_layer(il)
        if not hasattr(step, "read"):
            raise ConfigError(f"layer {il} has no state: attend to it instead")
        states: tuple[np.ndarray, np.ndarray] = step.read(local)
        return states

    @property
    def n_seqs(self) -> int:
        """Sequences (or groups of them) of the ubatch."""
        return self.ubatch.n_seqs

    @property
    def n_seq_tokens(self) -> int:
        """Tokens of each of them."""
        return self.ubatch.n_seq_tokens

    @property
    def extent(self) -> Extent:
        """The extent of the first part."""
        extent: Extent = self.involved[0].extent  # type: ignore[attr-defined]
        return extent


class CompositeCache:
    """Base of the caches with parts. A call happens in all parts or in none.

    Attributes
    ----------
    parts : tuple of Memory
    part_names : tuple of str
    guard : Guard
        Entered by every change: one thread, one process.
    """

    part_names: ClassVar[tuple[str, ...]] = ()
    config: Any

    def _set_up(self, config: Any, parts: Sequence[Any], route: Sequence[tuple[int, int]]) -> None:
        self.config, self.parts = config, tuple(parts)
        self.guard = Guard()
        self._route = list(route)
        self._version = 0
        self._pending: list[CompositeStep] = []
        self._last_step: CompositeStep | None = None

    def route(self, il: int) -> tuple[int, int]:
        """Return the part that has layer `il` of the model, and its number there."""
        if not is_whole(il) or not 0 <= il < len(self._route):
            raise ConfigError(f"layer {il!r} is outside [0, {len(self._route)})")
        return self._route[int(il)]

    # -- placing ------------------------------------------------------------------------------

    def _splits(self, batch: Batch, n_ubatch: int) -> Iterator[list[Ubatch]]:
        """Yield ways to split a batch, the preferred one first."""
        raise NotImplementedError

    def prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps[CompositeStep]:
        """Apply pending updates, split a batch, and find room for all of it in every part.

        Parameters
        ----------
        batch : Batch or array_like of int
            Tokens; bare token ids continue sequence 0.
        n_ubatch : int, optional
            Most tokens per step; default ``config.n_ubatch``.

        Raises
        ------
        NoSlotError, CacheFullError
            If not all of it fits in every part: nothing is placed in any.
        SequenceError, PositionError, ShapeError, StepError
            If the batch is impossible, or an earlier one is still pending.
        """
        batch, n = checked_batch(batch, n_ubatch, self.config)
        with self.guard:
            self._check_none_pending()
            batch = with_positions(batch, self.seq_pos_max, self.config.n_pos)
            error: NoSlotError | None = None
            for ubatches in self._splits(batch, n):
                try:
                    return self.prepare_ubatches(batch, ubatches)
                except NoSlotError as e:
                    error = error or e
            assert error is not None
            raise error

    def prepare_ubatches(self, batch: Batch, ubatches: list[Ubatch]) -> Steps[CompositeStep]:
        """Find room for a batch that was split by someone else; see `prepare`."""
        with self.guard:
            self._check_none_pending()
            parts = [part.prepare_ubatches(batch, ubatches) for part in reversed(self.parts)]
            plans = list(zip(*reversed(parts), strict=True))
            return Steps(self, batch, ubatches, plans, self._version, CompositeStep)

    def try_prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps[CompositeStep]:
        """Prepare a batch; without room, return steps that are none, with the error."""
        return tried(self, batch, n_ubatch, CompositeStep)

    def init_full(self) -> Extent:
        """Return the greatest extent of a step in the first part."""
        extent: Extent = self.parts[0].init_full()
        return extent

    def _apply(self, step: CompositeStep) -> int:
        with self.guard:
            self._check_version(step.version)
            applied: list[Step] = []
            try:
                for part in step.involved:  # one by one: those done are undone on an error
                    applied.append(part.apply())  # noqa: PERF401
            except BaseException:
                for part in reversed(applied):
                    part.rollback()
                raise
            self._version += 1
            self._pending.append(step)
            self._last_step = step
            return self._version

    def _accept(self, step: CompositeStep) -> None:
        with self.guard:
            self._check_pending(step)
            for part in step.involved:
                part.commit()
            self._pending.remove(step)

    def _undo(self, steps: Sequence[CompositeStep]) -> int:
        with self.guard:
            if steps[-1] is not self._last_step:
                raise StepError("roll the later steps of this batch back first")
            for part in range(len(self.parts)):
                done = [p for s in steps if (p := s.parts[part]) is not None]
                if done:
                    done[0]._steps.undo(done)
            self._version += 1
            self._pending = [s for s in self._pending if s not in steps]
            self._last_step = steps[0]._steps.last_before(steps)
            return self._version

    def _check_pending(self, step: CompositeStep) -> None:
        if step not in self._pending:
            raise StepError(
                "this step's tokens are no longer pending: the cache was committed, rolled back or "
                "cleared meanwhile"
            )

    def _check_version(self, version: int) -> None:
        if version != self._version:
            raise StepError("the cache was changed since this batch was prepared; prepare it again")

    def _check_none_pending(self) -> None:
        n = sum(s.n_tokens for s in self._pending)
        if n:
            raise StepError(f"{n} placed tokens are pending; commit or roll them back first")

    def commit(self) -> None:
        """Accept all pending tokens."""
        for step in list(self._pending):
            step.commit()

    def rollback(self) -> None:
        """Undo all pending tokens, the last ones first."""
        for step in reversed(list(self._pending)):
            step.rollback()

    # -- the verbs ----------------------------------------------------------------------------

    def _check_seq_id(self, seq_id: Any, allow_all: bool = False) -> int:
        n = self.config.n_seq_max
        if is_whole(seq_id) and (0 <= seq_id < n or (allow_all and seq_id == -1)):
            return int(seq_id)
        allowed = f"[0, {n})" + (" or -1 for all" if allow_all else "")
        raise SequenceError(f"seq_id {seq_id!r} is outside {allowed}; raise n_seq_max")

    def _removals(self, s: int, p0: int, p1: int) -> Iterator[tuple[int, int, int]]:
        """Yield what a removal asks of every part: sequence (-1: all) and range.

        All sequences at once where that can be: those that share a state then still do.
        """
        yield s, p0, p1

    def refusal(self, seq_id: int, p0: int = -1, p1: int = -1) -> str | None:
        """Return why `seq_rm` would refuse, None when it would not.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        s, (p0, p1) = self._check_seq_id(seq_id, allow_all=True), Cells.check_range(p0, p1)
        for of, low, high in self._removals(s, p0, p1):
            for name, part in zip(self.part_names, self.parts, strict=True):
                reason: str | None = part.refusal(of, low, high)
                if reason is not None:
                    return f"{name}: {reason}"
        return None

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens ``[p0, p1)`` of a sequence (-1: of all) from all parts, or from none.

        Returns
        -------
        bool
            False, and nothing is changed, where `refusal` has a reason.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        s, (p0, p1) = self._check_seq_id(seq_id, allow_all=True), Cells.check_range(p0, p1)
        with self.guard:
            self._check_none_pending()
            reason = self.refusal(s, p0, p1)
            if reason is not None:
                log.warning("seq_rm(%d, %d, %d) refused: %s", s, p0, p1, reason)
                return False
            self._version += 1
            for of, low, high in self._removals(s, p0, p1):
                for part in self.parts:
                    if not part.seq_rm(of, low, high):
                        raise DamagedError("a part refused what it had agreed to")
        return True

    def seq_keep(self, seq_id: int) -> None:
        """Remove everything but one sequence."""
        s = self._check_seq_id(seq_id)
        with self.guard:
            self._check_none_pending()
            self._version += 1
            for part in self.parts:
                part.seq_keep(s)

    @property
    def can_shift(self) -> bool:
        """Whether positions may change after the fact, in all parts."""
        return all(part.can_shift for part in self.parts)

    def seq_pos_min(self, seq_id: int) -> int:
        """Return the least held position that all parts can be cut back to, -1 when empty."""
        s = self._check_seq_id(seq_id)
        return max(int(part.seq_pos_min(s)) for part in self.parts)

    def seq_pos_max(self, seq_id: int) -> int:
        """Return the position of the last token, -1 when the sequence is empty."""
        return int(self.parts[0].seq_pos_max(self._check_seq_id(seq_id)))

    def clear(self, data: bool = False) -> None:
        """Empty all parts, pending tokens too; with `data` also give their memory back."""
        with self.guard:
            self._version += 1
            self._pending.clear()
            self._last_step = None
            for part in self.parts:
                part.clear(data)

    def update(self) -> bool:
        """Do the deferred work of all parts; return whether there was any."""
        with self.guard:
            self._check_none_pending()
            done = [part.update() for part in self.parts]
            if any(done):
                self._version += 1
            return any(done)

    def check(self) -> None:
        """Test every invariant of the parts, and that they end at the same positions.

        Raises
        ------
        DamagedError
            Names the first broken one.
        """
        for part in self.parts:
            part.check()
        for s in range(self.config.n_seq_max):
            ends = [part.seq_pos_max(s) for part in self.parts]
            if len(set(ends)) > 1:
                raise DamagedError(f"sequence {s} ends at {ends} in {self.part_names}")

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows of all parts."""
        return sum(int(part.size_bytes) for part in self.parts)

    def close(self) -> None:
        """Let go of memory and files of all parts."""
        with self.guard:
            for part in self.parts:
                part.close()

    def __enter__(self) -> CompositeCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


__all__ = ["CompositeCache", "CompositeStep", "Memory"]
