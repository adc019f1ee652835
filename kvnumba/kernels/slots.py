"""Finding cells for new tokens. Nothing here changes the cells.

`used` marks cells with an owner; `pinned` marks cells that the last durable commit names. A cell
is free when it is neither.
"""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.bits import ONE, WORD_BITS, ZERO, _next_clear, _next_set, trailing_zeros
from kvnumba.kernels.jit import njit


@njit()
def find_ring_kernel(used, pinned, n_cells, n_used, n_tokens, search_start):
    """Find a contiguous run by the reference's circular first-fit search.

    Parameters
    ----------
    used, pinned : ndarray, shape (n_words,), uint64
    n_cells, n_used, n_tokens : int
        Cells of the cache, used cells, and cells wanted (``<= n_cells``).
    search_start : int
        Where the search begins.

    Returns
    -------
    found : bool
    start : int
        The first cell of the run; where the search stopped when nothing was found.

    Notes
    -----
    llama.cpp ``llama-kv-cache.cpp`` (spring 2025), ``find_slot``: a search start that lies far
    beyond the used cells goes back to 0, and every cell is tested at most once. Runs of used
    cells, which the reference steps through one by one, are jumped over with the same count.
    """
    if search_start > n_used + 2 * n_tokens:
        search_start = 0
    tested = np.int64(0)
    while True:
        if search_start + n_tokens > n_cells:
            tested += n_cells - search_start
            search_start = np.int64(0)
            continue
        stop = search_start + n_tokens
        hit = _next_set(used, pinned, search_start, stop)
        if hit == stop:
            return True, search_start
        tested += hit - search_start + 1
        search_start = hit + 1
        run = _next_clear(used, pinned, search_start, n_cells) - search_start
        run = min(run, n_cells - n_tokens - search_start + 1, n_cells - tested)
        if run > 0:
            tested += run
            search_start += run
        if tested >= n_cells:
            return False, search_start


@njit()
def find_run_kernel(used, pinned, n_cells, n_tokens):
    """Return the first cell of the lowest free run of `n_tokens` cells, or -1."""
    start = _next_clear(used, pinned, np.int64(0), n_cells)
    while start + n_tokens <= n_cells:
        hit = _next_set(used, pinned, start, start + n_tokens)
        if hit == start + n_tokens:
            return start
        start = _next_clear(used, pinned, hit + 1, n_cells)
    return np.int64(-1)


@njit()
def find_free_kernel(used, pinned, n_cells, out):
    """Find the lowest free cells, adjacent or not.

    Parameters
    ----------
    used, pinned : ndarray, shape (n_words,), uint64
    n_cells : int
    out : ndarray, shape (n_tokens,), int32
        Written from its start, in ascending order.

    Returns
    -------
    n : int
        Cells found, at most ``out.shape[0]``.
    """
    n = 0
    for w in range(used.shape[0]):
        free = ~(used[w] | pinned[w])
        while free != ZERO:
            i = w * WORD_BITS + np.int64(trailing_zeros(free))
            if n == out.shape[0] or i >= n_cells:
                return n
            out[n] = i
            n += 1
            free &= free - ONE
    return n


@njit()
def longest_free_run_kernel(used, n_cells):
    """Return the length and first cell of the longest run without an owner; the first one wins.

    Returns ``(0, -1)`` when every cell is used.
    """
    best = np.int64(0)
    best_start = np.int64(-1)
    start = _next_clear(used, used, np.int64(0), n_cells)
    while start < n_cells:
        stop = _next_set(used, used, start, n_cells)
        if stop - start > best:
            best = stop - start
            best_start = start
        start = _next_clear(used, used, stop, n_cells)
    return best, best_start
