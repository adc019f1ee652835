"""`Session`: a cache that is kept in a folder, and opens at its last commit."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvnumba.cells import Cells
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, DamagedError, DiskFullError, NoSlotError, SessionError
from kvnumba.files import File, folder_of, names_in, need_linux
from kvnumba.layers import KVLayers
from kvnumba.packs import MappedRows, new_files
from kvnumba.store import recovery
from kvnumba.store.checkpoint import plain_meta
from kvnumba.store.committed import Committed
from kvnumba.store.fingerprint import Fingerprint
from kvnumba.store.lock import give_up_folder, lock_folder, take_new_folder
from kvnumba.store.log import SessionLog
from kvnumba.store.recovery import Loaded
from kvnumba.unified import UnifiedCache

log = logging.getLogger(__name__)
DURABILITY = ("process", "power")


@dataclass(frozen=True)
class SessionInfo:
    """What a session holds as of its last commit.

    Attributes
    ----------
    path : Path
    config : CacheConfig
    fingerprint : Fingerprint
    cells : Cells
        Who owns which cell, at which position.
    user : dict of str to bytes
        The caller's data.
    n_commits : int
    """

    path: Path
    config: CacheConfig
    fingerprint: Fingerprint
    cells: Cells
    user: dict[str, bytes]
    n_commits: int


class Session:
    """A `UnifiedCache` in a folder. Made by `create` and `open`, never directly.

    What `commit` returned from is there again after any crash of the process (``durability=
    "process"``), or of the machine (``"power"``). What was not committed is gone. One session
    object writes a folder at a time; a forked child may not.

    Attributes
    ----------
    path : Path
    config : CacheConfig
    fingerprint : Fingerprint
    cache : UnifiedCache
        Change it through its own methods, then `commit`.
    user : dict of str to bytes
        The caller's data; it travels with the commit.
    durability : {"process", "power"}
    """

    def __init__(self, path: Path, lock: File, durability: str):
        self.path, self.durability = path, durability
        self._lock, self._pid = lock, os.getpid()
        self._log: SessionLog | None = None

    # -- making and opening -------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: CacheConfig,
        fingerprint: Fingerprint,
        durability: str = "process",
    ) -> Session:
        """Make a session in a new or empty folder.

        Parameters
        ----------
        path : path-like
        config : CacheConfig
            With ``n_spare=0`` the session gets ``n_spare=n_ctx``, so that every committed row can
            be moved.
        fingerprint : Fingerprint
            What `open` will ask for.
        durability : {"process", "power"}

        Raises
        ------
        SessionError, SessionLockedError, DiskFullError
            If the folder holds anything, is taken, or cannot be made.
        ConfigError
            Transposed V; several positions per token; an unknown durability; an argument that is
            none of its kind.
        """
        need_linux()
        _check_durability(durability)
        folder = folder_of(path)
        if not isinstance(config, CacheConfig):
            raise ConfigError(f"config is {type(config).__name__}, a CacheConfig wanted")
        _check_fingerprint(fingerprint)
        if config.v_trans:
            raise ConfigError("sessions store V by cell: v_trans is for caches without a path")
        if config.window:
            raise ConfigError(f"window is {config.window}: sessions hold caches without one so far")
        if config.n_pos > 1:
            raise ConfigError(
                f"n_pos {config.n_pos}: sessions keep one position per token; use a cache alone"
            )
        config = config if config.n_spare else replace(config, n_spare=config.n_ctx)
        session_id = uuid.uuid4().bytes
        meta = _meta(config, fingerprint, session_id)
        was_there = os.path.isdir(folder)
        session = cls(folder, take_new_folder(folder), durability)
        with session._undone_on_error(lambda: give_up_folder(folder, was_there)):
            recovery.create_mark(folder)
            rows = new_files(config, folder, session_id, make=False)
            session.config, session.fingerprint = config, fingerprint
            session._build(rows, Committed(config.n_cells, config.n_seq_max), meta)
            # The checkpoint comes last: without one the folder is not yet a session.
            session._writer.begin()
        return session

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        fingerprint: Fingerprint | None = None,
        n_ctx: int | None = None,
        durability: str = "process",
    ) -> Session:
        """Open a session at its last commit. Rows are mapped, not read.

        Parameters
        ----------
        path : path-like
        fingerprint : Fingerprint, optional
            What the session must have been made with.
        n_ctx : int, optional
            More cells than it has.
        durability : {"process", "power"}

        Raises
        ------
        SessionNotFoundError
            If there is none.
        SessionLockedError
            If another process, or another object in this one, has it open.
        FingerprintError
            If it belongs to another model, KV type or layout; names the field.
        DamagedError, StateFormatError
            If it cannot be opened whole, or a newer release wrote it.
        ConfigError
            If `n_ctx` is smaller than the session's; an argument that is none of its kind.
        """
        need_linux()
        _check_durability(durability)
        folder = folder_of(path)
        if fingerprint is not None:
            _check_fingerprint(fingerprint)
        _check_n_ctx(n_ctx)
        if not recovery.generations(names_in(folder), "base"):
            recovery.load(folder)  # says what is wrong, and makes no lock file there
        session = cls(folder, lock_folder(folder), durability)
        with session._undone_on_error():
            loaded = recovery.load(folder)
            if fingerprint is not None:
                fingerprint.compare(loaded.fingerprint)
            session._restore(loaded, _grown(loaded.config, n_ctx))
        return session

    def _restore(self, loaded: Loaded, config: CacheConfig) -> None:
        meta, is_changed = loaded.point.meta, config != loaded.config
        if is_changed:
            meta = {**meta, "config": config.to_dict()}
        owner = bytes.fromhex(meta["session"])
        self.config, self.fingerprint = config, loaded.fingerprint
        rows = MappedRows(config, self.path, owner, loaded.committed.packs)
        self._build(rows, loaded.committed.grown(config.n_cells), meta)
        rows.reserve(self.cache.cell_max(), exactly=True)
        self._writer.resume(loaded, is_changed)

    def _build(self, rows: MappedRows, committed: Committed, meta: dict[str, Any]) -> None:
        self.cache = UnifiedCache.over(self.config, KVLayers(self.config, rows=rows))
        committed.fill(self.cache.cells)
        self.cache.search_start = committed.search_start
        self.cache.has_shift = bool(self.cache.cells.shift.any())
        self.user = dict(committed.user)
        is_synced = self.durability == "power"
        self._log = SessionLog(self.path, rows, committed, meta, is_synced)

    @contextlib.contextmanager
    def _undone_on_error(self, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        try:
            yield
        except BaseException:
            undo()
            self._let_go()
            raise

    @staticmethod
    def read_config(path: str | os.PathLike[str]) -> CacheConfig:
        """Return the configuration of a session, open elsewhere or not.

        Raises
        ------
        SessionNotFoundError, DamagedError, StateFormatError
            As `open`.
        """
        return Session.inspect(path).config

    @staticmethod
    def inspect(path: str | os.PathLike[str]) -> SessionInfo:
        """Return what a session holds as of its last commit, without opening it for writing.

        Raises
        ------
        SessionNotFoundError, DamagedError, StateFormatError, ConfigError
            As `open`.
        """
        folder = folder_of(path)
        loaded = recovery.load(folder)
        state = loaded.committed
        return SessionInfo(
            folder, loaded.config, loaded.fingerprint, state.cells, state.user, loaded.seq
        )

    # -- use ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether `commit` is possible."""
        return self._log is not None

    @property
    def _writer(self) -> SessionLog:
        if self._log is None:
            raise SessionError(f"the session {self.path} is closed; open it again")
        return self._log

    @property
    def n_commits(self) -> int:
        """Commits so far that changed anything, of all times."""
        return self._writer.journal.seq

    def tokens(self, seq_id: int = 0) -> np.ndarray:
        """Return the token ids of a sequence in the order of their positions, int32."""
        return self.cache.cells.tokens_of(seq_id)

    def commit(self) -> None:
        """Make the cache and `user`, as they are now, what the session opens at.

        Pending shifts are applied first where there is room for it. Cells freed before may be
        given out again afterwards.

        Raises
        ------
        StepError
            If placed tokens are neither accepted nor rolled back.
        ConfigError
            If `user` holds something else than bytes.
        DiskFullError
            If there is no room: the session stays at the commit before, the cache as it is, and
            `commit` may be called again.
        SessionError
            If the session is closed, or an earlier sync failed.
        InUseError
            From another thread or a forked child.
        """
        with self.cache.guard:
            writer = self._writer
            try:
                self.cache.update()
            except (NoSlotError, DiskFullError) as error:
                log.info("a shift stays pending: %s", error)
            writer.commit(self.cache.cells, self.user, self.cache.search_start)

    def close(self) -> None:
        """Write a checkpoint, let go of files and lock. What was not committed is dropped.

        Arrays that were handed out then read zeros. Calling again does nothing. In a forked child
        only the child's own view ends.
        """
        if self._log is None:
            return
        if os.getpid() == self._pid:
            with self.cache.guard:
                self._log.try_checkpoint()
        self._let_go()

    def _let_go(self) -> None:
        if self._log is not None:
            self.cache.layers.close()
            self._log.close()
            self._log = None
        self._lock.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._log is None:
            return f"Session({str(self.path)!r}, closed)"
        return f"Session({str(self.path)!r}, {self.n_commits} commits, {self.cache!r})"


