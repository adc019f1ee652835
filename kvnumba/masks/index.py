"""Where the K and V of new tokens go in tensors over all streams."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvnumba.batch_rules import int32_array
from kvnumba.cells import is_whole
from kvnumba.errors import ShapeError
from kvnumba.kernels import row_index as kernels


def row_index(cells: Any, size: int, stream: Any = 0) -> np.ndarray:
    """Return the row of each token's K (and V) in a tensor of ``n_stream * size`` rows.

    Parameters
    ----------
    cells : array_like of int, shape (n_tokens,)
        The tokens' cells within their streams, such as ``step.cells``.
    size : int
        Cells of a stream.
    stream : int or array_like of int, shape (n_tokens,)

    Returns
    -------
    index : ndarray, shape (n_tokens,), int64

    Raises
    ------
    ShapeError
        If a cell lies outside ``[0, size)``, or an argument is no such number or array.
    """
    cells, streams, size = _places(cells, size, stream)
    out = np.empty(len(cells), np.int64)
    kernels.row_index_kernel(cells, streams, size, out)
    return out


def column_index(cells: Any, size: int, n_embd_v: int, stream: Any = 0) -> np.ndarray:
    """Return the item of each value of each token in transposed V, ``[n_stream, n_embd_v, size]``.

    Parameters
    ----------
    cells, size, stream
        As `row_index`.
    n_embd_v : int
        Values of a token's V row; the widest layer's, where layers differ and share an index.

    Returns
    -------
    index : ndarray, shape (n_tokens, n_embd_v), int64

    Raises
    ------
    ShapeError
        As `row_index`.
    """
    if not is_whole(n_embd_v) or n_embd_v < 1:
        raise ShapeError(f"n_embd_v {n_embd_v!r} must be a whole number of at least 1")
    cells, streams, size = _places(cells, size, stream)
    out = np.empty((len(cells), int(n_embd_v)), np.int64)
    kernels.column_index_kernel(cells, streams, size, out)
    return out


def _places(cells: Any, size: Any, stream: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Return cells and streams of the tokens, int32, and the size of a stream."""
    if not is_whole(size) or not 1 <= size < 1 << 31:
        raise ShapeError(f"size {size!r} must be a whole number of at least 1")
    cells = int32_array(cells, "cells")
    if is_whole(stream):
        streams = np.repeat(int32_array([stream], "stream"), len(cells))
    else:
        streams = int32_array(stream, "stream")
    if len(streams) != len(cells):
        raise ShapeError(f"stream has {len(streams)} entries for {len(cells)} cells")
    for name, given, end in (("cell", cells, int(size)), ("stream", streams, 1 << 31)):
        bad = np.flatnonzero((given < 0) | (given >= end))
        if len(bad):
            raise ShapeError(f"{name} {given[bad[0]]} of token {bad[0]} is outside [0, {end})")
    return cells, streams, int(size)
