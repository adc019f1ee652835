"""What a cache is: sizes, element types, rope and layout, and the byte counts that follow."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from kvnumba.config_fields import (
    checked_layer_map,
    per_layer,
    put_choice,
    put_count,
    put_flag,
    put_type,
)
from kvnumba.dtypes import ElementType, kv_type
from kvnumba.errors import ConfigError
from kvnumba.rope_config import RopeConfig, ropes_from

__all__ = [
    "MAX_LAYER",
    "MAX_SEQ",
    "PLACEMENTS",
    "SHARED_RULES",
    "WINDOW_KINDS",
    "CacheConfig",
    "RopeConfig",
]

PLACEMENTS = ("scatter", "ring")
SHARED_RULES = ("move", "refuse", "copy")
WINDOW_KINDS = ("standard", "chunked", "symmetric")
N_POS = (1, 3, 4)
MAX_SEQ = 1 << 16
MAX_LAYER = 1 << 14


@dataclass(frozen=True)
class CacheConfig:
    """Sizes, types and layout of a cache. All other numbers follow from these.

    Attributes
    ----------
    n_layer : int
        Layers that have K and V of their own.
    n_ctx : int
        Cells that may be in use at once.
    n_head_kv, head_dim : int or sequence of int
        KV heads and values per head, for all layers or for each.
    head_dim_v : int or sequence of int, optional
        Values per head of V; default `head_dim`. 0: the layer stores K alone.
    n_seq_max : int
        Sequence ids run from 0 to ``n_seq_max - 1``.
    type_k, type_v : str
        Element types of K and V, see `kvnumba.dtypes.KV_TYPES`.
    v_trans : bool
        Store V by channel (``[n_embd_v, n_cells]``) instead of by cell.
    rope : RopeConfig, sequence of RopeConfig, or None
        Rotation of K, for all layers or for each; None: K is not rotated.
    n_batch, n_ubatch : int
        Largest batch, and largest part of it that is placed and computed at once, in tokens.
    n_spare : int
        Further cells beyond `n_ctx`. Sessions need them to move rows that the last commit names.
    placement : {"scatter", "ring"}
        Any free cells, or one contiguous run found by the reference's search.
    shared : {"move", "refuse", "copy"}
        What `seq_add` and `seq_div` do with cells that other sequences also hold.
    flash_attn : bool
        Only the reference's padding depends on it: 256 cells with, 32 without.
    can_shift : bool
        False for models whose K must not be rotated after the fact, and with `n_pos` above 1.
    window : int
        Positions that a token sees, its own included; cells that nobody will see again are used
        anew. 0: all, and no cell is used anew.
    window_kind : {"standard", "chunked", "symmetric"}
        A token at p1 sees p0 if ``p1 - p0 < window``, if ``p0 >= p1 // window * window``, or if
        ``|p1 - p0| <= window // 2`` (llama-hparams.h).
    v_in_k : int
        Leading values of each K head that serve as V where a layer stores K alone (the latent
        rows of MLA); 0: such layers cannot be attended to here.
    layer_map : sequence of int or None, optional
        For each layer of the model the layer here whose K and V it reads; several may name one,
        which the first of them writes. None or -1: it has none here. Default: each its own.
    n_pos : {1, 3, 4}
        Positions per token. Above 1 (M-RoPE) a token has t, y and x, of which t is its position;
        tokens of text have the same in all.

    Raises
    ------
    ConfigError
        If a value is impossible; the message names it.
    """

    n_layer: int
    n_ctx: int
    n_head_kv: int | tuple[int, ...]
    head_dim: int | tuple[int, ...]
    head_dim_v: int | tuple[int, ...] | None = None
    n_seq_max: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    v_trans: bool = False
    rope: RopeConfig | tuple[RopeConfig | None, ...] | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_spare: int = 0
    placement: str = "scatter"
    shared: str = "move"
    flash_attn: bool = True
    can_shift: bool = True
    window: int = 0
    window_kind: str = "standard"
    v_in_k: int = 0
    layer_map: tuple[int, ...] | None = None
    n_pos: int = 1
    _ropes: tuple[RopeConfig | None, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_ctx", "n_seq_max", "n_batch", "n_ubatch"):
            put_count(self, name, 1)
        for name in ("n_spare", "window", "v_in_k"):
            put_count(self, name, 0)
        for name in ("v_trans", "flash_attn", "can_shift"):
            put_flag(self, name)
        put_choice(self, "placement", PLACEMENTS)
        put_choice(self, "shared", SHARED_RULES)
        put_choice(self, "window_kind", WINDOW_KINDS)
        put_type(self, "type_k")
        put_type(self, "type_v")
        if self.window and self.placement == "ring":
            raise ConfigError('a window wants placement="scatter": cells are used anew one by one')
        if self.n_cells > np.iinfo(np.int32).max - 64:
            raise ConfigError(f"n_ctx + n_spare = {self.n_cells} is beyond 2**31 - 65 cells")
        if self.n_seq_max > MAX_SEQ:
            raise ConfigError(f"n_seq_max {self.n_seq_max} is beyond {MAX_SEQ}")
        if self.n_layer > MAX_LAYER:
            raise ConfigError(f"n_layer {self.n_layer} is beyond {MAX_LAYER}")
        put = object.__setattr__
        put(self, "n_head_kv", per_layer(self.n_head_kv, self.n_layer, "n_head_kv"))
        put(self, "head_dim", per_layer(self.head_dim, self.n_layer, "head_dim"))
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        put(self, "head_dim_v", per_layer(head_dim_v, self.n_layer, "head_dim_v", 0))
        put(self, "layer_map", checked_layer_map(self.layer_map, self.n_layer))
        put(self, "_ropes", self._rope_per_layer())
        for il in range(self.n_layer):
            self._check_layer(il)
        self._check_n_pos()

    def _check_n_pos(self) -> None:
        put_count(self, "n_pos", 1)
        if self.n_pos not in N_POS:
            raise ConfigError(f"n_pos {self.n_pos} is not one of {N_POS}")
        if self.n_pos > 1 and self.window:
            raise ConfigError(
                f"window {self.window} does not go with n_pos {self.n_pos}: use one of the two"
            )
        if self.n_pos > 1:
            object.__setattr__(self, "can_shift", False)

    def _rope_per_layer(self) -> tuple[RopeConfig | None, ...]:
        given: Any = self.rope
        if isinstance(given, list):
            given = tuple(given)
            object.__setattr__(self, "rope", given)
        ropes: tuple[Any, ...] = given if isinstance(given, tuple) else (given,) * self.n_layer
        for rope in ropes:
            if rope is not None and not isinstance(rope, RopeConfig):
                raise ConfigError(f"rope must hold RopeConfig or None, got {reprlib.repr(rope)}")
        if len(ropes) != self.n_layer:
            raise ConfigError(f"rope has {len(ropes)} entries, n_layer is {self.n_layer}")
        return ropes

    def _check_layer(self, il: int) -> None:
        rope = self._ropes[il]
        n = self.k_head_dim(il)
        if rope is not None and rope.first + rope.n_rot > n:
            raise ConfigError(
                f"n_rot {rope.n_rot} values from {rope.first} on are more than head_dim {n} of "
                f"layer {il}"
            )
        if not self.has_v(il) and self.v_in_k > n:
            raise ConfigError(f"v_in_k {self.v_in_k} is more than head_dim {n} of layer {il}")
        self.k_type.row_bytes(self.n_embd_k(il))
        if not self.v_trans:
            self.v_type.row_bytes(self.n_embd_v(il))
        elif self.v_type.block != 1:
            raise ConfigError(f"v_trans needs a plain type for V, not {self.type_v}")

    @property
    def n_cells(self) -> int:
        """Cells that exist: ``n_ctx + n_spare``."""
        return self.n_ctx + self.n_spare

    @property
    def k_type(self) -> ElementType:
        """Element type of K."""
        return kv_type(self.type_k)

    @property
    def v_type(self) -> ElementType:
        """Element type of V."""
        return kv_type(self.type_v)

    def n_kv_heads(self, il: int) -> int:
        """Return the KV heads of layer `il`."""
        return self.n_head_kv[il]  # type: ignore[index]

    def k_head_dim(self, il: int) -> int:
        """Return the values per K head of layer `il`."""
        return self.head_dim[il]  # type: ignore[index]

    def v_head_dim(self, il: int) -> int:
        """Return the values per V head of layer `il`."""
        return self.head_dim_v[il]  # type: ignore[index]

    def n_embd_k(self, il: int) -> int:
        """Return the values of one K row of layer `il`."""
        return self.n_kv_heads(il) * self.k_head_dim(il)

    def n_embd_v(self, il: int) -> int:
        """Return the values of one V row of layer `il`."""
        return self.n_kv_heads(il) * self.v_head_dim(il)

    def has_v(self, il: int) -> bool:
        """Return whether layer `il` stores V, and not K alone."""
        return self.v_head_dim(il) > 0

    def out_head_dim(self, il: int) -> int:
        """Return the values per head of what attention in layer `il` gives, 0 for no attention."""
        return self.v_head_dim(il) or self.v_in_k

    @property
    def n_model_layer(self) -> int:
        """Layers of the model, those included that read another's K and V or have none."""
        return self.n_layer if self.layer_map is None else len(self.layer_map)

    def storage_of(self, il: int) -> int:
        """Return the layer here whose K and V layer `il` of the model reads.

        Raises
        ------
        ConfigError
            If there is no such layer, or it has no K and V here.
        """
        is_whole = isinstance(il, (int, np.integer)) and not isinstance(il, bool)
        if not is_whole or not 0 <= il < self.n_model_layer:
            raise ConfigError(f"layer {il!r} is outside [0, {self.n_model_layer})")
        storage = il if self.layer_map is None else self.layer_map[il]
        if storage < 0:
            raise ConfigError(f"layer {il} has no K and V in this cache: layer_map leaves it out")
        return int(storage)

    def storage_to_write(self, il: int) -> int:
        """Return the layer here that layer `il` of the model writes.

        Raises
        ------
        ConfigError
            As `storage_of`; if an earlier layer writes it.
        """
        storage = self.storage_of(il)
        if self.layer_map is not None and (first := self.layer_map.index(storage)) != il:
            raise ConfigError(
                f"layer {il} only reads the K and V of layer {first}; write them through that one"
            )
        return storage

    def rope_of(self, il: int) -> RopeConfig | None:
        """Return the rope of layer `il`; None when its K is not rotated."""
        rope = self._ropes[il]
        return None if rope is None or rope.pairing == "none" or rope.n_rot == 0 else rope

    def row_bytes_k(self, il: int) -> int:
        """Return the bytes of one K row of layer `il`."""
        return self.k_type.row_bytes(self.n_embd_k(il))

    def row_bytes_v(self, il: int) -> int:
        """Return the bytes of one V row of layer `il`."""
        return self.v_type.block_bytes * self.n_embd_v(il) // self.v_type.block

    @property
    def bytes_per_cell_k(self) -> int:
        """Bytes of K of one cell, all layers."""
        return sum(self.row_bytes_k(il) for il in range(self.n_layer))

    @property
    def bytes_per_cell_v(self) -> int:
        """Bytes of V of one cell, all layers."""
        return sum(self.row_bytes_v(il) for il in range(self.n_layer))

    @property
    def size_k_bytes(self) -> int:
        """Bytes of K for `n_ctx` cells."""
        return self.bytes_per_cell_k * self.n_ctx

    @property
    def size_v_bytes(self) -> int:
        """Bytes of V for `n_ctx` cells."""
        return self.bytes_per_cell_v * self.n_ctx

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain JSON values."""
        return {k: v for k, v in asdict(self).items() if not k.startswith("_")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheConfig:
        """Build a configuration from what `to_dict` gave (or a JSON file of the same shape).

        Raises
        ------
        ConfigError
            If a key is unknown or missing, or a value is impossible.
        """
        known = {f.name for f in fields(cls) if f.init}
        unknown = sorted(map(str, set(values) - known))
        if unknown:
            raise ConfigError(f"unknown keys {unknown}; known: {sorted(known)}")
        missing = {"n_layer", "n_ctx", "n_head_kv", "head_dim"} - set(values)
        if missing:
            raise ConfigError(f"missing keys {sorted(missing)}")
        given = dict(values)
        given["rope"] = ropes_from(given.get("rope"))
        return cls(**given)
