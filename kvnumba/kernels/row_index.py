"""Where the values of new tokens go in tensors over all streams, for scatter operations."""

from __future__ import annotations

import numpy as np

from kvnumba.kernels.jit import njit


@njit()
def row_index_kernel(cells, streams, size, out):
    """Write the row of each token in a tensor of ``n_stream * size`` rows.

    Parameters
    ----------
    cells, streams : ndarray of int32, shape (n_tokens,)
        Cell of each token, within its stream.
    size : int
        Cells of a stream.
    out : ndarray of int64, shape (n_tokens,)
        Result.
    """
    for t in range(cells.shape[0]):
        out[t] = np.int64(streams[t]) * size + np.int64(cells[t])


@njit()
def column_index_kernel(cells, streams, size, out):
    """Write the item of each value of each token in transposed tensors ``[n_stream, n, size]``.

    Parameters
    ----------
    cells, streams, size
        As `row_index_kernel`.
    out : ndarray of int64, shape (n_tokens, n)
        Result; `n` is the number of values a token.
    """
    for t in range(cells.shape[0]):
        row = out[t]
        first = np.int64(streams[t]) * size * row.shape[0] + np.int64(cells[t])
        for j in range(row.shape[0]):
            row[j] = first + j * size
