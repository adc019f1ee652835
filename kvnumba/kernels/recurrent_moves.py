"""Cells of recurrent states, see `kvnumba.kernels.recurrent`: new positions, and the invariants."""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.jit import njit
from kvnumba.kernels.recurrent import FIRST, KEPT, PAST, POS, RING, SRC, _count_ids, _depth


@njit()
def _moved(p, p0, p1, delta, d):
    p = np.int64(p)
    return (p + delta) // d if p0 <= p < p1 else p


@njit()
def _moved_bounds(low, high, p0, p1, delta, d):
    """Return bounds of the new positions of tokens that are somewhere in ``[low, high]``."""
    least, greatest = np.int64(1) << 62, -(np.int64(1) << 62)
    for a, b in (
        (low, min(high, p0 - 1)),
        (max(low, p0), min(high, p1 - 1)),
        (max(low, p1), high),
    ):
        if a <= b:
            least = min(least, _moved(a, p0, p1, delta, d))
            greatest = max(greatest, _moved(b, p0, p1, delta, d))
    return least, greatest


@njit()
def move_positions_kernel(cell, p0, p1, delta, d, may_be_negative, pos_limit):
    """Change positions in ``[p0, p1)`` of one cell by ``(p + delta) // d``.

    A kept state stays as long as it can be told which tokens came after it: older ones whose
    position is not below the next one's any more are dropped, and so are those below 0.

    Parameters
    ----------
    cell : ndarray
        Its line of the table, in use; modified in place.
    p0, p1, delta, d : int
    may_be_negative : bool
        Positions below 0 stay as they are.
    pos_limit : int
        The greatest position.
    """
    depth, kept = _depth(cell), cell[KEPT]
    ring, ring_pos = cell[RING : RING + depth], cell[RING + depth :]
    first, past = np.int64(cell[FIRST]), np.int64(cell[PAST])
    highest = max(np.int64(cell[POS]), past)
    older = np.int64(ring_pos[0])
    ring_pos[0] = _moved(older, p0, p1, delta, d)
    n = 1
    while n < kept:
        p = _moved(ring_pos[n], p0, p1, delta, d)
        if p >= ring_pos[n - 1] or (p < 0 and not may_be_negative):
            break
        older = np.int64(ring_pos[n])
        ring_pos[n] = p
        n += 1
    ring[n:] = -1
    ring_pos[n:] = -1
    # Tokens before the oldest state that is left: they were below it, or where a batch went back.
    bound = _moved_bounds(first, max(older - 1, past), p0, p1, delta, d)[1]
    bound = min(bound, np.int64(pos_limit))
    least = _moved_bounds(first, highest, p0, p1, delta, d)[0]
    cell[POS], cell[KEPT] = ring_pos[0], n
    cell[PAST] = bound if bound >= ring_pos[n - 1] and bound >= 0 else -1
    least = min(least, np.int64(ring_pos[n - 1]))
    cell[FIRST] = least if may_be_negative else max(least, 0)


@njit()
def _check_ring(cell, n_rows):
    depth, kept = _depth(cell), cell[KEPT]
    ring, ring_pos = cell[RING : RING + depth], cell[RING + depth :]
    if kept < 1 or kept > depth:
        return 5
    for j in range(kept):
        if ring[j] < 0 or ring[j] >= n_rows:
            return 6
        for k in range(j):
            if ring[k] == ring[j]:
                return 7
        if j > 0 and ring_pos[j] >= ring_pos[j - 1]:
            return 8
    for j in range(kept, depth):
        if ring[j] != -1 or ring_pos[j] != -1:
            return 9
    if ring_pos[0] != cell[POS]:
        return 10
    return 11 if cell[FIRST] > ring_pos[kept - 1] else 0


@njit()
def check_states_kernel(table, tail, n_rows, may_be_negative, count):
    """Test every invariant; return ``(code, cell or sequence)``, code 0: all hold.

    Parameters
    ----------
    table, tail : ndarray
    n_rows : int
        Rows that exist.
    may_be_negative : bool
        Whether a cell in use may have a position below 0.
    count : ndarray, shape (n_cells,), int32
        Scratch.

    Returns
    -------
    code : int
        1: a tail leads nowhere; 2: a source does; 3: an empty cell holds something; 4: a position
        below 0; 5 to 11: the ring's length, rows, a row twice, order, leftovers, newest position,
        least position.
    where : int
    """
    n_cells = table.shape[0]
    for s in range(tail.shape[0]):
        if tail[s] < -1 or tail[s] >= n_cells:
            return 1, s
    _count_ids(tail, count)
    for i in range(n_cells):
        cell = table[i]
        if cell[SRC] < -1 or cell[SRC] >= n_cells:
            return 2, i
        if count[i] == 0:
            for f in range(cell.shape[0]):
                # An empty cell between those of a slot has been cleared: it is its own source.
                if f != SRC and cell[f] != (0 if f == KEPT else -1):
                    return 3, i
            continue
        if cell[POS] < 0 and not may_be_negative:
            return 4, i
        code = _check_ring(cell, n_rows)
        if code:
            return code, i
    return 0, -1
