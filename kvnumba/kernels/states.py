"""Read, write, clear and copy recurrent states in their rows.

The arrays are the storage itself, as in `kvnumba.kernels.rows`: float32, or uint16 for f16 and
bf16 bits, ``[n_rows, width]``. Nothing is checked: shapes, dtypes and rows are the caller's
promise. A row of -1 reads as zeros and takes nothing.
"""

from __future__ import annotations

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


def gather_states(kind, src, rows, out) -> None:
    """Convert states to float32; zeros where there is none.

    Parameters
    ----------
    kind : {"f32", "f16", "bf16"} or int
        Element type of `src`, by ggml name or id.
    src : ndarray, shape (n_rows, width)
        Storage.
    rows : ndarray, shape (n,), int32
        The row of each state, -1: zeros.
    out : ndarray, shape (n, width), float32
        Modified in place.
    """
    _GATHER[kind_id(kind)](src, rows, out)


def scatter_states(kind, dst, rows, states) -> None:
    """Convert float32 ``states[n, width]`` to the storage type; state j becomes row ``rows[j]``.

    Rows of -1 are left out. `dst` is modified in place.
    """
    _SCATTER[kind_id(kind)](dst, rows, states)


@njit()
def zero_rows_kernel(dst, rows):
    """Fill the listed rows (int32; -1: none) of ``dst[n_rows, width]`` with zeros."""
    for j in range(rows.shape[0]):
        if rows[j] >= 0:
            dst[rows[j], :] = 0


@njit()
def copy_states_kernel(dst, dst_rows, src_rows):
    """Copy rows in list order: ``dst_rows[j]`` becomes ``src_rows[j]``, zeros where that is -1.

    Parameters
    ----------
    dst : ndarray, shape (n_rows, width), any storage dtype
        Modified in place; an earlier copy is seen by a later one.
    dst_rows, src_rows : ndarray, shape (n,), int32
        Copies to -1 are left out.
    """
    for j in range(dst_rows.shape[0]):
        if dst_rows[j] < 0:
            continue
        to = dst[dst_rows[j]]
        if src_rows[j] < 0:
            to[:] = 0
        elif src_rows[j] != dst_rows[j]:
            row = dst[src_rows[j]]
            for d in range(to.shape[0]):
                to[d] = row[d]


# One kernel per element type and direction, for the reason given in rows.py.


@njit()
def gather_states_f32_kernel(src, rows, out):
    """Read float32 states; see `gather_states`."""
    for j in range(rows.shape[0]):
        to = out[j]
        if rows[j] < 0:
            to[:] = 0
            continue
        row = src[rows[j]]
        for d in range(to.shape[0]):
            to[d] = row[d]


@njit()
def gather_states_f16_kernel(src, rows, out):
    """Read f16 states; see `gather_states`."""
    for j in range(rows.shape[0]):
        to = out[j]
        if rows[j] < 0:
            to[:] = 0
            continue
        row = src[rows[j]]
        for d in range(to.shape[0]):
            to[d] = f16_to_f32(row[d])


@njit()
def gather_states_bf16_kernel(src, rows, out):
    """Read bf16 states; see `gather_states`."""
    for j in range(rows.shape[0]):
        to = out[j]
        if rows[j] < 0:
            to[:] = 0
            continue
        row = src[rows[j]]
        for d in range(to.shape[0]):
            to[d] = bf16_to_f32(row[d])


@njit()
def scatter_states_f32_kernel(dst, rows, states):
    """Write float32 states; see `scatter_states`."""
    for j in range(rows.shape[0]):
        if rows[j] < 0:
            continue
        to, state = dst[rows[j]], states[j]
        for d in range(to.shape[0]):
            to[d] = state[d]


@njit()
def scatter_states_f16_kernel(dst, rows, states):
    """Write f16 states; see `scatter_states`."""
    for j in range(rows.shape[0]):
        if rows[j] < 0:
            continue
        to, state = dst[rows[j]], states[j]
        for d in range(to.shape[0]):
            to[d] = f32_to_f16(state[d])


@njit()
def scatter_states_bf16_kernel(dst, rows, states):
    """Write bf16 states; see `scatter_states`."""
    for j in range(rows.shape[0]):
        if rows[j] < 0:
            continue
        to, state = dst[rows[j]], states[j]
        for d in range(to.shape[0]):
            to[d] = f32_to_bf16(state[d])


_GATHER = {
    KIND_F32: gather_states_f32_kernel,
    KIND_F16: gather_states_f16_kernel,
    KIND_BF16: gather_states_bf16_kernel,
}
_SCATTER = {
    KIND_F32: scatter_states_f32_kernel,
    KIND_F16: scatter_states_f16_kernel,
    KIND_BF16: scatter_states_bf16_kernel,
}
