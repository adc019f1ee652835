"""Attention of a few queries over many cells: rows are walked once, split over threads.

Cells are taken in tiles small enough for the second-level cache. Within a tile the scores are
computed cell by cell for all heads, as the rows lie in memory; then come the online softmax of
Milakov and Gimelshein (arXiv 1805.02867) and the weighted sum of the V rows. Each thread keeps
maxima, sums and outputs of its part of the cells; they are merged at the end.

A "row" here is one query of one head. The ``n_rows`` rows of a KV head are its queries times the
query heads that share it, and lie together: row ``t * n_group + g`` of head h belongs to query t
and query head ``h * n_group + g``.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types

from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.indirect import address_of, make_call
from kvnumba.kernels.jit import njit
from kvnumba.kernels.loops import MAX_ROWS
from kvnumba.kernels.micro_rows import dots, gather, mix, prefetch
from kvnumba.kernels.micro_scores import (
    MASKED,
    NO_MAXIMUM,
    power_of_two,
    soft_cap_row,
    softmax_row,
)
from kvnumba.kernels.sight import NOTHING, SOME, gather_seen, seen_run, sees, sight_bounds, sight_of

AHEAD = 16
"""Cells between the K row that is used and the one that is fetched from memory."""


def work_size(tile, n_head_kv, n_rows, dv, v_trans):
    """Return the float32 values of working memory that one part of the cells needs."""
    rows = n_head_kv * n_rows
    return rows * (tile + 2 + dv) + (tile * n_head_kv * dv if v_trans else 0)


_F32, _I32, _ITEMS = types.float32[::1], types.int32[::1], types.uint16[:, ::1]
_PART_TYPES = (
    types.float32[:, ::1], types.int32[:, :, ::1], _F32, _ITEMS, _ITEMS, _ITEMS, _I32, _I32, _I32,
    _I32, types.UniTuple(types.int64, 6), types.boolean, types.float64, types.int64, types.int64,
)  # fmt: skip
_call_part = make_call(_PART_TYPES)


def part_address():
    """Return the address of the work on one part, which the kernel below is given."""
    return address_of(_attend_part, _PART_TYPES)


@njit(parallel=True)
def attend_decode_kernel(
    part_function, work, lists, ends, qs, q, k, v, work_items, cells, cell_pos, q_pos, window,
    window_kind, causal, kind_k, kind_v, n_head_kv, v_trans, scale, soft_cap, n_parts, out,
):  # fmt: skip
    """Attend from ``q[n_q, n_head, dk]`` to the listed cells; for small `n_q`.

    Parameters
    ----------
    part_function : int
        What `part_address` returned.
    work : ndarray of float32, shape (at least n_parts, at least `work_size`)
        Scratch.
    lists : ndarray of int32, shape (at least n_parts, 3, tile)
        Scratch; its last axis sets how many cells are handled at once.
    ends : ndarray of int32, shape (2, n_q), scratch
    qs : ndarray of float32, shape (at least q.size,), scratch
    q, k, v, cells, cell_pos, q_pos, out
        As `kvnumba.kernels.attend.attend_rows` has them, `k` and `v` as uint16 items.
    work_items : ndarray of uint16
        `work` again, as items.
    window, window_kind, kind_k, kind_v, n_head_kv : int
    causal, v_trans : bool
    scale, soft_cap : float
    n_parts : int
        Into how many parts the cells are split; at most one thread works on each.
    """
    n_q, n_head, dk = q.shape
    dims = (kind_k, kind_v, n_head_kv, n_q * (n_head // n_head_kv), dk, out.shape[2])
    _pack_queries(qs, q, n_head_kv, scale, soft_cap)
    low, high = ends[0], ends[1]
    sight_bounds(q_pos, window, window_kind, causal, low, high)
    for part in prange(n_parts):
        arguments = (
            work, lists, qs, k, v, work_items, cells, cell_pos, low, high, dims, v_trans,
            soft_cap, n_parts, np.int64(part),
        )  # fmt: skip
        _call_part(part_function, arguments)
    _merge_parts(work, lists.shape[2], dims, n_parts, out)


@njit()
def _pack_queries(qs, q, n_head_kv, scale, soft_cap):
    """Lay the rows of each KV head together and put every constant factor into q."""
    n_q, n_head, dk = q.shape
    n_group = n_head // n_head_kv
    # log2(e) makes exponentials powers of two; with a cap it comes after the cap
    factor = np.float32(scale / soft_cap if soft_cap > 0 else scale * 1.4426950408889634)
    for t in range(n_q):
        for head in range(n_head):
            row = (head // n_group) * n_q * n_group + t * n_group + head % n_group
            to, values = qs[row * dk : (row + 1) * dk], q[t, head]
            for d in range(dk):
                to[d] = values[d] * factor


@njit()
def _split_work(work, tile, dims):
    """Return the scores, maxima, sums and outputs within one part's working memory."""
    rows, dv = dims[2] * dims[3], dims[5]
    m = rows * tile
    return (
        work[:m], work[m : m + rows], work[m + rows : m + 2 * rows],
        work[m + 2 * rows :][: rows * dv],
    )  # fmt: skip


