"""`Batch`: the tokens handed in at once, with their positions and sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvnumba.errors import PositionError, SequenceError, ShapeError

MAX_POS = np.iinfo(np.int32).max - 1
"""The greatest position; the value above it means "no end" in a range."""

_BOOLS = frozenset((bool, np.bool_))


def int32_array(values: Any, name: str) -> np.ndarray:
    """Return `values` as a one-dimensional int32 array of its own.

    Raises
    ------
    ShapeError
        If it is not one-dimensional, not of whole numbers, or does not fit in int32.
    """
    if isinstance(values, (list, tuple)) and not _BOOLS.isdisjoint(map(type, values)):
        raise ShapeError(f"{name} holds a bool, whole numbers wanted")
    try:
        given = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"{name} cannot be read as an array: {error}") from None
    if given.ndim != 1:
        raise ShapeError(f"{name} has {given.ndim} dimensions, 1 wanted")
    if given.size == 0:
        return np.empty(0, np.int32)
    if given.dtype.kind not in "iu":
        raise ShapeError(f"{name} has dtype {given.dtype}, whole numbers wanted")
    if int(given.max()) > np.iinfo(np.int32).max or int(given.min()) < np.iinfo(np.int32).min:
        raise ShapeError(f"{name} holds values that do not fit in 32 bits")
    return given.astype(np.int32)


class Batch:
    """Tokens with positions and sequence ids.

    Parameters
    ----------
    tokens : array_like of int, shape (n_tokens,)
        Token ids, 0 or more.
    pos : array_like of int, shape (n_tokens,), optional
        Positions. Default: the cache counts on from each sequence's last position.
    seq_ids : int, sequence of int, or sequence of sequences of int, optional
        One id for all tokens, one id a token, or several ids a token. Default 0.

    Attributes
    ----------
    tokens : ndarray, shape (n_tokens,), int32
    pos : ndarray, shape (n_tokens,), int32, or None
    id_start : ndarray, shape (n_tokens + 1,), int64
        Token ``t`` belongs to ``ids[id_start[t]:id_start[t + 1]]``.
    ids : ndarray, int32

    Raises
    ------
    ShapeError, PositionError, SequenceError
        If lengths disagree, a value is no whole number, a token, position or id is negative, or a
        token has no or a repeated id; the message names token and field.
    """

    def __init__(self, tokens: Any, pos: Any = None, seq_ids: Any = 0):
        self.tokens = int32_array(tokens, "tokens")
        bad = np.flatnonzero(self.tokens < 0)
        if len(bad):
            raise ShapeError(f"token {bad[0]} of tokens is {self.tokens[bad[0]]}; ids start at 0")
        self.pos = None if pos is None else checked_positions(pos, self.n_tokens)
        self.id_start, self.ids = pack_ids(seq_ids, self.n_tokens)

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def first_ids(self) -> np.ndarray:
        """Return the first sequence id of each token, shape ``(n_tokens,)``, int32."""
        return self.ids[self.id_start[:-1]]

    def part(self, start: int, stop: int) -> Batch:
        """Return the tokens ``[start, stop)`` as a batch of their own."""
        out = Batch.__new__(Batch)
        out.tokens = self.tokens[start:stop]
        out.pos = None if self.pos is None else self.pos[start:stop]
        first, last = self.id_start[start], self.id_start[stop]
        out.id_start = self.id_start[start : stop + 1] - first
        out.ids = self.ids[first:last]
        return out


def checked_positions(pos: Any, n_tokens: int) -> np.ndarray:
    """Return positions as int32, shape ``(n_tokens,)``.

    Raises
    ------
    ShapeError, PositionError
        If there are not `n_tokens` of them, or one lies outside ``[0, 2**31 - 2]``.
    """
    out = int32_array(pos, "pos")
    if len(out) != n_tokens:
        raise ShapeError(f"pos has {len(out)} entries for {n_tokens} tokens")
    bad = np.flatnonzero((out < 0) | (out > MAX_POS))
    if len(bad):
        raise PositionError(f"pos of token {bad[0]} is {out[bad[0]]}; positions are 0 to {MAX_POS}")
    return out


def pack_ids(seq_ids: Any, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(id_start, ids)`` of one id, one id a token, or several ids a token.

    Raises
    ------
    ShapeError, SequenceError
        If the count is not `n_tokens`, or a token has no, a negative or a repeated id.
    """
    if _is_int(seq_ids):
        if not 0 <= seq_ids <= MAX_POS:
            _not_negative(int32_array([seq_ids], "seq_ids"), np.zeros(1, int))
        return np.arange(n_tokens + 1), np.full(n_tokens, seq_ids, np.int32)
    if isinstance(seq_ids, (str, bytes)) or not isinstance(seq_ids, Iterable):
        raise ShapeError(f"seq_ids is {seq_ids!r}; an id, a list of ids, or a list of lists wanted")
    if isinstance(seq_ids, np.ndarray) and seq_ids.ndim != 1:
        if seq_ids.ndim != 2:
            raise ShapeError(f"seq_ids has {seq_ids.ndim} dimensions, 1 or 2 wanted")
        seq_ids = seq_ids.tolist()
    entries = seq_ids if isinstance(seq_ids, np.ndarray) else list(seq_ids)
    if len(entries) != n_tokens:
        raise ShapeError(f"seq_ids has {len(entries)} entries for {n_tokens} tokens")
    if isinstance(entries, np.ndarray) or set(map(type, entries)) <= {int, np.int32, np.int64}:
        ids = int32_array(entries, "seq_ids")
        return np.arange(n_tokens + 1), _not_negative(ids, np.arange(n_tokens))
    return _pack_lists(entries)


def _pack_lists(entries: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(id_start, ids)`` of entries of which each is an id or several."""
    id_start = np.zeros(len(entries) + 1, np.int64)
    flat: list[int] = []
    for t, entry in enumerate(entries):
        several = isinstance(entry, Iterable) and not isinstance(entry, (str, bytes))
        if isinstance(entry, np.ndarray):
            several, entry = entry.ndim > 0, entry.tolist()
        given = list(entry) if several else [entry]
        for s in given:
            if not _is_int(s):
                raise ShapeError(f"a sequence id of token {t} is {s!r}; whole numbers wanted")
        if not given:
            raise SequenceError(f"token {t} has no sequence id; give at least one")
        if len(set(given)) != len(given):
            raise SequenceError(f"token {t} names a sequence twice: {given}")
        flat += given
        id_start[t + 1] = len(flat)
    of_token = np.repeat(np.arange(len(entries)), np.diff(id_start))
    return id_start, _not_negative(int32_array(flat, "seq_ids"), of_token)


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _not_negative(ids: np.ndarray, of_token: np.ndarray) -> np.ndarray:
    bad = np.flatnonzero(ids < 0)
    if len(bad):
        raise SequenceError(
            f"token {of_token[bad[0]]} has sequence id {ids[bad[0]]}; ids start at 0"
        )
    return ids
