"""What a recurrent cache is: layers, widths of the states, cells, and how far back it can go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvnumba.config import MAX_SEQ, SHARED_RULES, CacheConfig
from kvnumba.config_fields import count, entries, put_choice, put_count, put_type
from kvnumba.dtypes import ElementType, kv_type
from kvnumba.errors import ConfigError

MAX_REWIND = 1 << 12
MAX_ROWS = (1 << 31) - 65


def _widths(value: Any, n_layer: int, name: str, least: int) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        return (count(value, name, least),) * n_layer
    values = tuple(count(v, name, least) for v in entries(value, name))
    if len(values) != n_layer:
        raise ConfigError(f"{name} has {len(values)} entries, n_layer is {n_layer}")
    return values


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes and types of a recurrent cache.

    Attributes
    ----------
    n_layer : int
        Layers that have a state.
    n_embd_r, n_embd_s : int or sequence of int
        Values of the states r (convolution, token shift) and s (ssm, wkv) of one sequence, for
        all layers or for each; `n_embd_s` may be 0.
    n_seq_max : int
        Sequence ids run from 0 to ``n_seq_max - 1``.
    n_cells : int, optional
        Cells; each holds the whole state of a sequence. Default and least: `n_seq_max`.
    n_rewind : int
        States kept of each sequence beside the newest: so many tokens can be taken back.
    type_r, type_s : str
        Element types of the states, see `kvnumba.dtypes.KV_TYPES`.
    n_batch, n_ubatch : int
        Largest batch, and largest part of it that is placed and computed at once, in tokens.
    shared : {"move", "refuse", "copy"}
        What `seq_add` and `seq_div` do with a state that other sequences also hold.

    Raises
    ------
    ConfigError
        If a value is impossible; the message names it.
    """

    n_layer: int
    n_embd_r: int | tuple[int, ...]
    n_embd_s: int | tuple[int, ...]
    n_seq_max: int = 1
    n_cells: int | None = None
    n_rewind: int = 0
    type_r: str = "f32"
    type_s: str = "f32"
    n_batch: int = 2048
    n_ubatch: int = 512
    shared: str = "move"

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_seq_max", "n_batch", "n_ubatch"):
            put_count(self, name, 1)
        put_count(self, "n_rewind", 0)
        put_type(self, "type_r")
        put_type(self, "type_s")
        put_choice(self, "shared", SHARED_RULES)
        if self.n_seq_max > MAX_SEQ:
            raise ConfigError(f"n_seq_max {self.n_seq_max} is beyond {MAX_SEQ}")
        if self.n_rewind > MAX_REWIND:
            raise ConfigError(f"n_rewind {self.n_rewind} is beyond {MAX_REWIND}")
        put = object.__setattr__
        if self.n_cells is None:
            put(self, "n_cells", self.n_seq_max)
        put_count(self, "n_cells", 1)
        assert self.n_cells is not None
        if self.n_cells < self.n_seq_max:
            raise ConfigError(
                f"n_cells {self.n_cells} is less than n_seq_max {self.n_seq_max}; every sequence "
                "needs a cell of its own"
            )
        if self.n_rows > MAX_ROWS:
            raise ConfigError(
                f"n_cells {self.n_cells} with n_rewind {self.n_rewind} makes {self.n_rows} rows, "
                f"beyond {MAX_ROWS}"
            )
        put(self, "n_embd_r", _widths(self.n_embd_r, self.n_layer, "n_embd_r", 1))
        put(self, "n_embd_s", _widths(self.n_embd_s, self.n_layer, "n_embd_s", 0))
        _ = self.rows_config  # refuses what the rows would refuse

    @property
    def depth(self) -> int:
        """States kept of each sequence: ``n_rewind + 1``."""
        return self.n_rewind + 1

    @property
    def n_rows(self) -> int:
        """Rows of states, enough that none is overwritten while it may still be wanted.

        Every cell keeps `depth` of them; as many are being written; as many were kept before the
        batch, for its rollback; and as many by the last durable commit. Rows cost memory only once
        they are written.
        """
        assert self.n_cells is not None
        return 4 * self.depth * self.n_cells

    @property
    def rows_config(self) -> CacheConfig:
        """The rows as cells of K (r) and V (s), for `kvnumba.layers.KVLayers`."""
        return CacheConfig(
            n_layer=self.n_layer,
            n_ctx=self.n_rows,
            n_head_kv=1,
            head_dim=self.n_embd_r,
            head_dim_v=self.n_embd_s,
            type_k=self.type_r,
            type_v=self.type_s,
        )

    @property
    def r_type(self) -> ElementType:
        """Element type of r."""
        return kv_type(self.type_r)

    @property
    def s_type(self) -> ElementType:
        """Element type of s."""
        return kv_type(self.type_s)

    def r_width(self, il: int) -> int:
        """Return the values of r of layer `il`."""
        return self.n_embd_r[il]  # type: ignore[index]

    def s_width(self, il: int) -> int:
        """Return the values of s of layer `il`."""
        return self.n_embd_s[il]  # type: ignore[index]

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state of one sequence, all layers."""
        config = self.rows_config
        return config.bytes_per_cell_k + config.bytes_per_cell_v

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecurrentConfig:
        """Build a configuration from what `to_dict` gave (or a JSON file of the same shape).

        Raises
        ------
        ConfigError
            If a key is unknown or missing, or a value is impossible.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(str, set(values) - known))
        if unknown:
            raise ConfigError(f"unknown keys {unknown}; known: {sorted(known)}")
        missing = {"n_layer", "n_embd_r", "n_embd_s"} - set(values)
        if missing:
            raise ConfigError(f"missing keys {sorted(missing)}")
        return cls(**values)
