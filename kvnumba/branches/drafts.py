"""Drafts of speculative decoding: accepted up to the first wrong token."""

from __future__ import annotations

from dataclasses import dataclass

from kvnumba.branches.ends import can_rewind, cut, drop_hidden
from kvnumba.branches.forks import fork
from kvnumba.cells import is_whole
from kvnumba.errors import ConfigError, SequenceError, StepError
from kvnumba.memory import Memory


@dataclass(frozen=True)
class AcceptPlan:
    """What becomes of a batch of which the first tokens are accepted.

    Attributes
    ----------
    seq_id : int
    n_kept : int
        Tokens that the sequence shall have.
    n_again : int
        Of these, the last ones that must be computed again.
    source : {"all", "cut", "backup", "nothing"}
        Nothing has to go; the end is removed; another sequence, which has the tokens before the
        batch, takes its place; everything is removed.
    backup : int or None
        That other sequence.
    reason : str
        In words.
    """

    seq_id: int
    n_kept: int
    n_again: int
    source: str
    backup: int | None
    reason: str

    def apply(self, memory: Memory) -> int:
        """Carry it out; return `n_again`.

        Raises
        ------
        StepError
            If tokens are pending; nothing is changed.
        """
        if self.source == "cut":
            cut(memory, self.seq_id, self.n_kept)
        elif self.source == "backup":
            assert self.backup is not None
            fork(memory, self.backup, [self.seq_id])
        elif self.source == "nothing":
            memory.seq_rm(self.seq_id)
        return self.n_again


def plan_accept(
    memory: Memory, seq_id: int, n_tokens: int, n_accepted: int, backup: int | None = None
) -> AcceptPlan:
    """Plan how the rejected end of a batch leaves a sequence; nothing is changed.

    Parameters
    ----------
    memory : Memory
    seq_id : int
        Has the batch's tokens as its last ones, committed.
    n_tokens : int
        Tokens of the batch.
    n_accepted : int
        How many of them stay, the first ones. (The token that was sampled before the draft is one
        of the batch, and always stays.)
    backup : int, optional
        A sequence with a part of the tokens that stay, from the first on: a fork made before the
        batch, or a checkpoint. It is used when the memory cannot go back.

    Raises
    ------
    ConfigError
        If the counts are impossible.
    SequenceError
        If an id is.
    """
    n_held = memory.seq_pos_max(seq_id) + 1
    if not (is_whole(n_tokens) and is_whole(n_accepted) and 0 <= n_accepted <= n_tokens <= n_held):
        raise ConfigError(
            f"{n_accepted!r} accepted of {n_tokens!r} tokens, of {n_held} that sequence {seq_id} "
            "has: these must be whole numbers, in ascending order"
        )
    n_kept = n_held - (n_tokens - n_accepted)
    if n_kept == n_held:
        return AcceptPlan(seq_id, n_kept, 0, "all", None, "all tokens of the batch are accepted")
    reason = memory.refusal(seq_id, n_kept, -1)
    if reason is None:
        return AcceptPlan(seq_id, n_kept, 0, "cut", None, f"{n_held - n_kept} tokens are removed")
    n_backup = 0 if backup is None else memory.seq_pos_max(backup) + 1
    if 0 < n_backup <= n_kept:
        reason = f"sequence {backup} with {n_backup} tokens takes its place ({reason})"
        return AcceptPlan(seq_id, n_kept, n_kept - n_backup, "backup", backup, reason)
    return AcceptPlan(seq_id, n_kept, n_kept, "nothing", None, f"all is computed again: {reason}")


class Draft:
    """Speculative decoding: a batch of guesses that is accepted up to the first wrong one.

    Parameters
    ----------
    memory : Memory
    seq_id : int
        The sequence that the guesses are for.
    spare : int, optional
        An unused sequence. Where the memory might not be able to go back, the sequence is forked
        to it before each batch, at no cost in K, V or states.

    Examples
    --------
    Each round: ``draft.open()``, compute the sampled token and the guesses as one batch, then
    ``n_again = draft.accept(n)``: the sequence has the first ``n`` tokens of the batch and what
    was before, less the last ``n_again``, which are to be computed again.
    """

    def __init__(self, memory: Memory, seq_id: int, spare: int | None = None):
        self.memory, self.seq_id, self.spare = memory, seq_id, spare
        memory.seq_pos_max(seq_id)
        if spare is not None and (spare == seq_id or memory.seq_pos_max(spare) >= 0):
            raise SequenceError(f"spare sequence {spare} must be another one, and empty")
        self._n_before: int | None = None
        self._has_fork = False

    @property
    def is_open(self) -> bool:
        """Whether a batch is under way."""
        return self._n_before is not None

    def open(self, n_tokens: int | None = None) -> None:
        """Begin a batch; call it before the batch is computed.

        Parameters
        ----------
        n_tokens : int, optional
            Tokens that the batch will have at most; a recurrent memory that keeps as many states
            needs no fork then.

        Raises
        ------
        StepError
            If the last batch was not accepted, or tokens are pending.
        """
        if self.is_open:
            raise StepError("the last draft is still open; accept some of it, or none, first")
        n_before = self.memory.seq_pos_max(self.seq_id) + 1
        n_back = 2**31 if n_tokens is None else n_tokens
        if self.spare is not None and n_before and not can_rewind(self.memory, n_back):
            fork(self.memory, self.seq_id, [self.spare])
            drop_hidden(self.memory, self.spare)
            self._has_fork = True
        self._n_before = n_before

    def plan_accept(self, n_accepted: int) -> AcceptPlan:
        """Plan how the first `n_accepted` tokens of the batch stay; nothing is changed.

        Raises
        ------
        StepError
            If no draft is open, or the sequence has lost tokens meanwhile.
        ConfigError
            If the batch has fewer tokens.
        """
        if self._n_before is None:
            raise StepError("no draft is open; call open() before the batch is computed")
        n_tokens = self.memory.seq_pos_max(self.seq_id) + 1 - self._n_before
        if n_tokens < 0:
            raise StepError(f"sequence {self.seq_id} lost tokens since the draft was opened")
        backup = self.spare if self._has_fork else None
        return plan_accept(self.memory, self.seq_id, n_tokens, n_accepted, backup)

    def accept(self, n_accepted: int) -> int:
        """Keep the first `n_accepted` tokens of the batch, and close the draft.

        Returns
        -------
        n_again : int
            Last tokens, of those that stay, that must be computed again.

        Raises
        ------
        StepError, ConfigError
            As `plan_accept`; nothing is changed.
        """
        n_again = self.plan_accept(n_accepted).apply(self.memory)
        if self._has_fork:
            assert self.spare is not None
            self.memory.seq_rm(self.spare)
        self._n_before, self._has_fork = None, False
        return n_again
