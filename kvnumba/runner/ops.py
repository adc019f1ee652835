"""Per-token operations of the forward pass: how they are split over threads, and rope's tables."""

from __future__ import annotations

import numpy as np

from kvnumba.config import RopeConfig
from kvnumba.runner.kernels.rows import gate_rows_kernel, norm_rows_kernel, rope_rows_kernel

MIN_VALUES = 1 << 14
"""Values that are worth another thread."""


def n_parts(n_values: int, n_threads: int) -> int:
    """Return into how many parts work on `n_values` values is split."""
    return max(1, min(n_threads, n_values // MIN_VALUES))


def rms_norm(
    x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, n_threads: int = 1,
    add: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Set ``out = x / sqrt(mean(x**2) + eps) * weight``, after adding `add` to `x` in place.

    Parameters
    ----------
    x, out, add : ndarray of float32, shape (n, n_embd), C order
    weight : ndarray of float32, shape (n_embd,)
    """
    if add is None:
        add = x[:0]
    norm_rows_kernel(out, x, add, weight, np.float32(eps), n_parts(x.size, n_threads))


def rope_tables(rope: RopeConfig | None, pos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of each token's angles, times the magnitude.

    Returns
    -------
    cos, sin : ndarray of float32, shape (n, n_rot // 2)
        No columns without rope.
    """
    if rope is None:
        empty = np.empty((len(pos), 0), np.float32)
        return empty, empty
    # float64 up to here: at position 100,000 a float32 angle is off by 1/100 of a radian
    angle = pos.astype(np.float64)[:, None] * rope.theta()[None, :]
    cos = (np.cos(angle) * rope.magnitude).astype(np.float32)
    return cos, (np.sin(angle) * rope.magnitude).astype(np.float32)


def rotate(
    q: np.ndarray, k: np.ndarray, tables: tuple[np.ndarray, np.ndarray], head_dim: int,
    neox: bool, n_threads: int = 1,
) -> None:  # fmt: skip
    """Rotate the heads of `q` and `k` in place.

    Parameters
    ----------
    q, k : ndarray of float32, shapes (n, n_head * head_dim), (n, n_head_kv * head_dim), C order
    tables : (cos, sin)
        From `rope_tables`.
    """
    if tables[0].shape[1]:
        rope_rows_kernel(q, k, *tables, head_dim, neox, n_parts(q.size + k.size, n_threads))


def swiglu(gate: np.ndarray, up: np.ndarray, n_threads: int = 1) -> None:
    """Set ``gate = silu(gate) * up``; float32 arrays of the same shape, C order.

    Notes
    -----
    Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
    """
    gate_rows_kernel(gate, up, n_parts(gate.size, n_threads))
