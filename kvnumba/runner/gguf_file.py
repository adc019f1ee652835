"""GGUF model files: metadata and tensors read from one read-only mapping."""

from __future__ import annotations

import math
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvnumba.errors import ModelFileError
from kvnumba.runner.ggml_kinds import KINDS
from kvnumba.runner.gguf_values import Cursor, RawValue, decode_value, skip_value

_SAMPLE = 64 * 1024
_MAX_DIMS = 4


class TensorInfo(NamedTuple):
    """One tensor of a file.

    Attributes
    ----------
    name : str
    kind : int
        ggml's id of the element kind, see `kvnumba.runner.ggml_kinds.KINDS`.
    shape : tuple of int
        In numpy's row-major order, the reverse of the file's.
    offset : int
        Of the first byte, from the start of the file.
    n_bytes : int
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile:
    """A GGUF file (versions 2 and 3, little endian), open for reading.

    Opening checks that all metadata and every tensor lie inside the file. Arrays of strings are
    only stepped over: no object is made per token until somebody asks.

    Parameters
    ----------
    path : str or os.PathLike

    Attributes
    ----------
    path : str
    n_bytes : int
        Size of the file.
    tensors : dict of str to TensorInfo
        In the file's order.

    Raises
    ------
    ModelFileError
        If the file cannot be read, is not GGUF, is damaged or cut off, or is one of several
        parts of a model. The message names the key or tensor.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._map = _map_file(self.path)
        self.n_bytes = len(self._map)
        self._bytes: np.ndarray | None = np.frombuffer(self._map, np.uint8)
        self._cursor: Cursor | None = Cursor(memoryview(self._map), self.path)
        self._values: dict[str, tuple[int, RawValue]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read()
        except ModelFileError:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapping; it lives on while arrays over it are still referenced."""
        self._bytes = None
        if self._cursor is not None:
            self._cursor = None
            try:
                self._map.close()
            except BufferError:  # views are in use: the last of them frees it
                return

    @property
    def keys(self) -> list[str]:
        """The metadata keys in the file's order."""
        return list(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or `default` when the file lacks it.

        Returns
        -------
        str, int, float, bool, numpy.ndarray of shape (n,) or StringArray
        """
        found = self._values.get(key)
        return default if found is None else decode_value(self._open(), key, found[1])

    def require(self, key: str) -> Any:
        """Return the value of a metadata key.

        Raises
        ------
        ModelFileError
            If the file lacks it.
        """
        if key not in self._values:
            raise ModelFileError(f"{self.path} lacks the key {key}, which this runner needs")
        return self.get(key)

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``, for example ``"llama"``."""
        name = self.require("general.architecture")
        if not isinstance(name, str):
            raise ModelFileError(f"{self.path}: general.architecture is {name!r}, not a string")
        return name

    def tensor_bytes(self, name: str) -> np.ndarray:
        """Return a tensor's bytes without copying them.

        Returns
        -------
        numpy.ndarray of shape (n_bytes,), uint8, read-only

        Raises
        ------
        ModelFileError
            If the file has no such tensor.
        """
        self._open()
        info = self.tensors.get(name)
        if info is None or self._bytes is None:
            raise ModelFileError(f"{self.path} lacks the tensor {name}")
        return self._bytes[info.offset : info.offset + info.n_bytes]

    def weights_digest(self) -> str:
        """Return a digest of what the file says, quick enough to take at each start.

        It covers all metadata, the tensor table, and 64 KiB at the start, middle and end of each
        tensor; a change elsewhere inside a tensor goes unseen (`file_digest` sees it).
        """
        digest = xxhash.xxh3_128(self._open().data[: self._table_end])
        for name, info in self.tensors.items():
            data = self.tensor_bytes(name)
            if info.n_bytes <= 3 * _SAMPLE:
                digest.update(data.data)
                continue
            for start in (0, (info.n_bytes - _SAMPLE) // 2, info.n_bytes - _SAMPLE):
                digest.update(data[start : start + _SAMPLE].data)
        return digest.hexdigest()

    def file_digest(self) -> str:
        """Return a digest of every byte of the file."""
        return xxhash.xxh3_128_hexdigest(self._open().data)

    def tokenizer_digest(self) -> str:
        """Return a digest of the ``tokenizer.*`` keys and values, whatever their order."""
        data, digest = self._open().data, xxhash.xxh3_128()
        for key in sorted(self._values):
            if key.startswith("tokenizer."):
                start, raw = self._values[key]
                digest.update(data[start : raw.end])
        return digest.hexdigest()

    def _open(self) -> Cursor:
        if self._cursor is None:
            raise ModelFileError(f"{self.path} has been closed")
        return self._cursor

    def _read(self) -> None:
        cursor = self._open()
        _check_header(cursor)
        n_tensors, n_values = cursor.u64("the count of tensors"), cursor.u64("the count of keys")
        for i in range(n_values):
            start = cursor.pos
            key = cursor.string(f"key {i} of {n_values}")
            if key in self._values:
                raise cursor.fail(key, "occurs twice")
            self._values[key] = (start, skip_value(cursor, key))
        n_parts = self.get("split.count", 0)
        if not isinstance(n_parts, int) or n_parts > 1:
            raise ModelFileError(
                f"{self.path}: split.count is {n_parts!r}: the model is split over several files; "
                "merge them into one first (llama-gguf-split --merge)"
            )
        table = [_read_tensor(cursor, f"tensor {i} of {n_tensors}") for i in range(n_tensors)]
        self._table_end = cursor.pos
        self._place_tensors(table)

    def _place_tensors(self, table: list[TensorInfo]) -> None:
        cursor, alignment = self._open(), self.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.fail("general.alignment", f"is {alignment!r}, not a power of two")
        base = -(-self._table_end // alignment) * alignment
        for info in table:
            what = f"tensor {info.name}"
            if info.name in self.tensors:
                raise cursor.fail(what, "occurs twice")
            if info.offset % alignment:
                raise cursor.fail(what, f"starts at {info.offset}, not a multiple of {alignment}")
            end = base + info.offset + info.n_bytes
            if end > self.n_bytes:
                raise cursor.fail(what, f"ends at {end} of {self.n_bytes} bytes")
            self.tensors[info.name] = info._replace(offset=base + info.offset)


def _map_file(path: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise ModelFileError(f"{path} is not a GGUF file: it is too short for a header")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"the model file {path} cannot be read: {reason}") from error


def _check_header(cursor: Cursor) -> None:
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise ModelFileError(
            f"{cursor.name} is not a GGUF file: it starts with {magic!r}, not b'GGUF'"
        )
    cursor.skip(4, "the header")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise ModelFileError(
            f"{cursor.name} is a big-endian GGUF file; convert it to little endian "
            "(gguf-convert-endian FILE little)"
        )
    if version not in (2, 3):
        raise ModelFileError(f"{cursor.name} is GGUF version {version}; 2 and 3 can be read")


def _read_tensor(cursor: Cursor, what: str) -> TensorInfo:
    """Read one row of the tensor table; its offset still counts from the start of the data."""
    name = cursor.string(what)
    what = f"tensor {name}"
    n_dims = cursor.u32(what)
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.fail(what, f"has {n_dims} dimensions; 1 to {_MAX_DIMS} are possible")
    sizes = [cursor.u64(what) for _ in range(n_dims)]
    kind, offset = cursor.u32(what), cursor.u64(what)
    if kind not in KINDS:
        raise ModelFileError(
            f"{cursor.name}: {what} has the element kind {kind}, which is not known here"
        )
    if sizes[0] % KINDS[kind].block:
        raise cursor.fail(
            what, f"has rows of {sizes[0]} values, not a multiple of {KINDS[kind].block}"
        )
    n_bytes = math.prod(sizes) // KINDS[kind].block * KINDS[kind].block_bytes
    return TensorInfo(name, kind, tuple(reversed(sizes)), offset, n_bytes)
