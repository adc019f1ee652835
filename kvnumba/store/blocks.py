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

from kvnumba.errors import DamagedError, StateFormatError

META, CELLS, WORDS, USER, PLACE, PACKS = range(1, 7)
KINDS = {META: "meta", CELLS: "cells", WORDS: "words", USER: "user", PLACE: "place", PACKS: "packs"}
_COUNTS = struct.Struct("<II")
_ENTRY = struct.Struct("<Iq")
_PLACE = struct.Struct("<q")

CELL_RUN, WORD_RUN = 4, 3
"""Numbers in one run of each kind."""

Buffer = bytes | memoryview


def check_kind(kind: int, where: object) -> None:
    """Raise StateFormatError for a block that this release does not know."""
    if kind not in KINDS:
        raise StateFormatError(
            f"{where} holds data of kind {kind}, which this release does not know; it was written "
            "by a newer one"
        )


def pack_runs(runs: np.ndarray, items: np.ndarray) -> bytes:
    """Return a CELLS or WORDS block: runs (int32), and tokens (int32) or words (uint64)."""
    little = items.dtype.newbyteorder("<")
    counts = _COUNTS.pack(len(runs), len(items))
    return counts + runs.astype("<i4").tobytes() + items.astype(little).tobytes()


def unpack_runs(data: Buffer, width: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs, shape ``(n, width)``, int32, and the items of a CELLS or WORDS block.

    Raises
    ------
    DamagedError
        If its length is not what it says.
    """
    little = np.dtype(dtype).newbyteorder("<")
    n_runs = n_items = -1
    if len(data) >= _COUNTS.size:
        n_runs, n_items = _COUNTS.unpack_from(data)
    at = _COUNTS.size + 4 * width * n_runs
    if len(data) != at + little.itemsize * n_items:
        raise DamagedError("a list of changes has the wrong length")
    runs = np.frombuffer(data, "<i4", width * n_runs, _COUNTS.size).astype(np.int32)
    return runs.reshape(n_runs, width), np.frombuffer(data, little, n_items, at).astype(dtype)


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
