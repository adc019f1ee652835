"""Which of some cells some queries see: causal order and window, by position.

Every rule lets a query see the cells whose position lies in one range of whole numbers, so a rule
is applied once, by `sight_bounds`, and attention compares positions with the two ends.
"""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.jit import njit

WINDOW_IDS = {"standard": 0, "chunked": 1, "symmetric": 2}
"""Kinds of window by name; what each hides is in `_window_ends`."""

NOTHING, SOME, ALL = 0, 1, 2
"""How much of some cells some queries see; SOME may turn out to be none."""

NO_LOW, NO_HIGH = -(1 << 31), (1 << 31) - 1
"""Ends of a range that leaves nothing out."""

NO_LIMIT = 1 << 33
"""A window that holds every position there is, whatever its kind; greater ones are cut to it."""


@njit()
def _window_ends(q_pos, window, kind):
    """Return the least and greatest position within a query's window; 0 is no window.

    Standard: the last `window` positions. Chunked: from the start of the query's chunk on.
    Symmetric: up to half a window away on both sides. (llama-hparams.h, is_masked_swa)
    """
    q = np.int64(q_pos)
    if window <= 0:
        return np.int64(NO_LOW), np.int64(NO_HIGH)
    if kind == 1:
        return q // window * window, np.int64(NO_HIGH)
    if kind == 2:
        return q - window // 2, q + window // 2
    return q - window + 1, np.int64(NO_HIGH)


@njit()
def sight_bounds(q_pos, window, kind, is_causal, low, high):
    """Write the least and greatest position that each query sees.

    Parameters
    ----------
    q_pos : ndarray of int32, shape (n_q,)
    window : int
        0 for none.
    kind : int
        A value of `WINDOW_IDS`.
    is_causal : bool
        Nothing beyond the query's own position is seen.
    low, high : ndarray of int32, shape (n_q,)
        Result.
    """
    for t in range(q_pos.shape[0]):
        first, last = _window_ends(q_pos[t], window, kind)
        if is_causal:
            last = np.int64(q_pos[t])
        low[t] = max(first, np.int64(NO_LOW))
        high[t] = min(last, np.int64(NO_HIGH))


@njit()
def sees(pos, low, high):
    """Return whether a query that sees ``[low, high]`` sees a cell."""
    return low <= pos and pos <= high


@njit()
def sight_of(pos, low, high):
    """Return ALL if every query sees every cell, NOTHING if none can see any, else SOME."""
    first, last = pos[0], pos[0]
    for i in range(pos.shape[0]):
        first, last = min(first, pos[i]), max(last, pos[i])
    least_low, most_low, least_high, most_high = low[0], low[0], high[0], high[0]
    for t in range(low.shape[0]):
        least_low, most_low = min(least_low, low[t]), max(most_low, low[t])
        least_high, most_high = min(least_high, high[t]), max(most_high, high[t])
    if first > most_high or last < least_low:
        return NOTHING
    if first >= most_low and last <= least_high:
        return ALL
    return SOME


@njit()
def gather_seen(lists, cells, cell_pos, low, high):
    """List the cells that at least one query sees in ``lists[0]``; return how many.

    Their positions go to ``lists[1]``.
    """
    n = 0
    for i in range(cells.shape[0]):
        for t in range(low.shape[0]):
            if sees(cell_pos[i], low[t], high[t]):
                lists[0, n], lists[1, n] = cells[i], cell_pos[i]
                n += 1
                break
    return n


@njit()
def seen_run(pos, low, high, start):
    """Return the next run of cells that a query sees, possibly empty at the end."""
    n = pos.shape[0]
    while start < n and not sees(pos[start], low, high):
        start += 1
    stop = start
    while stop < n and sees(pos[stop], low, high):
        stop += 1
    return start, stop