def _check_durability(durability: str) -> None:
    if durability not in DURABILITY:
        raise ConfigError(f"durability {durability!r} is not one of {DURABILITY}")


def _check_fingerprint(fingerprint: object) -> None:
    if not isinstance(fingerprint, Fingerprint):
        raise ConfigError(
            f"fingerprint is {type(fingerprint).__name__}; make one with Fingerprint.of_config"
        )


def _check_n_ctx(n_ctx: object) -> None:
    is_whole = isinstance(n_ctx, (int, np.integer)) and not isinstance(n_ctx, bool)
    if n_ctx is not None and not is_whole:
        raise ConfigError(f"n_ctx {n_ctx!r} must be a whole number, or None for the session's own")


def _meta(config: CacheConfig, fingerprint: Fingerprint, session_id: bytes) -> dict[str, Any]:
    """Return what checkpoints will say; ConfigError if that could not be read back."""
    meta = plain_meta(
        {
            "config": config.to_dict(),
            "fingerprint": fingerprint.to_dict(),
            "session": session_id.hex(),
            "created": time.time(),
        }
    )
    try:
        CacheConfig.from_dict(meta["config"])
        Fingerprint.from_dict(meta["fingerprint"])
    except DamagedError as error:
        raise ConfigError(f"this fingerprint cannot be stored: {error}") from None
    return meta


def _grown(config: CacheConfig, n_ctx: int | None) -> CacheConfig:
    if n_ctx is None or n_ctx == config.n_ctx:
        return config
    n_ctx = int(n_ctx)
    if n_ctx < config.n_ctx:
        raise ConfigError(f"the session has n_ctx {config.n_ctx}; it may grow, but {n_ctx} is less")
    return replace(config, n_ctx=n_ctx, n_spare=max(config.n_spare, n_ctx))
