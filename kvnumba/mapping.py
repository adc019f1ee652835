"""`Region`: a long range of addresses over memory and files, read through plain arrays.

A region is reserved once, costs nothing until used, and is unmapped when the last array over it
dies. What is not mapped to anything reads as zeros, and a stray store there is a SIGSEGV, never
silent damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

from kvnumba.errors import SessionError

IS_LINUX = sys.platform == "linux"
PAGE = mmap.PAGESIZE
_READ, _WRITE = 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_DONTNEED, _POPULATE_WRITE = 4, 23
_FAILED = ctypes.c_void_p(-1).value


def up_to_page(n_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def _load_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [address, size]
    libc.mprotect.argtypes = [address, size, ctypes.c_int]
    libc.madvise.argtypes = [address, size, ctypes.c_int]
    libc.mincore.argtypes = [address, size, address]
    return libc


_LIBC: Any = _load_libc() if IS_LINUX else None


class _Piece:
    """What numpy needs to make an array over an address; keeps the region alive."""

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": dtype.str,
        }


class Region:
    """Reserved addresses, parts of which are mapped to memory or to files.

    Parameters
    ----------
    n_bytes : int
        Length; rounded up to whole pages.

    Raises
    ------
    SessionError
        If there are not enough addresses or mappings.
    """

    def __init__(self, n_bytes: int):
        self.n_bytes = max(PAGE, up_to_page(n_bytes))
        self.is_open = True
        self.address = self._map(None, self.n_bytes, _READ, _PRIVATE | _ANONYMOUS | _NORESERVE)
        self._unmap = weakref.finalize(self, _LIBC.munmap, self.address, self.n_bytes)
        # At interpreter exit other code may still look at arrays; the kernel unmaps anyway.
        self._unmap.atexit = False
        _LIVE.add(self)

    @staticmethod
    def _map(
        address: int | None, n_bytes: int, access: int, flags: int, fd: int = -1, offset: int = 0
    ) -> int:
        got = _LIBC.mmap(address, n_bytes, access, flags, fd, offset)
        if got == _FAILED or got is None:
            code = ctypes.get_errno()
            raise SessionError(
                f"cannot map {n_bytes} bytes: {os.strerror(code)} (a process may have about "
                "65,000 mappings: close some sessions, or lower n_ctx)"
            )
        return int(got)

    def map_memory(self, offset: int, n_bytes: int) -> None:
        """Put anonymous zero pages that can be written at `offset`; they cost memory when used."""
        flags = _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED
        self._map(self.address + offset, up_to_page(n_bytes), _READ | _WRITE, flags)

    def map_file(self, offset: int, fd: int, file_offset: int, n_bytes: int) -> None:
        """Put a range of a file at `offset`, shared and writable; offsets are whole pages.

        Its disk space must be reserved already, or a store on a full disk kills the process.
        """
        flags = _SHARED | _FIXED
        at = self.address + offset
        self._map(at, up_to_page(n_bytes), _READ | _WRITE, flags, fd, file_offset)

    def map_nothing(self, offset: int, n_bytes: int) -> None:
        """Put zero pages over a range: reads give zeros, a store is a SIGSEGV."""
        flags = _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED
        self._map(self.address + offset, up_to_page(n_bytes), _READ, flags)

    def populate(self, offset: int, n_bytes: int) -> None:
        """Bring writable pages in now, in one go: stores then cost no page fault each.

        Best effort: kernels before 5.14 do not know it.
        """
        _LIBC.madvise(self.address + offset, up_to_page(n_bytes), _POPULATE_WRITE)

    def drop(self, offset: int, n_bytes: int) -> None:
        """Give anonymous memory back; it reads as zeros."""
        _LIBC.madvise(self.address + offset, up_to_page(n_bytes), _DONTNEED)

    def n_resident(self, offset: int, n_bytes: int) -> int:
        """Return how many bytes of a range are in RAM (the page cache counts)."""
        n = -(-n_bytes // PAGE)
        pages = np.empty(max(1, n), np.uint8)
        if n == 0 or _LIBC.mincore(self.address + offset, n * PAGE, pages.ctypes.data):
            return 0
        return int(np.count_nonzero(pages[:n] & 1)) * PAGE

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a plain ndarray over the region; the region lives as long as it does."""
        end = offset + math.prod(shape) * dtype.itemsize
        if offset < 0 or end > self.n_bytes:
            raise SessionError(f"bytes {offset} to {end} are outside {self.n_bytes} mapped ones")
        return np.asarray(_Piece(self, self.address + offset, shape, dtype))

    def forbid_stores(self) -> None:
        """Make everything read-only: a forked child must not change its parent's rows."""
        if self.is_open:
            _LIBC.mprotect(self.address, self.n_bytes, _READ)

    def close(self) -> None:
        """Let go of memory and files. Arrays that are still around read zeros."""
        if self.is_open:
            self.is_open = False
            self.map_nothing(0, self.n_bytes)


_LIVE: weakref.WeakSet[Region] = weakref.WeakSet()


def _forbid_stores_in_child() -> None:
    for region in list(_LIVE):
        region.forbid_stores()


if IS_LINUX:
    os.register_at_fork(after_in_child=_forbid_stores_in_child)


class MemoryBlock:
    """Anonymous memory where `Region` does not work; the same methods as far as it goes."""

    def __init__(self, n_bytes: int):
        self.n_bytes = max(PAGE, up_to_page(n_bytes))
        self._map = mmap.mmap(-1, self.n_bytes)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a plain ndarray over the memory."""
        n = math.prod(shape)
        return np.frombuffer(self._map, dtype, n, offset).reshape(shape)

    def drop(self, offset: int, n_bytes: int) -> None:
        """Make a range read as zeros."""
        np.frombuffer(self._map, np.uint8, n_bytes, offset).fill(0)

    def n_resident(self, offset: int, n_bytes: int) -> int:
        """Return the bytes that may be in RAM: all of them, it cannot be asked here."""
        return n_bytes

    def close(self) -> None:
        """Let go of the memory; with arrays still around, the last of them does."""
        with contextlib.suppress(BufferError):
            self._map.close()


def memory(n_bytes: int) -> Region | MemoryBlock:
    """Return anonymous zeroed memory that costs RAM only where it was written."""
    if not IS_LINUX:
        return MemoryBlock(n_bytes)
    region = Region(n_bytes)
    region.map_memory(0, region.n_bytes)
    return region
