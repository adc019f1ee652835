"""Attention of many queries: tiles of K and V are converted once and used by a block of rows.

A piece of work is one KV head and a block of query rows (see attend_decode.py for what a row
is), so nothing is shared between threads. Tiles that no query of the block sees are skipped, and
panels of rows are masked only where a tile is seen in part.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types

from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.indirect import address_of, make_call
from kvnumba.kernels.jit import njit
from kvnumba.kernels.micro_panels import (
    CELLS,
    COLUMNS,
    PANEL,
    panel_mix,
    panel_scores,
    panel_softmax,
)
from kvnumba.kernels.micro_rows import gather, widen
from kvnumba.kernels.micro_scores import MASKED, NO_MAXIMUM, soft_cap_row
from kvnumba.kernels.sight import ALL, NOTHING, SOME, sees, sight_bounds, sight_of

TILE = 128
"""Cells converted at once; a multiple of CELLS."""


def work_size(n_panels, dk, dv):
    """Return the float32 values of working memory that one thread needs."""
    width = -(-dv // COLUMNS) * COLUMNS
    return n_panels * PANEL * (dk + width + 3) + TILE * (PANEL + dk + width)


_PART_TYPES = (
    types.float32[:, ::1], types.int32[:, :, ::1], types.float32[:, :, ::1], types.uint16[:, ::1],
    types.uint16[:, ::1], types.int32[::1], types.int32[::1], types.int32[::1], types.int32[::1],
    types.UniTuple(types.int64, 6), types.boolean, types.float64, types.float64,
    types.float32[:, :, ::1], types.int64,
)  # fmt: skip
_call_part = make_call(_PART_TYPES)


def part_address():
    """Return the address of one thread's work, which the kernel below is given."""
    return address_of(_attend_part, _PART_TYPES)


@njit(parallel=True)
def attend_prefill_kernel(
    part_function, work, row_ends, ends, q, k, v, cells, cell_pos, q_pos, window, window_kind,
    causal, kind_k, kind_v, n_head_kv, v_trans, scale, soft_cap, n_panels, out,
):  # fmt: skip
    """Attend from ``q[n_q, n_head, dk]`` to the listed cells; for large `n_q`.

    Parameters
    ----------
    part_function : int
        What `part_address` returned.
    work : ndarray of float32, shape (n_threads, at least `work_size`)
        Scratch; one thread works on each row.
    row_ends : ndarray of int32, shape (n_threads, 2, n_panels * PANEL)
        Scratch.
    ends : ndarray of int32, shape (2, n_q), scratch
    q, k, v, cells, cell_pos, q_pos, out
        As `kvnumba.kernels.attend.attend_rows` has them, `k` and `v` as uint16 items.
    window, window_kind : int
        See `kvnumba.kernels.sight`.
    kind_k, kind_v, n_head_kv : int
    causal, v_trans : bool
    scale, soft_cap : float
    n_panels : int
        Panels of query rows that share one conversion of K and V.
    """
    dims = (kind_k, kind_v, n_head_kv, q.shape[2], out.shape[2], n_panels)
    low, high = ends[0], ends[1]
    sight_bounds(q_pos, window, window_kind, causal, low, high)
    for part in prange(work.shape[0]):
        arguments = (
            work, row_ends, q, k, v, cells, cell_pos, low, high, dims, v_trans, scale, soft_cap,
            out, np.int64(part),
        )  # fmt: skip
        _call_part(part_function, arguments)


