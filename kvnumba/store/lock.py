"""Who may write a session's folder: one object in one process, and not its forked children."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from kvnumba.errors import KVCacheError, SessionError, SessionNotFoundError
from kvnumba.files import File, make_folder, names_in, remove
from kvnumba.mapping import IS_LINUX
from kvnumba.store import recovery

LOCK = "lock"


def lock_folder(folder: Path) -> File:
    """Take the lock of a folder; it is held until the file is closed or the process dies.

    Raises
    ------
    SessionLockedError
        If somebody else holds it.
    """
    file = File(folder / LOCK, create=True, may_exist=True)
    try:
        file.lock()
    except KVCacheError:
        file.close()
        raise
    _HELD.add(file)
    return file


def take_new_folder(folder: Path) -> File:
    """Make a folder, or take an empty one or one whose making was interrupted; return its lock.

    Raises
    ------
    SessionError, SessionLockedError
        If it holds anything else; nothing is changed.
    """
    if not (os.path.isdir(folder) and LOCK in names_in(folder)):
        make_folder(folder)
    lock = lock_folder(folder)
    try:
        if lock.size:
            raise SessionError(f"{folder} holds a file {LOCK} that is not ours; name a new folder")
        _clear_unfinished(folder)
    except BaseException:
        lock.close()
        raise
    return lock


def give_up_folder(folder: Path, was_there: bool) -> None:
    """Remove what a failed `Session.create` made, the folder too unless it was there before."""
    with contextlib.suppress(KVCacheError):
        _clear_unfinished(folder)
        remove(folder / LOCK)
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _clear_unfinished(folder: Path) -> None:
    """Remove the files of a session that has no checkpoint yet.

    Raises
    ------
    SessionError
        If there is a session, or anything that is not ours; nothing is changed.
    """
    try:
        recovery.load(folder)
    except SessionNotFoundError:
        pass
    else:
        raise SessionError(f"{folder} holds a session already; open it, or name another folder")
    names = [name for name in names_in(folder) if name != LOCK]
    for name in names:
        if not recovery.is_ours(folder, name):
            raise SessionError(f"{folder} is not empty (it holds {name}); name a new folder")
    for name in names:
        remove(folder / name)


_HELD: weakref.WeakSet[File] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A flock lives as long as any process has the file open. A child that kept it would lock the
    # session beyond its parent's end; closing the copy does not unlock the parent's.
    for file in list(_HELD):
        file.close()


if IS_LINUX:
    os.register_at_fork(after_in_child=_let_go_in_child)
