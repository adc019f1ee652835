"""What a cache is: sizes, element types, rope and layout, and the byte counts that follow."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from kvnumba.dtypes import ElementType, kv_type
from kvnumba.errors import ConfigError

PAIRINGS = ("normal", "neox", "none")
PLACEMENTS = ("scatter", "ring")
SHARED_RULES = ("move", "refuse", "copy")
WINDOW_KINDS = ("standard", "chunked", "symmetric")
MAX_SEQ = 1 << 16
MAX_LAYER = 1 << 14
MAX_NUMBER = float(np.finfo(np.float64).max)


def _count(value: Any, name: str, least: int) -> int:
    if _is_bool(value) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}, got {reprlib.repr(value)}"
        )
    return int(value)


def _number(value: Any, name: str, above_0: bool = False) -> float:
    good = isinstance(value, (int, float, np.integer, np.floating)) and not _is_bool(value)
    if good and isinstance(value, np.generic):
        value = value.item()  # a numpy scalar would be compared in its own width
    # Compared before float(), which has no room for the largest whole numbers; false for nan.
    if not good or not abs(value) <= MAX_NUMBER or (above_0 and not value > 0):
        wanted = "a number above 0" if above_0 else "a finite number"
        raise ConfigError(f"{name} must be {wanted}, got {reprlib.repr(value)}")
    return float(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _entries(values: Any, name: str) -> tuple[Any, ...]:
    if isinstance(values, np.ndarray) and values.ndim:
        return tuple(values)
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} must be a list of numbers, got {reprlib.repr(values)}")
    return tuple(values)


def _put_count(config: Any, name: str, least: int) -> None:
    object.__setattr__(config, name, _count(getattr(config, name), name, least))


def _put_number(config: Any, name: str, above_0: bool = False) -> None:
    object.__setattr__(config, name, _number(getattr(config, name), name, above_0))


def _put_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} {reprlib.repr(value)} is not one of {allowed}")
    object.__setattr__(config, name, str(value))


def _put_flag(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not _is_bool(value):
        raise ConfigError(f"{name} must be true or false, got {reprlib.repr(value)}")
    object.__setattr__(config, name, bool(value))


def _put_type(config: Any, name: str) -> None:
    value = getattr(config, name)
    if _is_bool(value) or not isinstance(value, (str, int, np.integer, ElementType)):
        raise ConfigError(f"{name} must be the name of an element type, got {reprlib.repr(value)}")
    value = int(value) if isinstance(value, np.integer) else value
    object.__setattr__(config, name, kv_type(value).name)


def _per_layer(value: Any, n_layer: int, name: str, least: int = 1) -> tuple[int, ...]:
    if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str):
        values = tuple(_count(v, name, least) for v in _entries(value, name))
    else:
        values = (_count(value, name, least),) * n_layer
    if len(values) != n_layer:
        raise ConfigError(f"{name} has {len(values)} entries, n_layer is {n_layer}")
    return values


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the K rows.

    Attributes
    ----------
    n_rot : int
        Values of each head that are rotated, starting at its first; even. The rest is untouched.
    pairing : {"normal", "neox", "none"}
        Which values form a pair: ``(2i, 2i+1)``, ``(i, i + n_rot/2)``, or no rotation at all.
    freq_base, freq_scale : float
        Base of the frequencies, and the linear position scale (1 / context extension).
    ext_factor : float
        YaRN mix; 0 switches YaRN off.
    attn_factor : float
        Magnitude given to rotated values when they are first written (never again on a shift).
    beta_fast, beta_slow : float
        YaRN ramp, in rotations over the original context.
    n_ctx_orig : int
        Context length the model was trained with, in tokens (YaRN only).
    freq_factors : tuple of float, optional
        Divisor of each pair's frequency, length ``n_rot // 2``.

    Notes
    -----
    Formulas: llama.cpp ``ggml/src/ggml-cpu/ops.cpp`` at 0c1e57098, and Peng et al., "YaRN"
    (arXiv 2309.00071), section 3.2.
    """

    n_rot: int
    pairing: str = "normal"
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _put_choice(self, "pairing", PAIRINGS)
        _put_count(self, "n_rot", 0)
        _put_count(self, "n_ctx_orig", 0)
        if self.n_rot % 2:
            raise ConfigError(f"n_rot {self.n_rot} must be even and at least 0")
        for name in ("freq_base", "freq_scale", "attn_factor", "beta_fast", "beta_slow"):
            _put_number(self, name, above_0=name.startswith("freq"))
        _put_number(self, "ext_factor")
        if self.ext_factor:
            self._check_yarn()
        if self.freq_factors is not None:
            factors = _entries(self.freq_factors, "freq_factors")
            values = tuple(_number(f, "freq_factors", above_0=True) for f in factors)
            object.__setattr__(self, "freq_factors", values)
            if len(values) != self.n_rot // 2:
                raise ConfigError(
                    f"{len(values)} freq_factors given, n_rot // 2 = {self.n_rot // 2} wanted"
                )

    def _check_yarn(self) -> None:
        if self.n_ctx_orig < 1:
            raise ConfigError("YaRN (ext_factor != 0) needs n_ctx_orig, the trained context length")
        if self.beta_fast <= 0 or self.beta_slow <= 0:
            raise ConfigError(
                f"YaRN needs beta_fast and beta_slow above 0, got {self.beta_fast} and "
                f"{self.beta_slow}"
            )
        if self.freq_base == 1:
            raise ConfigError("YaRN needs a freq_base other than 1: all pairs would turn alike")
        if not all(math.isfinite(self._yarn_dim(b)) for b in (self.beta_fast, self.beta_slow)):
            raise ConfigError("beta_fast or beta_slow is too close to 0 for n_ctx_orig")

    @property
    def magnitude(self) -> float:
        """Factor on K (and Q) values when they are written; 1 for a shift, which finds it there."""
        if self.ext_factor == 0:
            return self.attn_factor
        return self.attn_factor * (1 + 0.1 * math.log(1 / self.freq_scale))

    def theta(self) -> np.ndarray:
        """Return the angle of each pair per position, shape ``(n_rot // 2,)``, float64, radians.

        Frequency factors, linear scaling and YaRN are all linear in the position, so this one
        table serves the first rotation and every shift.
        """
        i = np.arange(self.n_rot // 2, dtype=np.float64)
        a = self.freq_base ** (-2 * i / max(1, self.n_rot))
        if self.freq_factors is not None:
            a = a / np.asarray(self.freq_factors)
        if self.ext_factor == 0:
            return a * self.freq_scale
        low = max(0.0, math.floor(self._yarn_dim(self.beta_fast)))
        high = min(self.n_rot - 1.0, math.ceil(self._yarn_dim(self.beta_slow)))
        ramp = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)
        ramp = ramp * self.ext_factor
        return a * self.freq_scale * (1 - ramp) + a * ramp

    def _yarn_dim(self, beta: float) -> float:
        n = self.n_ctx_orig / (2 * math.pi * beta)
        return self.n_rot * math.log(n) / (2 * math.log(self.freq_base))


