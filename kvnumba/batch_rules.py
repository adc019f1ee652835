"""What the fields of a batch must be: each alone, and all together against a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvnumba.errors import PositionError, SequenceError, ShapeError

if TYPE_CHECKING:
    from kvnumba.batch import Batch

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


def checked_embeddings(values: Any) -> np.ndarray:
    """Return embeddings as float32, shape ``(n_tokens, n_embd)``, in memory of their own.

    Raises
    ------
    ShapeError
        If it is not two-dimensional, has no columns, or does not hold numbers.
    """
    try:
        given = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"embeddings cannot be read as an array: {error}") from None
    if given.ndim != 2 or not given.shape[1]:
        raise ShapeError(f"embeddings has shape {given.shape}, (n_tokens, n_embd) wanted")
    if given.dtype.kind not in "fiu":
        raise ShapeError(f"embeddings has dtype {given.dtype}, numbers wanted")
    return given.astype(np.float32)


def output_flags(outputs: Any, n_tokens: int) -> np.ndarray:
    """Return output flags, shape ``(n_tokens,)``, bool: as given, all, or the last token only.

    Raises
    ------
    ShapeError
        If there are not `n_tokens` of them, or one is neither True, False, 1 nor 0.
    """
    if outputs is None:
        flags = np.zeros(n_tokens, np.bool_)
        flags[-1:] = True
        return flags
    if isinstance(outputs, str):
        if outputs != "all":
            raise ShapeError(f'outputs is {outputs!r}; flags, "all" or None wanted')
        return np.ones(n_tokens, np.bool_)
    try:
        given = np.asarray(outputs)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"outputs cannot be read as an array: {error}") from None
    if given.shape != (n_tokens,):
        raise ShapeError(f"outputs has shape {given.shape} for {n_tokens} tokens")
    if n_tokens and given.dtype.kind not in "biu":
        raise ShapeError(f"outputs has dtype {given.dtype}, flags wanted")
    bad = np.flatnonzero((given != 0) & (given != 1))
    if len(bad):
        raise ShapeError(f"outputs of token {bad[0]} is {given[bad[0]]}; a flag is 0 or 1")
    return given.astype(np.bool_)


def split_sections(pos: Any, n_tokens: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return positions and, where there are several rows of them, all the rows."""
    if np.ndim(pos) != 2:
        return checked_positions(pos, n_tokens), None
    if len(pos) not in (3, 4):
        raise ShapeError(f"pos has {len(pos)} rows; a token has 1, 3 or 4 positions")
    sections = np.stack([checked_positions(row, n_tokens) for row in pos])
    return sections[0], sections


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


def validated(batch: Batch, memory: Any, n_vocab: int | None) -> Batch:
    """Return a batch with positions filled in, if it keeps every rule; see `Batch.validate`.

    The rules, in this order: there are tokens; ids lie below `n_vocab`; sequences lie below the
    cache's `n_seq_max`; sequences that share a token hold the same positions in the cache; in
    each sequence the positions do not decrease, follow directly on what the cache holds, and
    leave no gap. With several positions per token they need only be greater (embeddings: not
    less) than what it holds.

    llama.cpp also asks that the id sets of a sequence's tokens have an id in common. They always
    have: the sequence itself.

    Source: spec/llama_cpp.md 4.1.
    """
    n_pos = getattr(memory.config, "n_pos", None)
    if not batch.n_tokens:
        raise ShapeError("tokens: the batch has none; give at least one")
    _check_vocabulary(batch, n_vocab)
    _check_sequences(batch, memory.config.n_seq_max)
    _check_coupling(batch, memory)
    _check_sections(batch, n_pos)
    batch = batch.filled(memory.seq_pos_max, by_first_id=True)
    is_loose = batch.sections is not None or (n_pos or 1) > 1
    of_token = owners(batch)
    order = np.argsort(batch.ids, kind="stable")
    seqs, start = np.unique(batch.ids[order], return_index=True)
    for s, tokens in zip(seqs.tolist(), np.split(of_token[order], start[1:]), strict=True):
        _check_order(batch, s, tokens, memory.seq_pos_max(s), is_loose)
    return batch


def owners(batch: Batch) -> np.ndarray:
    """Return the token that each entry of ``batch.ids`` is of, int64."""
    return np.repeat(np.arange(batch.n_tokens), np.diff(batch.id_start))


def _check_vocabulary(batch: Batch, n_vocab: int | None) -> None:
    if n_vocab is None:
        return
    bad = np.flatnonzero(batch.tokens >= n_vocab)
    if len(bad):
        raise ShapeError(
            f"token {bad[0]}: tokens is {batch.tokens[bad[0]]}; ids of this model are 0 to "
            f"{n_vocab - 1}"
        )


def _check_sequences(batch: Batch, n_seq_max: int) -> None:
    bad = np.flatnonzero(batch.ids >= n_seq_max)
    if len(bad):
        raise SequenceError(
            f"token {owners(batch)[bad[0]]}: seq_ids has {batch.ids[bad[0]]}; ids of this cache "
            f"are 0 to {n_seq_max - 1}; make it with a greater n_seq_max"
        )


def _check_coupling(batch: Batch, memory: Any) -> None:
    if not batch.is_coupled:
        return
    held = {
        s: (memory.seq_pos_min(s), memory.seq_pos_max(s)) for s in np.unique(batch.ids).tolist()
    }
    for t in np.flatnonzero(np.diff(batch.id_start) > 1).tolist():
        first, *others = batch.ids_of(t)
        for s in others:
            if held[s] != held[first]:
                raise SequenceError(
                    f"token {t}: seq_ids couples {s} with {first}, but the cache holds positions "
                    f"{_span(held[s])} of {s} and {_span(held[first])} of {first}; sequences that "
                    "share a token must hold the same, e.g. by seq_cp"
                )


def _span(bounds: tuple[int, int]) -> str:
    return "none" if bounds[1] < 0 else f"{bounds[0]} to {bounds[1]}"


def _check_sections(batch: Batch, n_pos: int | None) -> None:
    if n_pos is None:
        return
    if batch.sections is not None and len(batch.sections) > n_pos:
        raise PositionError(
            f"token 0: pos has {len(batch.sections)} positions a token; this cache keeps {n_pos}"
        )
    if n_pos > 1 and batch.sections is None and not batch.has_tokens:
        raise PositionError(
            f"token 0: pos has one position for an embedding; give {n_pos} rows of them (only "
            "tokens have the same in all)"
        )


def _check_order(batch: Batch, s: int, tokens: np.ndarray, last: int, is_loose: bool) -> None:
    """Refuse what does not follow on within one sequence that is at `last` in the cache."""
    assert batch.pos is not None
    pos = batch.pos[tokens].astype(np.int64)
    step = np.diff(pos)
    bad = np.flatnonzero(step < 0 if is_loose else (step < 0) | (step > 1))
    first = int(pos[0])
    if last >= 0:
        least = last if is_loose and not batch.has_tokens else last + 1
        if first < least or (first > least and not is_loose):
            raise PositionError(
                f"token {tokens[0]}: pos is {first} in sequence {s}, which the cache holds up to "
                f"{last}; it must be {least}{' or more' if is_loose else ''}"
            )
    if len(bad):
        j = int(bad[0])
        reason = "positions must not decrease" if step[j] < 0 else "positions must have no gaps"
        raise PositionError(
            f"token {tokens[j + 1]}: pos is {pos[j + 1]} in sequence {s}, after {pos[j]} at token "
            f"{tokens[j]}; {reason}"
        )
