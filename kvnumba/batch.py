"""`Batch`: the tokens handed in at once, with their positions and sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvnumba.batch_rules import (
    MAX_POS,
    checked_embeddings,
    checked_positions,
    int32_array,
    output_flags,
    pack_ids,
    split_sections,
    validated,
)
from kvnumba.errors import PositionError, ShapeError

__all__ = ["MAX_POS", "Batch", "checked_positions", "int32_array", "pack_ids"]


class Batch:
    """Tokens, as ids or as embeddings, with positions, sequence ids and output flags.

    Parameters
    ----------
    tokens : array_like of int, shape (n_tokens,), optional
        Token ids, 0 or more. May be left out when there are embeddings.
    pos : array_like of int, shape (n_tokens,) or (n_pos, n_tokens), optional
        Positions; for models with several per token one row for each (3 or 4: t, y, x and an
        extra one). Default: the cache counts on from each sequence's last position.
    seq_ids : int, sequence of int, or sequence of sequences of int, optional
        One id for all tokens, one id a token, or several ids a token. Default 0. The order of a
        token's ids is kept.
    embeddings : array_like of float, shape (n_tokens, n_embd), optional
        One vector a token, instead of the ids or beside them.
    outputs : array_like of bool, shape (n_tokens,), or "all", optional
        Whose results are wanted. Default: the last token's.

    Attributes
    ----------
    tokens : ndarray, shape (n_tokens,), int32
        All -1 in a batch of embeddings alone.
    embeddings : ndarray, shape (n_tokens, n_embd), float32, or None
    pos : ndarray, shape (n_tokens,), int32, or None
    sections : ndarray, shape (n_pos, n_tokens), int32, or None
        All positions, where `pos` was given with several rows; the first row is `pos`.
    id_start : ndarray, shape (n_tokens + 1,), int64
        Token ``t`` belongs to ``ids[id_start[t]:id_start[t + 1]]``.
    ids : ndarray, int32
    outputs : ndarray, shape (n_tokens,), bool
    has_tokens : bool
        Whether token ids were given.

    Raises
    ------
    ShapeError, PositionError, SequenceError
        If lengths disagree, a value is no whole number, a token, position or id is negative, or a
        token has no or a repeated id; the message names token and field.
    """

    def __init__(
        self,
        tokens: Any = None,
        pos: Any = None,
        seq_ids: Any = 0,
        *,
        embeddings: Any = None,
        outputs: Any = None,
    ):
        self.embeddings = None if embeddings is None else checked_embeddings(embeddings)
        self.has_tokens = tokens is not None
        if tokens is not None:
            self.tokens = int32_array(tokens, "tokens")
            bad = np.flatnonzero(self.tokens < 0)
            if len(bad):
                raise ShapeError(
                    f"token {bad[0]} of tokens is {self.tokens[bad[0]]}; ids start at 0"
                )
        elif self.embeddings is None:
            raise ShapeError("the batch has neither tokens nor embeddings; give either, or both")
        else:
            self.tokens = np.full(len(self.embeddings), -1, np.int32)
        n = self.n_tokens
        if self.embeddings is not None and len(self.embeddings) != n:
            raise ShapeError(f"embeddings has {len(self.embeddings)} rows for {n} tokens")
        self.pos: np.ndarray | None = None
        self.sections: np.ndarray | None = None
        if pos is not None:
            self.pos, self.sections = split_sections(pos, n)
        self.id_start, self.ids = pack_ids(seq_ids, n)
        self.outputs = output_flags(outputs, n)

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def is_coupled(self) -> bool:
        """Whether some token belongs to several sequences."""
        return len(self.ids) > len(self.tokens)

    def first_ids(self) -> np.ndarray:
        """Return the first sequence id of each token, shape ``(n_tokens,)``, int32."""
        first: np.ndarray = self.ids[self.id_start[:-1]]
        return first

    def ids_of(self, t: int) -> tuple[int, ...]:
        """Return the sequence ids of token `t`, in the order in which they were given."""
        return tuple(self.ids[self.id_start[t] : self.id_start[t + 1]].tolist())

    def part(self, start: int, stop: int) -> Batch:
        """Return the tokens ``[start, stop)`` as a batch of their own (views, no copies)."""
        first, last = self.id_start[start], self.id_start[stop]
        return self._chosen(
            slice(start, stop), self.id_start[start : stop + 1] - first, self.ids[first:last]
        )

    def take(self, index: Any) -> Batch:
        """Return the listed tokens, in that order, as a batch of their own.

        Parameters
        ----------
        index : array_like of int, shape (n,)
            Numbers of tokens.
        """
        index = np.asarray(index, np.int64)
        if not self.is_coupled:
            return self._chosen(index, np.arange(len(index) + 1), self.ids[index])
        start = self.id_start[index]
        n_ids = self.id_start[index + 1] - start
        id_start = np.zeros(len(index) + 1, np.int64)
        np.cumsum(n_ids, out=id_start[1:])
        ids = self.ids[np.arange(id_start[-1]) + np.repeat(start - id_start[:-1], n_ids)]
        return self._chosen(index, id_start, ids)

    def _chosen(self, which: Any, id_start: np.ndarray, ids: np.ndarray) -> Batch:
        out = Batch.__new__(Batch)
        out.tokens, out.has_tokens = self.tokens[which], self.has_tokens
        out.embeddings = None if self.embeddings is None else self.embeddings[which]
        out.pos = None if self.pos is None else self.pos[which]
        out.sections = None if self.sections is None else self.sections[:, which]
        out.id_start, out.ids = id_start, ids
        out.outputs = self.outputs[which]
        return out

    def filled(self, pos_max: Callable[[int], int], by_first_id: bool = False) -> Batch:
        """Return the batch with positions: as given, or counting on in each sequence.

        Parameters
        ----------
        pos_max : callable
            The last position of a sequence so far, -1 when it is empty.
        by_first_id : bool
            A token of several sequences follows on its first one, as in llama.cpp, even where
            another one has that position already. Default: on the one that has come furthest.

        Raises
        ------
        PositionError
            If a position would be beyond the last one that exists.
        """
        if self.pos is not None or not self.n_tokens:
            return self
        out = self.part(0, self.n_tokens)
        if self.is_coupled:
            pos = _count_on_shared(self, pos_max, by_first_id)
        else:
            pos = _count_on(self.ids, pos_max)
        bad = np.flatnonzero(pos > MAX_POS)
        if len(bad):
            raise PositionError(
                f"token {bad[0]} would be at position {pos[bad[0]]}, beyond {MAX_POS}"
            )
        out.pos = pos.astype(np.int32)
        return out

    def validate(self, memory: Any, n_vocab: int | None = None) -> Batch:
        """Refuse what llama.cpp's decode would refuse; return the batch with positions filled in.

        Placing is less strict: a cache takes any positions, with a logged warning.

        Parameters
        ----------
        memory : Memory
            The cache that the batch is for; it is only asked.
        n_vocab : int, optional
            Size of the vocabulary; without it, token ids have no upper limit.

        Raises
        ------
        ShapeError, SequenceError, PositionError
            The message names token, field and reason; see `kvnumba.batch_rules`.
        """
        return validated(self, memory, n_vocab)


def _count_on(ids: np.ndarray, pos_max: Callable[[int], int]) -> np.ndarray:
    """Return positions, int64, where each token has one id."""
    order = np.argsort(ids, kind="stable")
    seqs, start, count = np.unique(ids[order], return_index=True, return_counts=True)
    base = np.array([pos_max(s) + 1 for s in seqs.tolist()], np.int64)
    pos = np.empty(len(ids), np.int64)
    pos[order] = np.arange(len(ids)) + np.repeat(base - start, count)
    return pos


def _count_on_shared(batch: Batch, pos_max: Callable[[int], int], by_first_id: bool) -> np.ndarray:
    """Return positions, int64, where tokens may have several ids."""
    following = {s: pos_max(s) + 1 for s in np.unique(batch.ids).tolist()}
    pos = np.empty(batch.n_tokens, np.int64)
    for t in range(batch.n_tokens):
        ids = batch.ids_of(t)
        pos[t] = following[ids[0]] if by_first_id else max(following[s] for s in ids)
        following.update(dict.fromkeys(ids, int(pos[t]) + 1))
    return pos
