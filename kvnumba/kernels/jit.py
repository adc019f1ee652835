"""How every kernel is compiled, and the thread settings that must come before the first one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# GNU OpenMP's idle workers spin for ~300,000 iterations and keep a core from OpenBLAS's threads
# (up to 10x slower when the two alternate); 1000 keeps both fast. It is read when libgomp loads.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numba
from numba.core import config as _numba_config
from numba.core.caching import FunctionCache

JIT = not _numba_config.DISABLE_JIT
"""False under ``NUMBA_DISABLE_JIT=1``: intrinsics must then be replaced by their plain twins."""


class _TolerantCache(FunctionCache):
    """Numba's disk cache, except that a damaged or read-only one only costs a compilation."""

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
