"""Biases by distance: ALiBi's slopes and T5's buckets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.cells import Cells, is_whole
from kvnumba.errors import ConfigError
from kvnumba.kernels import masks as kernels
from kvnumba.masks.inputs import check_n_kv, output_array, tokens_of


def alibi_slopes(n_head: int, max_bias: float = 8.0) -> np.ndarray:
    """Return the factor of each query head on the distances of `kq_mask`.

    Parameters
    ----------
    n_head : int
        Query heads, at least 1.
    max_bias : float
        The model's, at least 0; 8 in most models.

    Returns
    -------
    slopes : ndarray, shape (n_head,), float32

    Raises
    ------
    ConfigError
        If an argument is impossible.

    Source: Press et al., arXiv 2108.12409; ggml, soft_max_ext.
    """
    if not is_whole(n_head) or n_head < 1:
        raise ConfigError(f"n_head {n_head!r} must be a whole number of at least 1")
    number = (int, float, np.integer, np.floating)
    if not (isinstance(max_bias, number) and math.isfinite(max_bias) and max_bias >= 0):
        raise ConfigError(f"max_bias {max_bias!r} must be a finite number of at least 0")
    n_even = 1 << (int(n_head).bit_length() - 1)
    h = np.arange(n_head)
    # Heads beyond a power of two take every other slope of twice as many heads.
    exponent = np.where(h < n_even, h + 1, h - n_even + 0.5)
    return np.exp2(-max_bias / n_even * exponent).astype(np.float32)


def position_buckets(
    cells: Cells,
    batch: Batch | tuple[Any, Any],
    n_kv: int,
    n_buckets: int = 32,
    *,
    max_distance: int = 128,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return T5's bucket of the distance from each token back to each cell.

    The first half of the buckets has one distance each; the others grow by a constant factor up to
    `max_distance`. A cell ahead of the token counts as at distance 0, an empty one as at position
    -1: both are for `kq_mask` to hide.

    Parameters
    ----------
    cells, batch, n_kv
        As `kq_mask`.
    n_buckets : int
        From 2 up to less than ``2 * max_distance``.
    max_distance : int
        Greater distances share the last bucket.
    out : ndarray, shape (n_tokens, n_kv), int32, modified in place, optional

    Returns
    -------
    out : ndarray, shape (n_tokens, n_kv), int32

    Raises
    ------
    ConfigError, ShapeError, PositionError, SequenceError
        If an argument is impossible; nothing is written.

    Source: Raffel et al., arXiv 1910.10683; llama-kv-cache.cpp, set_input_pos_bucket.
    """
    pos, _, _ = tokens_of(cells, batch)
    check_n_kv(cells, n_kv)
    if not is_whole(max_distance) or not 2 <= max_distance <= 1 << 20:
        raise ConfigError(f"max_distance {max_distance!r} must be a whole number from 2 to 2**20")
    if not is_whole(n_buckets) or not 2 <= n_buckets < 2 * max_distance:
        raise ConfigError(
            f"n_buckets {n_buckets!r} must be a whole number in [2, {2 * max_distance}): half of "
            f"the buckets are for the distances below max_distance ({max_distance})"
        )
    buckets = output_array(out, (len(pos), int(n_kv)), np.dtype(np.int32))
    table = _bucket_table(int(n_buckets), int(max_distance))
    kernels.position_buckets_kernel(cells.pos, pos, table, buckets)
    return buckets


def _bucket_table(n_buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance up to `max_distance`."""
    n_exact = n_buckets // 2
    distance = np.arange(max_distance + 1)
    share = np.log(np.maximum(distance, 1) / n_exact) / np.log(max_distance / n_exact)
    # What misses a whole number by rounding alone is that number, whatever computes logarithms.
    far = np.floor(n_exact + share * (n_buckets - n_exact) + 1e-9)
    table = np.where(distance < n_exact, distance, np.minimum(n_buckets - 1, far))
    return table.astype(np.int32)
