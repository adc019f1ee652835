"""The splitters of today: simple, equal, one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvnumba.batch import Batch
from kvnumba.errors import ConfigError, SequenceError
from kvnumba.splitting.queues import Front, Queues
from kvnumba.splitting.ubatch import Ubatch, check_sizes, stretch


def split_simple(batch: Batch, n_ubatch: int) -> list[Ubatch]:
    """Cut a batch every `n_ubatch` tokens, whatever the sequences.

    Raises
    ------
    ConfigError
        If `n_ubatch` is no whole number of at least 1.
    """
    check_sizes(n_ubatch, 0)
    return [
        stretch(batch, start, min(start + n_ubatch, batch.n_tokens), None)
        for start in range(0, batch.n_tokens, n_ubatch)
    ]


def split_equal(
    batch: Batch, n_ubatch: int, sequential: bool = False, keep_tail: int = 0
) -> list[Ubatch]:
    """Give each ubatch the same number of tokens of each of several sequences.

    Tokens with the same ids are taken together; those whose ids overlap with others' wait until
    it is their turn in each of their sequences.

    Parameters
    ----------
    batch : Batch
    n_ubatch : int
        Most tokens, and so most sequences, in a ubatch.
    sequential : bool
        The sequences of a ubatch have consecutive ids, ascending.
    keep_tail : int
        A sequence's last `keep_tail` tokens are not parted, so that a cache that can take back
        that many finds their states in one ubatch. Must be less than `n_ubatch`.

    Raises
    ------
    ConfigError
        If `n_ubatch` or `keep_tail` is impossible.
    SequenceError
        If it is to be sequential but a token has several ids.
    """
    check_sizes(n_ubatch, keep_tail)
    if sequential:
        _check_not_coupled(batch)
    alone = _only_set(batch)
    if alone is not None:
        cuts = _cut_one(batch.n_tokens, n_ubatch, keep_tail)
        return [stretch(batch, start, stop, alone) for start, stop in cuts]
    queues = Queues(batch)
    out = []
    while fronts := queues.fronts_in_a_row() if sequential else queues.fronts():
        chosen, n_taken = _choose_equal(fronts[:n_ubatch], n_ubatch, keep_tail)
        index = np.array([t for front in chosen for t in queues.pop(front, n_taken)], np.int64)
        sets = tuple(front.ids for front in chosen)
        out.append(Ubatch(batch.take(index), index, len(chosen), n_taken, True, sets))
    return out


def split_seq(batch: Batch, n_ubatch: int, same_ids: bool = False) -> list[Ubatch]:
    """Give each ubatch tokens of one sequence: each token's ids are among those of the one before.

    Parameters
    ----------
    batch : Batch
    n_ubatch : int
    same_ids : bool
        All tokens of a ubatch have the same ids, so that each ubatch `is_equal`. Otherwise one
        whose tokens have different ids is not: a state after it is not a state of all of them.

    Raises
    ------
    ConfigError
        If `n_ubatch` is no whole number of at least 1.
    """
    check_sizes(n_ubatch, 0)
    alone = _only_set(batch)
    if alone is not None:
        cuts = _cut_one(batch.n_tokens, n_ubatch, 0)
        return [stretch(batch, start, stop, alone) for start, stop in cuts]
    queues = Queues(batch)
    out = []
    if same_ids or not batch.is_coupled:
        while fronts := queues.fronts():
            front = fronts[0]
            index = np.array(queues.pop(front, min(front.length, n_ubatch)), np.int64)
            out.append(Ubatch(batch.take(index), index, 1, len(index), True, (front.ids,)))
        return out
    for tokens in _narrowing(queues.sets, n_ubatch):
        index = np.array(tokens, np.int64)
        is_equal = queues.sets[tokens[0]] == queues.sets[tokens[-1]]
        sets = (queues.sets[tokens[0]],) if is_equal else ()
        out.append(Ubatch(batch.take(index), index, 1, len(index), is_equal, sets))
    return out


def split_for(
    batch: Batch,
    n_ubatch: int,
    kind: str = "attention",
    *,
    is_pooled: bool = False,
    sequential: bool = False,
    keep_tail: int = 0,
) -> list[Ubatch]:
    """Split a batch in the way that a kind of cache wants.

    Parameters
    ----------
    batch : Batch
    n_ubatch : int
    kind : {"attention", "recurrent", "hybrid"}
        Where there are recurrent layers the sequences of a ubatch are equally long.
    is_pooled : bool
        The results are embeddings pooled over each sequence: one sequence a ubatch.
    sequential, keep_tail
        As in `split_equal`, for recurrent layers.

    Raises
    ------
    ConfigError, SequenceError
        As the splitters do, or if `kind` is not known.
    """
    if kind not in ("attention", "recurrent", "hybrid"):
        raise ConfigError(
            f'kind {kind!r} is not known; "attention", "recurrent" or "hybrid" wanted'
        )
    if is_pooled:
        return split_seq(batch, n_ubatch, same_ids=kind != "attention")
    if kind == "attention":
        return split_simple(batch, n_ubatch)
    return split_equal(batch, n_ubatch, sequential, keep_tail)


def _check_not_coupled(batch: Batch) -> None:
    if batch.is_coupled:
        t = int(np.flatnonzero(np.diff(batch.id_start) > 1)[0])
        raise SequenceError(
            f"token {t}: seq_ids {list(batch.ids_of(t))}: a sequential split takes tokens of one "
            "sequence each; copy the sequence afterwards, or split without `sequential`"
        )


def _only_set(batch: Batch) -> tuple[int, ...] | None:
    """Return the ids of all tokens, ascending, if all have the same in the same order."""
    n = batch.n_tokens
    if not n or len(batch.ids) % n:
        return None
    n_ids = len(batch.ids) // n
    if n_ids > 1 and not np.array_equal(batch.id_start, np.arange(n + 1) * n_ids):
        return None
    first = batch.ids[:n_ids]
    if not (batch.ids.reshape(n, n_ids) == first).all():
        return None
    return tuple(sorted(first.tolist()))


def _cut_one(n_tokens: int, n_ubatch: int, keep_tail: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges into which `split_equal` cuts one sequence."""
    start = 0
    while start < n_tokens:
        n = min(n_ubatch, n_tokens - start)
        n_left = n_tokens - start - n
        if 0 < n_left < keep_tail:
            n -= keep_tail - n_left
        yield start, start + n
        start += n


