"""`Checkpoints`: sequences kept as they were, for memories that cannot be cut back at will.

A checkpoint is a spare sequence that shares the cells, or the state, of a live one. It costs no
copy, and works for every kind of memory.

Source: spec/llama_cpp.md 7 (context checkpoints).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvnumba.batch import int32_array
from kvnumba.branches import drop_hidden, fork
from kvnumba.cells import is_whole
from kvnumba.errors import ConfigError, SequenceError, ShapeError
from kvnumba.memory import Memory
from kvnumba.prefix import common_prefix

NEAR_END = 4
"""Tokens before a prompt's end at which a checkpoint is worth it: chat templates end alike."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A sequence as it was after `n_tokens` tokens.

    Attributes
    ----------
    seq_id : int
        The spare sequence that keeps it.
    tokens : ndarray, int32
        Its tokens, the first one at position 0.
    pos_min : int
        Least position that it can be cut back to.
    task : int
        Who made it: a request, a conversation.
    """

    seq_id: int
    tokens: np.ndarray = field(repr=False)
    pos_min: int
    task: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def pos_max(self) -> int:
        """Position of its last token."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class CheckpointPlan:
    """Whether a checkpoint is made, and which ones go for it.

    Attributes
    ----------
    is_due : bool
    drop : tuple of Checkpoint
        Replaced, or dropped to make room.
    reason : str
        In words.
    """

    is_due: bool
    drop: tuple[Checkpoint, ...]
    reason: str


def checkpoint_stops(
    n_prompt: int, n_ubatch: int, user_starts: Sequence[int] = (), n_done: int = 0
) -> dict[int, bool]:
    """Return after how many tokens of a prompt a checkpoint may be made.

    A batch should end there: where a message of the user starts, and shortly before the end.

    Parameters
    ----------
    n_prompt, n_ubatch : int
    user_starts : sequence of int
        Index of the first token of each message of the user.
    n_done : int
        Tokens that are computed already.

    Returns
    -------
    dict of int to bool
        Ascending; True where the checkpoint is made however close to others: before the last of
        the messages, and near the end.
    """
    stops = dict.fromkeys(user_starts, False)
    last = [max(user_starts)] if len(user_starts) else []
    stops |= dict.fromkeys([*last, n_prompt - NEAR_END - n_ubatch, n_prompt - NEAR_END], True)
    return {n: stops[n] for n in sorted(stops) if max(0, n_done) < n < n_prompt}


def plan_checkpoint(
    held: Sequence[Checkpoint],
    n_tokens: int,
    spacing: int,
    n_max: int,
    task: int = 0,
    is_forced: bool = False,
) -> CheckpointPlan:
    """Plan whether to make a checkpoint after `n_tokens` tokens.

    It is made when it is forced, or when none of `held` lies less than `spacing` tokens before it.
    One after as many tokens is replaced. With `n_max` others, those of other tasks go that have
    another checkpoint less than `spacing` tokens before them, then the oldest.

    Parameters
    ----------
    held : sequence of Checkpoint
        The oldest first.
    n_tokens, spacing, n_max : int
    task : int
        Who asks.
    is_forced : bool
        Make it however close to others it is: before the last message of the user, or near the
        end of the prompt.
    """
    if n_max < 1 or n_tokens < 1:
        return CheckpointPlan(False, (), "no room for checkpoints" if n_max < 1 else "no tokens")
    before = [c.n_tokens for c in held if c.n_tokens < n_tokens]
    gap = n_tokens - max(before, default=n_tokens - spacing)
    if gap < spacing and not is_forced:
        reason = f"the last checkpoint is {gap} tokens before, the spacing is {spacing}"
        return CheckpointPlan(False, (), reason)
    drop = [c for c in held if c.n_tokens == n_tokens]
    left = [c for c in held if c.n_tokens != n_tokens]
    while len(left) >= n_max:
        out = next((c for c in left if c.task != task and _is_close(c, left, spacing)), left[0])
        left.remove(out)
        drop.append(out)
    why = "it is wanted here" if is_forced else f"none within {spacing} tokens before"
    return CheckpointPlan(True, tuple(drop), f"{why}; {len(drop)} of {len(held)} dropped")


def _is_close(one: Checkpoint, held: Sequence[Checkpoint], spacing: int) -> bool:
    return any(0 <= one.n_tokens - c.n_tokens < spacing for c in held if c is not one)


def choose_checkpoint(held: Sequence[Checkpoint], tokens: np.ndarray) -> Checkpoint | None:
    """Return the checkpoint with most tokens that begins `tokens`, None without one.

    Parameters
    ----------
    held : sequence of Checkpoint
        The oldest first; of equals the newest is taken.
    tokens : ndarray, int32
        What shall be kept. Unknown ones (below 0) are like no other.
    """
    best = None
    for one in held:
        n = one.n_tokens
        fits = n <= len(tokens) and common_prefix(one.tokens, tokens) == n
        if fits and (one.tokens >= 0).all() and (best is None or n >= best.n_tokens):
            best = one
    return best


