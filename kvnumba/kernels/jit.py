"""How every kernel is compiled, and the thread settings that must come before the first one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# GNU OpenMP's idle workers spin for ~300,000 iterations and keep a core from OpenBLAS's threads
# (up to 10x slower when the two alternate); with 1000 they fall asleep between the regions of one
# token (measured: 1.4 to 3 times slower decode). It is read when libgomp loads.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numba
from numba.core import config as _numba_config
from numba.core.caching import FunctionCache

JIT = not _numba_config.DISABLE_JIT
"""False under ``NUMBA_DISABLE_JIT=1``: intrinsics must then be replaced by their plain twins."""


def _sources_stamp() -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of every file with kernels.

    Numba looks at the file of the function alone; a helper or an intrinsic that changed in another
    file would leave old machine code in use.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    stamp = []
    for folder in ("kernels", os.path.join("runner", "kernels")):
        with os.scandir(os.path.join(package, folder)) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    info = entry.stat()
                    stamp.append((entry.name, info.st_mtime_ns, info.st_size))
    return tuple(sorted(stamp))


_STAMP = _sources_stamp()


class _TolerantCache(FunctionCache):
    """Numba's disk cache, except that a damaged or read-only one only costs a compilation."""

    def __init__(self, function: Callable):
        super().__init__(function)
        self._cache_file._source_stamp = (self._cache_file._source_stamp, _STAMP)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception:
            return


def njit(*, parallel: bool = False, fastmath: set[str] | bool = False, **options: Any) -> Any:
    """Return the decorator that compiles a kernel: no GIL, numpy's error model, disk cache."""

    def decorate(function: Callable) -> Any:
        options.setdefault("nogil", True)
        options.setdefault("error_model", "numpy")
        kernel = numba.njit(parallel=parallel, fastmath=fastmath, **options)(function)
        if JIT:
            try:
                kernel._cache = _TolerantCache(function)
            except RuntimeError:  # no place that can be written: compile in every process
                return kernel
        return kernel

    return decorate
