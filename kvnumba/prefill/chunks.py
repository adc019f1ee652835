"""Reuse of chunks of a prompt that are held at other positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnumba.batch import int32_array
from kvnumba.branches import cut
from kvnumba.cells import is_whole
from kvnumba.errors import CannotShiftError, ConfigError, StepError
from kvnumba.memory import Memory
from kvnumba.prefill.moving import Range, move_refusal
from kvnumba.prefill.reuse import common_tokens

_FIRST_LOOK = 256
"""Tokens compared at first; each further look is twice as long."""


@dataclass(frozen=True)
class Move:
    """One chunk: remove ``[p0, p1)`` first, then move ``[p1, p2)`` down to `p0`.

    The positions are those at that time: after all earlier moves.
    """

    p0: int
    p1: int
    p2: int

    @property
    def removed(self) -> Range:
        """What `seq_rm` takes out."""
        return self.p0, self.p1

    @property
    def moved(self) -> Range:
        """What `seq_add` moves, where it is before."""
        return self.p1, self.p2

    @property
    def delta(self) -> int:
        """How far it moves: below 0."""
        return self.p0 - self.p1


@dataclass(frozen=True)
class ChunkPlan:
    """How a sequence comes to hold the beginning of a prompt, chunk by chunk.

    Attributes
    ----------
    n_held, n_prompt : int
        Tokens of the sequence and of the prompt.
    n_prefix : int
        First tokens that are where they should be.
    moves : tuple of Move
        What is done after them, in this order.
    n_reused : int
        First tokens of the prompt that are held after all moves.
    n_end : int
        Tokens of the sequence from this position on are not needed; they go first.
    """

    n_held: int
    n_prompt: int
    n_prefix: int
    moves: tuple[Move, ...]
    n_reused: int
    n_end: int

    @property
    def n_to_compute(self) -> int:
        """Last tokens of the prompt that are to be computed."""
        return self.n_prompt - self.n_reused

    def __str__(self) -> str:
        return (
            f"{self.n_reused} of {self.n_prompt} tokens reused: {self.n_prefix} in place, "
            f"{self.n_reused - self.n_prefix} in {len(self.moves)} chunks that move"
        )

    def refusal(self, memory: Memory, seq_id: int) -> str | None:
        """Return why a memory cannot do it, None when it can; nothing is changed."""
        removed = list(self._gaps())
        if self.n_end < self.n_held:
            removed.append((self.n_end, self.n_held))
        if self.moves:
            return move_refusal(memory, seq_id, removed, [m.moved for m in self.moves])
        return memory.refusal(seq_id, *removed[0]) if removed else None

    def _gaps(self) -> Iterator[Range]:
        """Go through what the moves remove, as it lies before any of them."""
        end = self.n_prefix
        for move in self.moves:
            if end < move.p1:
                yield end, move.p1
            end = move.p2

    def apply(self, memory: Memory, seq_id: int) -> None:
        """Carry it out: the sequence then holds the first `n_reused` tokens of the prompt.

        K follows at the next `update`.

        Raises
        ------
        CannotShiftError
            If the memory cannot, see `refusal`; nothing is changed.
        StepError, SequenceError
            If the sequence is not as long as planned, tokens are pending, or the id is impossible;
            nothing is changed.
        """
        n = memory.seq_pos_max(seq_id) + 1
        if n != self.n_held:
            raise StepError(f"sequence {seq_id} has {n} tokens, planned was {self.n_held}")
        reason = self.refusal(memory, seq_id)
        if reason is not None:
            raise CannotShiftError(f"no reuse of chunks: {reason}")
        cut(memory, seq_id, self.n_end)
        for move in self.moves:
            if not memory.seq_rm(seq_id, *move.removed):
                raise StepError(f"sequence {seq_id} refuses what it had agreed to")
            memory.seq_add(seq_id, *move.moved, move.delta)


def plan_chunk_reuse(held: Any, prompt: Any, n_min: int, n_prefix: int | None = None) -> ChunkPlan:
    """Plan which chunks of what is held move to where a prompt has them; nothing is changed.

    After the common prefix, the first run of at least `n_min` held tokens that the prompt has next
    moves there, and so on behind it. K and V of a chunk were computed after other tokens than
    those that the prompt has before it: the result is near, not the same as computing it.

    Parameters
    ----------
    held, prompt : array_like of int
        Tokens below 0 are unknown, and like no other.
    n_min : int
        Least length of a chunk; 0: none are reused.
    n_prefix : int, optional
        First tokens that stay where they are; default: all that are common.

    Raises
    ------
    ConfigError, ShapeError
        If the prompt is empty, `n_min` or `n_prefix` is impossible, or a list has no tokens.
    """
    held, prompt = int32_array(held, "held"), int32_array(prompt, "prompt")
    n_common = common_tokens(held, prompt)
    n_prefix = n_common if n_prefix is None else n_prefix
    if not len(prompt):
        raise ConfigError("the prompt is empty; give at least one token")
    if not is_whole(n_min) or n_min < 0:
        raise ConfigError(f"n_min {n_min!r} must be a whole number of at least 0")
    if not is_whole(n_prefix) or not 0 <= n_prefix <= n_common:
        raise ConfigError(f"n_prefix {n_prefix!r}: only {n_common} first tokens are common")
    n_last = len(prompt) - 1  # the last token is computed for its logits
    n_reused = n_end = min(int(n_prefix), n_last)
    moves = []
    for p0, p1, n in _walk(held, prompt, n_reused, n_min) if n_min else ():
        n = min(n, n_last - p0)
        if n and p0 == p1:
            n_prefix = p0 + n
        elif n:
            moves.append(Move(p0, p1, p1 + n))
        if n:
            n_reused, n_end = p0 + n, p1 + n
    return ChunkPlan(
        len(held), len(prompt), min(int(n_prefix), n_last), tuple(moves), n_reused, n_end
    )


def _walk(
    held: np.ndarray, prompt: np.ndarray, n_prefix: int, n_min: int
) -> Iterator[tuple[int, int, int]]:
    """Go through the chunks: where each one goes, where it is held, its length."""
    p0 = p1 = n_prefix
    while p0 + n_min <= len(prompt):
        p1 = _find(held, prompt[p0 : p0 + n_min], p1)
        if p1 < 0:
            return
        n = _run_length(held[p1:], prompt[p0:])
        yield p0, p1, n
        p0, p1 = p0 + n, p1 + n


def _find(held: np.ndarray, wanted: np.ndarray, start: int) -> int:
    """Return where `wanted` comes first in `held` from `start` on, -1: nowhere."""
    if (wanted < 0).any():
        return -1
    n_starts, n_look = len(held) - len(wanted) + 1, _FIRST_LOOK
    while start < n_starts:
        end = min(start + n_look, n_starts)
        at = np.arange(start, end)
        for j, token in enumerate(wanted):
            at = at[held[at + j] == token]
            if not len(at):
                break
        else:
            return int(at[0])
        start, n_look = end, 2 * n_look
    return -1


def _run_length(held: np.ndarray, prompt: np.ndarray) -> int:
    """Return how many leading tokens are equal and known."""
    n, n_look = 0, _FIRST_LOOK
    while True:
        run = common_tokens(held[n : n + n_look], prompt[n : n + n_look])
        n += run
        if run < n_look:
            return n
        n_look *= 2
