"""`Queues`: whose turn it is when a batch is taken apart by its sequences."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvnumba.batch import Batch


@dataclass(frozen=True, eq=False, slots=True)
class Front:
    """Tokens of one id set, which come next in all of its sequences."""

    token: int
    """The first of them."""
    length: int
    ranks: tuple[int, ...]
    """Numbers of the queues that it stands in."""
    ids: tuple[int, ...]


class Queues:
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
        self._end: list[int] = [*start.tolist(), len(order)][1:]
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

    def fronts(self) -> list[Front]:
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
                found.append(Front(token, self._run_end[at] - at, (rank,), ids))
                continue
            ranks = tuple(self._rank[s] for s in ids)
            if all(self._waits(r) == token for r in ranks):
                length = min(self._run_end[self._next[r]] - self._next[r] for r in ranks)
                found.append(Front(token, length, ranks, ids))
        found.sort(key=lambda front: front.token)
        return found

    def fronts_in_a_row(self) -> list[Front]:
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

    def pop(self, front: Front, n: int) -> list[int]:
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
