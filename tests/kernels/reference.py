"""Plain NumPy answers that kernel tests compare with; nothing here comes from kvnumba."""

from __future__ import annotations

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
