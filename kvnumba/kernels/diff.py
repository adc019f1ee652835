"""What changed between two states of the cells' metadata, as runs, and making those changes.

Runs of cells are ``(cell, n, pos, shift)``: `n` adjacent cells whose positions count up from
`pos`, or that became empty (`pos` -1); runs of bitmap words are ``(seq_id, word, n)``. A shared
prefix or a removed span is one run, so that what is written grows with what changed, not with the
cache.
"""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.bits import WORD_BITS
from kvnumba.kernels.jit import njit

END_POS = np.int64(2**31 - 1)


@njit()
def _word_differs(pos, shift, token, old_pos, old_shift, old_token, w):
    a, b = w * WORD_BITS, (w + 1) * WORD_BITS
    p, s, t = pos[a:b], shift[a:b], token[a:b]
    old_p, old_s, old_t = old_pos[a:b], old_shift[a:b], old_token[a:b]
    differ = np.int32(0)
    for j in range(p.shape[0]):
        differ |= (p[j] ^ old_p[j]) | (s[j] ^ old_s[j]) | (t[j] ^ old_t[j])
    return differ != 0


@njit()
def cell_changes_kernel(runs, tokens, pos, shift, token, old_pos, old_shift, old_token, n_words):
    """List the cells whose position, shift or token differs.

    Parameters
    ----------
    runs : ndarray, shape (n, 4), int32
        Modified in place: written from its start, as far as it reaches.
    tokens : ndarray, int32
        Modified in place: the tokens of the cells that are not empty, in order, as far as it
        reaches.
    pos, shift, token, old_pos, old_shift, old_token : ndarray, shape (n_words * 64 or more,), int32
    n_words : int
        Words of 64 cells to look at, from the first.

    Returns
    -------
    n_runs, n_tokens : int
        How many there are, also when the arrays are shorter than that.
    """
    n_runs = 0
    n_tokens = 0
    next_cell = -1
    next_pos = np.int64(-1)
    last_shift = np.int32(0)
    for w in range(n_words):
        if not _word_differs(pos, shift, token, old_pos, old_shift, old_token, w):
            continue
        for i in range(w * WORD_BITS, (w + 1) * WORD_BITS):
            if pos[i] == old_pos[i] and shift[i] == old_shift[i] and token[i] == old_token[i]:
                continue
            if i != next_cell or pos[i] != next_pos or shift[i] != last_shift:
                if n_runs < runs.shape[0]:
                    runs[n_runs, 0] = i
                    runs[n_runs, 1] = 0
                    runs[n_runs, 2] = pos[i]
                    runs[n_runs, 3] = shift[i]
                n_runs += 1
            if n_runs <= runs.shape[0]:
                runs[n_runs - 1, 1] += 1
            next_cell = i + 1
            last_shift = shift[i]
            next_pos = np.int64(-1)
            if pos[i] >= 0:
                next_pos = np.int64(pos[i]) + 1
                if n_tokens < tokens.shape[0]:
                    tokens[n_tokens] = token[i]
                n_tokens += 1
    return n_runs, n_tokens


@njit()
def word_changes_kernel(runs, values, seq, old_seq, n_words):
    """List the words of the sequences' bitmaps that differ, row by row.

    Parameters
    ----------
    runs : ndarray, shape (n, 3), int32
        Modified in place: written from its start, as far as it reaches.
    values : ndarray, uint64
        Modified in place: the words, as far as it reaches.
    seq, old_seq : ndarray, shape (n_seq_max, n_words or more), uint64
    n_words : int
        Words of each row to look at, from the first.

    Returns
    -------
    n_runs, n_values : int
        How many there are, also when the arrays are shorter than that.
    """
    n_runs = 0
    n_values = 0
    for s in range(seq.shape[0]):
        row, old_row = seq[s, :n_words], old_seq[s, :n_words]
        next_word = -1
        for w in range(row.shape[0]):
            if row[w] == old_row[w]:
                continue
            if w != next_word:
                if n_runs < runs.shape[0]:
                    runs[n_runs, 0] = s
                    runs[n_runs, 1] = w
                    runs[n_runs, 2] = 0
                n_runs += 1
            if n_runs <= runs.shape[0]:
                runs[n_runs - 1, 2] += 1
            if n_values < values.shape[0]:
                values[n_values] = row[w]
            n_values += 1
            next_word = w + 1
    return n_runs, n_values


@njit()
def apply_cells_kernel(pos, shift, token, runs, tokens, n_cells):
    """Make the changes that `cell_changes_kernel` lists.

    Parameters
    ----------
    pos, shift, token : ndarray, shape (n_cells or more,), int32
        Modified in place.
    runs : ndarray, shape (n_runs, 4), int32
    tokens : ndarray, shape (n_tokens,), int32
    n_cells : int

    Returns
    -------
    reach : int
        One more than the highest cell named; -1 if the runs contradict themselves, and then
        nothing is changed.
    """
    reach = np.int64(0)
    n_tokens = np.int64(0)
    for r in range(runs.shape[0]):
        end = np.int64(runs[r, 0]) + np.int64(runs[r, 1])
        end_pos = np.int64(runs[r, 2]) + np.int64(runs[r, 1])
        if runs[r, 0] < 0 or runs[r, 1] < 1 or end > n_cells or runs[r, 2] < -1:
            return np.int64(-1)
        if runs[r, 2] < 0:
            if runs[r, 3] != 0:
                return np.int64(-1)
        elif end_pos > END_POS:
            return np.int64(-1)
        else:
            n_tokens += np.int64(runs[r, 1])
        reach = max(reach, end)
    if n_tokens != tokens.shape[0]:
        return np.int64(-1)
    t = 0
    for r in range(runs.shape[0]):
        for j in range(runs[r, 1]):
            i = runs[r, 0] + j
            shift[i] = runs[r, 3]
            if runs[r, 2] < 0:
                pos[i] = -1
                token[i] = -1
            else:
                pos[i] = runs[r, 2] + j
                token[i] = tokens[t]
                t += 1
    return reach


@njit()
def apply_words_kernel(seq, runs, values):
    """Make the changes that `word_changes_kernel` lists.

    Parameters
    ----------
    seq : ndarray, shape (n_seq_max, n_words), uint64
        Modified in place.
    runs : ndarray, shape (n_runs, 3), int32
    values : ndarray, shape (n_values,), uint64

    Returns
    -------
    reach : int
        One more than the highest word named; -1 if the runs contradict themselves, and then
        nothing is changed.
    """
    reach = np.int64(0)
    n_values = np.int64(0)
    for r in range(runs.shape[0]):
        end = np.int64(runs[r, 1]) + np.int64(runs[r, 2])
        if runs[r, 0] < 0 or runs[r, 0] >= seq.shape[0] or runs[r, 1] < 0 or runs[r, 2] < 1:
            return np.int64(-1)
        if end > seq.shape[1]:
            return np.int64(-1)
        n_values += np.int64(runs[r, 2])
        reach = max(reach, end)
    if n_values != values.shape[0]:
        return np.int64(-1)
    n = 0
    for r in range(runs.shape[0]):
        for j in range(runs[r, 2]):
            seq[runs[r, 0], runs[r, 1] + j] = values[n]
            n += 1
    return reach
