"""`Pack`: a sparse file of row slots of all layers.

::

    64 KiB header    magic, version, byte order, ids, slots, planes, checksum; never changes
    plane 0          SLOTS rows of K of layer 0, at a multiple of 64 KiB
    plane 1          V of layer 0
    plane 2          K of layer 1 ...      (a layer without V has no plane for it)

A plane is as long as its SLOTS rows from the start, but disk space is reserved only for the slots
that may be written. With 65,536 slots every plane is a multiple of 64 KiB whatever its row, so it
can be mapped in one piece on machines with any page size.
"""

from __future__ import annotations

import contextlib
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, DamagedError, SessionNotFoundError, StateFormatError
from kvnumba.files import File, remove
from kvnumba.mapping import up_to_page

SLOTS = 65536
HEADER_BYTES = 65536
MAGIC = b"KVNPACK\0"
VERSION = 1
BYTE_ORDER = 0x01020304
SUFFIX = ".kv"
_FIXED = struct.Struct("<8sII16s16sII")
_PLANE = struct.Struct("<IIIIQQ")
_SUM = struct.Struct("<Q")
KIND_K, KIND_V = 0, 1


class Plane(NamedTuple):
    """K or V of one layer: kind (0 K, 1 V), layer, ggml type, bytes of a row, offset in a pack."""

    kind: int
    layer: int
    ggml_id: int
    row_bytes: int
    offset: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all its slots."""
        return self.row_bytes * SLOTS


def planes_of(config: CacheConfig) -> tuple[Plane, ...]:
    """Return the planes of a pack for `config`, in file order: K and V of each layer.

    A layer that stores K alone has one plane.

    Raises
    ------
    ConfigError
        If there are more of them than a header describes.
    """
    planes, offset = [], HEADER_BYTES
    for il in range(config.n_layer):
        for kind in (KIND_K, KIND_V):
            rows = config.row_bytes_k(il) if kind == KIND_K else config.row_bytes_v(il)
            if not rows:
                continue
            ggml_id = (config.k_type if kind == KIND_K else config.v_type).ggml_id
            planes.append(Plane(kind, il, ggml_id, rows, offset))
            offset += planes[-1].n_bytes
    most = (HEADER_BYTES - _FIXED.size - _SUM.size) // _PLANE.size
    if len(planes) > most:
        raise ConfigError(
            f"{config.n_layer} layers are too many for a pack: {len(planes)} planes of K and V, at "
            f"most {most}"
        )
    return tuple(planes)


def pack_header(pack_id: bytes, owner: bytes, planes: Sequence[Plane]) -> bytes:
    """Return the bytes of a header up to and including its checksum."""
    data = _FIXED.pack(MAGIC, VERSION, BYTE_ORDER, pack_id, owner, SLOTS, len(planes))
    for p in planes:
        data += _PLANE.pack(p.kind, p.layer, p.ggml_id, 0, p.row_bytes, p.offset)
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


class Pack:
    """One pack file, open.

    Attributes
    ----------
    pack_id : bytes
        Its 16-byte id; the file is named after it.
    file : File
    planes : tuple of Plane
    """

    def __init__(self, file: File, pack_id: bytes, planes: tuple[Plane, ...]):
        self.file, self.pack_id, self.planes = file, pack_id, planes

    @staticmethod
    def path_of(folder: Path, pack_id: bytes) -> Path:
        """Return the name of a pack in a folder."""
        return folder / (pack_id.hex() + SUFFIX)

    @classmethod
    def create(cls, folder: Path, owner: bytes, planes: tuple[Plane, ...]) -> Pack:
        """Make a pack without any reserved slot.

        Raises
        ------
        DiskFullError, SessionError
            If it cannot be made; nothing is left behind.
        """
        pack_id = uuid.uuid4().bytes
        file = File(cls.path_of(folder, pack_id), create=True)
        try:
            file.truncate(planes[-1].offset + planes[-1].n_bytes)
            file.allocate(0, HEADER_BYTES)
            file.write(pack_header(pack_id, owner, planes), 0)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                remove(file.path)
            raise
        return cls(file, pack_id, planes)

    @classmethod
    def open(cls, folder: Path, pack_id: bytes, planes: tuple[Plane, ...]) -> Pack:
        """Open a pack and test that it is the one it should be; no row is read.

        Raises
        ------
        DamagedError, StateFormatError
            If it is missing, foreign, damaged, too short, or laid out otherwise.
        """
        path = cls.path_of(folder, pack_id)
        try:
            file = File(path)
        except SessionNotFoundError:
            raise DamagedError(f"{path} is missing: the session's rows are gone") from None
        wanted = planes[-1].offset + planes[-1].n_bytes
        try:
            found = read_header(file)
            if found != (pack_id, planes):
                raise DamagedError(f"{path} is the pack of another session or layout")
            if file.size < wanted:
                raise DamagedError(f"{path} has {file.size} bytes, {wanted} wanted: it was cut")
        except BaseException:
            file.close()
            raise
        return cls(file, pack_id, planes)

    def plane_range(self, plane: Plane, first: int, last: int) -> tuple[int, int]:
        """Return (offset in the plane, bytes) of the whole pages that slots `first` to `last` add.

        Pages that the slots below `first` take already are left out.
        """
        start = up_to_page(first * plane.row_bytes)
        return start, up_to_page(last * plane.row_bytes) - start

    def reserve(self, first: int, last: int) -> None:
        """Reserve disk space for the slots ``[first, last)`` of every plane, or of none.

        Raises
        ------
        DiskFullError
            If there is not enough; the space is as before.
        """
        try:
            for plane in self.planes:
                start, n_bytes = self.plane_range(plane, first, last)
                self.file.allocate(plane.offset + start, n_bytes)
        except BaseException:
            # A refused request may keep what it got (ext4), and the planes before have theirs.
            self.punch(first, last)
            raise

    def punch(self, first: int, last: int) -> None:
        """Give the space of the slots ``[first, last)`` back; `first` must begin a page."""
        for plane in self.planes:
            start, n_bytes = self.plane_range(plane, first, last)
            self.file.punch(plane.offset + start, n_bytes)

    def close(self) -> None:
        """Close the file; mappings of it stay."""
        self.file.close()


def read_header(file: File) -> tuple[bytes, tuple[Plane, ...]]:
    """Return the id and the planes that a pack's header names.

    Raises
    ------
    DamagedError, StateFormatError
        If it is foreign, of another version, or fails its checksum.
    """
    data = file.read(_FIXED.size)
    if len(data) < _FIXED.size or data[:8] != MAGIC:
        raise DamagedError(f"{file.path} is not a pack of rows")
    _, version, order, pack_id, _, slots, n_planes = _FIXED.unpack(data)
    n_bytes = _FIXED.size + n_planes * _PLANE.size
    if n_bytes + _SUM.size > HEADER_BYTES:
        raise DamagedError(f"{file.path}: the header is damaged")
    data += file.read(n_bytes + _SUM.size - len(data), len(data))
    if len(data) != n_bytes + _SUM.size or _SUM.unpack_from(data, n_bytes)[0] != (
        xxhash.xxh3_64_intdigest(data[:n_bytes])
    ):
        raise DamagedError(f"{file.path}: the header fails its checksum")
    if (version, order, slots) != (VERSION, BYTE_ORDER, SLOTS):
        raise StateFormatError(
            f"{file.path} is a pack of version {version} with {slots} slots; this release reads "
            f"version {VERSION} with {SLOTS}"
        )
    planes = []
    for kind, layer, ggml_id, _, row_bytes, offset in _PLANE.iter_unpack(
        data[_FIXED.size : n_bytes]
    ):
        planes.append(Plane(kind, layer, ggml_id, row_bytes, offset))
    return pack_id, tuple(planes)