@dataclass(frozen=True)
class CacheConfig:
    """Sizes, types and layout of a cache. All other numbers follow from these.

    Attributes
    ----------
    n_layer : int
        Layers that have K and V.
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
        False for models whose K must not be rotated after the fact.
    window : int
        Positions that a token sees, its own included; cells that nobody will see again are used
        anew. 0: all, and no cell is used anew.
    window_kind : {"standard", "chunked", "symmetric"}
        A token at p1 sees p0 if ``p1 - p0 < window``, if ``p0 >= p1 // window * window``, or if
        ``|p1 - p0| <= window // 2`` (llama-hparams.h).

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
    _ropes: tuple[RopeConfig | None, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_ctx", "n_seq_max", "n_batch", "n_ubatch"):
            _put_count(self, name, 1)
        _put_count(self, "n_spare", 0)
        _put_count(self, "window", 0)
        for name in ("v_trans", "flash_attn", "can_shift"):
            _put_flag(self, name)
        _put_choice(self, "placement", PLACEMENTS)
        _put_choice(self, "shared", SHARED_RULES)
        _put_choice(self, "window_kind", WINDOW_KINDS)
        _put_type(self, "type_k")
        _put_type(self, "type_v")
        if self.window and self.placement == "ring":
            raise ConfigError('a window wants placement="scatter": cells are used anew one by one')
        if self.n_cells > np.iinfo(np.int32).max - 64:
            raise ConfigError(f"n_ctx + n_spare = {self.n_cells} is beyond 2**31 - 65 cells")
        if self.n_seq_max > MAX_SEQ:
            raise ConfigError(f"n_seq_max {self.n_seq_max} is beyond {MAX_SEQ}")
        if self.n_layer > MAX_LAYER:
            raise ConfigError(f"n_layer {self.n_layer} is beyond {MAX_LAYER}")
        put = object.__setattr__
        put(self, "n_head_kv", _per_layer(self.n_head_kv, self.n_layer, "n_head_kv"))
        put(self, "head_dim", _per_layer(self.head_dim, self.n_layer, "head_dim"))
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        put(self, "head_dim_v", _per_layer(head_dim_v, self.n_layer, "head_dim_v", 0))
        put(self, "_ropes", self._rope_per_layer())
        for il in range(self.n_layer):
            self._check_layer(il)

    def _rope_per_layer(self) -> tuple[RopeConfig | None, ...]:
        ropes: Any = self.rope
        if isinstance(ropes, list):
            ropes = tuple(ropes)
            object.__setattr__(self, "rope", ropes)
        if not isinstance(ropes, tuple):
            ropes = (ropes,) * self.n_layer
        for rope in ropes:
            if rope is not None and not isinstance(rope, RopeConfig):
                raise ConfigError(f"rope must hold RopeConfig or None, got {reprlib.repr(rope)}")
        if len(ropes) != self.n_layer:
            raise ConfigError(f"rope has {len(ropes)} entries, n_layer is {self.n_layer}")
        return ropes

    def _check_layer(self, il: int) -> None:
        rope = self._ropes[il]
        if rope is not None and rope.n_rot > self.k_head_dim(il):
            raise ConfigError(
                f"n_rot {rope.n_rot} is larger than head_dim {self.k_head_dim(il)} of layer {il}"
            )
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
        given["rope"] = _rope_from(given.get("rope"))
        return cls(**given)


def _rope_from(value: Any) -> Any:
    if isinstance(value, Mapping):
        try:
            return RopeConfig(**value)
        except TypeError as error:
            raise ConfigError(f"rope: {error}") from None
    if isinstance(value, (list, tuple)):
        # One level only: a list within the list is refused by CacheConfig.
        return tuple(_rope_from(v) if isinstance(v, Mapping) else v for v in value)
    return value