@njit()
def _attend_part(
    all_work, all_lists, qs, k, v, work_items, all_cells, all_pos, low, high, dims, v_trans,
    soft_cap, n_parts, part,
):  # fmt: skip
    """Sum over the cells of one part into its working memory."""
    per = (all_cells.shape[0] + n_parts - 1) // n_parts
    cells, cell_pos = all_cells[part * per :][:per], all_pos[part * per :][:per]
    work, lists, work_start = all_work[part], all_lists[part], part * all_work.shape[1]
    tile = lists.shape[1]
    s, m, total, acc = _split_work(work, tile, dims)
    m[:] = NO_MAXIMUM
    total[:] = np.float32(0)
    acc[:] = np.float32(0)
    v_tile = work_start + s.shape[0] + m.shape[0] + total.shape[0] + acc.shape[0]
    for t0 in range(0, cells.shape[0], tile):
        seen, pos, partial = cells[t0 : t0 + tile], cell_pos[t0 : t0 + tile], False
        sight = sight_of(pos, low, high)
        if sight == NOTHING:
            continue
        if sight == SOME:
            n = gather_seen(lists, seen, pos, low, high)
            seen, pos, partial = lists[0, :n], lists[1, :n], low.shape[0] > 1
            if n == 0:
                continue
        ahead = cells[t0 + AHEAD : t0 + AHEAD + seen.shape[0]]
        _score_tile(s, tile, qs, k, v, seen, ahead, dims, v_trans)
        if soft_cap > 0:
            _cap_scores(s, tile, seen.shape[0], soft_cap)
        if partial:
            _mask_scores(s, tile, pos, low, high, dims)
        _softmax_tile(s, tile, m, total, acc, seen.shape[0], dims)
        dims_v, rows_v, start_v, order = dims, v, 0, seen
        if v_trans:
            _transpose_v(work, v_tile - work_start, lists[2], v, seen, dims)
            dims_v = (dims[0], np.int64(KIND_F32), dims[2], dims[3], dims[4], dims[5])
            rows_v, start_v, order = work_items, v_tile, lists[2, : seen.shape[0]]
        _mix_tile(acc, s, tile, rows_v, start_v, order, pos, low, high, dims_v, partial)


@njit()
def _step(left):
    """Return how many of the rows that are left go next: never a lone one after a full step."""
    if left >= MAX_ROWS and left != MAX_ROWS + 1:
        return MAX_ROWS
    return min(left, 2)


@njit()
def _score_tile(s, tile, qs, k, v, cells, ahead, dims, v_trans):
    kind_k, kind_v, n_head_kv, n_rows, dk, dv = dims
    k_step, v_step, n = n_head_kv * dk, n_head_kv * dv, cells.shape[0]
    k_bytes = k_step * (4 if kind_k == KIND_F32 else 2)
    v_bytes = 0 if v_trans else v_step * (4 if kind_v == KIND_F32 else 2)
    k_share, v_share = 4 * k_bytes // n_head_kv + 63, 4 * v_bytes // n_head_kv + 63
    for i in range(0, n, 4):
        # short of four, the last cell is taken again: always a row that may be read
        c0, c1 = np.int64(cells[i]), np.int64(cells[min(i + 1, n - 1)])
        c2, c3 = np.int64(cells[min(i + 2, n - 1)]), np.int64(cells[min(i + 3, n - 1)])
        k_at, v_at = (i, np.int64(0)), (i, np.int64(0))
        for h in range(n_head_kv):
            k_at = _fetch(k, ahead, k_bytes, k_at, k_share)
            v_at = _fetch(v, cells, v_bytes, v_at, v_share)
            o, r, last = h * dk, h * n_rows, h * n_rows + n_rows
            while r < last:
                step = _step(last - r)
                dots(
                    kind_k, step, k, c0 * k_step + o, c1 * k_step + o, c2 * k_step + o,
                    c3 * k_step + o, dk, qs, r * dk, dk, s, r * tile + i, tile,
                )  # fmt: skip
                r += step


