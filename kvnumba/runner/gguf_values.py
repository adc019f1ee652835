"""Values of a GGUF file's metadata: bounds-checked reading, decoding when asked for."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from kvnumba.errors import ModelFileError

STRING, ARRAY, BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A reading position in the bytes of a file; nothing is read past their end.

    Parameters
    ----------
    data : memoryview
        All bytes of the file.
    name : str
        What error messages call the file.
    """

    def __init__(self, data: memoryview, name: str):
        self.data, self.name, self.pos = data, name, 0

    def fail(self, what: str, why: str) -> ModelFileError:
        """Return the error to raise about `what` (a key or tensor)."""
        return ModelFileError(f"{self.name}: {what} {why}; the file is damaged or cut off")

    def skip(self, n: int, what: str) -> int:
        """Step over `n` bytes and return where they start."""
        start = self.pos
        if n > len(self.data) - start:
            raise self.fail(what, f"takes {n} bytes at {start} of {len(self.data)}")
        self.pos = start + n
        return start

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        return int(_U64.unpack_from(self.data, self.skip(8, what))[0])

    def string(self, what: str) -> str:
        """Read a string: its length in 64 bits, then UTF-8."""
        n = self.u64(what)
        start = self.skip(n, what)
        try:
            return str(self.data[start : self.pos], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(what, "is not UTF-8") from error

    def skip_strings(self, n: int, what: str) -> None:
        """Step over `n` strings, reading their lengths only."""
        if n > (len(self.data) - self.pos) // 8:
            raise self.fail(what, f"says it holds {n} strings, more than fit into the file")
        data, pos, unpack = self.data, self.pos, _U64.unpack_from
        try:
            for _ in range(n):
                pos += 8 + unpack(data, pos)[0]
        except (struct.error, OverflowError, IndexError) as error:
            raise self.fail(what, "holds a string that ends beyond the file") from error
        self.skip(pos - self.pos, what)


class StringArray(Sequence[str]):
    """An array of strings in the file, decoded when it is read and not kept.

    One item costs a scan from the front; use `tolist` for all of them.
    """

    def __init__(self, data: memoryview, n: int, what: str):
        self._data, self._n, self._what = data, n, what

    def __len__(self) -> int:
        return self._n

    def _raw(self) -> Iterator[bytes]:
        # A bytes object is sliced and decoded twice as fast as a memoryview.
        data, pos, unpack = bytes(self._data), 0, _U64.unpack_from
        for _ in range(self._n):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            yield data[start:pos]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        return self.tolist()[i]

    def tolist(self) -> list[str]:
        """Return all strings.

        Raises
        ------
        ModelFileError
            If one of them is not UTF-8.
        """
        try:
            return [raw.decode("utf-8") for raw in self._raw()]
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._what} holds a string that is not UTF-8") from error


class RawValue(NamedTuple):
    """Where a value lies: bytes ``[start, end)``; `n` is None for a value that is no array."""

    kind: int
    n: int | None
    start: int
    end: int


def skip_value(cursor: Cursor, key: str) -> RawValue:
    """Step over one value, checking that all of it lies inside the file.

    Raises
    ------
    ModelFileError
        If it does not, or its type is none of GGUF's. The message names `key`.
    """
    kind, n = cursor.u32(key), None
    if kind == ARRAY:
        kind, n = cursor.u32(key), cursor.u64(key)
    start = cursor.pos
    if kind == STRING:
        cursor.skip_strings(1 if n is None else n, key)
    elif kind in _SCALARS:
        cursor.skip(_SCALARS[kind].itemsize * (1 if n is None else n), key)
    else:
        raise cursor.fail(key, f"has the value type {kind}, which cannot be read")
    return RawValue(kind, n, start, cursor.pos)


def decode_value(cursor: Cursor, key: str, raw: RawValue) -> Any:
    """Decode a value that `skip_value` has found.

    Returns
    -------
    str, int, float, bool, numpy.ndarray of shape (n,) or StringArray
    """
    data, n = cursor.data[raw.start : raw.end], 1 if raw.n is None else raw.n
    if raw.kind == STRING:
        strings = StringArray(data, n, f"{cursor.name}: {key}")
        return strings[0] if raw.n is None else strings
    array = np.frombuffer(data, _SCALARS[raw.kind])
    array = array.astype(np.bool_ if raw.kind == BOOL else array.dtype.newbyteorder("="))
    return array[0].item() if raw.n is None else array