@njit()
def _attend_part(
    work, row_ends, q, k, v, cells, cell_pos, low, high, dims, v_trans, scale, soft_cap, out, part,
):  # fmt: skip
    """Do every n-th block of rows of every head, n the number of threads.

    Later blocks see more cells: dealt out in turn, the threads finish together.
    """
    n_head_kv, n_block = dims[2], dims[5] * PANEL
    n_rows = q.shape[0] * (q.shape[1] // n_head_kv)
    n_items = n_head_kv * ((n_rows + n_block - 1) // n_block)
    for item in range(part, n_items, work.shape[0]):
        first = item // n_head_kv * n_block
        last = min(n_rows, first + n_block)
        _attend_block(
            work[part], row_ends[part], q, k, v, cells, cell_pos, low, high, dims,
            item % n_head_kv, first, last, v_trans, scale, soft_cap, out,
        )  # fmt: skip


@njit()
def _split_work(work, n_block, dk, width):
    """Return panels, outputs, maxima, totals, factors, scores, K tile and V tile within `work`."""
    a = n_block * dk
    b = a + n_block * width
    c = b + 3 * n_block
    d = c + TILE * PANEL
    e = d + TILE * dk
    state = work[b:c]
    return (
        work[:a], work[a:b], state[:n_block], state[n_block : 2 * n_block],
        state[2 * n_block :], work[c:d], work[d:e], work[e : e + TILE * width],
    )  # fmt: skip


@njit()
def _attend_block(
    work, row_ends, q, k, v, cells, cell_pos, low, high, dims, h, first, last, v_trans, scale,
    soft_cap, out,
):  # fmt: skip
    dk, dv = dims[3], dims[4]
    width = (dv + COLUMNS - 1) // COLUMNS * COLUMNS
    n_block = (last - first + PANEL - 1) // PANEL * PANEL
    panels, acc, m, total, factors, s, k_tile, v_tile = _split_work(work, n_block, dk, width)
    lows, highs = row_ends[0, :n_block], row_ends[1, :n_block]
    _pack_panels(panels, lows, highs, q, low, high, h, dims[2], first, last, scale, soft_cap)
    acc[:] = np.float32(0)
    m[:] = NO_MAXIMUM
    total[:] = np.float32(0)
    v_tile[:] = np.float32(0)  # columns beyond dv stay 0
    for t0 in range(0, cells.shape[0], TILE):
        seen, pos = cells[t0 : t0 + TILE], cell_pos[t0 : t0 + TILE]
        sight = sight_of(pos, lows, highs)
        if sight == NOTHING:
            continue
        _widen_tile(k_tile, v_tile, k, v, seen, dims, h, v_trans)
        finite = sight == ALL or np.isfinite(v_tile.sum())
        for p0 in range(0, n_block, PANEL):
            low_p, high_p = lows[p0 : p0 + PANEL], highs[p0 : p0 + PANEL]
            sight = sight_of(pos, low_p, high_p)
            if sight == NOTHING:
                continue
            n = pos.shape[0]
            panel_scores(k_tile, 0, n, dk, panels, p0 * dk, s, 0)
            if soft_cap > 0:
                soft_cap_row(s, 0, n * PANEL, np.float32(soft_cap * 1.4426950408889634))
            if sight == SOME:
                _mask_scores(s, pos, low_p, high_p)
            panel_softmax(s, 0, n, m, total, factors, p0)
            if sight == ALL or finite:
                panel_mix(s, 0, n, v_tile, 0, TILE * COLUMNS, acc, p0 * width, width, factors[p0:])
            else:
                _mix_seen(
                    acc[p0 * width :], s, v_tile, pos, low_p, high_p, factors[p0:], width
                )  # fmt: skip
    _write_out(out, acc, total, h, dims, first, last, width)


@njit()
def _pack_panels(panels, lows, highs, q, low, high, h, n_head_kv, first, last, scale, soft_cap):
    """Store the queries of rows [first, last) as panels, with every constant factor in them.

    Rows that fill up the last panel are 0 and see what the last row sees.
    """
    dk, n_group = q.shape[2], q.shape[1] // n_head_kv
    factor = np.float32(scale / soft_cap if soft_cap > 0 else scale * 1.4426950408889634)
    for j in range(panels.shape[0] // dk):
        row = min(first + j, last - 1)
        t, head = row // n_group, h * n_group + row % n_group
        lows[j], highs[j] = low[t], high[t]
        used = factor if first + j < last else np.float32(0)
        start = j // PANEL * PANEL * dk + j % PANEL
        values = q[t, head]
        for d in range(dk):
            panels[start + d * PANEL] = values[d] * used if used != 0 else np.float32(0)


@njit()
def _widen_tile(k_tile, v_tile, k, v, cells, dims, h, v_trans):
    """Convert one head's K rows to ``[cells][dk]`` and V rows to column groups, in float32."""
    kind_k, kind_v, n_head_kv, dk, dv, _ = dims
    n = cells.shape[0]
    for i in range(n):
        widen(kind_k, k, (np.int64(cells[i]) * n_head_kv + h) * dk, dk, k_tile, i * dk)
    k_tile[n * dk : (n + CELLS - 1) // CELLS * CELLS * dk] = np.float32(0)
    if v_trans:
        n_cells = v.shape[1] // 2 if kind_v == KIND_F32 else v.shape[1]
        for d in range(dv):
            start = d // COLUMNS * TILE * COLUMNS + d % COLUMNS
            gather(kind_v, v, (h * dv + d) * n_cells, cells, n, v_tile, start, COLUMNS)
        return
    for i in range(n):
        start = (np.int64(cells[i]) * n_head_kv + h) * dv
        for d in range(0, dv, COLUMNS):
            to = (d * TILE) + i * COLUMNS
            widen(kind_v, v, start + d, min(COLUMNS, dv - d), v_tile, to)


@njit()
def _mask_scores(s, pos, low, high):
    for i in range(pos.shape[0]):
        row = s[i * PANEL : (i + 1) * PANEL]
        for j in range(PANEL):
            row[j] = row[j] if sees(pos[i], low[j], high[j]) else MASKED


@njit()
def _mix_seen(acc, s, v_tile, pos, low, high, factors, width):
    """As `panel_mix`, cell by cell and only where seen: 0 times NaN would be NaN."""
    for j in range(PANEL):
        sums = acc[j * width : (j + 1) * width]
        for d in range(width):
            sums[d] *= factors[j]
        for i in range(pos.shape[0]):
            if sees(pos[i], low[j], high[j]):
                for d in range(width):
                    value = v_tile[d // COLUMNS * TILE * COLUMNS + i * COLUMNS + d % COLUMNS]
                    sums[d] += s[i * PANEL + j] * value


@njit()
def _write_out(out, acc, total, h, dims, first, last, width):
    n_group = out.shape[1] // dims[2]
    for j in range(last - first):
        row = first + j
        to = out[row // n_group, h * n_group + row % n_group]
        sums = acc[j * width : j * width + to.shape[0]]
        for d in range(to.shape[0]):
            to[d] = sums[d] / total[j] if total[j] != 0 else np.float32(0)
