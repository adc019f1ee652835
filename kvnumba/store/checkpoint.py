"""Checkpoints: ``base.G`` holds the whole state as of one commit.

::

    "KVB1"  u32 version  u32 header bytes  u32 number of sections  u64 G  u64 seq
    per section: u32 kind  u32 0  u64 offset  u64 bytes  u64 xxh3-64
    u64 xxh3-64 of the header up to here
    the sections, each at a multiple of 64 bytes

The sections are blocks, see `kvnumba.store.blocks`. A checkpoint is written under another name
and renamed, so that it is there whole or not at all; the one before it is kept.
"""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvnumba.errors import ConfigError, DamagedError, KVCacheError, StateFormatError
from kvnumba.files import File, remove, rename, sync_folder, write_new
from kvnumba.store import blocks

MAGIC = b"KVB1"
VERSION = 1
ALIGNMENT = 64
TEMPORARY = ".tmp"
_HEAD = struct.Struct("<4sIIIQQ")
_SECTION = struct.Struct("<IIQQQ")
_SUM = struct.Struct("<Q")


def path_of(folder: Path, generation: int) -> Path:
    """Return the name of a checkpoint in a folder."""
    return folder / f"base.{generation}"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says.

    Attributes
    ----------
    generation, seq : int
        Its number, and the commit it was made after.
    meta : dict
        Configuration, fingerprint, session id.
    sections : list of (kind, bytes)
        The state as changes of an empty one.
    n_bytes : int
        Length of the file.
    """

    generation: int
    seq: int
    meta: dict[str, Any]
    sections: list[tuple[int, bytes]]
    n_bytes: int = 0


def plain_meta(meta: dict[str, Any]) -> dict[str, Any]:
    """Return `meta` as it is read back: plain numbers for numpy's, lists for tuples.

    Raises
    ------
    ConfigError
        If it holds anything that JSON cannot say.
    """
    try:
        return dict(json.loads(json.dumps(meta, default=_plain_scalar)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the configuration or fingerprint cannot be stored: {error}; numbers, text, and "
            "tuples of them can"
        ) from None


def _plain_scalar(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is {type(value).__name__}")


def checkpoint_bytes(point: Checkpoint) -> bytes:
    """Return the file of a checkpoint."""
    sections = [(blocks.META, json.dumps(point.meta).encode()), *point.sections]
    n_header = _HEAD.size + _SECTION.size * len(sections) + _SUM.size
    header = _HEAD.pack(MAGIC, VERSION, n_header, len(sections), point.generation, point.seq)
    body, at = [], n_header
    for kind, data in sections:
        padding = -at % ALIGNMENT
        body += [bytes(padding), data]
        at += padding
        header += _SECTION.pack(kind, 0, at, len(data), xxhash.xxh3_64_intdigest(data))
        at += len(data)
    return b"".join([header, _SUM.pack(xxhash.xxh3_64_intdigest(header)), *body])


def write_checkpoint(folder: Path, point: Checkpoint, sync: bool) -> int:
    """Write a checkpoint under its name; return its length in bytes.

    Raises
    ------
    DiskFullError, SessionError
        If it cannot be written; the folder is as before.
    """
    data = checkpoint_bytes(point)
    path = path_of(folder, point.generation)
    temporary = path.with_name(path.name + TEMPORARY)
    remove(temporary)
    write_new(temporary, data, sync)
    try:
        rename(temporary, path)
    except KVCacheError:
        with contextlib.suppress(KVCacheError):
            remove(temporary)
        raise
    if sync:
        sync_folder(folder)
    return len(data)


def read_checkpoint(folder: Path, generation: int) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises
    ------
    SessionNotFoundError
        If it is not there (any more).
    DamagedError
        If anything in it fails its checksum.
    StateFormatError
        If a newer release wrote it.
    """
    file = File(path_of(folder, generation), write=False)
    try:
        data = file.read(file.size)
    finally:
        file.close()
    where = file.path
    version, seq, table = _parse_header(data, generation, where)
    if version != VERSION:
        raise StateFormatError(
            f"{where} is of version {version}, this release reads version {VERSION}; use the "
            "release that wrote it"
        )
    sections = []
    for kind, _, offset, n, digest in table:
        part = data[offset : offset + n]
        if len(part) != n or xxhash.xxh3_64_intdigest(part) != digest:
            raise DamagedError(f"{where}: section {blocks.KINDS.get(kind, kind)} is damaged")
        blocks.check_kind(kind, where)
        sections.append((kind, part))
    if not sections or sections[0][0] != blocks.META:
        raise DamagedError(f"{where} does not say what it belongs to")
    return Checkpoint(generation, seq, _parse_meta(sections[0][1], where), sections[1:], len(data))


def _parse_header(
    data: bytes, generation: int, where: Path
) -> tuple[int, int, list[tuple[int, ...]]]:
    """Return version, seq and section table."""
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        raise DamagedError(f"{where} is not a checkpoint of a session")
    _, version, n_header, n_sections, g, seq = _HEAD.unpack_from(data)
    stop = n_header - _SUM.size
    if not _HEAD.size <= stop <= len(data) - _SUM.size or (
        _SUM.unpack_from(data, stop)[0] != xxhash.xxh3_64_intdigest(data[:stop])
    ):
        raise DamagedError(f"{where}: the header fails its checksum")
    if version == VERSION and (
        g != generation or n_header != _HEAD.size + _SECTION.size * n_sections + _SUM.size
    ):
        raise DamagedError(f"{where}: the header says generation {g}")
    table = list(_SECTION.iter_unpack(data[_HEAD.size : stop])) if version == VERSION else []
    return version, seq, table


def _parse_meta(data: bytes, where: Path) -> dict[str, Any]:
    try:
        meta = json.loads(data)
        if not isinstance(meta["config"], dict) or not isinstance(meta["fingerprint"], dict):
            raise TypeError("not an object")
        bytes.fromhex(meta["session"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{where}: its description cannot be read: {error}") from None
    return dict(meta)
