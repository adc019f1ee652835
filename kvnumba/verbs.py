"""`SequenceVerbs`: removing, sharing, keeping and moving sequences over one pool of cells."""

from __future__ import annotations

import numpy as np

from kvnumba import upkeep
from kvnumba.batch import MAX_POS
from kvnumba.cells import is_whole
from kvnumba.errors import CannotShiftError, PositionError, SharedCellError, StepError
from kvnumba.guard import Guard
from kvnumba.kernels import cells as kernels
from kvnumba.kernels.bits import _next_clear
from kvnumba.layers import KVLayers
from kvnumba.queries import CellQueries


class SequenceVerbs(CellQueries):
    """The five verbs of llama.h, in its argument order.

    ``[p0, p1)`` is half-open; a negative bound means no bound. Bad arguments raise and change
    nothing.
    """

    layers: KVLayers
    guard: Guard
    has_shift: bool
    _pending: list[np.ndarray]
    _version: int

    @property
    def search_start(self) -> int:
        """Where ring placement begins its next search (the reference's ``head``)."""
        return self.placement.search_start

    @search_start.setter
    def search_start(self, cell: int) -> None:
        self.placement.search_start = int(cell)

    @property
    def can_shift(self) -> bool:
        """Whether positions may change after the fact."""
        return self.config.can_shift

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens ``[p0, p1)`` of a sequence (-1: of all).

        Returns
        -------
        bool
            True: a unified cache can always remove.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        s, (p0, p1) = (
            self.cells.check_seq_id(seq_id, allow_all=True),
            self.cells.check_range(p0, p1),
        )
        with self.guard:
            self._check_none_pending()
            self._changed()
            n_freed, first = self.cells.rm(s, p0, p1)
            if n_freed:
                self.placement.freed(first)
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the cells of `src` in ``[p0, p1)``. Nothing is copied.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        src, dst = self.cells.check_seq_id(src), self.cells.check_seq_id(dst)
        p0, p1 = self.cells.check_range(p0, p1)
        if src == dst:
            return
        with self.guard:
            self._check_none_pending()
            self._changed()
            c = self.cells
            kernels.seq_cp_kernel(c.pos, c.seq, c.shared, src, dst, p0, p1)
            self.search_start = 0

    def seq_keep(self, seq_id: int) -> None:
        """Remove everything but one sequence.

        Raises
        ------
        SequenceError
            If the id is impossible.
        """
        s = self.cells.check_seq_id(seq_id)
        with self.guard:
            self._check_none_pending()
            self._changed()
            kernels.seq_keep_kernel(*self.cells.state, s)
            row = self.cells.seq[s]
            first = _next_clear(row, row, 0, self.cells.n_cells)
            if first < self.cells.n_cells:
                self.placement.freed(first)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions ``[p0, p1)`` of a sequence; K follows at the next `update`.

        Tokens whose position becomes negative are removed. Cells that other sequences hold too
        follow ``config.shared``: all move, the call is refused, or this sequence gets copies.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible, or a position would leave ``[0, 2**31 - 2]``.
        CannotShiftError
            If this cache cannot rotate K.
        SharedCellError, NoSlotError
            ``shared="refuse"``; ``shared="copy"`` and not enough free cells.
        """
        s, (p0, p1) = self.cells.check_seq_id(seq_id), self.cells.check_range(p0, p1)
        if not is_whole(delta) or abs(int(delta)) > MAX_POS:
            raise PositionError(f"delta {delta!r} must be a whole number within +-{MAX_POS}")
        if delta == 0 or p0 == p1:
            return
        with self.guard:
            high = self.cells.pos_bounds(s, p0, p1)[1]
            if high + int(delta) > MAX_POS:
                raise PositionError(
                    f"position {high} + {delta} is beyond {MAX_POS}; use a smaller delta"
                )
            self._before_shift(s, p0, p1)
            self.has_shift = True  # first: an interruption must not leave shifts that nobody knows
            n_freed, first = kernels.seq_add_kernel(*self.cells.state, s, p0, p1, int(delta))
            self.search_start = int(first) if n_freed else 0

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions ``[p0, p1)`` of a sequence by `d`; K follows at the next `update`.

        Shared cells follow ``config.shared``, as in `seq_add`.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible (`d` must be at least 1).
        CannotShiftError, SharedCellError, NoSlotError
            As in `seq_add`.
        """
        s, (p0, p1) = self.cells.check_seq_id(seq_id), self.cells.check_range(p0, p1)
        if not is_whole(d) or not 1 <= d <= MAX_POS:
            raise PositionError(f"divisor {d!r} must be a whole number from 1 to {MAX_POS}")
        if d == 1 or p0 == p1:
            return
        with self.guard:
            self._before_shift(s, p0, p1)
            c = self.cells
            self.has_shift = True
            kernels.seq_div_kernel(c.pos, c.shift, c.seq, s, p0, p1, int(d))

    def _before_shift(self, seq_id: int, p0: int, p1: int) -> None:
        self._check_none_pending()
        if not self.can_shift:
            raise CannotShiftError("K of this model cannot be rotated: positions must not change")
        if self.config.shared != "move":
            src = self.cells.shared_in_range(seq_id, p0, p1)
            if len(src) and self.config.shared == "refuse":
                raise SharedCellError(
                    f"{len(src)} cells of sequence {seq_id} in the range belong to others too; "
                    'use shared="copy" to give it cells of its own'
                )
            if len(src):
                upkeep.split_cells(self.cells, self.layers, self.placement, seq_id, src)
        self._changed()

    @property
    def n_pending(self) -> int:
        """Cells placed but neither accepted nor undone."""
        return sum(map(len, self._pending))

    def _check_none_pending(self) -> None:
        if self._pending:
            raise StepError(
                f"{self.n_pending} placed tokens are pending; commit or roll them back first"
            )

    def _changed(self) -> None:
        self._version += 1
