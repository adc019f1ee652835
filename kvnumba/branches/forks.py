"""Forks: sequences that become what another one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnumba.cells import Cells
from kvnumba.errors import NoSlotError, SequenceError
from kvnumba.memory import Memory


@dataclass(frozen=True)
class ForkPlan:
    """Sequences that become what another one is.

    Attributes
    ----------
    parent : int
    children : tuple of int
        What they hold is dropped.
    dropped : tuple of int
        Those of them that hold something.
    n_tokens : int
        Tokens of the parent.
    """

    parent: int
    children: tuple[int, ...]
    dropped: tuple[int, ...]
    n_tokens: int

    def apply(self, memory: Memory) -> None:
        """Carry it out.

        Raises
        ------
        StepError
            If tokens are pending; nothing is changed.
        """
        for child in self.dropped:
            memory.seq_rm(child)
        streams = getattr(memory, "stream_of", None)
        first_of: dict[int, int] = {}
        if streams is not None:
            first_of[streams[self.parent]] = self.parent
        for child in self.children if self.n_tokens else ():
            # Only the first child in another stream needs copies; the others share its cells.
            source = self.parent if streams is None else first_of.get(streams[child], self.parent)
            memory.seq_cp(source, child)
            if streams is not None:
                first_of.setdefault(streams[child], child)


def plan_fork(memory: Memory, parent: int, children: Sequence[int]) -> ForkPlan:
    """Plan to let `children` have all that `parent` has; nothing is changed.

    Raises
    ------
    SequenceError
        If an id is impossible, comes twice, or is the parent's.
    NoSlotError
        If children live in another stream that has no room for copies.
    """
    last = memory.seq_pos_max(parent)
    dropped = tuple(c for c in children if memory.seq_pos_max(c) >= 0)
    if len({parent, *children}) != 1 + len(children):
        raise SequenceError(
            f"children {list(children)} of sequence {parent} must be different from it and from "
            "each other"
        )
    if hasattr(memory, "streams"):
        _check_streams(memory, parent, children)
    return ForkPlan(int(parent), tuple(int(c) for c in children), dropped, last + 1)


def fork(memory: Memory, parent: int, children: Sequence[int]) -> ForkPlan:
    """Let `children` have all that `parent` has, as for n completions of one prompt.

    What they held is dropped. No K, V or state is copied, except into other streams.

    Parameters
    ----------
    memory : Memory
        Modified in place.
    parent : int
    children : sequence of int

    Raises
    ------
    SequenceError, NoSlotError
        As `plan_fork`; nothing is changed.
    StepError
        If tokens are pending; nothing is changed.
    """
    plan = plan_fork(memory, parent, children)
    plan.apply(memory)
    return plan


def _check_streams(memory: Any, parent: int, children: Sequence[int]) -> None:
    """Refuse a fork into streams that cannot hold the parent once the children are dropped."""
    n_wanted = len(memory.stream(parent).cells.members(parent))
    for stream in {memory.stream_of[c] for c in children} - {memory.stream_of[parent]}:
        cache = memory.streams[stream]
        n_room = cache.n_free + len(_cells_freed(cache.cells, children))
        if n_wanted > n_room:
            raise NoSlotError(
                f"sequence {parent} has {n_wanted} cells, stream {stream} has room for {n_room} "
                "without its children; remove sequences from it first",
                n_wanted,
                n_room,
            )


def _cells_freed(cells: Cells, seq_ids: Sequence[int]) -> np.ndarray:
    """Return the cells that become free when these sequences are removed."""
    goes = np.zeros(cells.n_seq_max, bool)
    goes[list(seq_ids)] = True
    theirs = np.bitwise_or.reduce(cells.seq[goes], axis=0)
    others = np.bitwise_or.reduce(cells.seq[~goes], axis=0)
    return cells.listed(theirs & ~others & ~cells.pinned)
