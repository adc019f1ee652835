"""`SequenceVerbs`: removing, sharing, keeping and moving sequences over one pool of cells."""

from __future__ import annotations

import logging

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
from kvnumba.sliding import Sliding

log = logging.getLogger(__name__)


def checked_delta(delta: object) -> int:
    """Return a change of positions as int, or raise PositionError."""
    if not is_whole(delta) or abs(int(delta)) > MAX_POS:  # type: ignore[call-overload]
        raise PositionError(f"delta {delta!r} must be a whole number within +-{MAX_POS}")
    return int(delta)  # type: ignore[call-overload]


def checked_divisor(d: object) -> int:
    """Return a divisor of positions as int, or raise PositionError."""
    if not is_whole(d) or not 1 <= d <= MAX_POS:  # type: ignore[operator]
        raise PositionError(f"divisor {d!r} must be a whole number from 1 to {MAX_POS}")
    return int(d)  # type: ignore[call-overload]


class SequenceVerbs(CellQueries):
    """The five verbs of llama.h, in its argument order.

    ``[p0, p1)`` is half-open; a negative bound means no bound. Bad arguments raise and change
    nothing.
    """

    layers: KVLayers
    guard: Guard
    sliding: Sliding
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
            False, and nothing is changed, where `refusal` has a reason; without a window never.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        s = self.cells.check_seq_id(seq_id, allow_all=True)
        p0, p1 = self.cells.check_range(p0, p1)
        with self.guard:
            self._check_none_pending()
            reason = self._refusal(s, p0, p1)
            if reason is not None:
                log.warning("seq_rm(%d, %d, %d) refused: %s", s, p0, p1, reason)
                return False
            self._changed()
            n_freed, first = self.cells.rm(s, p0, p1)
            if n_freed:
                self.placement.freed(first)
            if self.config.window:
                for of in range(self.config.n_seq_max) if s < 0 else (s,):
                    self.sliding.removed(of, p0, p1)
        return True

    def refusal(self, seq_id: int, p0: int = -1, p1: int = -1) -> str | None:
        """Return why `seq_rm` would refuse, None when it would not.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        s = self.cells.check_seq_id(seq_id, allow_all=True)
        return self._refusal(s, *self.cells.check_range(p0, p1))

    def _refusal(self, s: int, p0: int, p1: int) -> str | None:
        if not self.config.window:
            return None
        ids = range(self.config.n_seq_max) if s < 0 else (s,)
        return next(filter(None, (self.sliding.refusal(of, p0, p1) for of in ids)), None)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the cells of `src` in ``[p0, p1)``. Nothing is copied.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        WindowLostError
            If `dst` would go on where its window has been used anew.
        """
        src, dst = self.cells.check_seq_id(src), self.cells.check_seq_id(dst)
        p0, p1 = self.cells.check_range(p0, p1)
        if src == dst:
            return
        with self.guard:
            self._check_none_pending()
            lost = self.sliding.checked_copy(src, dst, p0, p1)
            self._changed()
            c = self.cells
            kernels.seq_cp_kernel(c.pos, c.seq, c.shared, src, dst, p0, p1)
            self.sliding.lost[dst] = lost
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
            self.sliding.lost[np.arange(self.config.n_seq_max) != s] = -1
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
        WindowLostError
            If a token that follows would see positions whose cells were used anew.
        """
        s, (p0, p1) = self.cells.check_seq_id(seq_id), self.cells.check_range(p0, p1)
        by = checked_delta(delta)
        if by == 0 or p0 == p1:
            return
        with self.guard:
            self._before_move(s, p0, p1, self._check_move(s, p0, p1, by, 1))
            n_freed, first = kernels.seq_add_kernel(*self.cells.state, s, p0, p1, by)
            self.search_start = int(first) if n_freed else 0

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions ``[p0, p1)`` of a sequence by `d`; K follows at the next `update`.

        Shared cells follow ``config.shared``, as in `seq_add`.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible (`d` must be at least 1).
        CannotShiftError, SharedCellError, NoSlotError, WindowLostError
            As in `seq_add`.
        """
        s, (p0, p1) = self.cells.check_seq_id(seq_id), self.cells.check_range(p0, p1)
        by = checked_divisor(d)
        if by == 1 or p0 == p1:
            return
        with self.guard:
            self._before_move(s, p0, p1, self._check_move(s, p0, p1, 0, by))
            c = self.cells
            kernels.seq_div_kernel(c.pos, c.shift, c.seq, s, p0, p1, by)

    def _check_move(self, s: int, p0: int, p1: int, delta: int, d: int) -> np.ndarray:
        """Raise what `seq_add` and `seq_div` would raise; return what the window will have lost."""
        self._check_none_pending()
        if not self.can_shift:
            raise CannotShiftError("K of this model cannot be rotated: positions must not change")
        high = self.cells.pos_bounds(s, p0, p1)[1]
        if high + delta > MAX_POS:
            raise PositionError(
                f"position {high} + {delta} is beyond {MAX_POS}; use a smaller delta"
            )
        if self.config.shared != "move":
            n = len(self.cells.shared_in_range(s, p0, p1))
            if n and self.config.shared == "refuse":
                raise SharedCellError(
                    f"{n} cells of sequence {s} in the range belong to others too; "
                    'use shared="copy" to give it cells of its own'
                )
            if n:
                self.layers.reserve(int(self.placement.find_any(n).max()) + 1)
        return self.sliding.checked_move(s, p0, p1, delta, d)

    def _before_move(self, seq_id: int, p0: int, p1: int, lost: np.ndarray) -> None:
        if self.config.shared == "copy":
            src = self.cells.shared_in_range(seq_id, p0, p1)
            if len(src):
                upkeep.split_cells(self.cells, self.layers, self.placement, seq_id, src)
        self._changed()
        self.sliding.lost[:] = lost
        self.has_shift = True  # first: an interruption must not leave shifts that nobody knows

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
