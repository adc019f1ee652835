"""What changed between two states of the cells' metadata."""

from __future__ import annotations

from kvnumba.kernels.bits import WORD_BITS
from kvnumba.kernels.jit import njit


@njit()
def changed_cells_kernel(pos, shift, token, old_pos, old_shift, old_token, n_words, out):
    """List the cells whose position, shift or token differs, in ascending order.

    Parameters
    ----------
    pos, shift, token, old_pos, old_shift, old_token : ndarray, shape (n_words * 64 or more,), int32
    n_words : int
        Words of 64 cells to look at, from the first.
    out : ndarray, int32
        Written from its start, as far as it reaches.

    Returns
    -------
    n : int
        How many there are, also when `out` is shorter than that.
    """
    n = 0
    for w in range(n_words):
        a, b = w * WORD_BITS, (w + 1) * WORD_BITS
        p, s, t = pos[a:b], shift[a:b], token[a:b]
        old_p, old_s, old_t = old_pos[a:b], old_shift[a:b], old_token[a:b]
        differ = 0
        for j in range(p.shape[0]):
            differ |= (p[j] ^ old_p[j]) | (s[j] ^ old_s[j]) | (t[j] ^ old_t[j])
        if differ == 0:
            continue
        for j in range(p.shape[0]):
            if p[j] != old_p[j] or s[j] != old_s[j] or t[j] != old_t[j]:
                if n < out.shape[0]:
                    out[n] = a + j
                n += 1
    return n


@njit()
def changed_words_kernel(seq, old_seq, n_words, rows, words):
    """List the words of the sequences' bitmaps that differ, row by row.

    Parameters
    ----------
    seq, old_seq : ndarray, shape (n_seq_max, n_words or more), uint64
    n_words : int
        Words of each row to look at, from the first.
    rows, words : ndarray, int32
        Sequence and word of each difference; written from their start, as far as they reach.

    Returns
    -------
    n : int
        How many there are, also when `rows` is shorter than that.
    """
    n = 0
    for s in range(seq.shape[0]):
        row, old_row = seq[s, :n_words], old_seq[s, :n_words]
        for w in range(row.shape[0]):
            if row[w] != old_row[w]:
                if n < rows.shape[0]:
                    rows[n] = s
                    words[n] = w
                n += 1
    return n
