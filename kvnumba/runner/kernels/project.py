"""Products with stored weights for few tokens, and rows of weights picked out.

Up to three matrices share an input, which keeps the number of parallel regions per token small.
"""

from __future__ import annotations

from numba import prange

from kvnumba.kernels.jit import njit
from kvnumba.runner.kernels.blocks import decode_row
from kvnumba.runner.kernels.dots import dot_rows

_LINE = 16
"""Rows of one part begin at a multiple of this, so that threads share no cache line of `out`."""


@njit()
def _first_row(n_rows, part, n_parts):
    return n_rows if part == n_parts else n_rows * part // n_parts // _LINE * _LINE


@njit()
def _project_part(outs, x, weights, kinds, sizes, part, n_parts):
    for m in range(len(outs)):
        n_rows = outs[m].shape[1]
        r0, r1 = _first_row(n_rows, part, n_parts), _first_row(n_rows, part + 1, n_parts)
        dot_rows(kinds[m], weights[m], sizes[m], r0, r1, x.shape[1], x, x.shape[0], outs[m], n_rows)


@njit(parallel=True)
def project_kernel(outs, x, weights, kinds, sizes, n_parts):
    """Multiply vectors with three matrices.

    Parameters
    ----------
    outs : tuple of 3 ndarrays of float32, shapes (n, n_rows)
        Results; no columns where a matrix is not wanted.
    x : ndarray of float32, shape (n, n_in)
    weights : tuple of 3 ndarrays of uint8
        Rows of `n_in` weights.
    kinds, sizes : tuple of 3 int
        ggml id and bytes per row of each.
    n_parts : int
        Into how many parts the rows are split; at most one thread works on each.
    """
    for part in prange(n_parts):
        _project_part(outs, x, weights, kinds, sizes, part, n_parts)


@njit()
def pick_rows_kernel(out, w, kind, w_row_bytes, rows):
    """Decode some rows of a matrix: ``out[j]`` (float32) becomes row ``rows[j]`` (int32)."""
    for j in range(rows.shape[0]):
        decode_row(kind, w, rows[j] * w_row_bytes, out.shape[1], out, j * out.shape[1])
