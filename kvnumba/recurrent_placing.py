"""`RecurrentPlacing`: from a batch to placed tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from kvnumba.admission import checked_batch, with_positions
from kvnumba.batch import Batch
from kvnumba.errors import StepError
from kvnumba.recurrent_cells import RecurrentCells
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.recurrent_rows import NamedRows, StateRows
from kvnumba.recurrent_steps import RecurrentStep, StatePlan, place_ubatch
from kvnumba.recurrent_verbs import RecurrentVerbs
from kvnumba.splitting import Ubatch, split_equal, split_seed, split_seq
from kvnumba.status import Extent
from kvnumba.steps import Steps, tried


class _Applied:
    """A step that was applied, and the cells before it."""

    def __init__(self, step: RecurrentStep, before: RecurrentCells):
        self.step, self.is_pending = step, True
        self.before: RecurrentCells | None = before

    def name_rows(self, bits: np.ndarray) -> None:
        """Set in `bits` the rows that undoing the step would bring back, or that it writes."""
        if self.before is not None:
            self.before.name_rows(bits)
        if self.is_pending:
            NamedRows(self.step.target_rows).name_rows(bits)


class RecurrentPlacing(RecurrentVerbs):
    """Finding cells and rows for the sequences of a batch, accepting or undoing that."""

    config: RecurrentConfig
    rows: StateRows
    _applied: list[_Applied]
    _version: int

    def split(
        self, batch: Batch, n_ubatch: int, sequential: bool = True, pooled: bool = False
    ) -> list[Ubatch]:
        """Split a batch into ubatches of equally long sequences, as the reference does.

        Parameters
        ----------
        batch : Batch
            With positions.
        n_ubatch : int
        sequential : bool
            Only sequences with adjacent ids in one ubatch. (Not in a batch with tokens of several
            sequences, for which the reference knows no such way.)
        pooled : bool
            Embeddings are wanted of whole sequences: no sequence is split.
        """
        if self.is_seed:
            return split_seed(batch, n_ubatch, "seq" if pooled else "equal")
        if pooled:
            return split_seq(batch, n_ubatch)
        depth = self.config.depth
        keep_tail = depth if 1 < depth < n_ubatch else 0
        sequential = sequential and not batch.is_coupled
        return split_equal(batch, n_ubatch, sequential=sequential, keep_tail=keep_tail)

    def prepare(
        self, batch: Batch | Any, n_ubatch: int | None = None, pooled: bool = False
    ) -> Steps[RecurrentStep]:
        """Split a batch, and find room for all of it; nothing is placed yet.

        Parameters
        ----------
        batch : Batch or array_like of int
            Tokens; bare token ids continue sequence 0.
        n_ubatch : int, optional
            Most tokens per step; default ``config.n_ubatch``.
        pooled : bool
            See `split`.

        Returns
        -------
        steps : Steps
            ``for step in steps: step.apply(); step.read(il); step.write(il, r, s);
            step.commit()``.

        Raises
        ------
        NoSlotError
            If not all of it fits.
        DiskFullError
            If the files cannot grow by that much.
        SequenceError, PositionError, ShapeError, StepError
            If the batch is impossible, or an earlier one is still pending.
        """
        batch, n_ubatch = checked_batch(batch, n_ubatch, self.config)
        with self.guard:
            self._check_none_pending()
            batch = with_positions(batch, self.seq_pos_max)
            return self.prepare_ubatches(batch, self.split(batch, n_ubatch, pooled=pooled))

    def prepare_ubatches(self, batch: Batch, ubatches: list[Ubatch]) -> Steps[RecurrentStep]:
        """Find room for a batch that was split by someone else.

        Parameters, returns, raises: as `prepare`; the positions are filled in already, and each
        ubatch has sequences of equal length.
        """
        with self.guard:
            self._check_none_pending()
            plans = self._plan(ubatches)
            for plan in plans:
                self.rows.reserve(plan.target_rows)
            return Steps(self, batch, ubatches, plans, self._version, RecurrentStep)

    def try_prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps[RecurrentStep]:
        """Prepare a batch; without room, return steps that are none, with the error."""
        return tried(self, batch, n_ubatch, RecurrentStep)

    def init_full(self) -> Extent:
        """Return the greatest extent of a step: all cells."""
        return Extent(0, self.cells.n_cells, self.cells.n_cells, True)

    def _plan(self, ubatches: Sequence[Ubatch]) -> list[StatePlan]:
        """Place every ubatch on trial, on copies, each as if the ones before were accepted."""
        cells, plans = self.cells.copy(), []
        for ubatch in ubatches:
            holders = (self.cells, cells)
            plans.append(place_ubatch(cells, self.rows, ubatch, holders, self.is_seed))
            self._pass_over(cells, ubatch)
        return plans

    def _pass_over(self, cells: RecurrentCells, ubatch: Ubatch) -> None:
        """Let the next search begin behind an accepted ubatch, by the tokens, as it once was."""
        if self.is_seed:
            start = cells.search_start + ubatch.n_tokens
            cells.search_start = start if start < cells.n_cells else 0

    def _apply(self, step: RecurrentStep) -> int:
        with self.guard:
            self._check_version(step.version)
            earlier = list(takewhile(lambda s: s is not step, step._steps))
            if any(s.state not in ("applied", "committed") for s in earlier):
                raise StepError("a state goes on from the one before: apply the steps in order")
            applied = self._applied if earlier else []  # an earlier batch is final from here on
            cells = self.cells.copy()
            plan = place_ubatch(cells, self.rows, step.ubatch, [cells, *applied], self.is_seed)
            self.rows.reserve(plan.target_rows)
            self._version += 1  # first: an interruption must not leave stale plans that look good
            step.plan = plan
            self._applied = [*applied, _Applied(step, self.cells.copy())]
            self.cells.restore(cells)
            return self._version

    def _accept(self, step: RecurrentStep) -> None:
        with self.guard:
            self._check_pending(step)
            (n,) = (n for n, a in enumerate(self._applied) if a.step is step)
            self._applied[n].is_pending = False
            if n:
                self._applied[n].before = None  # from here on only the whole batch can be undone
            if n == len(self._applied) - 1:
                self._pass_over(self.cells, step.ubatch)

    def _undo(self, steps: Sequence[RecurrentStep]) -> int:
        with self.guard:
            n = len(self._applied) - len(steps)
            if n < 0 or any(a.step is not s for a, s in zip(self._applied[n:], steps, strict=True)):
                raise StepError("roll the later steps of this batch back first")
            before = self._applied[n].before
            if before is None:
                raise StepError("a committed step can only be rolled back with its whole batch")
            self._version += 1
            self.cells.restore(before)
            del self._applied[n:]
            return self._version

    def _check_version(self, version: int) -> None:
        if version != self._version:
            raise StepError("the cache was changed since this batch was prepared; prepare it again")

    def _check_pending(self, step: RecurrentStep) -> None:
        if not any(a.step is step and a.is_pending for a in self._applied):
            raise StepError(
                "this step's tokens are no longer pending: the cache was committed, rolled back or "
                "cleared meanwhile"
            )

    @property
    def n_pending(self) -> int:
        """Tokens placed but neither accepted nor undone."""
        return sum(a.step.n_tokens for a in self._applied if a.is_pending)

    def _check_none_pending(self) -> None:
        if self.n_pending:
            raise StepError(
                f"{self.n_pending} placed tokens are pending; commit or roll them back first"
            )

    def _changed(self) -> None:
        self._version += 1
        self._applied = []

    def commit(self) -> None:
        """Accept all pending tokens."""
        for applied in list(self._applied):
            if applied.is_pending:
                applied.step.commit()

    def rollback(self) -> None:
        """Undo all pending tokens, the last ones first.

        Raises
        ------
        StepError
            If a later step was committed before an earlier one: the states of one go on from the
            other's. Roll the whole batch back then (`Steps.rollback`).
        """
        is_pending = [applied.is_pending for applied in self._applied]
        if is_pending != sorted(is_pending):
            raise StepError("a later step is committed already; roll the whole batch back")
        for applied in reversed(list(self._applied)):
            if applied.is_pending:
                applied.step.rollback()
