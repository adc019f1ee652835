"""`Placement`: which free cells new tokens get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvnumba.cells import Cells, is_whole
from kvnumba.config import CacheConfig
from kvnumba.errors import CacheFullError, NoSlotError, ShapeError
from kvnumba.kernels import slots

_NONE = np.empty(0, np.int32)


class Slot(NamedTuple):
    """Where the tokens of one ubatch go.

    Attributes
    ----------
    cells : ndarray, shape (n_tokens,), int32
        The cell of each token.
    taken : ndarray, int32
        Those among them that are in use still and will be freed first (see `kvnumba.sliding`).
    """

    cells: np.ndarray
    taken: np.ndarray = _NONE


class Placement:
    """Finds free cells in the way that ``config.placement`` says; occupies none.

    Attributes
    ----------
    search_start : int
        Where the circular search of ``placement="ring"`` begins. As in the reference, searching
        moves it, on failure too.
    """

    def __init__(self, config: CacheConfig, cells: Cells):
        self._config, self._cells = config, cells
        self.search_start = 0

    @property
    def is_ring(self) -> bool:
        """Whether slots are contiguous runs, found by the reference's search."""
        return self._config.placement == "ring"

    @property
    def n_free(self) -> int:
        """Cells that may still be given out: limited by ``n_ctx``, and never pinned ones."""
        c = self._cells
        return int(min(self._config.n_ctx - c.n_used, c.n_cells - c.n_used - c.n_waiting))

    def checked_count(self, n_tokens: Any) -> int:
        """Return `n_tokens` as int.

        Raises
        ------
        ShapeError, CacheFullError
            If it is no count, or more than ``n_ctx``.
        """
        if not is_whole(n_tokens) or n_tokens < 0:
            raise ShapeError(f"n_tokens {n_tokens!r} must be a whole number of at least 0")
        if n_tokens > self._config.n_ctx:
            raise CacheFullError(
                f"{n_tokens} cells wanted, the cache has {self._config.n_ctx}: it can never fit; "
                "raise n_ctx or split the batch",
                int(n_tokens),
                self.n_free,
            )
        return int(n_tokens)

    def no_slot(self, n: int, what: str) -> NoSlotError:
        """Return the error for `n` cells that cannot be had now."""
        n_free, n_waiting = self.n_free, self._cells.n_waiting
        message = f"{n} {what} cells wanted, {n_free} are free"
        if n_waiting:
            message += f" and {n_waiting} freed ones wait for a session commit"
        return NoSlotError(f"{message}; remove tokens first", n, n_free, n_waiting)

    def check_limit(self, n: int) -> None:
        """Raise NoSlotError when fewer than `n` cells may still be given out."""
        if n > self.n_free:
            raise self.no_slot(n, "free")

    def check_free(self, where: np.ndarray) -> None:
        """Test that the listed cells exist, are free, and are named once each.

        Raises
        ------
        ShapeError, NoSlotError
            If one is not.
        """
        c = self._cells
        if len(np.unique(where)) != len(where):
            raise ShapeError("a cell is named twice")
        if where.min(initial=0) < 0 or where.max(initial=0) >= c.n_cells:
            raise ShapeError(f"cells are 0 to {c.n_cells - 1}, got {where.min()} to {where.max()}")
        self.check_limit(len(where))
        taken = where[(c.pos[where] >= 0) | c.is_pinned(where)]
        if len(taken):
            raise NoSlotError(f"cell {taken[0]} is not free; ask find_slot for free ones")

    def find_any(self, n: int) -> np.ndarray:
        """Return the `n` lowest free cells, int32, or raise NoSlotError."""
        self.check_limit(n)
        cells = self._cells.find_free(n)
        if len(cells) < n:
            raise self.no_slot(n, "free")
        return cells

    def find_run(self, n: int) -> np.ndarray:
        """Return the lowest run of `n` free cells, int32, or raise NoSlotError."""
        c = self._cells
        self.check_limit(n)
        start = slots.find_run_kernel(c.used, c.pinned, c.n_cells, n) if n else 0
        if start < 0:
            raise self.no_slot(n, "adjacent")
        return np.arange(start, start + n, dtype=np.int32)

    def find_ring(self, n: int) -> np.ndarray:
        """Return the run of `n` free cells that the circular search finds, or raise NoSlotError."""
        c = self._cells
        if n == 0:
            return np.empty(0, np.int32)
        found, start = slots.find_ring_kernel(
            c.used, c.pinned, c.n_cells, c.n_used, n, self.search_start
        )
        self.search_start = int(start)
        if not found or n > self.n_free:
            raise self.no_slot(n, "adjacent")
        return np.arange(start, start + n, dtype=np.int32)

    def plan(self, n_tokens: Sequence[int]) -> list[Slot]:
        """Find free cells for every ubatch of a batch, on trial.

        Parameters
        ----------
        n_tokens : sequence of int
            Tokens of each ubatch.

        Raises
        ------
        NoSlotError
            If not all of it fits; the cells are as before.
        """
        if not n_tokens:
            return []
        if not self.is_ring:
            cells = self.find_any(sum(n_tokens))
            ends = np.cumsum(n_tokens, dtype=np.int64)[:-1]
            return [Slot(part) for part in np.split(cells, ends)]
        start, used = self.search_start, self._cells.used.copy()
        found = []
        try:
            for n in n_tokens:
                cells = self.find_ring(n)
                found.append(Slot(cells))
                words = cells >> 6
                bits = np.uint64(1) << (cells & 63).astype(np.uint64)
                np.bitwise_or.at(self._cells.used, words, bits)
                self.search_start = (int(cells[-1]) + 1) % self._cells.n_cells
        finally:
            self._cells.used[:] = used
        self.search_start = start
        return found

    def began(self, cells: np.ndarray) -> None:
        """Note that a slot is being filled."""
        if self.is_ring and len(cells):
            self.search_start = int(cells[0])

    def accepted(self, cells: np.ndarray) -> None:
        """Note that a slot was filled for good: the next search begins behind it."""
        if self.is_ring and len(cells):
            self.search_start = (int(cells[0]) + len(cells)) % self._cells.n_cells

    def freed(self, cell: int) -> None:
        """Note that `cell` is the lowest of some cells that became free."""
        self.search_start = min(self.search_start, int(cell))
