"""`Journal`: one checksummed record per commit, appended to ``journal.G``.

::

    record   "KVJ1"  u32 type  u64 payload bytes  u64 G  u64 seq   payload   u64 xxh3-64 of all
    payload  blocks: u32 kind  u32 0  u64 bytes   data, padded to 8

Records follow each other without gaps; `seq` counts commits over all generations. The file is
reserved ahead, so it ends in zeros. `G` and `seq` make stale bytes invalid; reading ends at the
first record that is not whole, of this generation, and next in order. That is the torn end of a
killed writer, unless a whole later record follows it: then the journal is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvnumba.errors import DamagedError, DiskFullError, KVCacheError, SessionError
from kvnumba.files import File
from kvnumba.store.blocks import Buffer, check_kind

MAGIC = b"KVJ1"
COMMIT = 1
AHEAD = 65536
_HEAD = struct.Struct("<4sIQQQ")
_BLOCK = struct.Struct("<IIQ")
_SUM = struct.Struct("<Q")


def record_bytes(generation: int, seq: int, changes: list[tuple[int, bytes]]) -> bytes:
    """Return one record."""
    parts = []
    for kind, data in changes:
        parts += [_BLOCK.pack(kind, 0, len(data)), data, bytes(-len(data) % 8)]
    payload = b"".join(parts)
    out = _HEAD.pack(MAGIC, COMMIT, len(payload), generation, seq) + payload
    return out + _SUM.pack(xxhash.xxh3_64_intdigest(out))


def parse_blocks(payload: Buffer, where: object) -> Iterator[tuple[int, Buffer]]:
    """Yield ``(kind, data)`` of the blocks of a payload.

    Raises
    ------
    DamagedError, StateFormatError
        If they do not fill it exactly, or one is of a kind that is not known.
    """
    at = 0
    while at < len(payload):
        if at + _BLOCK.size > len(payload):
            raise DamagedError(f"{where}: a block is cut short")
        kind, _, n = _BLOCK.unpack_from(payload, at)
        at += _BLOCK.size
        if at + n > len(payload):
            raise DamagedError(f"{where}: a block is cut short")
        check_kind(kind, where)
        yield kind, payload[at : at + n]
        at += n + -n % 8


@dataclass(frozen=True)
class Record:
    """One whole record: its number, its payload, and where it ends in the file."""

    seq: int
    payload: memoryview
    end: int


def read_records(data: bytes, generation: int, seq: int) -> Iterator[Record]:
    """Yield the records that follow commit `seq`, up to the first that is not whole.

    Parameters
    ----------
    data : bytes
        The whole file.
    generation, seq : int
        What the file's name says, and the last commit before it.
    """
    view, at = memoryview(data), 0
    while at + _HEAD.size + _SUM.size <= len(data):
        magic, kind, n, g, s = _HEAD.unpack_from(data, at)
        if (magic, kind, g, s) != (MAGIC, COMMIT, generation, seq + 1):
            return
        stop = at + _HEAD.size + n
        if stop + _SUM.size > len(data):
            return
        if _SUM.unpack_from(data, stop)[0] != xxhash.xxh3_64_intdigest(view[at:stop]):
            return
        seq, begin, at = s, at + _HEAD.size, stop + _SUM.size
        yield Record(seq, view[begin:stop], at)


def later_seq(data: bytes, start: int, generation: int, seq: int) -> int | None:
    """Return the number of the first whole record beyond `start` that is later than `seq`.

    None: there is none, so that what is at `start` is the torn end of the journal.
    """
    at = start
    while (at := data.find(MAGIC, at)) >= 0:
        n_left = len(data) - at - _HEAD.size - _SUM.size
        if at % 8 == 0 and n_left >= 0:
            _, kind, n, g, s = _HEAD.unpack_from(data, at)
            stop = at + _HEAD.size + n
            if (kind, g) == (COMMIT, generation) and s > seq and n <= n_left:
                digest = xxhash.xxh3_64_intdigest(memoryview(data)[at:stop])
                if _SUM.unpack_from(data, stop)[0] == digest:
                    return int(s)
        at += 1
    return None


class Journal:
    """``journal.G``, open for appending.

    Attributes
    ----------
    generation : int
    seq : int
        Number of the last commit, here or in the checkpoint.
    end : int
        Bytes of all records.
    n_records : int
    broken : str
        Why nothing more may be appended; "" when all is well.
    """

    def __init__(self, file: File, generation: int, seq: int, end: int = 0, n_records: int = 0):
        self.file, self.generation, self.seq = file, generation, seq
        self.end, self.n_records = end, n_records
        self.broken = ""
        self._reserved = end

    @staticmethod
    def path_of(folder: Path, generation: int) -> Path:
        """Return the name of a journal in a folder."""
        return folder / f"journal.{generation}"

    @classmethod
    def create(cls, folder: Path, generation: int, seq: int) -> Journal:
        """Make an empty journal that follows commit `seq`, with space ahead."""
        journal = cls(File(cls.path_of(folder, generation), create=True), generation, seq)
        try:
            journal._reserve(AHEAD)
        except KVCacheError:
            journal.file.close()
            raise
        return journal

    @classmethod
    def resume(cls, folder: Path, generation: int, seq: int, end: int, n_records: int) -> Journal:
        """Open a journal whose good records end at `end`; what follows them is cut off."""
        journal = cls(
            File(cls.path_of(folder, generation)), generation, seq, end=end, n_records=n_records
        )
        journal.file.truncate(end)
        return journal

    def append(self, changes: list[tuple[int, bytes]], sync: bool = False) -> None:
        """Write one record with one system call.

        Parameters
        ----------
        changes : list of (kind, bytes)
        sync : bool
            Bring it to the disk before returning.

        Raises
        ------
        DiskFullError, SessionError
            If it cannot be written; the journal is as before. After a failed sync or an interrupt
            (`KeyboardInterrupt`) nothing can be appended any more: what was written is unknown.
        """
        if self.broken:
            raise SessionError(self.broken)
        record = record_bytes(self.generation, self.seq + 1, changes)
        self._reserve(self.end + len(record))
        # An interrupt between the bytes and the numbers that say where they are must not let
        # another record follow.
        self.broken = f"a commit to {self.file.path} was interrupted; open the session again"
        try:
            self.file.write(record, self.end)
        except KVCacheError:
            self._cut_back()
            raise
        if sync:
            self._sync()
        self.end += len(record)
        self.seq += 1
        self.n_records += 1
        self.broken = ""

    def _reserve(self, end: int) -> None:
        """Reserve space up to `end`, and some ahead if there is any."""
        if end <= self._reserved:
            return
        for wanted in (end + AHEAD, end):
            try:
                self.file.allocate(self._reserved, wanted - self._reserved)
            except DiskFullError:
                self.file.truncate(self._reserved)  # a refused request may keep a part
                if wanted == end:
                    raise
            else:
                self._reserved = wanted
                return

    def _cut_back(self) -> None:
        try:
            self.file.truncate(self.end)
            self._reserved = self.end
            self.broken = ""
        except KVCacheError as error:
            self.broken = f"{self.file.path} could not be mended ({error}); open the session again"

    def _sync(self) -> None:
        try:
            self.file.sync()
        except KVCacheError:
            self.broken = (
                f"syncing {self.file.path} failed: what reached the disk is unknown; open the "
                "session again"
            )
            raise

    def close(self) -> None:
        """Close the file."""
        self.file.close()
