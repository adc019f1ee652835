"""Cells of recurrent states: where a ubatch goes, how positions move, which rows are named.

A cell is one line of ``table[n_cells, RING + 2 * depth]`` (int32): position of its last token,
copy source, least position, the greatest position that a later token went back behind, number of
states kept, then `depth` rows and `depth` positions, newest first. ``tail[n_seq_max]`` (int32) is
the cell of each sequence, -1: none; a sequence is in a cell if its tail says so.
"""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.bits import ONE
from kvnumba.kernels.jit import njit

POS, SRC, FIRST, PAST, KEPT, RING = 0, 1, 2, 3, 4, 5
"""Columns of the table; rows begin at RING, their positions at ``RING + depth``."""


@njit()
def _depth(cell):
    return (cell.shape[0] - RING) // 2


@njit()
def _reset_cell(cell):
    cell[:] = -1
    cell[KEPT] = 0


@njit()
def free_cell_kernel(table, i):
    """Empty cell `i`: every field is as it was in the beginning."""
    _reset_cell(table[i])


@njit()
def _count_ids(tail, count):
    """Write into ``count[n_cells]`` how many sequences each cell has; return the cells in use."""
    count[:] = 0
    n_used = 0
    for s in range(tail.shape[0]):
        if tail[s] >= 0:
            if count[tail[s]] == 0:
                n_used += 1
            count[tail[s]] += 1
    return n_used


@njit()
def _next_empty(count, start):
    """Return the first cell without a sequence, from `start` and around; -1: there is none."""
    n_cells = count.shape[0]
    for k in range(n_cells):
        i = (start + k) % n_cells
        if count[i] == 0:
            return i
    return -1


@njit()
def next_empty_kernel(tail, start, count):
    """Return the first empty cell from `start` and around, or -1; ``count[n_cells]`` is scratch."""
    _count_ids(tail, count)
    return _next_empty(count, start)


@njit()
def _detach_followers(table, tail, set_start, set_ids, count):
    """Take all but the first sequence of each set out of their cells: they will follow it."""
    for q in range(set_start.shape[0] - 1):
        for e in range(set_start[q] + 1, set_start[q + 1]):
            i = tail[set_ids[e]]
            if i >= 0:
                tail[set_ids[e]] = -1
                count[i] -= 1
                if count[i] == 0:
                    _reset_cell(table[i])


@njit()
def _own_cells(table, tail, set_start, set_ids, count, search_start):
    """Give the first sequence of each set a cell that no other is in; a shared one is split.

    Returns the least and the greatest of these cells; ``(-1, -1)`` when there are not enough.
    """
    low, high = table.shape[0], -1
    for q in range(set_start.shape[0] - 1):
        s = set_ids[set_start[q]]
        i = tail[s]
        if i < 0 or count[i] > 1:
            to = _next_empty(count, search_start)
            if to < 0:
                return -1, -1
            if i >= 0:
                table[to, :] = table[i]
                count[i] -= 1
            tail[s] = to
            count[to] = 1
            search_start = to + 1
            i = to
        low, high = min(low, i), max(high, i)
    return low, high


@njit()
def _swap_cells(table, tail, a, b):
    one, other = table[a], table[b]
    for f in range(one.shape[0]):
        one[f], other[f] = other[f], one[f]
    # By value and in all sequences: one that has nothing yet is led along as well.
    for s in range(tail.shape[0]):
        if tail[s] == a:
            tail[s] = b
        elif tail[s] == b:
            tail[s] = a


@njit()
def _stage_sources(table, low, high, count, copy_sources):
    """Write where each cell of ``[low, high]`` would copy its state from; return the zero cell."""
    count[:] = 0
    for i in range(table.shape[0]):
        if table[i, SRC] >= 0:
            count[table[i, SRC]] += 1
    zero_cell = -1
    for i in range(high, low - 1, -1):
        if count[i] == 0:
            zero_cell = i
    for i in range(low, high + 1):
        copy_sources[i - low] = table[i, SRC] if table[i, SRC] >= 0 else zero_cell
        table[i, SRC] = i
    return zero_cell


