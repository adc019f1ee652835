"""What the functions on masks share: their arguments, checked and as kernels want them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.batch_rules import pack_ids, split_sections
from kvnumba.cells import Cells, is_whole
from kvnumba.errors import ConfigError, PositionError, SequenceError, ShapeError


def tokens_of(cells: Any, batch: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Return positions, their sections or None, and first ids of tokens, checked against `cells`.

    All int32; the first and the last contiguous.

    Raises
    ------
    ConfigError, ShapeError, PositionError, SequenceError
        If `cells` or `batch` is no such thing.
    """
    if not isinstance(cells, Cells):
        raise ConfigError(f"cells is a {type(cells).__name__}; the cache's Cells wanted")
    if isinstance(batch, Batch):
        if batch.pos is None:
            raise PositionError("the batch has no positions; a step's own batch has: step.batch")
        pos, sections, first_ids = batch.pos, batch.sections, batch.first_ids()
    elif isinstance(batch, tuple) and len(batch) == 2:
        n_tokens = _last_length(batch[0])
        pos, sections = split_sections(batch[0], n_tokens)
        id_start, ids = pack_ids(batch[1], n_tokens)
        first_ids = ids[id_start[:-1]]
    else:
        raise ShapeError(f"batch is a {type(batch).__name__}; a Batch or (pos, seq_ids) wanted")
    bad = np.flatnonzero(first_ids >= cells.n_seq_max)
    if len(bad):
        raise SequenceError(
            f"token {bad[0]} has sequence id {first_ids[bad[0]]}, outside [0, {cells.n_seq_max})"
        )
    return np.ascontiguousarray(pos), sections, np.ascontiguousarray(first_ids)


def _last_length(pos: Any) -> int:
    try:
        return int(np.shape(pos)[-1]) if np.ndim(pos) else 0
    except ValueError:
        raise ShapeError("pos has rows of different lengths") from None


def check_n_kv(cells: Cells, n_kv: Any) -> None:
    """Refuse a number of cells that the cache does not have."""
    if not is_whole(n_kv) or not 0 <= n_kv <= cells.n_cells:
        raise ShapeError(f"n_kv {n_kv!r} must be a whole number in [0, {cells.n_cells}]")


def output_array(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, also_bits: bool = False
) -> np.ndarray:
    """Return `out`, or a new array; float16 may come as its bits.

    Raises
    ------
    ShapeError
        If `out` is no writable array of that kind.
    """
    if out is None:
        return np.empty(shape, dtype)
    dtypes = [dtype, np.dtype(np.uint16)] if also_bits else [dtype]
    is_fit = isinstance(out, np.ndarray) and out.shape == shape and out.dtype in dtypes
    if not is_fit or not out.flags.carray:
        given = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise ShapeError(f"out is {given}; writable {dtype} {list(shape)} in C order wanted")
    return out
