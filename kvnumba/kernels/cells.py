"""The verbs on cell metadata.

State, always in this order: `pos`, `shift`, `token` (int32, one entry per cell, padded to a
multiple of 64), `seq` (uint64 bitmaps, shape ``(n_seq_max, n_words)``, one row per sequence),
`used` and `shared` (uint64 bitmaps, shape ``(n_words,)``: cells with at least one and at least
two owners). Nothing here validates: ids, ranges and sums are checked by `kvnumba.cells`.

Semantics: llama.cpp's unified cache, spring 2025 (``llama-kv-cache.cpp``), with one mend: a freed
cell forgets everything.
"""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.bits import (
    FULL,
    ONE,
    WORD_BITS,
    ZERO,
    _bits_from,
    _last_set,
    popcount,
    trailing_zeros,
)
from kvnumba.kernels.jit import njit

LANES = 64


@njit()
def _range_mask(pos, w, p0, p1):
    """Return which of the 64 cells of word `w` have a position in ``[p0, p1)``."""
    lanes = pos[w * LANES : w * LANES + LANES]
    low = np.int32(p0)
    high = np.int32(p1)
    mask = ZERO
    for j in range(lanes.shape[0]):
        inside = np.uint64(lanes[j] >= low) & np.uint64(lanes[j] < high)
        mask |= inside << np.uint64(j)
    return mask


@njit()
def _free_cells(pos, shift, token, used, shared, w, freed):
    """Empty the cells `freed` of word `w`, whose membership is already gone.

    The only code that empties a cell: a field forgotten in one of several copies of this loop
    was the reference's longest-lived kind of bug.
    """
    used[w] &= ~freed
    shared[w] &= ~freed
    while freed != ZERO:
        i = w * WORD_BITS + np.int64(trailing_zeros(freed))
        pos[i] = -1
        shift[i] = 0
        token[i] = -1
        freed &= freed - ONE


@njit()
def _owned_twice(seq, w):
    """Return which cells of word `w` have at least two owners."""
    once = ZERO
    twice = ZERO
    for s in range(seq.shape[0]):
        twice |= once & seq[s, w]
        once |= seq[s, w]
    return twice


@njit()
def _first_cell(w, word, first):
    """Return the lowest of `first` and the lowest set cell of `word` (word `w`)."""
    if word == ZERO:
        return first
    return min(first, w * WORD_BITS + np.int64(trailing_zeros(word)))


@njit()
def seq_rm_kernel(pos, shift, token, seq, used, shared, seq_id, p0, p1):
    """Take a sequence out of its cells with a position in ``[p0, p1)``.

    Parameters
    ----------
    pos, shift, token, seq, used, shared : ndarray, modified in place
        Cell metadata, see the module.
    seq_id : int
        Sequence, ``0 <= seq_id < seq.shape[0]``.
    p0, p1 : int
        Half-open position range.

    Returns
    -------
    n_freed : int
        Cells that became empty.
    first_freed : int
        The lowest of them, or ``pos.shape[0]``.
    """
    row = seq[seq_id]
    n_freed = np.int64(0)
    first = np.int64(pos.shape[0])
    for w in range(row.shape[0]):
        if row[w] == ZERO:
            continue
        hit = row[w] & _range_mask(pos, w, p0, p1)
        if hit == ZERO:
            continue
        row[w] &= ~hit
        freed = hit & ~shared[w]
        if hit & shared[w] != ZERO:
            shared[w] = _owned_twice(seq, w)
        _free_cells(pos, shift, token, used, shared, w, freed)
        first = _first_cell(w, freed, first)
        n_freed += np.int64(popcount(freed))
    return n_freed, first


