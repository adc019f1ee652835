"""kvnumba: a Numba-accelerated, memory-mapped KV cache for language models on CPUs.

Importing the package is cheap; Numba is loaded when a name that needs it is first used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import KVCacheError

if TYPE_CHECKING:
    from kvnumba.batch import Batch
    from kvnumba.composite_config import HybridConfig, WindowConfig
    from kvnumba.hybrid import HybridCache
    from kvnumba.recurrent import RecurrentCache
    from kvnumba.recurrent_config import RecurrentConfig
    from kvnumba.store.fingerprint import Fingerprint
    from kvnumba.store.session import Session
    from kvnumba.streams import StreamsCache
    from kvnumba.unified import UnifiedCache
    from kvnumba.window import WindowCache

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "Batch",
    "CacheConfig",
    "Fingerprint",
    "HybridCache",
    "HybridConfig",
    "KVCacheError",
    "RecurrentCache",
    "RecurrentConfig",
    "RopeConfig",
    "Session",
    "StreamsCache",
    "UnifiedCache",
    "WindowCache",
    "WindowConfig",
    "__version__",
]

_LAZY = {
    "Batch": "kvnumba.batch",
    "Fingerprint": "kvnumba.store.fingerprint",
    "HybridCache": "kvnumba.hybrid",
    "HybridConfig": "kvnumba.composite_config",
    "RecurrentCache": "kvnumba.recurrent",
    "RecurrentConfig": "kvnumba.recurrent_config",
    "Session": "kvnumba.store.session",
    "StreamsCache": "kvnumba.streams",
    "UnifiedCache": "kvnumba.unified",
    "WindowCache": "kvnumba.window",
    "WindowConfig": "kvnumba.composite_config",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvnumba' has no attribute {name!r}")