@njit()
def _push_states(cell, pos, rows):
    """Add the last ``rows.shape[0]`` states of tokens at `pos` to a cell's ring."""
    depth, kept, m, k = _depth(cell), cell[KEPT], pos.shape[0], rows.shape[0]
    ring, ring_pos = cell[RING : RING + depth], cell[RING + depth :]
    n_new = 1
    while n_new < k and pos[m - n_new - 1] < pos[m - n_new]:
        n_new += 1
    n_old = 0
    if n_new == m and kept > 0 and cell[POS] < pos[0]:
        n_old = min(kept, depth - n_new)
    last, first = cell[POS], cell[FIRST]
    for t in range(m):
        has_last = t > 0 or kept > 0
        if has_last and pos[t] <= last:
            cell[PAST] = max(cell[PAST], last)
        first = min(first, pos[t]) if has_last else pos[t]
        last = pos[t]
    for j in range(n_old - 1, -1, -1):
        ring[n_new + j] = ring[j]
        ring_pos[n_new + j] = ring_pos[j]
    for j in range(n_new):
        ring[j] = rows[k - 1 - j]
        ring_pos[j] = pos[m - 1 - j]
    ring[n_new + n_old :] = -1
    ring_pos[n_new + n_old :] = -1
    cell[POS], cell[FIRST], cell[KEPT] = last, first, n_new + n_old


@njit()
def place_states_kernel(
    table,
    tail,
    set_start,
    set_ids,
    token_pos,
    free_rows,
    n_seq_tokens,
    search_start,
    n_slack,
    count,
    copy_sources,
    source_rows,
    target_rows,
):
    """Place the sequences of a ubatch side by side, and name the rows of their new states.

    Parameters
    ----------
    table, tail : ndarray
        See the module; modified in place, also when there is no room.
    set_start : ndarray, shape (n_seqs + 1,), int64
        Sequences ``set_ids[set_start[q]:set_start[q + 1]]`` have the same tokens; each id once.
    set_ids : ndarray, int32
    token_pos : ndarray, shape (n_seqs * n_seq_tokens,), int32
        Positions, set by set.
    free_rows : ndarray, shape (n_seqs * n_states,), int32
        Rows that nothing names.
    n_seq_tokens : int
    search_start : int
        Cell at which the search for an empty one begins.
    n_slack : int
        The search begins at 0 if `search_start` is beyond the cells in use by more than that.
    count : ndarray, shape (n_cells,), int32
        Scratch.
    copy_sources : ndarray, shape (n_cells,), int32
        Written, ``n_kv`` of them: the cell whose state cell ``head + j`` goes on from, where
        states lie in the cells themselves.
    source_rows : ndarray, shape (n_seqs,), int32
        Written: the row of each set's state, -1 for a new one (zeros).
    target_rows : ndarray, shape (n_seqs, n_states), int32
        Written: the rows for each set's new states, in the order of its tokens.

    Returns
    -------
    head, n_kv : int
        First cell, and cells from there to the last one that has been looked at; ``(-1, 0)`` when
        there are not enough cells.
    zero_cell : int
        The first of those cells that no cell goes on from, -1: none.

    Notes
    -----
    llama.cpp ``llama-memory-recurrent.cpp`` at 0c1e57098, ``find_slot``. There the states move
    with the cells; here only the rows' numbers do.
    """
    n_seqs, n_states = target_rows.shape
    n_used = _count_ids(tail, count)
    if search_start > n_used + n_slack:
        search_start = 0
    _detach_followers(table, tail, set_start, set_ids, count)
    low, high = _own_cells(table, tail, set_start, set_ids, count, search_start)
    if high < low + n_seqs - 1 or low < 0:
        return -1, 0, -1
    for q in range(n_seqs):
        i = tail[set_ids[set_start[q]]]
        if i != low + q:
            _swap_cells(table, tail, i, low + q)
    zero_cell = _stage_sources(table, low, high, count, copy_sources)
    for q in range(n_seqs):
        cell = table[low + q]
        source_rows[q] = cell[RING] if cell[KEPT] > 0 else -1
        target_rows[q, :] = free_rows[q * n_states : (q + 1) * n_states]
        pos = token_pos[q * n_seq_tokens : (q + 1) * n_seq_tokens]
        _push_states(cell, pos, target_rows[q])
        for e in range(set_start[q], set_start[q + 1]):
            tail[set_ids[e]] = low + q
    return low, high - low + 1, zero_cell


@njit()
def name_rows_kernel(table, bits):
    """Set in ``bits[n_words]`` (uint64) the bit of every row that a ring names."""
    for i in range(table.shape[0]):
        for j in range(table[i, KEPT]):
            r = np.int64(table[i, RING + j])
            bits[r >> 6] |= ONE << np.uint64(r & 63)


@njit()
def set_bits_kernel(rows, bits):
    """Set in ``bits[n_words]`` (uint64) the bit of every row in `rows` (int32)."""
    for j in range(rows.shape[0]):
        r = np.int64(rows[j])
        bits[r >> 6] |= ONE << np.uint64(r & 63)
