"""Context shift: dropping tokens after the first ones when the context is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnumba.batch import int32_array
from kvnumba.cells import is_whole
from kvnumba.errors import CannotShiftError, ConfigError, ShapeError, StepError
from kvnumba.memory import Memory
from kvnumba.prefill.moving import move_refusal

N_ROOM = 4
"""Tokens that must remain beside those kept."""


@dataclass(frozen=True)
class ContextShift:
    """Which tokens are dropped: `n_discard` of them after the first `n_keep`.

    Attributes
    ----------
    n_tokens : int
        Tokens before.
    n_keep, n_discard : int
    """

    n_tokens: int
    n_keep: int
    n_discard: int

    @property
    def n_left(self) -> int:
        """Tokens that stay."""
        return self.n_tokens - self.n_discard

    def __str__(self) -> str:
        return (
            f"{self.n_discard} of {self.n_tokens} tokens after the first {self.n_keep} are "
            f"dropped, {self.n_left} stay"
        )

    def cut(self, tokens: Any) -> np.ndarray:
        """Return a token list without those that are dropped, int32.

        Parameters
        ----------
        tokens : array_like of int
            `n_tokens` of them; more may follow, and stay.

        Raises
        ------
        ShapeError
            If there are fewer.
        """
        tokens = int32_array(tokens, "tokens")
        if len(tokens) < self.n_tokens:
            raise ShapeError(f"{len(tokens)} tokens are given, {self.n_tokens} are to be shifted")
        return np.concatenate([tokens[: self.n_keep], tokens[self.n_keep + self.n_discard :]])

    def refusal(self, memory: Memory, seq_id: int) -> str | None:
        """Return why a memory cannot do it, None when it can; nothing is changed."""
        if not self.n_discard:
            return None
        p1 = self.n_keep + self.n_discard
        return move_refusal(memory, seq_id, [(self.n_keep, p1)], [(p1, self.n_tokens)])

    def apply(self, memory: Memory, seq_id: int, tokens: Any) -> np.ndarray:
        """Shift a sequence and its token list, both once; K follows at the next `update`.

        Parameters
        ----------
        memory : Memory
            Modified in place.
        seq_id : int
        tokens : array_like of int
            Those of the sequence; more may follow, which have no cell yet.

        Returns
        -------
        tokens : ndarray, int32
            The list as it is now. Go on with this one, or it and the memory disagree.

        Raises
        ------
        CannotShiftError
            If the memory cannot, see `refusal`; nothing is changed.
        StepError, ShapeError, SequenceError
            If the sequence or the list is not as long as planned, tokens are pending, or the id
            is impossible; nothing is changed.
        """
        left = self.cut(tokens)
        n = memory.seq_pos_max(seq_id) + 1
        if n != self.n_tokens:
            raise StepError(f"sequence {seq_id} has {n} tokens, planned was {self.n_tokens}")
        reason = self.refusal(memory, seq_id)
        if reason is not None:
            raise CannotShiftError(f"no context shift: {reason}")
        if self.n_discard:
            p1 = self.n_keep + self.n_discard
            if not memory.seq_rm(seq_id, self.n_keep, p1):
                raise StepError(f"sequence {seq_id} refuses what it had agreed to")
            memory.seq_add(seq_id, p1, -1, -self.n_discard)
        return left


def must_shift(n_tokens: int, n_ctx: int) -> bool:
    """Return whether one more token would fill the context."""
    return n_tokens + 1 >= n_ctx


def _n_kept(n_tokens: int, n_ctx: int, n_keep: int, n_prompt: int | None, has_bos: bool) -> int:
    """Return how many first tokens stay whatever happens."""
    for name, value in (("n_tokens", n_tokens), ("n_ctx", n_ctx), ("n_keep", n_keep)):
        if not is_whole(value):
            raise ConfigError(f"{name} {value!r} must be a whole number")
    if n_ctx <= N_ROOM:
        raise ConfigError(f"n_ctx {n_ctx} must be more than {N_ROOM}, or nothing could stay")
    if n_keep < 0:
        if n_prompt is None:
            raise ConfigError("n_keep is negative (the whole prompt): give n_prompt as well")
        n_keep = n_prompt
    return int(min(n_keep + has_bos, n_ctx - N_ROOM))


def plan_context_shift(
    n_tokens: int,
    n_ctx: int,
    n_keep: int = 0,
    n_discard: int | None = None,
    *,
    n_prompt: int | None = None,
    has_bos: bool = False,
) -> ContextShift:
    """Plan which tokens a full context drops.

    Parameters
    ----------
    n_tokens, n_ctx : int
        Tokens held, and the most there may be.
    n_keep : int
        First tokens that stay; negative: the whole prompt. Never more than ``n_ctx - 4``.
    n_discard : int, optional
        Tokens to drop; at least one of the others stays. Default (also 0): half of the others.
    n_prompt : int, optional
        Tokens of the prompt; needed when `n_keep` is negative.
    has_bos : bool
        The first token was put before the prompt, and stays too.

    Raises
    ------
    ConfigError
        If a number is impossible, or there is nothing to drop.
    """
    kept = _n_kept(n_tokens, n_ctx, n_keep, n_prompt, has_bos)
    if n_discard is not None and (not is_whole(n_discard) or n_discard < 0):
        raise ConfigError(f"n_discard {n_discard!r} must be a whole number of at least 0")
    n_others = n_tokens - kept
    if n_others < 2:
        raise ConfigError(
            f"nothing to discard: {n_tokens} tokens, of which {kept} stay; at least one of the "
            "others is dropped and one stays"
        )
    return ContextShift(n_tokens, kept, min(n_discard or n_others // 2, n_others - 1))


def plan_prompt_cut(
    n_prompt: int, n_ctx: int, n_keep: int = 0, *, has_bos: bool = False
) -> ContextShift:
    """Plan what of a prompt is read that is too long, before any of it is.

    The first tokens stay, and of the others the last ones: whole blocks, each half of the room for
    them, are dropped until there is room for at least one token more. (A context that runs full
    while tokens are generated would be shifted alike.) Nothing is in a memory yet: ``cut`` the
    prompt, and reuse what is held for the rest.

    Parameters
    ----------
    n_prompt, n_ctx, n_keep, has_bos
        As in `plan_context_shift`; a negative `n_keep` keeps as much as it can.

    Raises
    ------
    ConfigError
        If a number is impossible.
    """
    kept = _n_kept(n_prompt, n_ctx, n_keep, n_prompt, has_bos)
    if n_prompt < n_ctx:
        return ContextShift(n_prompt, min(kept, n_prompt), 0)
    block = (n_ctx - kept) // 2
    n_blocks = (n_prompt - kept - block) // block
    return ContextShift(n_prompt, kept, n_blocks * block)