@njit()
def cells_rm_kernel(pos, shift, token, seq, used, shared, p0, p1):
    """Empty every cell with a position in ``[p0, p1)``, whoever owns it.

    Parameters, returns: as `seq_rm_kernel`.
    """
    n_freed = np.int64(0)
    first = np.int64(pos.shape[0])
    for w in range(used.shape[0]):
        if used[w] == ZERO:
            continue
        freed = used[w] & _range_mask(pos, w, p0, p1)
        if freed == ZERO:
            continue
        _drop_cells(pos, shift, token, seq, used, shared, w, freed)
        first = _first_cell(w, freed, first)
        n_freed += np.int64(popcount(freed))
    return n_freed, first


@njit()
def _drop_cells(pos, shift, token, seq, used, shared, w, freed):
    """Take every owner out of the cells `freed` of word `w`, and empty them."""
    for s in range(seq.shape[0]):
        seq[s, w] &= ~freed
    _free_cells(pos, shift, token, used, shared, w, freed)


@njit()
def drop_cells_kernel(pos, shift, token, seq, used, shared, cells):
    """Empty the listed cells (int32), whoever owns them. Metadata is modified in place."""
    for j in range(cells.shape[0]):
        i = np.int64(cells[j])
        _drop_cells(pos, shift, token, seq, used, shared, i // LANES, ONE << np.uint64(i % LANES))


@njit()
def seq_cp_kernel(pos, seq, shared, src, dst, p0, p1):
    """Let `dst` join `src` in its cells with a position in ``[p0, p1)``.

    Parameters
    ----------
    pos : ndarray, shape (n_words * 64,), int32
    seq, shared : ndarray, uint64, modified in place
        Cell metadata, see the module.
    src, dst : int
        Two different sequences.
    p0, p1 : int
        Half-open position range.

    Returns
    -------
    n_cells : int
        Cells that `dst` now shares with `src` in the range.
    """
    n_cells = np.int64(0)
    for w in range(seq.shape[1]):
        if seq[src, w] == ZERO:
            continue
        hit = seq[src, w] & _range_mask(pos, w, p0, p1)
        if hit == ZERO:
            continue
        seq[dst, w] |= hit
        shared[w] |= hit
        n_cells += np.int64(popcount(hit))
    return n_cells


@njit()
def seq_keep_kernel(pos, shift, token, seq, used, shared, seq_id):
    """Empty every cell that `seq_id` does not own, and make it the only owner of the rest.

    Returns
    -------
    n_freed : int
        Cells that became empty.
    """
    n_freed = np.int64(0)
    for w in range(used.shape[0]):
        if used[w] == ZERO:
            continue
        for s in range(seq.shape[0]):
            if s != seq_id:
                seq[s, w] = ZERO
        shared[w] = ZERO
        freed = used[w] & ~seq[seq_id, w]
        _free_cells(pos, shift, token, used, shared, w, freed)
        n_freed += np.int64(popcount(freed))
    return n_freed


@njit()
def seq_add_kernel(pos, shift, token, seq, used, shared, seq_id, p0, p1, delta):
    """Move the positions in ``[p0, p1)`` of a sequence by `delta`, and remember the shift.

    A cell moves for all its owners; one whose position becomes negative is emptied for all.

    Returns
    -------
    n_freed, first_freed : int
        As `seq_rm_kernel`.
    """
    n_freed = np.int64(0)
    first = np.int64(pos.shape[0])
    for w in range(seq.shape[1]):
        if seq[seq_id, w] == ZERO:
            continue
        hit = seq[seq_id, w] & _range_mask(pos, w, p0, p1)
        freed = ZERO
        while hit != ZERO:
            j = trailing_zeros(hit)
            i = w * WORD_BITS + np.int64(j)
            pos[i] += delta
            shift[i] += delta
            if pos[i] < 0:
                freed |= ONE << j
            hit &= hit - ONE
        if freed != ZERO:
            _drop_cells(pos, shift, token, seq, used, shared, w, freed)
            first = _first_cell(w, freed, first)
            n_freed += np.int64(popcount(freed))
    return n_freed, first


@njit()
def seq_div_kernel(pos, shift, seq, seq_id, p0, p1, d):
    """Divide the positions in ``[p0, p1)`` of a sequence by `d` >= 1, and remember the shift.

    The shift is new minus old: K was rotated for the old position and must be turned back. (The
    reference's newer cells store the opposite sign; that is a bug.)
    """
    for w in range(seq.shape[1]):
        if seq[seq_id, w] == ZERO:
            continue
        hit = seq[seq_id, w] & _range_mask(pos, w, p0, p1)
        while hit != ZERO:
            i = w * WORD_BITS + np.int64(trailing_zeros(hit))
            new = pos[i] // d
            shift[i] += new - pos[i]
            pos[i] = new
            hit &= hit - ONE


@njit()
def place_kernel(pos, token, seq, used, cells, new_pos, new_token, id_start, ids, shared):
    """Fill empty cells with new tokens.

    Parameters
    ----------
    pos, token, seq, used, shared : ndarray, modified in place
        Cell metadata, see the module.
    cells, new_pos, new_token : ndarray, shape (n_tokens,), int32
        The empty cells, distinct, and what they get.
    id_start : ndarray, shape (n_tokens + 1,), int64
        Token ``t`` belongs to the sequences ``ids[id_start[t]:id_start[t + 1]]``.
    ids : ndarray, shape (id_start[-1],), int32
    """
    for t in range(cells.shape[0]):
        i = np.int64(cells[t])
        w = i // LANES
        bit = ONE << np.uint64(i % LANES)
        pos[i] = new_pos[t]
        token[i] = new_token[t]
        used[w] |= bit
        for j in range(id_start[t], id_start[t + 1]):
            if seq[ids[j], w] & bit == ZERO and j > id_start[t]:
                shared[w] |= bit
            seq[ids[j], w] |= bit


@njit()
def move_cells_kernel(pos, shift, token, seq, used, shared, src, dst):
    """Move the metadata of the cells `src` to the empty cells `dst`, and empty `src`.

    Parameters
    ----------
    pos, shift, token, seq, used, shared : ndarray, modified in place
        Cell metadata, see the module.
    src, dst : ndarray, shape (n,), int32
        Moves, done in this order.
    """
    for j in range(src.shape[0]):
        a = np.int64(src[j])
        b = np.int64(dst[j])
        pos[b] = pos[a]
        shift[b] = shift[a]
        token[b] = token[a]
        wa = a // LANES
        wb = b // LANES
        bit_a = ONE << np.uint64(a % LANES)
        bit_b = ONE << np.uint64(b % LANES)
        for s in range(seq.shape[0]):
            if seq[s, wa] & bit_a != ZERO:
                seq[s, wb] |= bit_b
        used[wb] |= bit_b
        if shared[wa] & bit_a != ZERO:
            shared[wb] |= bit_b
        _drop_cells(pos, shift, token, seq, used, shared, wa, bit_a)


@njit()
def split_cells_kernel(pos, shift, token, seq, used, shared, seq_id, src, dst):
    """Give `seq_id` cells of its own: it leaves the shared cells `src` for the empty `dst`.

    Parameters
    ----------
    pos, shift, token, seq, used, shared : ndarray, modified in place
        Cell metadata, see the module.
    seq_id : int
        A sequence that owns every cell of `src` together with others.
    src, dst : ndarray, shape (n,), int32
    """
    for j in range(src.shape[0]):
        a = np.int64(src[j])
        b = np.int64(dst[j])
        pos[b] = pos[a]
        shift[b] = shift[a]
        token[b] = token[a]
        wa = a // LANES
        wb = b // LANES
        seq[seq_id, wa] &= ~(ONE << np.uint64(a % LANES))
        seq[seq_id, wb] |= ONE << np.uint64(b % LANES)
        used[wb] |= ONE << np.uint64(b % LANES)
        shared[wa] = _owned_twice(seq, wa)


@njit()
def shared_in_range_kernel(pos, seq, shared, seq_id, p0, p1, out):
    """List a sequence's cells in ``[p0, p1)`` that others own too.

    `out` (int32) is written from its start, in cell order; returns how many there are, also when
    `out` is shorter than that.
    """
    n = 0
    for w in range(seq.shape[1]):
        hit = seq[seq_id, w] & shared[w]
        if hit == ZERO:
            continue
        hit &= _range_mask(pos, w, p0, p1)
        while hit != ZERO:
            if n < out.shape[0]:
                out[n] = w * WORD_BITS + np.int64(trailing_zeros(hit))
            hit &= hit - ONE
            n += 1
    return n


@njit()
def shifted_kernel(shift, used, out):
    """List the used cells with a pending shift into `out` (int32); returns how many."""
    n = 0
    for w in range(used.shape[0]):
        if used[w] == ZERO:
            continue
        lanes = shift[w * LANES : w * LANES + LANES]
        for j in range(lanes.shape[0]):
            if lanes[j] != 0:
                out[n] = w * WORD_BITS + j
                n += 1
    return n


@njit()
def pos_bounds_kernel(pos, members, p0, p1):
    """Return the least and greatest position in ``[p0, p1)`` of the cells of a bitmap, or -1, -1.

    Parameters
    ----------
    pos : ndarray, shape (n_words * 64,), int32
    members : ndarray, shape (n_words,), uint64
    p0, p1 : int
        Half-open position range.
    """
    low = np.int64(-1)
    high = np.int64(-1)
    for w in range(members.shape[0]):
        if members[w] == ZERO:
            continue
        hit = members[w] & _range_mask(pos, w, p0, p1)
        while hit != ZERO:
            p = np.int64(pos[w * WORD_BITS + np.int64(trailing_zeros(hit))])
            if low < 0 or p < low:
                low = p
            if p > high:
                high = p
            hit &= hit - ONE
    return low, high


@njit()
def cell_max_kernel(used):
    """Return one more than the highest used cell, 0 when none is used."""
    return _last_set(used) + 1


@njit()
def rebuild_kernel(seq, used, shared):
    """Recompute `used` and `shared` from the sequences' bitmaps."""
    for w in range(used.shape[0]):
        once = ZERO
        twice = ZERO
        for s in range(seq.shape[0]):
            twice |= once & seq[s, w]
            once |= seq[s, w]
        used[w] = once
        shared[w] = twice


OK = 0
BAD_USED = 1
BAD_SHARED = 2
BAD_POS_EMPTY = 3
BAD_POS_USED = 4
BAD_SHIFT = 5
BAD_TOKEN = 6
BAD_TAIL = 7


@njit()
def check_kernel(pos, shift, token, seq, used, shared, n_cells):
    """Test the invariants of the metadata; nothing is changed.

    Returns
    -------
    code : int
        ``OK`` or one of the ``BAD_*`` constants.
    cell : int
        The first cell that breaks it, -1 when all is well.
    """
    for w in range(used.shape[0]):
        once = ZERO
        twice = ZERO
        for s in range(seq.shape[0]):
            twice |= once & seq[s, w]
            once |= seq[s, w]
        first = w * WORD_BITS
        if once != used[w]:
            return BAD_USED, first + np.int64(trailing_zeros(once ^ used[w]))
        if twice != shared[w]:
            return BAD_SHARED, first + np.int64(trailing_zeros(twice ^ shared[w]))
        valid = FULL
        if n_cells - first < WORD_BITS:
            valid = ~_bits_from(n_cells - first)
        if once & ~valid != ZERO:
            return BAD_TAIL, first + np.int64(trailing_zeros(once & ~valid))
        for j in range(WORD_BITS):
            i = first + j
            if (once >> np.uint64(j)) & ONE != ZERO:
                if pos[i] < 0:
                    return BAD_POS_USED, i
            elif pos[i] != -1:
                return BAD_POS_EMPTY, i
            elif shift[i] != 0:
                return BAD_SHIFT, i
            elif token[i] != -1:
                return BAD_TOKEN, i
    return OK, np.int64(-1)
