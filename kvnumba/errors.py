"""Every exception kvnumba raises; each docstring says when."""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of all errors that kvnumba raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A size, type or option of a configuration or call cannot be right."""


class ShapeError(KVCacheError, ValueError):
    """An array has the wrong shape or dtype."""


class SequenceError(KVCacheError, IndexError):
    """A sequence id lies outside ``[0, n_seq_max)``."""


class PositionError(KVCacheError, ValueError):
    """A position or position range is not possible."""


class SharedCellError(KVCacheError, RuntimeError):
    """``shared="refuse"``: an operation would move cells that another sequence also holds."""


class NoSlotError(KVCacheError, RuntimeError):
    """Not enough free cells now; the same batch may fit later.

    Attributes
    ----------
    n_wanted, n_free, n_waiting : int
        Cells asked for, cells free now, and freed cells that wait for a ``Session.commit()``.
    """

    def __init__(self, message: str, n_wanted: int = 0, n_free: int = 0, n_waiting: int = 0):
        super().__init__(message)
        self.n_wanted, self.n_free, self.n_waiting = n_wanted, n_free, n_waiting


class CacheFullError(NoSlotError):
    """More cells are asked for than the cache has: it can never fit."""


class StepError(KVCacheError, RuntimeError):
    """The calls on a step come in the wrong order, or its cache has moved on."""


class CannotShiftError(KVCacheError, RuntimeError):
    """The cache cannot rotate its K rows, so positions must not change."""


class WindowLostError(KVCacheError, RuntimeError):
    """A sequence would go on where its window has already been used anew."""


class InUseError(KVCacheError, RuntimeError):
    """A change came from a second thread, or from a forked child process."""


class ModelFileError(KVCacheError, ValueError):
    """A model file is unreadable, foreign, or asks for something this runner does not do."""


class StateFormatError(KVCacheError, ValueError):
    """A file is not what its name or header says."""


class DamagedError(StateFormatError):
    """A stored session fails a checksum or contradicts itself."""


class FingerprintError(KVCacheError, ValueError):
    """A stored session belongs to another model, KV type or layout.

    Attributes
    ----------
    field : str
        The first field that differs.
    expected, found : object
        What the caller has, and what the session was made with.
    """

    def __init__(self, field: str, expected: object, found: object):
        super().__init__(
            f"the session does not fit: {field} is {found!r} in the session but {expected!r} here; "
            "use the model and cache types it was made with, or start a new session"
        )
        self.field, self.expected, self.found = field, expected, found


class SessionError(KVCacheError, OSError):
    """A session cannot be opened, made or written."""


class SessionNotFoundError(SessionError, FileNotFoundError):
    """The named folder holds no session."""


class SessionLockedError(SessionError, BlockingIOError):
    """Another process (or another object in this one) is writing the session."""


class DiskFullError(SessionError):
    """The disk has no room for the next rows or the next journal record."""


class MissingExtraError(KVCacheError, ImportError):
    """A command needs an optional dependency that is not installed."""
