"""How far a sequence can go back, and going back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvnumba.errors import StepError
from kvnumba.memory import Memory


def parts_of(memory: Memory) -> Iterator[Any]:
    """Go through the caches that a memory is made of; a plain one is its own only part."""
    parts: Sequence[Memory] = getattr(memory, "parts", ())
    if not parts:
        yield memory
    for part in parts:
        yield from parts_of(part)


def can_rewind(memory: Memory, n_tokens: int) -> bool:
    """Return whether the last `n_tokens` can be taken back at any time, whatever they replaced."""
    for part in parts_of(memory):
        if getattr(part.config, "n_rewind", n_tokens) < n_tokens:
            return False
        if getattr(part.config, "window", 0):
            return False
    return True


def cut(memory: Memory, seq_id: int, n_tokens: int) -> None:
    """Remove all but the first `n_tokens` of a sequence; without more than that nothing happens.

    Raises
    ------
    StepError
        If the memory refuses; nothing is changed.
    """
    if memory.seq_pos_max(seq_id) < n_tokens:
        return
    reason = memory.refusal(seq_id, n_tokens, -1)
    if reason is not None or not memory.seq_rm(seq_id, n_tokens, -1):
        raise StepError(f"sequence {seq_id} cannot be cut to {n_tokens} tokens: {reason}")


def drop_hidden(memory: Memory, seq_id: int) -> None:
    """Take a sequence out of the cells of window layers that its next token does not see.

    A sequence that waits for its use should hold no more: cells of several sequences are not used
    anew, so it would take them from those that go on. It cannot be cut back afterwards.
    """
    for part in parts_of(memory):
        if not getattr(part.config, "window", 0):
            continue
        pos = part.cells.pos[part.cells.members(seq_id)].astype(np.int64)
        last = int(pos.max(initial=-1))
        hidden = int(pos[part.sliding.hides(pos, last + 1) & (pos < last)].max(initial=-1))
        with part.guard:
            part.cells.rm(seq_id, 0, hidden + 1)
            part.sliding.lost[seq_id] = max(hidden, int(part.sliding.lost[seq_id]))
