"""Deferred work on the rows: turning K after positions changed, and closing holes."""

from __future__ import annotations

import numpy as np

from kvnumba.cells import Cells
from kvnumba.config import CacheConfig
from kvnumba.kernels.defrag import defrag_plan_kernel
from kvnumba.layers import KVLayers
from kvnumba.placement import Placement

NO_LIMIT = 1 << 30


def split_cells(
    cells: Cells, layers: KVLayers, placement: Placement, seq_id: int, src: np.ndarray
) -> None:
    """Give a sequence copies of the cells `src` that it shares with others.

    Raises
    ------
    NoSlotError, DiskFullError
        If there is no room for the copies; nothing is changed.
    """
    dst = placement.find_any(len(src))
    layers.reserve(int(dst.max()) + 1)
    layers.copy_cells(src, dst)
    cells.split(seq_id, src, dst)


def apply_shift(config: CacheConfig, cells: Cells, layers: KVLayers, placement: Placement) -> int:
    """Rotate K of every cell with a pending shift, and forget the shifts.

    Rows that the last durable commit names are written to other cells, and their tokens move
    there: a kill in the middle leaves that commit whole.

    Returns
    -------
    n_cells : int
        Cells that had a shift.

    Raises
    ------
    NoSlotError, DiskFullError
        If there is no room for rows that must move; nothing is changed.
    """
    src = cells.shifted()
    if not len(src):
        return 0
    dst = src
    if any(config.rope_of(il) is not None for il in range(config.n_layer)):
        dst = _shift_targets(cells, layers, placement, src)
        layers.shift_cells(src, dst, cells.shift[src])
    moved = src != dst
    cells.move(src[moved], dst[moved])
    cells.shift[dst] = 0
    return len(src)


def _shift_targets(
    cells: Cells, layers: KVLayers, placement: Placement, src: np.ndarray
) -> np.ndarray:
    dst = src.copy()
    pinned = np.flatnonzero(cells.is_pinned(src))
    free = cells.find_free(len(pinned))
    if len(free) < len(pinned):
        raise placement.no_slot(len(pinned), "free")
    if len(pinned):
        layers.reserve(int(free.max()) + 1)
        dst[pinned] = free
    return dst


def plan_defrag(cells: Cells, max_moves: int = NO_LIMIT) -> tuple[np.ndarray, np.ndarray, int]:
    """Plan which cells move where so that the used ones come first; nothing is changed.

    Returns
    -------
    src, dst : ndarray, int32
        The cells that would move, and where to.
    n_moves : int
        Runs of adjacent cells among them, at most `max_moves`.
    """
    n_kv, n_used = cells.cell_max, cells.n_used
    ids = np.empty(n_kv, np.int32)
    src, dst = np.empty(n_used, np.int32), np.empty(n_used, np.int32)
    n, n_moves = defrag_plan_kernel(
        cells.used, cells.pinned, n_kv, n_used, max_moves, ids, src, dst
    )
    return src[:n], dst[:n], int(n_moves)


def apply_defrag(cells: Cells, layers: KVLayers, max_moves: int) -> int:
    """Move cells as `plan_defrag` says; return how many moved."""
    src, dst, _ = plan_defrag(cells, max_moves)
    if len(src):
        layers.copy_cells(src, dst)
        cells.move(src, dst)
    return len(src)
