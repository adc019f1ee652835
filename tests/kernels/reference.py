"""Plain NumPy answers that kernel tests compare with; nothing here comes from kvnumba."""

from __future__ import annotations

import math

import numpy as np

STEP = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
"""Distance between neighbours just above 1, for each element type."""


def narrow(kind: str, values: np.ndarray) -> np.ndarray:
    """Round float32 values to storage items, ties to even."""
    if kind == "f32":
        return values.copy()
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(kind: str, items: np.ndarray) -> np.ndarray:
    """Return storage items as float32 values."""
    if kind == "f32":
        return items.copy()
    if kind == "f16":
        return items.view(np.float16).astype(np.float32)
    return (items.astype(np.uint32) << 16).view(np.float32)


def is_hidden(p0, p1, window=0, window_kind="standard", causal=True):
    """Return whether a token at `p1` does not see the position `p0`; whole numbers of Python."""
    if causal and p0 > p1:
        return True
    if window <= 0:
        return False
    if window_kind == "standard":
        return p1 - p0 >= window
    if window_kind == "chunked":
        return p0 < math.floor(p1 / window) * window
    return abs(p1 - p0) > window // 2


def attention(q, k, v, n_head_kv, cells, cell_pos, q_pos, *, scale, soft_cap=0.0, **rule):
    """Attend in float64, one query and head at a time; `k` and `v` are values by row."""
    n_q, n_head, dk = q.shape
    dv = v.shape[1] // n_head_kv
    keys = k[cells].reshape(len(cells), n_head_kv, dk).astype(np.float64)
    values = v[cells].reshape(len(cells), n_head_kv, dv).astype(np.float64)
    out = np.zeros((n_q, n_head, dv))
    for t in range(n_q):
        seen = np.array([not is_hidden(p, int(q_pos[t]), **rule) for p in cell_pos.tolist()], bool)
        if not seen.any():
            continue
        for head in range(n_head):
            h = head // (n_head // n_head_kv)
            s = keys[seen, h] @ q[t, head].astype(np.float64) * scale
            if soft_cap:
                s = soft_cap * np.tanh(s / soft_cap)
            p = np.exp(s - s.max())
            out[t, head] = p @ values[seen, h] / p.sum()
    return out
