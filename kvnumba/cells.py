"""`Cells`: who owns which cell, at which position; validates and calls the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvnumba.batch import MAX_POS
from kvnumba.errors import DamagedError, PositionError, SequenceError
from kvnumba.extra_positions import ExtraPositions
from kvnumba.kernels import bits, slots
from kvnumba.kernels import cells as kernels

NO_END = MAX_POS + 1

_BROKEN = {
    1: "`used` disagrees with the sequences' bitmaps",
    2: "`shared` disagrees with the sequences' bitmaps",
    3: "an empty cell has a position",
    4: "a used cell has no position",
    5: "an empty cell has a pending shift",
    6: "an empty cell has a token",
    7: "a cell beyond the last one is used",
}


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; True and False are none here."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class Cells:
    """Metadata of `n_cells` cells and `n_seq_max` sequences, as a structure of arrays.

    Attributes
    ----------
    pos, shift, token : ndarray, shape (n_words * 64,), int32
        Position (-1: empty), pending change of position, and token id (-1: unknown) of each cell.
    seq : ndarray, shape (n_seq_max, n_words), uint64
        One bitmap over the cells per sequence: bit ``i % 64`` of word ``i // 64`` is cell ``i``.
    used, shared : ndarray, shape (n_words,), uint64
        Cells with at least one and at least two owners; follow from `seq`.
    pinned : ndarray, shape (n_words,), uint64
        Cells that the last durable commit names: neither given out nor overwritten.
    extra : ExtraPositions or None
        x and y of each cell; with several positions per token only.
    """

    def __init__(self, n_cells: int, n_seq_max: int, n_pos: int = 1):
        self.n_cells, self.n_seq_max, self.n_pos = n_cells, n_seq_max, n_pos
        n_words = bits.n_words(n_cells)
        self.pos = np.full(n_words * bits.WORD_BITS, -1, np.int32)
        self.shift = np.zeros_like(self.pos)
        self.token = np.full_like(self.pos, -1)
        self.seq = np.zeros((n_seq_max, n_words), np.uint64)
        self.used = np.zeros(n_words, np.uint64)
        self.shared = np.zeros(n_words, np.uint64)
        self.pinned = np.zeros(n_words, np.uint64)
        self.extra = ExtraPositions(self.pos) if n_pos > 1 else None

    @property
    def state(self) -> tuple[np.ndarray, ...]:
        """The arrays that kernels modify, in the kernels' order."""
        return self.pos, self.shift, self.token, self.seq, self.used, self.shared

    def check_seq_id(self, seq_id: Any, allow_all: bool = False) -> int:
        """Return `seq_id` as int.

        Raises
        ------
        SequenceError
            If it lies outside ``[0, n_seq_max)`` (and is not -1, where that means all).
        """
        if is_whole(seq_id) and (0 <= seq_id < self.n_seq_max or (allow_all and seq_id == -1)):
            return int(seq_id)
        allowed = f"[0, {self.n_seq_max})" + (" or -1 for all" if allow_all else "")
        raise SequenceError(
            f"seq_id {seq_id!r} is outside {allowed}; raise n_seq_max in CacheConfig"
        )

    @staticmethod
    def check_range(p0: Any, p1: Any) -> tuple[int, int]:
        """Return the half-open range with negative bounds resolved: 0, and no end.

        Raises
        ------
        PositionError
            If a bound is not a whole number.
        """
        for p in (p0, p1):
            if not is_whole(p):
                raise PositionError(f"position bound {p!r} is not a whole number")
        low = 0 if p0 < 0 else min(int(p0), NO_END)
        high = NO_END if p1 < 0 else min(int(p1), NO_END)
        return low, high

    def rm(self, seq_id: int, p0: int, p1: int) -> tuple[int, int]:
        """Take a sequence (-1: all) out of ``[p0, p1)``; return (cells freed, lowest of them)."""
        if seq_id < 0:
            return kernels.cells_rm_kernel(*self.state, p0, p1)
        return kernels.seq_rm_kernel(*self.state, seq_id, p0, p1)

    def place(
        self,
        where: np.ndarray,
        pos: np.ndarray,
        tokens: np.ndarray,
        id_start: np.ndarray,
        ids: np.ndarray,
        sections: np.ndarray | None = None,
    ) -> None:
        """Put tokens into the empty cells `where`; arguments as in `kvnumba.batch.Batch`."""
        kernels.place_kernel(
            self.pos, self.token, self.seq, self.used, where, pos, tokens, id_start, ids,
            self.shared,
        )  # fmt: skip
        if self.extra is not None:
            self.extra.place(where, pos, sections)

    def move(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Move what the cells `src` hold to the empty cells `dst`, and empty `src`."""
        kernels.move_cells_kernel(*self.state, src, dst)
        if self.extra is not None:
            self.extra.follow(src, dst)

    def split(self, seq_id: int, src: np.ndarray, dst: np.ndarray) -> None:
        """Let a sequence leave the shared cells `src` for the empty cells `dst`."""
        kernels.split_cells_kernel(*self.state, seq_id, src, dst)
        if self.extra is not None:
            self.extra.follow(src, dst)

    def sections(self, cells: np.ndarray) -> np.ndarray | None:
        """Return t, y, x of some cells, shape ``(3, n)``; None with one position per token."""
        return None if self.extra is None else self.extra.sections(cells)

    def pos_bounds(self, seq_id: int, p0: int = 0, p1: int = NO_END) -> tuple[int, int]:
        """Return the least and greatest position of a sequence (-1: all) in a range, or -1, -1."""
        return kernels.pos_bounds_kernel(
            self.pos, self.used if seq_id < 0 else self.seq[seq_id], p0, p1
        )

    def shared_in_range(self, seq_id: int, p0: int, p1: int) -> np.ndarray:
        """Return a sequence's cells in ``[p0, p1)`` that others own too, int32, ascending."""
        args = (self.pos, self.seq, self.shared, seq_id, p0, p1)
        out = np.empty(kernels.shared_in_range_kernel(*args, np.empty(0, np.int32)), np.int32)
        if len(out):
            kernels.shared_in_range_kernel(*args, out)
        return out

    def shifted(self) -> np.ndarray:
        """Return the used cells with a pending shift, int32, ascending."""
        out = np.empty(self.n_used, np.int32)
        return out[: kernels.shifted_kernel(self.shift, self.used, out)].copy()

    def members(self, seq_id: int) -> np.ndarray:
        """Return the cells of a sequence, int32, ascending."""
        return self.listed(self.seq[self.check_seq_id(seq_id)])

    @staticmethod
    def listed(members: np.ndarray) -> np.ndarray:
        """Return the cells of a bitmap, int32, ascending."""
        out = np.empty(bits.count_kernel(members), np.int32)
        bits.list_kernel(members, out)
        return out

    def tokens_of(self, seq_id: int) -> np.ndarray:
        """Return the token ids of a sequence in the order of their positions, int32."""
        cells = self.members(seq_id)
        return self.token[cells[np.argsort(self.pos[cells], kind="stable")]]

    @property
    def n_used(self) -> int:
        """Cells with an owner."""
        return bits.count_kernel(self.used)

    @property
    def n_tokens(self) -> int:
        """Sum over the cells of their owners."""
        return bits.count_kernel(self.seq.reshape(-1))

    @property
    def n_waiting(self) -> int:
        """Freed cells that the last durable commit still names."""
        return bits.count_kernel(self.pinned & ~self.used)

    @property
    def cell_max(self) -> int:
        """One more than the highest used cell, 0 when none is used."""
        return kernels.cell_max_kernel(self.used)

    def is_pinned(self, cells: np.ndarray) -> np.ndarray:
        """Return for each listed cell whether the last durable commit names it, bool."""
        words = self.pinned[cells >> 6]
        return (words >> (cells & 63).astype(np.uint64)) & np.uint64(1) != 0

    def find_free(self, n: int) -> np.ndarray:
        """Return the lowest free cells, int32; fewer than `n` when there are not that many."""
        out = np.empty(n, np.int32)
        return out[: slots.find_free_kernel(self.used, self.pinned, self.n_cells, out)]

    def copy(self) -> Cells:
        """Return a copy that shares nothing with this one."""
        out = Cells(self.n_cells, self.n_seq_max, self.n_pos)
        out.restore(self)
        return out

    def restore(self, other: Cells) -> None:
        """Take over the metadata of a copy; arrays stay where they are."""
        for mine, theirs in zip(self.state, other.state, strict=True):
            mine[:] = theirs
        self.pinned[:] = other.pinned
        if self.extra is not None and other.extra is not None:
            self.extra.restore(other.extra)

    def clear(self) -> None:
        """Empty every cell."""
        self.pos.fill(-1)
        self.shift.fill(0)
        self.token.fill(-1)
        self.seq.fill(0)
        self.used.fill(0)
        self.shared.fill(0)

    def rebuild(self) -> None:
        """Recompute `used` and `shared` after `seq` was filled from elsewhere."""
        kernels.rebuild_kernel(self.seq, self.used, self.shared)

    def check(self) -> None:
        """Test every invariant of the metadata.

        Raises
        ------
        DamagedError
            Names the first broken invariant and its cell.
        """
        code, cell = kernels.check_kernel(*self.state, self.n_cells)
        if code:
            raise DamagedError(f"cell {cell}: {_BROKEN[code]}")
        if self.extra is not None:
            self.extra.check()
