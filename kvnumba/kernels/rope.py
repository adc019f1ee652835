"""K-shift: turn stored K rows by the change of their cells' positions.

Rotations about the same axis add up, so a row that was rotated for its old position becomes the
row of the new one when each pair is turned by ``delta * theta``. No magnitude is applied: the row
already carries the one it was written with.
"""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.half import (
    KIND_BF16,
    KIND_F16,
    KIND_F32,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    kind_id,
)
from kvnumba.kernels.jit import njit


def shift_rows(
    kind, k, src_cells, dst_cells, delta, n_head_kv, head_dim, n_rot, neox, theta, first=0
) -> None:
    """Rotate the K rows of some cells by a number of positions each.

    Parameters
    ----------
    kind : {"f32", "f16", "bf16"} or int
        Element type of `k`, by ggml name or id. Results are rounded to nearest, ties to even.
    k : ndarray, shape (n_cells, n_head_kv * head_dim)
        Storage (uint16 for the half types), modified in place.
    src_cells, dst_cells : ndarray of int32, shape (n,)
        Row ``dst_cells[j]`` becomes the rotated row ``src_cells[j]``; the two may be equal. The
        lists are followed in order.
    delta : ndarray of int32, shape (n,)
        Positions to move by. A row with 0 is copied bit for bit, or left alone in place.
    n_head_kv, head_dim, n_rot : int
        `n_rot` values of each head are rotated, the rest is copied bit for bit.
    neox : bool
        Pairs are ``(i, i + n_rot/2)`` if true, else ``(2i, 2i + 1)``.
    theta : ndarray of float64, shape (n_rot // 2,)
        Angle of each pair per position, in radians.
    first : int
        The first of the rotated values of each head.
    """
    cos = np.empty(n_rot // 2, np.float32)
    turn = (cos, np.empty_like(cos), np.empty(n_rot, np.float32))
    _SHIFT_ROWS[kind_id(kind)](
        k, src_cells, dst_cells, delta, theta, n_head_kv, head_dim, first, bool(neox), *turn
    )


@njit()
def _set_angles(delta, theta, cos, sin):
    # float64 up to here: at position 100,000 a float32 angle is off by 1/100 of a radian
    for i in range(theta.shape[0]):
        angle = np.float64(delta) * theta[i]
        cos[i] = np.cos(angle)
        sin[i] = np.sin(angle)


@njit()
def _rotate(head, neox, cos, sin):
    """Rotate the pairs of ``head[n_rot]`` (float32) in place."""
    half = cos.shape[0]
    if neox:
        lower, upper = head[:half], head[half : 2 * half]
        for i in range(half):
            x, y = lower[i], upper[i]
            lower[i] = x * cos[i] - y * sin[i]
            upper[i] = x * sin[i] + y * cos[i]
    else:
        for i in range(half):
            x, y = head[2 * i], head[2 * i + 1]
            head[2 * i] = x * cos[i] - y * sin[i]
            head[2 * i + 1] = x * sin[i] + y * cos[i]


@njit()
def _copy_row(to, row):
    for d in range(to.shape[0]):
        to[d] = row[d]


@njit()
def shift_rows_f32_kernel(
    k, src_cells, dst_cells, delta, theta, n_head_kv, head_dim, first, neox, cos, sin, head
):
    """Rotate float32 rows; see `shift_rows`. `cos`, `sin` and ``head[n_rot]`` are scratch."""
    turned = np.int32(0)
    for j in range(src_cells.shape[0]):
        row = k[dst_cells[j]]
        if dst_cells[j] != src_cells[j]:
            _copy_row(row, k[src_cells[j]])
        if delta[j] == 0:
            continue
        if delta[j] != turned:
            turned = delta[j]
            _set_angles(turned, theta, cos, sin)
        for h in range(n_head_kv):
            _rotate(row[h * head_dim + first :][: head.shape[0]], neox, cos, sin)


@njit()
def shift_rows_f16_kernel(
    k, src_cells, dst_cells, delta, theta, n_head_kv, head_dim, first, neox, cos, sin, head
):
    """Rotate f16 rows; see `shift_rows`. `cos`, `sin` and ``head[n_rot]`` are scratch."""
    turned = np.int32(0)
    for j in range(src_cells.shape[0]):
        row = k[dst_cells[j]]
        if dst_cells[j] != src_cells[j]:
            _copy_row(row, k[src_cells[j]])
        if delta[j] == 0:
            continue
        if delta[j] != turned:
            turned = delta[j]
            _set_angles(turned, theta, cos, sin)
        for h in range(n_head_kv):
            stored = row[h * head_dim + first :][: head.shape[0]]
            for d in range(head.shape[0]):
                head[d] = f16_to_f32(stored[d])
            _rotate(head, neox, cos, sin)
            for d in range(head.shape[0]):
                stored[d] = f32_to_f16(head[d])


@njit()
def shift_rows_bf16_kernel(
    k, src_cells, dst_cells, delta, theta, n_head_kv, head_dim, first, neox, cos, sin, head
):
    """Rotate bf16 rows; see `shift_rows`. `cos`, `sin` and ``head[n_rot]`` are scratch."""
    turned = np.int32(0)
    for j in range(src_cells.shape[0]):
        row = k[dst_cells[j]]
        if dst_cells[j] != src_cells[j]:
            _copy_row(row, k[src_cells[j]])
        if delta[j] == 0:
            continue
        if delta[j] != turned:
            turned = delta[j]
            _set_angles(turned, theta, cos, sin)
        for h in range(n_head_kv):
            stored = row[h * head_dim + first :][: head.shape[0]]
            for d in range(head.shape[0]):
                head[d] = bf16_to_f32(stored[d])
            _rotate(head, neox, cos, sin)
            for d in range(head.shape[0]):
                stored[d] = f32_to_bf16(head[d])


_SHIFT_ROWS = {
    KIND_F32: shift_rows_f32_kernel,
    KIND_F16: shift_rows_f16_kernel,
    KIND_BF16: shift_rows_bf16_kernel,
}
