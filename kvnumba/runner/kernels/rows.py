"""Per-token work of the forward pass: RMS norm with residual, rotary positions, SwiGLU.

Each kernel splits the tokens into `n_parts` parts, worked on side by side.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from kvnumba.kernels.jit import njit
from kvnumba.runner.kernels.gates import gate_values

_SUMS = {"nsz", "arcp", "contract", "afn", "reassoc"}
"""Sums may be reordered, so that they vectorise; infinities and NaN stay what they are."""


@njit(fastmath=_SUMS)
def _mean_square(x):
    total = np.float32(0)
    for d in range(x.shape[0]):
        total += x[d] * x[d]
    return total / np.float32(x.shape[0])


@njit()
def _norm_row(out, x, weight, eps):
    factor = np.float32(1) / np.sqrt(_mean_square(x) + eps)
    for d in range(x.shape[0]):
        out[d] = x[d] * factor * weight[d]


@njit()
def _norm_part(out, x, add, weight, eps, t0, t1):
    for t in range(t0, t1):
        row = x[t]
        if add.shape[0]:
            more = add[t]
            for d in range(row.shape[0]):
                row[d] += more[d]
        _norm_row(out[t], row, weight, eps)


@njit(parallel=True)
def norm_rows_kernel(out, x, add, weight, eps, n_parts):
    """Set ``out = x / sqrt(mean(x**2) + eps) * weight`` for each token.

    Parameters
    ----------
    out : ndarray of float32, shape (n, n_embd)
    x : ndarray of float32, shape (n, n_embd)
        Modified in place: `add` is added to it first.
    add : ndarray of float32, shape (n, n_embd) or (0, n_embd)
        The residual; no rows for none.
    weight : ndarray of float32, shape (n_embd,)
    eps : float32
    n_parts : int

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """
    n = x.shape[0]
    if n_parts == 1:
        _norm_part(out, x, add, weight, eps, 0, n)
    else:
        for part in prange(n_parts):
            t0, t1 = n * part // n_parts, n * (part + 1) // n_parts
            _norm_part(out, x, add, weight, eps, t0, t1)


@njit()
def _rope_head(x, cos, sin, neox):
    n_pairs = cos.shape[0]
    if neox:
        low, high = x[:n_pairs], x[n_pairs : 2 * n_pairs]
        for i in range(n_pairs):
            a, b = low[i], high[i]
            low[i] = a * cos[i] - b * sin[i]
            high[i] = a * sin[i] + b * cos[i]
    else:
        for i in range(n_pairs):
            a, b = x[2 * i], x[2 * i + 1]
            x[2 * i] = a * cos[i] - b * sin[i]
            x[2 * i + 1] = a * sin[i] + b * cos[i]


@njit()
def _rope_part(q, k, cos, sin, head_dim, neox, t0, t1):
    for t in range(t0, t1):
        for start in range(0, q.shape[1], head_dim):
            _rope_head(q[t, start : start + head_dim], cos[t], sin[t], neox)
        for start in range(0, k.shape[1], head_dim):
            _rope_head(k[t, start : start + head_dim], cos[t], sin[t], neox)


@njit(parallel=True)
def rope_rows_kernel(q, k, cos, sin, head_dim, neox, n_parts):
    """Rotate the queries and keys of each token for its position, in place.

    Parameters
    ----------
    q, k : ndarray of float32, shapes (n, n_head * head_dim), (n, n_head_kv * head_dim)
    cos, sin : ndarray of float32, shape (n, n_rot // 2)
        Of each token's angles, times the magnitude. Only the first n_rot values of a head turn.
    head_dim : int
    neox : bool
        Pairs are ``(i, i + n_rot/2)`` if true, else ``(2i, 2i + 1)``.
    n_parts : int

    Notes
    -----
    Su et al., "RoFormer" (arXiv 2104.09864).
    """
    n = q.shape[0]
    if n_parts == 1:
        _rope_part(q, k, cos, sin, head_dim, neox, 0, n)
    else:
        for part in prange(n_parts):
            t0, t1 = n * part // n_parts, n * (part + 1) // n_parts
            _rope_part(q, k, cos, sin, head_dim, neox, t0, t1)


@njit(parallel=True)
def gate_rows_kernel(gate, up, n_parts):
    """Set ``gate = silu(gate) * up``, both float32 of the same shape and size, in C order."""
    if n_parts == 1:
        gate_values(gate, 0, up, 0, gate.size)
        return
    for part in prange(n_parts):
        start, stop = gate.size * part // n_parts, gate.size * (part + 1) // n_parts
        gate_values(gate, start, up, start, stop - start)
