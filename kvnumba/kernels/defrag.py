"""Planning a defragmentation: which cells move into which holes. Nothing is changed."""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.bits import ONE, WORD_BITS, ZERO
from kvnumba.kernels.jit import njit


@njit()
def _bit(bits, i):
    return (bits[i // WORD_BITS] >> np.uint64(i % WORD_BITS)) & ONE != ZERO


@njit()
def _sources_start(used, ids, n_kv, i0, n_wanted):
    """Return where the last `n_wanted` movable cells above `i0` begin, and how many there are."""
    n_found = 0
    i = n_kv - 1
    while i > i0:
        if _bit(used, i) and ids[i] == n_kv:
            n_found += 1
            if n_found == n_wanted:
                break
        i -= 1
    return i, n_found


@njit()
def defrag_plan_kernel(used, pinned, n_kv, n_used, max_moves, ids, src, dst):
    """Plan moves that bring all used cells to the front.

    Parameters
    ----------
    used, pinned : ndarray, shape (n_words,), uint64
    n_kv : int
        One more than the highest used cell.
    n_used : int
        Used cells.
    max_moves : int
        Most moves; a move is one contiguous run of source cells inside one hole.
    ids : ndarray, shape (n_kv,), int32
        Written: where each cell goes; itself when it stays; `n_kv` when it is not looked at.
    src, dst : ndarray, shape (n_used,), int32
        Written: the cells that move, in order of planning, and where to.

    Returns
    -------
    n_cells : int
        Entries of `src` and `dst`.
    n_moves : int
        Contiguous runs among them.

    Notes
    -----
    llama.cpp ``llama-kv-cache.cpp`` (spring 2025), ``defrag_prepare``: holes are filled from the
    front with cells taken from the end, and the order among the taken ones is kept. Free cells
    that are still pinned are no holes.
    """
    for i in range(n_kv):
        ids[i] = n_kv
    n_cells = 0
    n_moves = 0
    i0 = np.int64(0)
    while i0 < n_used and n_moves < max_moves:
        if _bit(used, i0):
            ids[i0] = i0
            i0 += 1
            continue
        n_hole = 0
        while i0 + n_hole < n_used and not (_bit(used, i0 + n_hole) or _bit(pinned, i0 + n_hole)):
            n_hole += 1
        if n_hole == 0:
            i0 += 1
            continue
        first, n_found = _sources_start(used, ids, n_kv, i0, n_hole)
        n_hole_filled = 0
        in_run = False
        for i1 in range(max(first, i0 + n_hole), n_kv):
            if n_hole_filled >= min(n_found, n_hole):
                break
            if not _bit(used, i1) or ids[i1] != n_kv:
                if n_moves == max_moves:
                    break
                in_run = False
                continue
            ids[i1] = i0 + n_hole_filled
            src[n_cells] = i1
            dst[n_cells] = i0 + n_hole_filled
            n_cells += 1
            if not in_run:
                n_moves += 1
                in_run = True
            n_hole_filled += 1
        if n_found < n_hole:
            break
        i0 += n_hole
    return n_cells, n_moves
