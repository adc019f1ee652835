"""`Fingerprint`: what a stored session and a model must agree on before its rows may be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import DamagedError, FingerprintError


@dataclass(frozen=True)
class Fingerprint:
    """Identity of the model and the rows that a session was made with.

    Attributes
    ----------
    architecture : str
    weights : str
        Digest of the weights, made in the way that `weights_kind` names.
    weights_kind : str
        ``"sampled"`` (header and samples of each tensor: milliseconds) or ``"whole"``.
    tokenizer : str
        Digest of the vocabulary and its rules.
    adapters : tuple of str
        Digest of each adapter (LoRA), in order.
    n_layer : int
    type_k, type_v : str
    n_head_kv, head_dim, head_dim_v : tuple of int
        For each layer.
    v_trans : bool
    rope : tuple of RopeConfig or None
        For each layer; K rows are stored rotated.
    """

    architecture: str
    weights: str
    weights_kind: str
    tokenizer: str
    adapters: tuple[str, ...]
    n_layer: int
    type_k: str
    type_v: str
    n_head_kv: tuple[int, ...]
    head_dim: tuple[int, ...]
    head_dim_v: tuple[int, ...]
    v_trans: bool
    rope: tuple[RopeConfig | None, ...]

    @classmethod
    def of_config(
        cls,
        config: CacheConfig,
        *,
        architecture: str = "",
        weights: str = "",
        weights_kind: str = "sampled",
        tokenizer: str = "",
        adapters: tuple[str, ...] = (),
    ) -> Fingerprint:
        """Return the fingerprint of a model with a cache of `config`; what is not given is ""."""
        return cls(
            architecture=architecture,
            weights=weights,
            weights_kind=weights_kind,
            tokenizer=tokenizer,
            adapters=tuple(adapters),
            n_layer=config.n_layer,
            type_k=config.type_k,
            type_v=config.type_v,
            n_head_kv=tuple(map(config.n_kv_heads, range(config.n_layer))),
            head_dim=tuple(map(config.k_head_dim, range(config.n_layer))),
            head_dim_v=tuple(map(config.v_head_dim, range(config.n_layer))),
            v_trans=config.v_trans,
            rope=tuple(map(config.rope_of, range(config.n_layer))),
        )

    def compare(self, found: Fingerprint) -> None:
        """Test that a stored session's fingerprint is this one.

        Raises
        ------
        FingerprintError
            Names the first field that differs and both values.
        """
        if self == found:
            return
        theirs = dict(found._parts())
        for name, value in self._parts():
            if name not in theirs or theirs[name] != value:
                raise FingerprintError(name, value, theirs.get(name))

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values in the order of the fields, rope field by field."""
        for f in fields(self):
            if f.name != "rope":
                yield f.name, getattr(self, f.name)
        for il, rope in enumerate(self.rope):
            yield f"rope[{il}]", None if rope is None else "rotated"
            for name, value in asdict(rope).items() if rope is not None else ():
                yield f"rope[{il}].{name}", value

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values; a rope that all layers share is given once."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        ropes = self.rope[:1] if len(set(self.rope)) == 1 else self.rope
        out["rope"] = [None if r is None else asdict(r) for r in ropes]
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Build it from what `to_dict` gave.

        Raises
        ------
        DamagedError
            If something is missing or impossible.
        """
        try:
            given: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
            }
            ropes = [None if r is None else RopeConfig(**r) for r in given["rope"]]
            given["rope"] = tuple(ropes * given["n_layer"] if len(ropes) == 1 else ropes)
            return cls(**given)
        except (TypeError, KeyError, ValueError) as error:
            raise DamagedError(f"the stored fingerprint cannot be read: {error}") from None
