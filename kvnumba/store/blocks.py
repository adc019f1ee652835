"""The parts that a checkpoint and a journal record are made of.

A block is ``(kind, bytes)``. The same kinds serve both files: a record holds what changed since
the commit before, a checkpoint what differs from an empty cache. All numbers are little-endian.

======= ==========================================================================================
kind    bytes
======= ==========================================================================================
META    JSON: configuration, fingerprint, session id (checkpoint only)
CELLS   u32 number of runs, u32 number of tokens; the runs ``(cell, n, pos, shift)``, int32; the
        tokens, int32. Positions count up within a run; ``pos`` -1: the cells became empty, and
        have no tokens here.
WORDS   u32 number of runs, u32 number of words; the runs ``(seq_id, word, n)``, int32; the words
        of the sequence's bitmap, u64.
USER    entries of the caller's data: u32 bytes of the name, i64 bytes of the value (-1: removed),
        name in UTF-8, value
PLACE   i64 where the next slot search begins
PACKS   ids of all packs in the order of their cells, 16 bytes each
======= ==========================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import numpy as np

from kvnumba.batch import MAX_POS
from kvnumba.errors import DamagedError, StateFormatError

META, CELLS, WORDS, USER, PLACE, PACKS = range(1, 7)
KINDS = {META: "meta", CELLS: "cells", WORDS: "words", USER: "user", PLACE: "place", PACKS: "packs"}
_COUNTS = struct.Struct("<II")
_ENTRY = struct.Struct("<Iq")
_PLACE = struct.Struct("<q")

Buffer = bytes | memoryview


def check_kind(kind: int, where: object) -> None:
    """Raise StateFormatError for a block that this release does not know."""
    if kind not in KINDS:
        raise StateFormatError(
            f"{where} holds data of kind {kind}, which this release does not know; it was written "
            "by a newer one"
        )


# -- cells ----------------------------------------------------------------------------------------


def pack_cells(cells: np.ndarray, pos: np.ndarray, shift: np.ndarray, token: np.ndarray) -> bytes:
    """Return the CELLS block for cells in ascending order and what they hold now, all int32."""
    full = pos >= 0
    same_run = (
        (np.diff(cells) == 1)
        & (full[1:] == full[:-1])
        & (np.diff(pos) == full[1:])
        & (np.diff(shift) == 0)
    )
    starts = np.flatnonzero(np.concatenate([[True], ~same_run]))
    runs = np.empty((len(starts), 4), "<i4")
    runs[:, 0], runs[:, 2], runs[:, 3] = cells[starts], pos[starts], shift[starts]
    runs[:, 1] = np.diff(np.append(starts, len(cells)))
    tokens = token[full].astype("<i4")
    return _COUNTS.pack(len(runs), len(tokens)) + runs.tobytes() + tokens.tobytes()


def unpack_cells(data: Buffer, n_cells: int) -> tuple[np.ndarray, ...]:
    """Return `cells`, `pos`, `shift` and `token` of a CELLS block, int32.

    Raises
    ------
    DamagedError
        If it contradicts itself or names a cell beyond `n_cells`.
    """
    n_runs, n_tokens = _counts(data, "cells", 16, 4)
    runs = np.frombuffer(data, "<i4", 4 * n_runs, _COUNTS.size).reshape(n_runs, 4).astype(np.int64)
    cell, n, pos, shift = runs.T
    full = pos >= 0
    good = (cell >= 0) & (n >= 1) & (cell + n <= n_cells) & (pos >= -1)
    good &= np.where(full, pos + n - 1 <= MAX_POS, shift == 0)
    if not good.all() or n[full].sum() != n_tokens or n.sum() > n_cells:
        raise DamagedError("a list of cells contradicts itself")
    ahead = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    is_full = np.repeat(full, n)
    token = np.full(len(ahead), -1, np.int32)
    token[is_full] = np.frombuffer(data, "<i4", n_tokens, _COUNTS.size + 16 * n_runs)
    cells = (np.repeat(cell, n) + ahead).astype(np.int32)
    new_pos = np.where(is_full, np.repeat(pos, n) + ahead, -1).astype(np.int32)
    return cells, new_pos, np.repeat(shift, n).astype(np.int32), token


def _counts(data: Buffer, what: str, run_bytes: int, item_bytes: int) -> tuple[int, int]:
    if len(data) < _COUNTS.size:
        raise DamagedError(f"a list of {what} is cut short")
    n_runs, n_items = _COUNTS.unpack_from(data)
    if len(data) != _COUNTS.size + run_bytes * n_runs + item_bytes * n_items:
        raise DamagedError(f"a list of {what} has the wrong length")
    return int(n_runs), int(n_items)


# -- bitmaps --------------------------------------------------------------------------------------


def pack_words(rows: np.ndarray, words: np.ndarray, values: np.ndarray) -> bytes:
    """Return the WORDS block for words (int32) of rows (int32), row by row, ascending."""
    same_run = (np.diff(rows) == 0) & (np.diff(words) == 1)
    starts = np.flatnonzero(np.concatenate([[True], ~same_run]))
    runs = np.empty((len(starts), 3), "<i4")
    runs[:, 0], runs[:, 1] = rows[starts], words[starts]
    runs[:, 2] = np.diff(np.append(starts, len(rows)))
    return _COUNTS.pack(len(runs), len(values)) + runs.tobytes() + values.astype("<u8").tobytes()


def unpack_words(data: Buffer, n_rows: int, n_words: int) -> tuple[np.ndarray, ...]:
    """Return `rows`, `words` (int32) and `values` (uint64) of a WORDS block.

    Raises
    ------
    DamagedError
        If it contradicts itself or names a word outside ``[n_rows, n_words]``.
    """
    n_runs, n_values = _counts(data, "bitmap words", 12, 8)
    runs = np.frombuffer(data, "<i4", 3 * n_runs, _COUNTS.size).reshape(n_runs, 3).astype(np.int64)
    row, word, n = runs.T
    good = (row >= 0) & (row < n_rows) & (word >= 0) & (n >= 1) & (word + n <= n_words)
    if not good.all() or n.sum() != n_values:
        raise DamagedError("a list of bitmap words contradicts itself")
    ahead = np.arange(n_values) - np.repeat(np.cumsum(n) - n, n)
    values = np.frombuffer(data, "<u8", n_values, _COUNTS.size + 12 * n_runs)
    return np.repeat(row, n), np.repeat(word, n) + ahead, values.astype(np.uint64)


# -- the caller's data, and the rest --------------------------------------------------------------


def pack_user(entries: Mapping[str, bytes | None]) -> bytes:
    """Return the USER block of named values; None removes a name."""
    out = []
    for name, value in entries.items():
        key = name.encode()
        out += [_ENTRY.pack(len(key), -1 if value is None else len(value)), key, value or b""]
    return b"".join(out)


def unpack_user(data: Buffer) -> Iterator[tuple[str, bytes | None]]:
    """Yield the names and values of a USER block; None: removed.

    Raises
    ------
    DamagedError
        If it is cut short or a name is not text.
    """
    data, at = bytes(data), 0
    while at < len(data):
        if at + _ENTRY.size > len(data):
            raise DamagedError("the caller's data is cut short")
        n_name, n_value = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        end = at + n_name + max(0, n_value)
        if n_value < -1 or end > len(data):
            raise DamagedError("the caller's data is cut short")
        try:
            name = data[at : at + n_name].decode()
        except UnicodeDecodeError:
            raise DamagedError("a name in the caller's data is not text") from None
        yield name, None if n_value < 0 else data[at + n_name : end]
        at = end


def pack_place(search_start: int) -> bytes:
    """Return the PLACE block."""
    return _PLACE.pack(search_start)


def unpack_place(data: Buffer, n_cells: int) -> int:
    """Return where the next slot search begins; DamagedError if that is no cell."""
    if len(data) != _PLACE.size or not 0 <= (start := _PLACE.unpack(data)[0]) <= n_cells:
        raise DamagedError("the start of the slot search is not a cell")
    return int(start)


def unpack_packs(data: Buffer) -> list[bytes]:
    """Return the pack ids of a PACKS block; DamagedError if it is not made of them."""
    ids = [bytes(data[i : i + 16]) for i in range(0, len(data), 16)]
    if len(data) % 16 or not ids or len(set(ids)) != len(ids):
        raise DamagedError("the list of packs is damaged")
    return ids
