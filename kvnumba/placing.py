"""`TokenPlacing`: from a batch to placed tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvnumba.admission import checked_batch, with_positions
from kvnumba.batch import Batch, int32_array, pack_ids
from kvnumba.batch_rules import split_sections
from kvnumba.errors import ShapeError, StepError
from kvnumba.extra_positions import check_sections
from kvnumba.kernels import cells as kernels
from kvnumba.splitting import Ubatch, split_simple
from kvnumba.status import Extent
from kvnumba.steps import Steps, tried
from kvnumba.unified_steps import UnifiedStep
from kvnumba.verbs import SequenceVerbs

_NO_CELLS = np.empty(0, np.int32)


class TokenPlacing(SequenceVerbs):
    """Finding cells for tokens, giving them out, accepting or undoing that."""

    _last_step: UnifiedStep | None

    def _update(self) -> bool:
        """Do deferred work; return whether there was any."""
        raise NotImplementedError

    def find_slot(self, n_tokens: int, contiguous: bool | None = None) -> np.ndarray:
        """Find free cells; they stay free.

        Parameters
        ----------
        n_tokens : int
            Cells wanted.
        contiguous : bool, optional
            One run of adjacent cells, or any. Default: the reference's circular search with
            ``placement="ring"`` (which moves `search_start`, on failure too), else any.

        Returns
        -------
        cells : ndarray, shape (n_tokens,), int32, ascending

        Raises
        ------
        CacheFullError
            If the cache has fewer cells than that: it can never fit.
        NoSlotError
            If that many are not free now; says how many wait for a session commit.
        """
        n = self.placement.checked_count(n_tokens)
        with self.guard:
            if contiguous is None and self.placement.is_ring:
                return self.placement.find_ring(n)
            return self.placement.find_run(n) if contiguous else self.placement.find_any(n)

    def place(self, cells: Any, pos: Any, seq_ids: Any, tokens: Any = None) -> None:
        """Put tokens into free cells; they are pending until `commit` or `rollback`.

        Parameters
        ----------
        cells : array_like of int, shape (n_tokens,)
            Free cells, each named once, for example from `find_slot`.
        pos : array_like of int, shape (n_tokens,) or (n_pos, n_tokens)
        seq_ids : int, sequence of int, or sequence of sequences of int
            As in `Batch`.
        tokens : array_like of int, shape (n_tokens,), optional
            Token ids; default: unknown.

        Raises
        ------
        ShapeError, PositionError, SequenceError, NoSlotError
            If an argument is impossible or a cell is not free.
        """
        where = int32_array(cells, "cells")
        new_pos, sections = split_sections(pos, len(where))
        check_sections(sections, self.config.n_pos)
        id_start, ids = pack_ids(seq_ids, len(where))
        self._check_ids(ids)
        new_tokens = np.full(len(where), -1, np.int32)
        if tokens is not None:
            new_tokens = int32_array(tokens, "tokens")
            if len(new_tokens) != len(where):
                raise ShapeError(f"{len(new_tokens)} tokens for {len(where)} cells")
        with self.guard:
            self.placement.check_free(where)
            self.layers.reserve(int(where.max(initial=-1)) + 1)
            self.cells.place(where, new_pos, new_tokens, id_start, ids, sections)
            if len(where):
                self._pending.append(where)
            self._version += 1

    def _check_ids(self, ids: np.ndarray) -> None:
        for s in (ids.min(initial=0), ids.max(initial=0)):
            self.cells.check_seq_id(int(s))

    def commit(self) -> None:
        """Accept all pending tokens."""
        with self.guard:
            for cells in list(self._pending):
                self._accept_cells(cells)

    def rollback(self) -> None:
        """Empty the cells of all pending tokens."""
        with self.guard:
            if self._last_step is not None and self._last_step.plan.taken.size:
                raise StepError("cells were used anew: roll the steps back, the last one first")
            if self._pending:
                self._drop(np.concatenate(self._pending))

    def _check_pending(self, step: UnifiedStep) -> None:
        self._check_pending_cells(step.cells)

    def _check_pending_cells(self, cells: np.ndarray) -> None:
        if not any(p is cells for p in self._pending):
            raise StepError(
                "this step's tokens are no longer pending: the cache was committed, rolled back or "
                "cleared meanwhile"
            )

    def _accept(self, step: UnifiedStep) -> None:
        self._accept_cells(step.cells)

    def _accept_cells(self, cells: np.ndarray) -> None:
        with self.guard:
            self._check_pending_cells(cells)
            self._pending = [p for p in self._pending if p is not cells]
            self.placement.accepted(cells)

    def _apply(self, step: UnifiedStep) -> int:
        with self.guard:
            self._check_version(step.version)
            if step.plan.taken.size:
                step.overwritten = self.sliding.save(step.plan, self.layers)
            self._changed()  # batches prepared beside this one may have planned the same cells
            self.placement.began(step.cells)
            self.sliding.place(step.plan, step.ubatch)
            if len(step.cells):
                self._pending.append(step.cells)
            self._last_step = step
            return self._version

    def _undo(self, steps: Sequence[UnifiedStep]) -> int:
        with self.guard:
            first = next((n for n, s in enumerate(steps) if s.overwritten is not None), len(steps))
            if first < len(steps) and steps[-1] is not self._last_step:
                raise StepError("cells were used anew: roll the steps back, the last one first")
            for step in reversed(steps[first:]):
                if step.overwritten is not None:
                    self.sliding.bring_back(step.overwritten, self.layers)
            self._forget(steps[first:])
            self._drop(np.concatenate([s.cells for s in steps[:first]] or [_NO_CELLS]))
            self._last_step = steps[0]._steps.last_before(steps)
            return self._version

    def _forget(self, steps: Sequence[UnifiedStep]) -> None:
        """Take steps whose cells are free again off the list of what is pending."""
        self._pending = [p for p in self._pending if not any(p is s.cells for s in steps)]

    def _drop(self, cells: np.ndarray) -> None:
        self._changed()
        kernels.drop_cells_kernel(*self.cells.state, cells)
        gone = set(cells.tolist())
        self._pending = [p for p in self._pending if int(p[0]) not in gone]
        if len(cells):
            self.placement.freed(int(cells.min()))

    def _check_version(self, version: int) -> None:
        if version != self._version:
            raise StepError("the cache was changed since this batch was prepared; prepare it again")

    def prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps[UnifiedStep]:
        """Apply pending updates, split a batch, and find cells for all of it.

        Parameters
        ----------
        batch : Batch or array_like of int
            Tokens; bare token ids continue sequence 0.
        n_ubatch : int, optional
            Most tokens per step; default ``config.n_ubatch``.

        Returns
        -------
        steps : Steps
            ``for step in steps: step.apply(); step.write(...); step.attend(...); step.commit()``.

        Raises
        ------
        NoSlotError, CacheFullError
            If not all of it fits: nothing is placed. (Deferred work that was asked for before, a
            shift or a defragmentation, may have been done.)
        DiskFullError
            If the files cannot grow by that much.
        SequenceError, PositionError, ShapeError, StepError
            If the batch is impossible, or an earlier one is still pending.
        """
        batch, n_ubatch = checked_batch(batch, n_ubatch, self.config)
        with self.guard:
            if not self.config.window:  # what can never fit is said before what may pass
                self.placement.checked_count(batch.n_tokens)
            self._check_none_pending()
            batch = with_positions(batch, self.seq_pos_max, self.config.n_pos)
            return self.prepare_ubatches(batch, split_simple(batch, n_ubatch))

    def prepare_ubatches(self, batch: Batch, ubatches: list[Ubatch]) -> Steps[UnifiedStep]:
        """Apply pending updates, and find cells for a batch that was split by someone else.

        Parameters, returns, raises: as `prepare`; the positions are filled in already.
        """
        n_tokens = [u.n_tokens for u in ubatches]
        # With a window the cells of a batch's first part may serve its last one.
        n_at_once = max(n_tokens, default=0) if self.config.window else sum(n_tokens)
        self.placement.checked_count(n_at_once)
        with self.guard:
            self._check_none_pending()
            if not (self.placement.is_ring or self.config.window):
                self.placement.check_limit(sum(n_tokens))  # before the deferred work
            self._update()
            if self.config.window and sum(n_tokens) > self.placement.n_free:
                plans = self.sliding.plan(self.placement, ubatches)
            else:
                self.sliding.check_sight(batch)
                plans = self.placement.plan(n_tokens)
            self.layers.reserve(max((int(s.cells.max()) + 1 for s in plans), default=0))
            return Steps(self, batch, ubatches, plans, self._version, UnifiedStep)

    def try_prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps[UnifiedStep]:
        """Prepare a batch; without room, return steps that are none.

        Returns
        -------
        steps : Steps
            Its `status` is FAILED_PREPARE where `prepare` would raise NoSlotError, which is then
            ``steps.error``.
        """
        return tried(self, batch, n_ubatch, UnifiedStep)

    def init_full(self) -> Extent:
        """Return the greatest extent of a step: all cells."""
        n = self.cells.n_cells
        return Extent(0, n, n, True)
