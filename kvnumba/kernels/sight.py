"""Which of some cells some queries see: causal order and window, by position."""

from __future__ import annotations

from kvnumba.kernels.jit import njit

NOTHING, SOME, ALL = 0, 1, 2
"""How much of some cells some queries see; SOME may turn out to be none."""


@njit()
def sees(q_pos, pos, window):
    """Return whether a query sees a cell; window 0 is none."""
    return pos <= q_pos and (window <= 0 or q_pos - pos < window)


@njit()
def sight_of(pos, q_pos, window):
    """Return ALL if every query sees every cell, NOTHING if none can see any, else SOME."""
    low, high = pos[0], pos[0]
    for i in range(pos.shape[0]):
        low, high = min(low, pos[i]), max(high, pos[i])
    first, last = q_pos[0], q_pos[0]
    for j in range(q_pos.shape[0]):
        first, last = min(first, q_pos[j]), max(last, q_pos[j])
    if low > last or (window > 0 and first - high >= window):
        return NOTHING
    if high <= first and (window <= 0 or last - low < window):
        return ALL
    return SOME


@njit()
def gather_seen(lists, cells, cell_pos, q_pos, window):
    """List the cells that at least one query sees in ``lists[0]``; return how many.

    Their positions go to ``lists[1]``.
    """
    n = 0
    for i in range(cells.shape[0]):
        for t in range(q_pos.shape[0]):
            if sees(q_pos[t], cell_pos[i], window):
                lists[0, n], lists[1, n] = cells[i], cell_pos[i]
                n += 1
                break
    return n


@njit()
def seen_run(pos, q_pos, window, start):
    """Return the next run of cells that a query sees, possibly empty at the end."""
    n = pos.shape[0]
    while start < n and not sees(q_pos, pos[start], window):
        start += 1
    stop = start
    while stop < n and sees(q_pos, pos[stop], window):
        stop += 1
    return start, stop
