"""`kq_mask`: what each token sees of a cache's cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.cells import Cells
from kvnumba.errors import ConfigError, ShapeError
from kvnumba.kernels import masks as kernels
from kvnumba.kernels.sight import NO_HIGH, NO_LIMIT, WINDOW_IDS, sight_bounds
from kvnumba.masks.inputs import check_n_kv, output_array, tokens_of
from kvnumba.reading import check_window

PARALLEL_ITEMS = 1 << 18
"""Smaller masks are not worth waking threads."""

_INF_F16 = 0xFC00
_ITEMS: dict[str, np.ndarray] = {
    "f32": np.array([0, -np.inf], np.float32),
    "f16": np.array([0, _INF_F16], np.uint16),
    "bool": np.array([1, 0], np.uint8),
}
"""What stands for seen and for hidden, as storage items."""
_DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bool": np.dtype(np.bool_),
}


def kq_mask(
    cells: Cells,
    batch: Batch | tuple[Any, Any],
    n_kv: int,
    *,
    causal: bool = True,
    window: int = 0,
    window_kind: str = "standard",
    whole_batch: bool = False,
    alibi: bool = False,
    cell_xy: np.ndarray | None = None,
    dtype: str | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return what each token sees of the cells ``[0, n_kv)``, to be added to the scores.

    A cell is hidden (-inf) if it is empty; else if it does not belong to the token's first
    sequence; else if, in causal order, its position is beyond the token's; else if it has the
    token's position but comes later row by row in two dimensions; else if the window hides it.
    Every other cell gets 0, or minus its distance with `alibi`.

    Parameters
    ----------
    cells : Cells
        The cache's metadata, ``cache.cells``; the batch's own tokens must have been placed
        (``step.apply()``) to see themselves. Only read.
    batch : Batch or (pos, seq_ids)
        Tokens with positions, such as ``step.batch``; or the two as `Batch` takes them.
    n_kv : int
        How many cells, such as ``step.extent.n_kv``.
    causal : bool
        False: later positions are seen too.
    window : int
        0 for none.
    window_kind : {"standard", "chunked", "symmetric"}
        See `CacheConfig.window_kind`.
    whole_batch : bool
        Without causal order: what the batch's sequence holds from its first token in this batch on
        is seen, whatever the window says.
    alibi : bool
        Give ``-|p0 - p1|``, to be multiplied by each head's slope (`alibi_slopes`). float16 has no
        distance beyond 65504, which stands for all of them.
    cell_xy : ndarray, shape (2, at least n_kv), int32, optional
        x and y of each cell, for models with several positions a token. Those of the tokens are the
        batch's third and second row of positions; where it has one row, they equal the position.
        Default: what `cells` keeps of them.
    dtype : {"f32", "f16", "bool"}, optional
        "bool": True where a cell is seen. Default: that of `out`, or "f32".
    out : ndarray, shape (n_tokens, n_kv), modified in place, optional
        float32, float16 (or uint16, its bits), or bool.

    Returns
    -------
    out : ndarray, shape (n_tokens, n_kv)

    Raises
    ------
    ConfigError, ShapeError, PositionError, SequenceError
        If an argument is impossible; the message names it, and nothing is written.

    Source: llama-kv-cache.cpp, set_input_kq_mask.
    """
    pos, sections, first_ids = tokens_of(cells, batch)
    check_n_kv(cells, n_kv)
    _check_rules(causal, window, window_kind, whole_batch, alibi)
    name = _dtype_name(dtype, out, alibi)
    mask = output_array(out, (len(pos), int(n_kv)), _DTYPES[name], also_bits=name == "f16")
    low, high = np.empty((2, len(pos)), np.int32)
    kind = WINDOW_IDS[window_kind]
    sight_bounds(pos, min(int(window), NO_LIMIT), kind, bool(causal), low, high)
    if whole_batch:
        low, high = np.minimum(low, _least_of_sequence(pos, first_ids)), np.full_like(high, NO_HIGH)
    if cell_xy is None and cells.extra is not None:
        cell_xy = cells.extra.xy
    cell_xy, q_xy = _coordinates(cell_xy, int(n_kv), pos, sections, causal)
    is_large = mask.size >= PARALLEL_ITEMS and len(pos) > 1
    fill = kernels.fill_mask_parallel_kernel if is_large else kernels.fill_mask_kernel
    items = _ITEMS[name]
    fill(
        cells.seq, cells.pos, cell_xy, first_ids, pos, q_xy, low, high, bool(alibi), items,
        mask.view(items.dtype),
    )  # fmt: skip
    return mask


def _check_rules(causal: Any, window: Any, window_kind: Any, whole_batch: Any, alibi: Any) -> None:
    check_window(window, window_kind, causal)
    for name, flag in (("whole_batch", whole_batch), ("alibi", alibi)):
        if not isinstance(flag, (bool, np.bool_)):
            raise ConfigError(f"{name} {flag!r} must be True or False")
    if whole_batch and causal:
        raise ConfigError("whole_batch wants causal=False: in causal order nothing is seen ahead")


def _dtype_name(dtype: Any, out: Any, alibi: Any) -> str:
    name = dtype
    if name is None:
        kinds = {np.dtype(np.uint16): "f16"} | {kind: n for n, kind in _DTYPES.items()}
        name = "f32" if out is None else kinds.get(getattr(out, "dtype", None))
    if not isinstance(name, str) or name not in _DTYPES:
        given = repr(dtype) if dtype is not None else f"of out ({getattr(out, 'dtype', type(out))})"
        raise ConfigError(f"dtype {given} must be one of {', '.join(_DTYPES)}")
    if alibi and name == "bool":
        raise ConfigError("alibi gives distances, which a mask of bools cannot hold")
    return name


def _least_of_sequence(pos: np.ndarray, first_ids: np.ndarray) -> np.ndarray:
    """Return for each token the least position of its sequence in this batch."""
    least = np.full(int(first_ids.max(initial=-1)) + 1, NO_HIGH, np.int32)
    np.minimum.at(least, first_ids, pos)
    return least[first_ids]


def _coordinates(
    cell_xy: Any, n_kv: int, pos: np.ndarray, sections: np.ndarray | None, causal: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of the cells, shape (2, n_kv) or (2, 0) for none, and of the tokens."""
    if cell_xy is not None:
        is_int32 = isinstance(cell_xy, np.ndarray) and cell_xy.dtype == np.int32
        if not is_int32 or cell_xy.ndim != 2 or len(cell_xy) != 2 or cell_xy.shape[1] < n_kv:
            raise ShapeError(f"cell_xy must be an int32 array of shape (2, at least {n_kv})")
    q_xy = np.empty((len(pos), 2), np.int32)
    if cell_xy is None or not causal:
        return np.empty((2, 0), np.int32), q_xy
    q_xy[:, 0], q_xy[:, 1] = (pos, pos) if sections is None else (sections[2], sections[1])
    return np.ascontiguousarray(cell_xy), q_xy
