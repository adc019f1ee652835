"""How much of a stored token list a new prompt can reuse."""

from __future__ import annotations

import numpy as np


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading entries of two one-dimensional arrays are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def n_reusable(held: np.ndarray, prompt: np.ndarray) -> int:
    """Return how many tokens of `prompt` need not be computed again.

    At least the last one is computed, because its logits are what the prompt is read for.
    """
    return max(0, min(common_prefix(held, prompt), len(prompt) - 1))
