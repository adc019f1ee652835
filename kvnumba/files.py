"""Every file operation of sessions and packs: counted, and with our errors.

All of them go through this module, so that a test can stop, fail or count each one: `hook` is
called with the operation's name right before it happens. Nothing here reads or writes through a
mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvnumba.errors import (
    ConfigError,
    DiskFullError,
    SessionError,
    SessionLockedError,
    SessionNotFoundError,
)

FILE_MODE = 0o600
FOLDER_MODE = 0o700
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

hook: Callable[[str], None] | None = None
"""Called with ``"read"``, ``"write"``, ``"rename"`` ... before each operation (tests only)."""

n_bytes_read = 0
"""Bytes read from files so far."""


def _step(name: str) -> None:
    if hook is not None:
        hook(name)


def fail(error: OSError, doing: str, path: str | os.PathLike[str]) -> NoReturn:
    """Raise our error for an operating system's one: what was done to which file, and why not."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        raise DiskFullError(
            f"no room while {doing} {path}: {reason}; free disk space and try again"
        ) from error
    if error.errno == errno.ENOENT:
        raise SessionNotFoundError(f"{path} is not there ({doing}: {reason})") from error
    raise SessionError(f"{doing} {path}: {reason}") from error


def need_linux() -> None:
    """Raise SessionError unless this is Linux, where mapped files and sessions work."""
    if sys.platform != "linux":
        raise SessionError(
            f"mapped files and sessions need Linux, this is {sys.platform}; use path=None"
        )


class File:
    """An open file; closed with the object at the latest.

    Parameters
    ----------
    path : path-like
    create : bool
        Make it anew (it must not exist), readable and writable by its owner only.
    write : bool
        Open for writing too.
    may_exist : bool
        With `create`: take the file that is there.

    Raises
    ------
    SessionNotFoundError, SessionError, DiskFullError
        If it cannot be opened or made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        write: bool = True,
        may_exist: bool = False,
    ) -> None:
        self.path = Path(path)
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | (0 if may_exist else os.O_EXCL)
        _step("create" if create else "open")
        try:
            self.fd = os.open(self.path, flags, FILE_MODE)
        except OSError as error:
            fail(error, "creating" if create else "opening", self.path)
        self._closer = weakref.finalize(self, os.close, self.fd)
        self._closer.atexit = False

    def close(self) -> None:
        """Close it; calling again does nothing."""
        self._closer()

    @property
    def size(self) -> int:
        """Its length in bytes, holes included."""
        return os.fstat(self.fd).st_size

    def read(self, n: int, offset: int = 0) -> bytes:
        """Return `n` bytes from `offset`, fewer only at the end of the file."""
        global n_bytes_read
        _step("read")
        parts = []
        try:
            while n > 0 and (part := os.pread(self.fd, n, offset)):
                parts.append(part)
                n -= len(part)
                offset += len(part)
        except OSError as error:
            fail(error, "reading", self.path)
        out = b"".join(parts)
        n_bytes_read += len(out)
        return out

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write `data` at `offset` with one system call; a short write is an error."""
        _step("write")
        try:
            n = os.pwrite(self.fd, data, offset)
            if n != len(data):
                raise OSError(errno.ENOSPC, f"only {n} of {len(data)} bytes were written")
        except OSError as error:
            fail(error, "writing", self.path)

    def truncate(self, n_bytes: int) -> None:
        """Set the length; new bytes are a hole that reads as zeros."""
        _step("truncate")
        try:
            os.ftruncate(self.fd, n_bytes)
        except OSError as error:
            fail(error, "resizing", self.path)

    def allocate(self, offset: int, n_bytes: int) -> None:
        """Reserve disk space for a range.

        Raises
        ------
        DiskFullError
            If there is not enough; what was reserved of it stays, see `punch`.
        """
        if n_bytes < 1:
            return
        _step("allocate")
        try:
            os.posix_fallocate(self.fd, offset, n_bytes)
        except OSError as error:
            fail(error, f"reserving {n_bytes} bytes in", self.path)

    def punch(self, offset: int, n_bytes: int) -> None:
        """Give the disk space of a range back; it then reads as zeros. The length stays.

        A file system that cannot do it keeps the space: no error, since nothing is lost.
        """
        if n_bytes < 1:
            return
        _step("punch")
        _libc().fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, offset, n_bytes)

    def sync(self) -> None:
        """Bring its bytes to the disk (and the length, where it is needed to read them)."""
        _step("sync")
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            fail(error, "syncing", self.path)

    def lock(self) -> None:
        """Take the advisory lock that dies with this process.

        Raises
        ------
        SessionLockedError
            If somebody else holds it.
        """
        import fcntl  # Unix only; the rest of this module imports anywhere

        _step("lock")
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SessionLockedError(
                f"{self.path.parent} is being written by another process or session object; "
                "close it there first"
            ) from None
        except OSError as error:
            fail(error, "locking", self.path)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def write_new(path: Path, data: bytes, sync: bool) -> None:
    """Write a whole new file; it is removed again if that fails."""
    file = File(path, create=True)
    try:
        file.write(data, 0)
        if sync:
            file.sync()
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    file.close()


def rename(source: Path, target: Path) -> None:
    """Give a file its name in one step, over an older one."""
    _step("rename")
    try:
        os.rename(source, target)
    except OSError as error:
        fail(error, f"renaming {source.name} to", target)


def remove(path: Path) -> None:
    """Remove a file; one that is gone already is fine."""
    _step("remove")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        fail(error, "removing", path)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    _step("sync folder")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        fail(error, "syncing", path)
    finally:
        os.close(fd)


def folder_of(path: object) -> Path:
    """Return the path of a folder that a caller named.

    Raises
    ------
    ConfigError
        If it is no path, or an empty one.
    """
    try:
        name = os.fspath(path)  # type: ignore[call-overload]
        if isinstance(name, str) and name and b"\0" not in os.fsencode(name):
            return Path(name)
    except (TypeError, UnicodeEncodeError):
        pass
    raise ConfigError(f"path {path!r} names no folder; give a str or a pathlib.Path, not empty")


def make_folder(path: Path) -> None:
    """Make a folder for its owner only, parents as usual; an empty one is taken.

    Raises
    ------
    SessionError
        If it holds anything, or cannot be made; a folder that was there is as before.
    """
    _step("mkdir")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(FOLDER_MODE, exist_ok=True)
        entry = next(path.iterdir(), None)
        if entry is None:
            path.chmod(FOLDER_MODE)
    except OSError as error:
        fail(error, "making folder", path)
    if entry is not None:
        raise SessionError(
            f"{path} is not empty (it holds {entry.name}); name a new or empty folder, or open "
            "the session that is there"
        )


def names_in(path: Path) -> list[str]:
    """Return the names in a folder, sorted.

    Raises
    ------
    SessionNotFoundError
        If there is no such folder.
    """
    _step("list")
    try:
        return sorted(os.listdir(path))
    except NotADirectoryError:
        raise SessionNotFoundError(f"{path} is a file, not the folder of a session") from None
    except OSError as error:
        fail(error, "listing", path)
