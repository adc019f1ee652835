"""Element types of K and V rows: names, ggml ids, block layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvnumba.errors import ConfigError


@dataclass(frozen=True)
class ElementType:
    """How the values of one row are stored.

    Attributes
    ----------
    name : str
        ggml's name, for example ``"f16"``.
    ggml_id : int
        The id that GGUF and state files use.
    block : int
        Values per block (1 for plain types).
    block_bytes : int
        Bytes per block.
    storage : numpy.dtype
        The dtype of the arrays that hold rows. Half types are kept as their 16 bits, because
        Numba cannot compute with ``float16``; blocks are kept as bytes.
    """

    name: str
    ggml_id: int
    block: int
    block_bytes: int
    storage: np.dtype

    def row_bytes(self, n: int) -> int:
        """Return the bytes of a row of `n` values; `n` must be a multiple of the block."""
        if n % self.block:
            raise ConfigError(
                f"a row of {n} values cannot be {self.name}: it must be a multiple of {self.block}"
            )
        return n // self.block * self.block_bytes

    def row_items(self, n: int) -> int:
        """Return how many storage items a row of `n` values takes."""
        return self.row_bytes(n) // self.storage.itemsize


F32 = ElementType("f32", 0, 1, 4, np.dtype(np.float32))
F16 = ElementType("f16", 1, 1, 2, np.dtype(np.uint16))
BF16 = ElementType("bf16", 30, 1, 2, np.dtype(np.uint16))

KV_TYPES: dict[str, ElementType] = {t.name: t for t in (F32, F16, BF16)}
"""The element types that a cache can hold today."""


def kv_type(name: str | int | ElementType) -> ElementType:
    """Look up a K/V element type by name or ggml id.

    Raises
    ------
    ConfigError
        If the type is unknown or not yet supported for K and V.
    """
    if isinstance(name, ElementType):
        return name
    is_id = isinstance(name, int) and not isinstance(name, bool)
    for t in KV_TYPES.values():
        if name == t.name or (is_id and name == t.ggml_id):
            return t
    raise ConfigError(f"K/V type {name!r} is not known; allowed: {', '.join(KV_TYPES)}")