def _choose_equal(fronts: list[Front], n_ubatch: int, keep_tail: int) -> tuple[list[Front], int]:
    """Return which fronts go into an equal ubatch, and how many tokens of each."""
    n = min(n_ubatch // len(fronts), min(front.length for front in fronts))
    n_kept = 0
    for front in fronts:
        if 0 < front.length - n < keep_tail:
            break
        n_kept += 1
    if n_kept:
        return fronts[:n_kept], n
    first = fronts[0]
    return [first], first.length if first.length <= n_ubatch else first.length - keep_tail


def _narrowing(sets: list[tuple[int, ...]], n_ubatch: int) -> Iterator[list[int]]:
    """Yield tokens each of whose ids are among those of the token before.

    A token that is passed over keeps back all later ones of its sequences.
    """
    waiting = list(range(len(sets)))
    as_sets = [frozenset(ids) for ids in sets]
    while waiting:
        taken, passed = [waiting[0]], []
        current, kept_back = as_sets[waiting[0]], set[int]()
        for j, t in enumerate(waiting[1:], 1):
            if len(taken) == n_ubatch:
                passed += waiting[j:]
                break
            if as_sets[t] <= current and kept_back.isdisjoint(as_sets[t]):
                taken.append(t)
                current = as_sets[t]
            else:
                passed.append(t)
                kept_back |= as_sets[t]
        waiting = passed
        yield taken
