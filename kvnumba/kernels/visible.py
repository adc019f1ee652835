"""Which cells a sequence's queries can see, as a list that attention walks."""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.bits import FULL, ONE, WORD_BITS, ZERO, trailing_zeros
from kvnumba.kernels.jit import njit


@njit()
def visible_cells_kernel(row, pos, p_min, p_max, cells_out, pos_out):
    """List the cells of one sequence with ``p_min <= pos <= p_max``, in cell order.

    Parameters
    ----------
    row : ndarray of uint64, shape (n_words,)
        The sequence's bitmap over the cells.
    pos : ndarray of int32, shape (at least n_cells,)
        Position of each cell; read only where `row` has a bit.
    p_min, p_max : int
        Smallest and largest position listed.
    cells_out, pos_out : ndarray of int32, shape (at least the number of set bits,)
        The cells and their positions, written from the start.

    Returns
    -------
    n : int
        How many were written.
    """
    n = 0
    for w in range(row.shape[0]):
        word = row[w]
        if word == FULL:
            n = _list_full_word(pos, w * WORD_BITS, p_min, p_max, cells_out, pos_out, n)
            continue
        while word != ZERO:
            i = w * WORD_BITS + np.int64(trailing_zeros(word))
            word &= word - ONE
            if p_min <= pos[i] <= p_max:
                cells_out[n] = i
                pos_out[n] = pos[i]
                n += 1
    return n


@njit()
def _list_full_word(pos, first, p_min, p_max, cells_out, pos_out, n):
    """List 64 neighbours of which all are members; branch-free when all are in range."""
    p = pos[first : first + WORD_BITS]
    n_out = 0
    for j in range(WORD_BITS):
        n_out += (p[j] < p_min) | (p[j] > p_max)
    if n_out == 0:
        cells, positions = cells_out[n : n + WORD_BITS], pos_out[n : n + WORD_BITS]
        for j in range(WORD_BITS):
            cells[j] = first + j
            positions[j] = p[j]
        return n + WORD_BITS
    if n_out < WORD_BITS:
        for j in range(WORD_BITS):
            if p_min <= p[j] <= p_max:
                cells_out[n] = first + j
                pos_out[n] = p[j]
                n += 1
    return n
