"""Sizes and layers of the caches that combine two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvnumba.config import WINDOW_KINDS, CacheConfig
from kvnumba.errors import ConfigError
from kvnumba.recurrent_config import RecurrentConfig

PAD = 256
"""Cells that the reference rounds a window part's size up to."""


def _flags(values: Any, name: str) -> tuple[bool, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} must be a list of true and false, one a layer, got {values!r}")
    if not all(isinstance(v, bool) for v in values):
        raise ConfigError(f"{name} must hold true and false only, got {list(values)!r}")
    if all(values) or not any(values):
        raise ConfigError(
            f"{name} must have layers of both kinds; a cache of one kind alone serves a model "
            "whose layers are all alike"
        )
    return tuple(values)


def _pick(value: Any, layers: Sequence[int]) -> Any:
    """Return the entries of those layers of a setting that may be one for all."""
    return tuple(value[il] for il in layers) if isinstance(value, tuple) else value


def _of_layers(config: CacheConfig, mine: Sequence[bool], **changes: Any) -> CacheConfig:
    """Return the cache of some layers of the model."""
    all_storage = range(config.n_layer) if config.layer_map is None else config.layer_map
    mapped = [storage for storage, is_mine in zip(all_storage, mine, strict=True) if is_mine]
    layers = sorted({storage for storage in mapped if storage >= 0})
    per_layer = {
        name: _pick(getattr(config, name), layers)
        for name in ("n_head_kv", "head_dim", "head_dim_v", "rope")
    }
    if config.layer_map is not None:
        changes["layer_map"] = tuple(layers.index(s) if s >= 0 else -1 for s in mapped)
    return replace(config, n_layer=len(layers), **per_layer, **changes)


@dataclass(frozen=True)
class WindowConfig:
    """A model of which some layers see a sliding window only.

    Attributes
    ----------
    base : CacheConfig
        All layers of the model, and the cells of those that see everything.
    window : int
        Positions that a token sees in the other layers, its own included.
    is_window : sequence of bool, one per layer of the model
        Which layers have the window; there must be both kinds.
    kind : {"standard", "chunked", "symmetric"}
        See `CacheConfig.window_kind`.
    full_size : bool
        Give the window part as many cells as the base, so that nothing is lost.
    n_checkpoints : int
        Windows that may be kept beside the live ones (see `kvnumba.checkpoints`).
    n_window_cells : int, optional
        Cells of the window part. Default, the reference's rule: room for the window of each
        sequence and one ubatch, a multiple of 256, at most the base's.

    Raises
    ------
    ConfigError
        If a value is impossible; the message names it.
    """

    base: CacheConfig
    window: int
    is_window: tuple[bool, ...]
    kind: str = "standard"
    full_size: bool = False
    n_checkpoints: int = 0
    n_window_cells: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, CacheConfig) or self.base.window:
            raise ConfigError("base must be a CacheConfig without a window of its own")
        object.__setattr__(self, "is_window", _flags(self.is_window, "is_window"))
        if len(self.is_window) != self.base.n_model_layer:
            raise ConfigError(
                f"is_window has {len(self.is_window)} entries for {self.base.n_model_layer} layers"
            )
        self._check_layer_map()
        if self.kind not in WINDOW_KINDS:
            raise ConfigError(f"kind {self.kind!r} is not one of {WINDOW_KINDS}")
        for name, least in (("window", 1), ("n_checkpoints", 0), ("n_window_cells", 1)):
            value = getattr(self, name)
            if name == "n_window_cells" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} {value!r} must be a whole number of at least {least}")
        _ = self.base_part, self.window_part  # refuse what those caches would refuse

    def _check_layer_map(self) -> None:
        kinds: dict[int, bool] = {}
        for il, (storage, is_window) in enumerate(
            zip(self.base.layer_map or (), self.is_window, strict=False)
        ):
            if storage >= 0 and kinds.setdefault(storage, is_window) != is_window:
                raise ConfigError(
                    f"layer_map lets layer {il} read what a layer of the other kind stores; layers "
                    "with a window and those without have caches of their own"
                )

    @property
    def n_seq_max(self) -> int:
        """Sequence ids run from 0 to ``n_seq_max - 1``."""
        return self.base.n_seq_max

    @property
    def n_pos(self) -> int:
        """Positions per token."""
        return self.base.n_pos

    @property
    def n_batch(self) -> int:
        """Most tokens of a batch."""
        return self.base.n_batch

    @property
    def n_ubatch(self) -> int:
        """Most tokens that are placed and computed at once."""
        return self.base.n_ubatch

    @property
    def base_part(self) -> CacheConfig:
        """The cache of the layers that see everything."""
        return _of_layers(self.base, [not w for w in self.is_window])

    @property
    def window_part(self) -> CacheConfig:
        """The cache of the layers with the window."""
        n_ctx = self.base.n_ctx
        if self.n_window_cells is not None:
            n_ctx = self.n_window_cells
        elif not self.full_size:
            n = self.window * (self.n_seq_max + self.n_checkpoints) + self.n_ubatch
            n_ctx = min(n_ctx, -(-n // PAD) * PAD)
        return _of_layers(
            self.base,
            self.is_window,
            n_ctx=n_ctx,
            window=self.window,
            window_kind=self.kind,
        )


@dataclass(frozen=True)
class HybridConfig:
    """A model of which some layers attend and the others keep a recurrent state.

    Attributes
    ----------
    attention : CacheConfig or WindowConfig
        The attention layers, in their order.
    recurrent : RecurrentConfig
        The recurrent layers, in their order. What is done with shared states (`shared`) is taken
        from the attention part.
    is_recurrent : sequence of bool, one per layer of the model

    Raises
    ------
    ConfigError
        If the counts disagree.
    """

    attention: CacheConfig | WindowConfig
    recurrent: RecurrentConfig
    is_recurrent: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.attention, (CacheConfig, WindowConfig)):
            raise ConfigError("attention must be a CacheConfig or a WindowConfig")
        if not isinstance(self.recurrent, RecurrentConfig):
            raise ConfigError("recurrent must be a RecurrentConfig")
        object.__setattr__(self, "is_recurrent", _flags(self.is_recurrent, "is_recurrent"))
        a = self.attention.base if isinstance(self.attention, WindowConfig) else self.attention
        object.__setattr__(self, "recurrent", replace(self.recurrent, shared=a.shared))
        n_attention = a.n_model_layer
        for name, n, found in (
            ("attention", n_attention, self.is_recurrent.count(False)),
            ("recurrent", self.recurrent.n_layer, self.is_recurrent.count(True)),
        ):
            if n != found:
                raise ConfigError(f"{name}.n_layer is {n}, is_recurrent has {found} such layers")
        if self.attention.n_seq_max != self.recurrent.n_seq_max:
            raise ConfigError(
                f"n_seq_max is {self.attention.n_seq_max} in attention and "
                f"{self.recurrent.n_seq_max} in recurrent; both must be the same"
            )

    @property
    def n_seq_max(self) -> int:
        """Sequence ids run from 0 to ``n_seq_max - 1``."""
        return self.attention.n_seq_max

    @property
    def n_pos(self) -> int:
        """Positions per token."""
        return self.attention.n_pos

    @property
    def n_batch(self) -> int:
        """Most tokens of a batch."""
        return min(self.attention.n_batch, self.recurrent.n_batch)

    @property
    def n_ubatch(self) -> int:
        """Most tokens that are placed and computed at once."""
        return min(self.attention.n_ubatch, self.recurrent.n_ubatch)
