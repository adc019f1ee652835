"""Splitting a batch into ubatches, and bringing results back into the order of the batch.

A ubatch is what a cache places and a model computes in one go. Whatever the way of splitting,
every token is in exactly one ubatch, no ubatch has more than `n_ubatch` tokens, and the tokens of
a sequence stay in the order of the batch (`split_seed` has an order of its own).

Source: spec/llama_cpp.md 4.2 and 4.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.errors import ConfigError, SequenceError, ShapeError


@dataclass(frozen=True, eq=False, slots=True)
class Ubatch:
    """Tokens of a batch that are placed and computed together.

    Attributes
    ----------
    batch : Batch
        The tokens.
    index : ndarray, shape (n_tokens,), int64
        Their numbers in the whole batch.
    n_seqs, n_seq_tokens : int
        The tokens are `n_seqs` sequences of `n_seq_tokens` each, one after the other.
    is_equal : bool
        Whether each of those sequences has the same ids all along, and no two share one. If not
        (`split_simple`), each token counts as a sequence.
    seq_sets : tuple of tuple of int
        If `is_equal`: the ids of each of the `n_seqs` sequences, ascending; else empty.
    """

    batch: Batch
    index: np.ndarray
    n_seqs: int
    n_seq_tokens: int
    is_equal: bool
    seq_sets: tuple[tuple[int, ...], ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.index)


def split_simple(batch: Batch, n_ubatch: int) -> list[Ubatch]:
    """Cut a batch every `n_ubatch` tokens, whatever the sequences.

    Raises
    ------
    ConfigError
        If `n_ubatch` is no whole number of at least 1.
    """
    _check_sizes(n_ubatch, 0)
    return [
        _stretch(batch, start, min(start + n_ubatch, batch.n_tokens), None)
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
    _check_sizes(n_ubatch, keep_tail)
    if sequential:
        _check_not_coupled(batch)
    alone = _only_set(batch)
    if alone is not None:
        cuts = _cut_one(batch.n_tokens, n_ubatch, keep_tail)
        return [_stretch(batch, start, stop, alone) for start, stop in cuts]
    queues = _Queues(batch)
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
    _check_sizes(n_ubatch, 0)
    alone = _only_set(batch)
    if alone is not None:
        cuts = _cut_one(batch.n_tokens, n_ubatch, 0)
        return [_stretch(batch, start, stop, alone) for start, stop in cuts]
    queues = _Queues(batch)
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


def split_seed(batch: Batch, n_ubatch: int, kind: str = "equal") -> list[Ubatch]:
    """Split as llama.cpp did in 2025, which sorted the batch first.

    Tokens with the same list of ids form a group, in the order of their positions. Groups with
    more ids come first (shared prompts), then shorter ones, then those with greater ids. A shared
    prompt is split alone. Since shared prompts come first wherever they stand in the batch, a
    sequence keeps its order only if they stand first there, too.

    Parameters
    ----------
    batch : Batch
    n_ubatch : int
    kind : {"equal", "simple", "seq"}
        Several groups a ubatch, as they are, or one group a ubatch.

    Raises
    ------
    ConfigError
        If `n_ubatch` or `kind` is impossible.
    """
    if kind == "simple":
        return split_simple(batch, n_ubatch)
    if kind not in ("equal", "seq"):
        raise ConfigError(f'kind {kind!r} is not known; "equal", "simple" or "seq" wanted')
    _check_sizes(n_ubatch, 0)
    groups = _seed_groups(batch)
    out = []
    while groups:
        most = min(n_ubatch, sum(len(tokens) for _, tokens in groups))
        length = min(len(groups[0][1]), most)
        n_seqs = 1
        if kind == "equal" and len(groups[0][0]) == 1:
            n_seqs = min(most // length, len(groups))
        taken = groups[:n_seqs]
        index = np.concatenate([tokens[:length] for _, tokens in taken])
        sets = tuple(tuple(sorted(ids)) for ids, _ in taken)
        out.append(Ubatch(batch.take(index), index, n_seqs, length, True, sets))
        groups[:n_seqs] = [(ids, rest[length:]) for ids, rest in taken if len(rest) > length]
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


def output_index(ubatches: Sequence[Ubatch]) -> np.ndarray:
    """Return the batch's output tokens in the order in which the ubatches give results, int64."""
    chosen = [u.index[u.batch.outputs] for u in ubatches]
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)


def in_batch_order(rows: Any, ubatches: Sequence[Ubatch]) -> np.ndarray:
    """Sort results back into the order of the batch.

    Parameters
    ----------
    rows : array_like, shape (n_outputs, ...)
        Results of the output tokens as the ubatches gave them, one after the other.
    ubatches : sequence of Ubatch

    Raises
    ------
    ShapeError
        If there are not as many rows as output tokens.
    """
    rows, index = np.asarray(rows), output_index(ubatches)
    if rows.ndim == 0 or len(rows) != len(index):
        n = "no" if rows.ndim == 0 else len(rows)
        raise ShapeError(f"{n} rows for {len(index)} outputs; give one row for each, in order")
    ordered: np.ndarray = rows[np.argsort(index)]
    return ordered


def _check_sizes(n_ubatch: Any, keep_tail: Any) -> None:
    for name, value, least in (("n_ubatch", n_ubatch, 1), ("keep_tail", keep_tail, 0)):
        is_int = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
        if not is_int or value < least:
            raise ConfigError(f"{name} {value!r} must be a whole number of at least {least}")
    if keep_tail >= n_ubatch:
        raise ConfigError(
            f"keep_tail {keep_tail} must be less than n_ubatch {n_ubatch}; raise n_ubatch or keep "
            "fewer states"
        )


