"""Reuse of what a sequence holds for a prompt that begins alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnumba.batch import int32_array
from kvnumba.branches import cut, fork
from kvnumba.checkpoints import Checkpoint, Checkpoints, choose_checkpoint
from kvnumba.errors import ConfigError, StepError
from kvnumba.memory import Memory
from kvnumba.prefix import common_prefix


@dataclass(frozen=True)
class ReusePlan:
    """How a sequence comes to hold the beginning of a prompt.

    Attributes
    ----------
    seq_id : int
    n_prompt : int
        Tokens of the prompt.
    n_held : int
        Tokens that the memory holds now.
    n_common : int
        Of these, the first ones that the prompt begins with.
    n_reused : int
        Tokens of the prompt that will not be computed.
    source : {"cache", "logits", "checkpoint", "nothing"}
        Where they are: in the sequence (its end is removed, if it has more); all of it, and the
        caller has the logits; in a checkpoint; nowhere.
    checkpoint : Checkpoint or None
        The one that takes the sequence's place.
    reason : str
        Why it is no more, in words.
    """

    seq_id: int
    n_prompt: int
    n_held: int
    n_common: int
    n_reused: int
    source: str
    checkpoint: Checkpoint | None
    reason: str

    @property
    def n_to_compute(self) -> int:
        """Last tokens of the prompt that are to be computed."""
        return self.n_prompt - self.n_reused

    def __str__(self) -> str:
        return f"{self.n_reused} of {self.n_prompt} tokens reused from {self.source}: {self.reason}"

    def apply(self, memory: Memory, checkpoints: Checkpoints | None = None) -> None:
        """Carry it out: the sequence then holds the first `n_reused` tokens of the prompt.

        Parameters
        ----------
        memory : Memory
            Modified in place.
        checkpoints : Checkpoints, optional
            Those that were planned with; the ones beyond `n_reused` are dropped.

        Raises
        ------
        StepError
            If the sequence changed since it was planned, or tokens are pending; nothing is changed.
        """
        if memory.seq_pos_max(self.seq_id) + 1 != self.n_held:
            raise StepError(f"sequence {self.seq_id} changed since this was planned; plan again")
        one = self.checkpoint
        if one is not None:
            if memory.seq_pos_max(one.seq_id) != one.pos_max:
                raise StepError(f"{one} was dropped since this was planned; plan again")
            fork(memory, one.seq_id, [self.seq_id])
        else:
            cut(memory, self.seq_id, self.n_reused)
        if checkpoints is not None:
            checkpoints.erase_beyond(self.n_reused)


def plan_reuse(
    memory: Memory,
    seq_id: int,
    held: Any,
    prompt: Any,
    checkpoints: Checkpoints | Sequence[Checkpoint] = (),
    has_logits: bool = False,
) -> ReusePlan:
    """Plan how much of a prompt is served from what the memory holds; nothing is changed.

    At least the last token of the prompt is computed, for its logits, unless the caller has them.

    Parameters
    ----------
    memory : Memory
    seq_id : int
    held : array_like of int
        The tokens of the sequence; those without a cell yet may follow. Unknown ones (below 0)
        are like no other.
    prompt : array_like of int
        All tokens of the prompt.
    checkpoints : Checkpoints or sequence of Checkpoint, optional
        Used when the memory cannot go back to where the prompt leaves what is held.
    has_logits : bool
        Whether the caller has the logits of the last token in the memory: a prompt that is all
        that is held needs nothing else then.

    Raises
    ------
    ConfigError, ShapeError, SequenceError
        If the prompt is empty or no list of tokens, or the id is impossible.
    """
    held, prompt = int32_array(held, "held"), int32_array(prompt, "prompt")
    if not len(prompt):
        raise ConfigError("the prompt is empty; give at least one token")
    n_held, n_prompt = memory.seq_pos_max(seq_id) + 1, len(prompt)
    n_common = min(n_held, common_tokens(held, prompt))

    def plan(n: int, source: str, reason: str, one: Checkpoint | None = None) -> ReusePlan:
        return ReusePlan(seq_id, n_prompt, n_held, n_common, n, source, one, reason)

    if has_logits and n_common == n_prompt == n_held:
        return plan(n_prompt, "logits", "the prompt is what is held, and its logits are known")
    n = min(n_common, n_prompt - 1)
    if n == 0:
        return plan(0, "nothing", _why_none(n_held, n_prompt, n_common))
    reason = memory.refusal(seq_id, n, -1) if n < n_held else None
    if reason is None:
        return plan(n, "cache", _why(n_held, n_prompt, n_common))
    entries = checkpoints.held if isinstance(checkpoints, Checkpoints) else checkpoints
    one = choose_checkpoint(entries, prompt[:n])
    if one is not None:
        why = f"sequence {one.seq_id} was kept after {one.n_tokens} tokens ({reason})"
        return plan(one.n_tokens, "checkpoint", why, one)
    return plan(0, "nothing", f"{n} tokens are common, but: {reason}; no checkpoint fits")


def common_tokens(held: np.ndarray, prompt: np.ndarray) -> int:
    """Return how many leading tokens are equal and known (not below 0)."""
    n = common_prefix(held, prompt)
    unknown = np.flatnonzero(prompt[:n] < 0)
    return int(unknown[0]) if len(unknown) else n


def _why(n_held: int, n_prompt: int, n_common: int) -> str:
    if n_common == n_prompt:
        return "all of the prompt is held; its last token is computed for its logits"
    if n_common == n_held:
        return "the prompt continues all that is held"
    return f"the prompt differs from what is held at token {n_common}"


def _why_none(n_held: int, n_prompt: int, n_common: int) -> str:
    if n_held == 0:
        return "nothing is held"
    if n_common:
        return "the prompt is one token, which is computed for its logits"
    return "the prompt differs from what is held at token 0"