class Checkpoints:
    """Checkpoints of a live sequence, whatever conversations it served one after the other.

    Parameters
    ----------
    memory : Memory
    seq_ids : sequence of int
        Spare sequences: all empty, and used by nobody else.
    spacing : int
        Fewest tokens from one checkpoint to the next, see `plan_checkpoint`.
    n_max : int, optional
        Most checkpoints; default: as many as there are spare sequences.

    Raises
    ------
    SequenceError
        If a spare sequence is impossible, comes twice or is not empty.
    ConfigError
        If `spacing` or `n_max` is impossible.

    Attributes
    ----------
    held : tuple of Checkpoint
        The oldest first.

    Notes
    -----
    Cells that a checkpoint holds are not free, even when the live sequence lets go of them. When
    positions of a live sequence are to change (context shift, reuse of chunks) the checkpoints
    must go first (`erase_beyond`), or have cells of their own (``shared="copy"``).
    """

    def __init__(
        self,
        memory: Memory,
        seq_ids: Sequence[int],
        spacing: int = 8192,
        n_max: int | None = None,
    ):
        n_max = len(seq_ids) if n_max is None else n_max
        for name, value, most in (("spacing", spacing, 2**31), ("n_max", n_max, len(seq_ids))):
            if not is_whole(value) or not 0 <= value <= most:
                raise ConfigError(f"{name} {value!r} must be a whole number from 0 to {most}")
        if len(set(seq_ids)) != len(seq_ids):
            raise SequenceError(f"spare sequences {list(seq_ids)} must be different")
        for s in seq_ids:
            if memory.seq_pos_max(s) >= 0:
                raise SequenceError(f"spare sequence {s} holds tokens; it must be empty")
        self.memory, self.spacing, self.n_max = memory, int(spacing), int(n_max)
        self.seq_ids = tuple(int(s) for s in seq_ids)
        self.held: tuple[Checkpoint, ...] = ()

    def save(
        self, seq_id: int, tokens: np.ndarray, task: int = 0, is_forced: bool = False
    ) -> CheckpointPlan:
        """Make a checkpoint of a sequence, if one is due.

        Parameters
        ----------
        seq_id : int
        tokens : array_like of int
            All its tokens, the first one at position 0.
        task : int
            Who asks.
        is_forced : bool
            See `plan_checkpoint`.

        Raises
        ------
        SequenceError, ShapeError, StepError
            If the id is impossible or a spare one, the sequence has not as many tokens, or some
            are pending; nothing is changed.
        """
        tokens = int32_array(tokens, "tokens")
        n = self.memory.seq_pos_max(seq_id) + 1
        if seq_id in self.seq_ids:
            raise SequenceError(f"sequence {seq_id} is a spare one; {self.seq_ids} all are")
        if n != len(tokens):
            raise ShapeError(f"sequence {seq_id} has {n} tokens, {len(tokens)} are given")
        plan = plan_checkpoint(self.held, n, self.spacing, self.n_max, task, is_forced)
        if plan.is_due:
            left = tuple(c for c in self.held if c not in plan.drop)
            taken = {c.seq_id for c in left}
            spare = next(s for s in self.seq_ids if s not in taken)
            fork(self.memory, seq_id, [spare])
            drop_hidden(self.memory, spare)
            new = Checkpoint(spare, tokens.copy(), self.memory.seq_pos_min(spare), task)
            dropped = [c for c in plan.drop if c.seq_id != spare]
            self.held = (*left, *dropped, new)
            self._erase(dropped)
        return plan

    def choose(self, tokens: np.ndarray) -> Checkpoint | None:
        """Return the checkpoint with most tokens that begins `tokens`, None without one."""
        return choose_checkpoint(self.held, int32_array(tokens, "tokens"))

    def restore(self, checkpoint: Checkpoint, seq_id: int) -> None:
        """Make a sequence what it was; the checkpoint stays, those with more tokens go.

        Parameters
        ----------
        checkpoint : Checkpoint
        seq_id : int
            What it holds is dropped.

        Raises
        ------
        SequenceError, StepError
            If it is not one of `held`, the id is impossible or a spare one, or tokens are pending;
            nothing is changed.
        """
        if checkpoint not in self.held or seq_id in self.seq_ids:
            raise SequenceError(f"{checkpoint} is not held, or sequence {seq_id} is a spare one")
        fork(self.memory, checkpoint.seq_id, [seq_id])
        self.erase_beyond(checkpoint.n_tokens)

    def erase_beyond(self, n_tokens: int) -> None:
        """Drop the checkpoints with more than `n_tokens` tokens."""
        self._erase([c for c in self.held if c.n_tokens > n_tokens])

    def clear(self) -> None:
        """Drop all checkpoints."""
        self._erase(self.held)

    def _erase(self, dropped: Sequence[Checkpoint]) -> None:
        for one in dropped:
            self.memory.seq_rm(one.seq_id)
            self.held = tuple(c for c in self.held if c is not one)
