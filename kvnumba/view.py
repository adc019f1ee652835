"""`CacheView`: a readable copy of the cells, and their text picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvnumba.cells import Cells
from kvnumba.kernels.slots import longest_free_run_kernel


@dataclass(frozen=True)
class CacheView:
    """What is in the cells at one moment.

    Attributes
    ----------
    n_cells, n_seq_max : int
        Cells, and the most sequences listed per cell.
    pos : ndarray, shape (n_cells,), int32
        Position of each cell, -1 when empty.
    seq_ids : ndarray, shape (n_cells, n_seq_max), int32
        Owners of each cell in ascending order, -1 beyond the last; only the first `n_seq_max`.
    n_tokens, used : int
        Sum over the cells of all their owners, and cells with an owner.
    max_contiguous, max_contiguous_idx : int
        Length and first cell of the longest run of empty cells (the first such run); 0 and -1
        when there is none.
    """

    n_cells: int
    n_seq_max: int
    pos: np.ndarray
    seq_ids: np.ndarray
    n_tokens: int
    used: int
    max_contiguous: int
    max_contiguous_idx: int

    @classmethod
    def of(cls, cells: Cells, n_seq_max: int) -> CacheView:
        """Copy the state of `cells`, listing at most `n_seq_max` owners per cell."""
        n = cells.n_cells
        seq_ids = np.full((n, n_seq_max), -1, np.int32)
        n_listed = np.zeros(n, np.int64)
        for s in np.flatnonzero(cells.seq.any(axis=1)):
            members = cells.members(int(s))
            members = members[n_listed[members] < n_seq_max]
            seq_ids[members, n_listed[members]] = s
            n_listed[members] += 1
        run, start = longest_free_run_kernel(cells.used, n)
        return cls(
            n, n_seq_max, cells.pos[:n].copy(), seq_ids, cells.n_tokens, cells.n_used, run, start
        )
