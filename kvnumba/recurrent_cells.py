"""`RecurrentCells`: which sequence has which cell, and where its states are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvnumba.batch import MAX_POS
from kvnumba.cells import is_whole
from kvnumba.errors import DamagedError, SequenceError
from kvnumba.kernels import recurrent as kernels
from kvnumba.kernels import recurrent_moves as moves
from kvnumba.kernels.recurrent import FIRST, KEPT, PAST, POS, RING, SRC
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.view import CacheView

_BROKEN = {
    1: "a sequence's cell does not exist",
    2: "a cell's copy source does not exist",
    3: "an empty cell holds something",
    4: "a used cell has a position below 0",
    5: "a used cell keeps no state, or more than it may",
    6: "a kept state's row does not exist",
    7: "two kept states are in one row",
    8: "the positions of kept states do not descend",
    9: "an unused entry of kept states holds something",
    10: "the newest state is not at the cell's position",
    11: "the least position is above that of a kept state",
}


class RecurrentCells:
    """Metadata of the cells: small arrays, copied as a whole for every plan and undo.

    Attributes
    ----------
    table : ndarray, shape (n_cells, 5 + 2 * depth), int32
        One line per cell, see `kvnumba.kernels.recurrent`; the other arrays are views of it.
    pos : ndarray, shape (n_cells,), int32
        Position of the last token, -1: empty cell.
    src : ndarray, shape (n_cells,), int32
        Where a cache that keeps the states in the cells themselves has this cell's state; -1:
        nowhere yet.
    first_pos, past_max : ndarray, shape (n_cells,), int32
        Least position of the tokens in the state, and the greatest one that a later token went
        back behind (-1: none did).
    n_kept : ndarray, shape (n_cells,), int32
        States kept, newest first:
    row, row_pos : ndarray, shape (n_cells, depth), int32
        the row of each, and the position after which it was taken.
    tail : ndarray, shape (n_seq_max,), int32
        The cell of each sequence, -1: none. Membership is nothing but this.
    search_start : int
        Where the search for an empty cell begins (the reference's ``head``).
    """

    def __init__(self, config: RecurrentConfig):
        assert config.n_cells is not None
        self.config, self.n_cells, self.depth = config, config.n_cells, config.depth
        self._over(
            np.full((self.n_cells, RING + 2 * self.depth), -1, np.int32),
            np.full(config.n_seq_max, -1, np.int32),
        )
        self.n_kept[:] = 0
        self.search_start = 0

    def _over(self, table: np.ndarray, tail: np.ndarray) -> None:
        self.table, self.tail = table, tail
        self.pos, self.src = table[:, POS], table[:, SRC]
        self.first_pos, self.past_max = table[:, FIRST], table[:, PAST]
        self.n_kept = table[:, KEPT]
        self.row, self.row_pos = table[:, RING : RING + self.depth], table[:, RING + self.depth :]

    @property
    def state(self) -> tuple[np.ndarray, ...]:
        """The arrays that kernels modify, in the kernels' order."""
        return self.table, self.tail

    def scratch(self) -> np.ndarray:
        """Return an int32 array of one entry per cell, for kernels that count."""
        return np.empty(self.n_cells, np.int32)

    def check_seq_id(self, seq_id: Any, allow_all: bool = False) -> int:
        """Return `seq_id` as int.

        Raises
        ------
        SequenceError
            If it lies outside ``[0, n_seq_max)`` (and is not -1, where that means all).
        """
        n = len(self.tail)
        if is_whole(seq_id) and (0 <= seq_id < n or (allow_all and seq_id == -1)):
            return int(seq_id)
        allowed = f"[0, {n})" + (" or -1 for all" if allow_all else "")
        raise SequenceError(
            f"seq_id {seq_id!r} is outside {allowed}; raise n_seq_max in RecurrentConfig"
        )

    # -- asking -------------------------------------------------------------------------------

    def ids_of(self, i: int) -> list[int]:
        """Return the sequences of a cell, ascending."""
        ids: list[int] = np.flatnonzero(self.tail == i).tolist()
        return ids

    def used_cells(self) -> list[int]:
        """Return the cells with a sequence, ascending."""
        cells: list[int] = np.unique(self.tail[self.tail >= 0]).tolist()
        return cells

    @property
    def n_used(self) -> int:
        """Cells with a sequence."""
        return len(self.used_cells())

    @property
    def n_tokens(self) -> int:
        """Sum over the cells of their sequences."""
        return int(np.count_nonzero(self.tail >= 0))

    def span(self, i: int) -> tuple[int, int]:
        """Return the least and the greatest position of the tokens in a cell's state."""
        return int(self.first_pos[i]), int(max(self.pos[i], self.past_max[i]))

    def entry_before(self, i: int, p0: int) -> int | None:
        """Return which kept state of a cell has just the tokens below `p0`; None: not kept."""
        if p0 <= self.past_max[i]:
            return None
        for j in range(int(self.n_kept[i])):
            if self.row_pos[i, j] < p0:
                return j
        return None

    def oldest_pos(self, i: int) -> int:
        """Return the least position of a cell that it can be cut back to."""
        kept = self.row_pos[i, : self.n_kept[i]]
        return int(min(kept[kept >= self.past_max[i]], default=self.pos[i]))

    def next_empty(self) -> int:
        """Return the first empty cell from `search_start` on; -1: none."""
        return int(kernels.next_empty_kernel(self.tail, self.search_start, self.scratch()))

    def name_rows(self, bits: np.ndarray) -> None:
        """Set in `bits` (uint64 bitmap) every row that a kept state is in."""
        kernels.name_rows_kernel(self.table, bits)

    # -- changing -----------------------------------------------------------------------------

    def freed(self, i: int) -> None:
        """Note that a cell became empty: the next search begins there at the latest."""
        self.search_start = min(self.search_start, i)

    def detach(self, seq_id: int) -> int:
        """Take a sequence out of its cell, which is emptied when that was its last one.

        Returns
        -------
        int
            The cell if it was emptied, else -1.
        """
        i = int(self.tail[seq_id])
        self.tail[seq_id] = -1
        if i < 0 or np.any(self.tail == i):
            return -1
        kernels.free_cell_kernel(self.table, i)
        return i

    def remove(self, i: int, ids: list[int]) -> None:
        """Take sequences out of their cell."""
        for s in ids:
            if self.detach(s) >= 0:
                self.freed(i)

    def split(self, seq_id: int) -> int:
        """Give a sequence a cell of its own, with all that its shared one keeps; return it."""
        to = self.next_empty()
        self.table[to] = self.table[self.tail[seq_id]]
        self.src[to] = to
        self.tail[seq_id] = to
        return to

    def rewind(self, i: int, j: int) -> None:
        """Make kept state `j` of a cell its newest."""
        kept = int(self.n_kept[i]) - j
        for ring in (self.row[i], self.row_pos[i]):
            ring[:kept] = ring[j : j + kept].copy()
            ring[kept:] = -1
        self.n_kept[i], self.pos[i] = kept, self.row_pos[i, 0]

    def keep(self, seq_id: int) -> None:
        """Take out all sequences but one."""
        mine = int(self.tail[seq_id])
        for s in np.flatnonzero(self.tail >= 0).tolist():
            if s != seq_id:
                self.detach(s)
        if mine != 0 or self.n_cells > 1:
            self.freed(1 if mine == 0 else 0)

    def move(self, i: int, p0: int, p1: int, delta: int, d: int, may_be_negative: bool) -> None:
        """Change the positions ``[p0, p1)`` of a cell to ``(pos + delta) // d``."""
        moves.move_positions_kernel(self.table[i], p0, p1, delta, d, may_be_negative, MAX_POS)

    def clear(self) -> None:
        """Empty every cell."""
        self.table.fill(-1)
        self.n_kept[:] = 0
        self.tail.fill(-1)
        self.search_start = 0

    def copy(self) -> RecurrentCells:
        """Return a copy that shares nothing with this one."""
        out = RecurrentCells.__new__(RecurrentCells)
        out.config, out.n_cells, out.depth = self.config, self.n_cells, self.depth
        out._over(self.table.copy(), self.tail.copy())
        out.search_start = self.search_start
        return out

    def restore(self, other: RecurrentCells) -> None:
        """Take over the metadata of a copy; arrays stay where they are."""
        for mine, theirs in zip(self.state, other.state, strict=True):
            mine[:] = theirs
        self.search_start = other.search_start

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Go through the cells in use: each with its sequences."""
        for i in self.used_cells():
            yield i, self.ids_of(i)

    def view(self, n_seq_max: int) -> CacheView:
        """Return a copy of the state, listing at most `n_seq_max` sequences per cell."""
        seq_ids = np.full((self.n_cells, n_seq_max), -1, np.int32)
        for i, ids in self:
            seq_ids[i, : len(ids)] = ids[:n_seq_max]
        used = np.isin(np.arange(self.n_cells), self.tail)
        edges = np.flatnonzero(np.diff(np.concatenate([[True], used, [True]]).astype(np.int8)))
        starts, lengths = edges[0::2], edges[1::2] - edges[0::2]
        best = int(np.argmax(lengths)) if len(lengths) else -1
        run, start = (int(lengths[best]), int(starts[best])) if best >= 0 else (0, -1)
        return CacheView(
            self.n_cells,
            n_seq_max,
            self.pos.copy(),
            seq_ids,
            self.n_tokens,
            self.n_used,
            run,
            start,
        )

    def check(self, n_rows: int, may_be_negative: bool) -> None:
        """Test every invariant.

        Raises
        ------
        DamagedError
            Names the first broken one, and its cell or sequence.
        """
        code, where = moves.check_states_kernel(
            *self.state, n_rows, may_be_negative, self.scratch()
        )
        if code:
            what = "sequence" if code == 1 else "cell"
            raise DamagedError(f"{what} {where}: {_BROKEN[code]}")
        if not 0 <= self.search_start < self.n_cells:
            raise DamagedError(f"the search would start at cell {self.search_start}")