def _check_not_coupled(batch: Batch) -> None:
    if batch.is_coupled:
        t = int(np.flatnonzero(np.diff(batch.id_start) > 1)[0])
        raise SequenceError(
            f"token {t}: seq_ids {list(batch.ids_of(t))}: a sequential split takes tokens of one "
            "sequence each; copy the sequence afterwards, or split without `sequential`"
        )


def _stretch(batch: Batch, start: int, stop: int, ids: tuple[int, ...] | None) -> Ubatch:
    """Return the tokens ``[start, stop)``: one sequence with `ids`, or each token for itself."""
    n = stop - start
    index = np.arange(start, stop)
    if ids is None:
        return Ubatch(batch.part(start, stop), index, n, 1, False, ())
    return Ubatch(batch.part(start, stop), index, 1, n, True, (ids,))


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


@dataclass(frozen=True, eq=False, slots=True)
class _Front:
    """Tokens of one id set, which come next in all of its sequences."""

    token: int
    """The first of them."""
    length: int
    ranks: tuple[int, ...]
    """Numbers of the queues that it stands in."""
    ids: tuple[int, ...]


class _Queues:
    """One queue of waiting tokens for each sequence; a shared token stands in several."""

    def __init__(self, batch: Batch):
        of_token = np.repeat(np.arange(batch.n_tokens), np.diff(batch.id_start))
        order = np.argsort(batch.ids, kind="stable")
        seqs, start = np.unique(batch.ids[order], return_index=True)
        self.seqs: list[int] = seqs.tolist()
        self.sets: list[tuple[int, ...]] = _id_sets(batch)
        self._rank = {s: rank for rank, s in enumerate(self.seqs)}
        self._flat: list[int] = of_token[order].tolist()
        self._next: list[int] = start.tolist()
        self._end: list[int] = [*start[1:].tolist(), len(order)]
        self._run_end = self._find_run_ends()

    def _find_run_ends(self) -> list[int]:
        """For each place in the queues: where tokens with the same ids end."""
        flat, sets = self._flat, self.sets
        out = list(range(1, len(flat) + 1))
        for first, end in zip(self._next, self._end, strict=True):
            for j in range(end - 2, first - 1, -1):
                if sets[flat[j]] == sets[flat[j + 1]]:
                    out[j] = out[j + 1]
        return out

    def fronts(self) -> list[_Front]:
        """Return the sets whose turn it is in each of their sequences, in batch order.

        No two of them share an id. While tokens wait there is one: the first token's.
        """
        found = []
        for rank, at in enumerate(self._next):
            if at == self._end[rank]:
                continue
            token = self._flat[at]
            ids = self.sets[token]
            if ids[0] != self.seqs[rank]:  # its first queue answers for it
                continue
            if len(ids) == 1:
                found.append(_Front(token, self._run_end[at] - at, (rank,), ids))
                continue
            ranks = tuple(self._rank[s] for s in ids)
            if all(self._waits(r) == token for r in ranks):
                length = min(self._run_end[self._next[r]] - self._next[r] for r in ranks)
                found.append(_Front(token, length, ranks, ids))
        found.sort(key=lambda front: front.token)
        return found

    def fronts_in_a_row(self) -> list[_Front]:
        """Return sequences with consecutive ids, from the first token's on, without shared tokens.

        Each has a token that stands later in the batch than the one that let its neighbour in.
        """
        fronts = {front.ids[0]: front for front in self.fronts()}
        if not fronts:
            return []
        row = [next(iter(fronts.values()))]
        token = row[0].token
        while (front := fronts.get(row[-1].ids[0] + 1)) is not None:
            (rank,) = front.ranks
            end = self._end[rank]
            at = bisect_right(self._flat, token, self._next[rank], end)
            if at == end:
                break
            token = self._flat[at]
            row.append(front)
        return row

    def _waits(self, rank: int) -> int:
        at = self._next[rank]
        return self._flat[at] if at < self._end[rank] else -1

    def pop(self, front: _Front, n: int) -> list[int]:
        """Take `n` tokens out of all queues that a front stands in, and return them."""
        at = self._next[front.ranks[0]]
        for rank in front.ranks:
            self._next[rank] += n
        return self._flat[at : at + n]


def _id_sets(batch: Batch) -> list[tuple[int, ...]]:
    """Return the ids of each token, ascending."""
    ids = batch.ids.tolist()
    if not batch.is_coupled:
        return [(s,) for s in ids]
    start = batch.id_start.tolist()
    return [tuple(sorted(ids[a:b])) for a, b in pairwise(start)]


def _choose_equal(fronts: list[_Front], n_ubatch: int, keep_tail: int) -> tuple[list[_Front], int]:
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


def _seed_groups(batch: Batch) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return (ids, tokens) of each group, in the order in which they are used up."""
    found: dict[tuple[int, ...], list[int]] = {}
    for t in range(batch.n_tokens):
        found.setdefault(batch.ids_of(t), []).append(t)
    groups = []
    for ids, tokens in found.items():
        index = np.array(tokens, np.int64)
        if batch.pos is not None:
            index = index[np.argsort(batch.pos[index], kind="stable")]
        groups.append((ids, index))
    groups.sort(key=lambda group: group[0], reverse=True)
    groups.sort(key=lambda group: (-len(group[0]), len(group[1])))
    return groups
