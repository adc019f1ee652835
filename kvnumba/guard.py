"""`Guard`: one thread of one process changes a cache; anyone else gets a clear error."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from kvnumba.errors import InUseError


class Guard:
    """Context manager around every change of a cache; may be nested by the same thread.

    Raises
    ------
    InUseError
        On entry from a second thread while the first is inside, or from a forked child, whose
        shared mappings would change the parent's rows under its metadata.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> Guard:
        if os.getpid() != self._pid:
            raise InUseError(
                f"this cache belongs to process {self._pid}; a forked child ({os.getpid()}) may "
                "read it but not change it: open or build one of its own in the child"
            )
        if not self._lock.acquire(blocking=False):
            raise InUseError(
                "another thread is changing this cache; let one thread do it, or take turns"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
