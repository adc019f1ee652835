"""Whether tokens of a sequence can be taken out and the ones behind them moved up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvnumba.branches import parts_of
from kvnumba.cells import Cells
from kvnumba.memory import Memory

Range = tuple[int, int]


def move_refusal(
    memory: Memory, seq_id: int, removed: Sequence[Range], moved: Sequence[Range]
) -> str | None:
    """Return why tokens cannot be removed and others moved in their place, None when they can.

    Parameters
    ----------
    memory : Memory
    seq_id : int
    removed, moved : sequence of (p0, p1)
        Half-open ranges of positions as they are now, ascending.

    Raises
    ------
    SequenceError
        If the id is impossible.
    """
    last = memory.seq_pos_max(seq_id)
    if not memory.can_shift:
        return "K of this memory cannot be rotated: positions must not change"
    first = memory.seq_pos_min(seq_id)
    for p0, p1 in removed:
        reason = memory.refusal(seq_id, p0, p1)
        if reason is not None:
            return reason
    if first > 0:
        return (
            f"tokens before position {first} are lost, or in states that cannot be told apart: "
            f"what sequence {seq_id} has up to {last} cannot move"
        )
    reasons = (_part_refusal(part, seq_id, removed, moved) for part in _pools(memory, seq_id))
    return next(filter(None, reasons), None)


def _pools(memory: Any, seq_id: int) -> list[Any]:
    """Return the caches whose cells a sequence has."""
    if hasattr(memory, "streams"):
        return [memory.stream(seq_id)]
    return [part for part in parts_of(memory) if isinstance(getattr(part, "cells", None), Cells)]


def _part_refusal(
    cache: Any, seq_id: int, removed: Sequence[Range], moved: Sequence[Range]
) -> str | None:
    """Return why a pool of cells would refuse to move, or would move more than is meant."""
    cells: Cells = cache.cells
    n_shared = sum(len(cells.shared_in_range(seq_id, p0, p1)) for p0, p1 in moved)
    if not n_shared:
        return None
    if cache.config.shared != "copy":
        return (
            f"{n_shared} cells to move are held by other sequences too, which would "
            f"{'move along' if cache.config.shared == 'move' else 'be in the way'}; remove those "
            '(checkpoints, forks), or use shared="copy"'
        )
    n_room = cache.n_free + sum(_n_freed(cells, seq_id, p0, p1) for p0, p1 in removed)
    if n_shared > n_room:
        return (
            f"{n_shared} cells to move are held by other sequences too, and {n_room} are free for "
            "copies of them"
        )
    return None


def _n_freed(cells: Cells, seq_id: int, p0: int, p1: int) -> int:
    own = cells.listed(cells.seq[seq_id] & ~cells.shared & ~cells.pinned)
    return int(np.count_nonzero((cells.pos[own] >= p0) & (cells.pos[own] < p1)))