@njit()
def _fetch(rows, cells, row_bytes, at, share):
    """Ask for the next `share` bytes of the listed rows; return where to go on.

    Requests spread over the work of all heads, in address order, are what the memory keeps up
    with.
    """
    j, start = at
    while share >= 64 and j < cells.shape[0] and row_bytes > 0:
        size = min(share, row_bytes - start)
        prefetch(rows, np.int64(cells[j]) * row_bytes + start, size)
        share -= size
        start += size
        if start == row_bytes:
            j, start = j + 1, np.int64(0)
    return j, start


@njit()
def _cap_scores(s, tile, n, soft_cap):
    for start in range(0, s.shape[0], tile):
        soft_cap_row(s, start, n, np.float32(soft_cap * 1.4426950408889634))


@njit()
def _mask_scores(s, tile, pos, low, high, dims):
    n_rows, n_group = dims[3], dims[3] // low.shape[0]
    for row in range(dims[2] * n_rows):
        t = row % n_rows // n_group
        scores = s[row * tile : row * tile + pos.shape[0]]
        for i in range(pos.shape[0]):
            if not sees(pos[i], low[t], high[t]):
                scores[i] = MASKED


@njit()
def _softmax_tile(s, tile, m, total, acc, n, dims):
    """Turn scores to weights, after scaling what was summed so far to the new maxima."""
    dv = dims[5]
    for row in range(m.shape[0]):
        largest, weight = softmax_row(s, row * tile, n, m[row])
        if largest != m[row]:
            factor = power_of_two(m[row] - largest)
            total[row] *= factor
            sums = acc[row * dv : row * dv + dv]
            for d in range(dv):
                sums[d] *= factor
            m[row] = largest
        total[row] += weight


@njit()
def _transpose_v(work, start, order, v, cells, dims):
    """Copy a tile of transposed V to rows of float32 and list them in `order`."""
    width = dims[2] * dims[5]
    n_cells = v.shape[1] // 2 if dims[1] == KIND_F32 else v.shape[1]
    for d in range(width):
        gather(dims[1], v, d * n_cells, cells, cells.shape[0], work, start + d, width)
    for i in range(cells.shape[0]):
        order[i] = i


@njit()
def _mix_tile(acc, s, tile, v, v_start, cells, pos, low, high, dims, partial):
    """Add the weighted V rows; in a partial tile each row adds only runs of cells that it sees.

    A weight of 0 is no excuse for touching a row: 0 times NaN is NaN.
    """
    kind_v, n_head_kv, n_rows, dv = dims[1], dims[2], dims[3], dims[5]
    n_group, n = n_rows // low.shape[0], pos.shape[0]
    for h in range(n_head_kv):
        row, last = h * n_rows, h * n_rows + n_rows
        while row < last:
            step, start, stop = 1 if partial else _step(last - row), 0, n
            while start < n:
                if partial:
                    t = row % n_rows // n_group
                    start, stop = seen_run(pos, low[t], high[t], start)
                mix(
                    kind_v, step, v, v_start + h * dv, n_head_kv * dv, dv, cells[start:],
                    stop - start, s, row * tile + start, tile, acc, row * dv, dv,
                )  # fmt: skip
                start = stop
            row += step


@njit()
def _merge_parts(work, tile, dims, n_parts, out):
    dv, n_rows, n_group = dims[5], dims[3], dims[3] // out.shape[0]
    for row in range(dims[2] * n_rows):
        largest = NO_MAXIMUM
        for part in range(n_parts):
            largest = max(largest, _split_work(work[part], tile, dims)[1][row])
        to = out[row % n_rows // n_group, row // n_rows * n_group + row % n_group]
        to[:] = np.float32(0)
        total = np.float32(0)
        for part in range(n_parts):
            _, m, part_total, acc = _split_work(work[part], tile, dims)
            factor = power_of_two(m[row] - largest)
            total += part_total[row] * factor
            sums = acc[row * dv : row * dv + dv]
            for d in range(dv):
                to[d] += sums[d] * factor
        if total != 0:
            for d in range(dv):
                to[d] /= total
