"""Write, read and move the K and V rows of cells.

The arrays are the storage itself: float32, or uint16 for f16 and bf16 bits, ``[n_cells, width]``
with one row per cell, or ``[width, n_cells]`` for transposed V. Nothing is checked here: shapes,
dtypes and cells (each within ``[0, n_cells)``) are the caller's promise.
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


def write_rows(kind, dst, cells, src) -> None:
    """Convert rows to the storage type and put row j at cell ``cells[j]``.

    Parameters
    ----------
    kind : {"f32", "f16", "bf16"} or int
        Element type of `dst`, by ggml name or id.
    dst : ndarray, shape (n_cells, width)
        Storage, modified in place.
    cells : ndarray of int32, shape (n,)
    src : ndarray of float32, shape (n, width)
    """
    _WRITE_ROWS[kind_id(kind)](dst, cells, src)


def write_cols(kind, dst, cells, src) -> None:
    """As `write_rows`, for transposed storage ``dst[width, n_cells]``."""
    _WRITE_COLS[kind_id(kind)](dst, cells, src)


def read_rows(kind, src, cells, out) -> None:
    """Convert the rows of ``src[n_cells, width]`` at `cells` to ``out[n, width]`` (float32)."""
    _READ_ROWS[kind_id(kind)](src, cells, out)


def read_cols(kind, src, cells, out) -> None:
    """As `read_rows`, for transposed storage ``src[width, n_cells]``."""
    _READ_COLS[kind_id(kind)](src, cells, out)


def copy_rows(dst, dst_cells, src_cells) -> None:
    """Move rows inside one storage array, one after the other in the order of the lists.

    Parameters
    ----------
    dst : ndarray, shape (n_cells, width), any storage dtype
        Modified in place: row ``dst_cells[j]`` becomes row ``src_cells[j]`` as it is at that
        moment, so an earlier move is seen by a later one.
    dst_cells, src_cells : ndarray of int32, shape (n,)
    """
    copy_rows_kernel(dst, dst_cells, src_cells)


def copy_cols(dst, dst_cells, src_cells) -> None:
    """As `copy_rows`, for transposed storage ``dst[width, n_cells]``."""
    copy_cols_kernel(dst, dst_cells, src_cells)


@njit()
def copy_rows_kernel(dst, dst_cells, src_cells):
    """Move rows in list order; see `copy_rows`."""
    for j in range(dst_cells.shape[0]):
        if dst_cells[j] != src_cells[j]:
            to, row = dst[dst_cells[j]], dst[src_cells[j]]
            for d in range(to.shape[0]):
                to[d] = row[d]


@njit()
def copy_cols_kernel(dst, dst_cells, src_cells):
    """Move columns in list order; see `copy_rows`."""
    for d in range(dst.shape[0]):
        channel = dst[d]
        for j in range(dst_cells.shape[0]):
            channel[dst_cells[j]] = channel[src_cells[j]]


# One kernel per element type and direction: the conversion must be known when the loop is
# compiled, or it would be chosen again for every value and nothing would vectorise.


@njit()
def write_rows_f32_kernel(dst, cells, src):
    """Write float32 rows; see `write_rows`."""
    for j in range(cells.shape[0]):
        to, row = dst[cells[j]], src[j]
        for d in range(to.shape[0]):
            to[d] = row[d]


@njit()
def write_rows_f16_kernel(dst, cells, src):
    """Write f16 rows; see `write_rows`."""
    for j in range(cells.shape[0]):
        to, row = dst[cells[j]], src[j]
        for d in range(to.shape[0]):
            to[d] = f32_to_f16(row[d])


@njit()
def write_rows_bf16_kernel(dst, cells, src):
    """Write bf16 rows; see `write_rows`."""
    for j in range(cells.shape[0]):
        to, row = dst[cells[j]], src[j]
        for d in range(to.shape[0]):
            to[d] = f32_to_bf16(row[d])


@njit()
def write_cols_f32_kernel(dst, cells, src):
    """Write float32 columns; see `write_cols`."""
    for d in range(dst.shape[0]):
        channel = dst[d]
        for j in range(cells.shape[0]):
            channel[cells[j]] = src[j, d]


@njit()
def write_cols_f16_kernel(dst, cells, src):
    """Write f16 columns; see `write_cols`."""
    for d in range(dst.shape[0]):
        channel = dst[d]
        for j in range(cells.shape[0]):
            channel[cells[j]] = f32_to_f16(src[j, d])


@njit()
def write_cols_bf16_kernel(dst, cells, src):
    """Write bf16 columns; see `write_cols`."""
    for d in range(dst.shape[0]):
        channel = dst[d]
        for j in range(cells.shape[0]):
            channel[cells[j]] = f32_to_bf16(src[j, d])


@njit()
def read_rows_f32_kernel(src, cells, out):
    """Read float32 rows; see `read_rows`."""
    for j in range(cells.shape[0]):
        row, to = src[cells[j]], out[j]
        for d in range(to.shape[0]):
            to[d] = row[d]


@njit()
def read_rows_f16_kernel(src, cells, out):
    """Read f16 rows; see `read_rows`."""
    for j in range(cells.shape[0]):
        row, to = src[cells[j]], out[j]
        for d in range(to.shape[0]):
            to[d] = f16_to_f32(row[d])


@njit()
def read_rows_bf16_kernel(src, cells, out):
    """Read bf16 rows; see `read_rows`."""
    for j in range(cells.shape[0]):
        row, to = src[cells[j]], out[j]
        for d in range(to.shape[0]):
            to[d] = bf16_to_f32(row[d])


@njit()
def read_cols_f32_kernel(src, cells, out):
    """Read float32 columns; see `read_cols`."""
    for d in range(src.shape[0]):
        channel = src[d]
        for j in range(cells.shape[0]):
            out[j, d] = channel[cells[j]]


@njit()
def read_cols_f16_kernel(src, cells, out):
    """Read f16 columns; see `read_cols`."""
    for d in range(src.shape[0]):
        channel = src[d]
        for j in range(cells.shape[0]):
            out[j, d] = f16_to_f32(channel[cells[j]])


@njit()
def read_cols_bf16_kernel(src, cells, out):
    """Read bf16 columns; see `read_cols`."""
    for d in range(src.shape[0]):
        channel = src[d]
        for j in range(cells.shape[0]):
            out[j, d] = bf16_to_f32(channel[cells[j]])


_WRITE_ROWS = {
    KIND_F32: write_rows_f32_kernel,
    KIND_F16: write_rows_f16_kernel,
    KIND_BF16: write_rows_bf16_kernel,
}
_WRITE_COLS = {
    KIND_F32: write_cols_f32_kernel,
    KIND_F16: write_cols_f16_kernel,
    KIND_BF16: write_cols_bf16_kernel,
}
_READ_ROWS = {
    KIND_F32: read_rows_f32_kernel,
    KIND_F16: read_rows_f16_kernel,
    KIND_BF16: read_rows_bf16_kernel,
}
_READ_COLS = {
    KIND_F32: read_cols_f32_kernel,
    KIND_F16: read_cols_f16_kernel,
    KIND_BF16: read_cols_bf16_kernel,
}
