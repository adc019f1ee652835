"""What a llama-architecture file says about sizes and rope, and the cache it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import ConfigError, ModelFileError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.keys import Keys
from kvnumba.runner.quants import decode, read_rows

ARCHITECTURE = "llama"
_FREQ_FACTORS = "rope_freqs.weight"
_NOT_DONE = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_scale": 0,
    "logit_scale": 0,
    "residual_scale": 0,
    "rope.dimension_sections": 0,
    "rope.scaling.yarn_log_multiplier": 0,
}
"""Keys that change the arithmetic in ways that this runner does not follow, and the value that
does not."""


@dataclass(frozen=True)
class LlamaParams:
    """Sizes and constants of a model.

    Attributes
    ----------
    n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, head_dim_v, n_ctx_train : int
    eps : float
        Of the RMS norms.
    rope : RopeConfig
    """

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    n_ctx_train: int
    eps: float
    rope: RopeConfig

    def cache_config(self, n_ctx: int | None = None, **options: Any) -> CacheConfig:
        """Return the configuration of a cache for this model.

        Parameters
        ----------
        n_ctx : int, optional
            Default: the length the model was trained with.
        **options
            Further fields of `CacheConfig`, such as `type_k` and `n_seq_max`.
        """
        return CacheConfig(
            n_layer=self.n_layer,
            n_ctx=self.n_ctx_train if n_ctx is None else n_ctx,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            rope=self.rope,
            **options,
        )


def cache_config_of(file: GGUFFile, n_ctx: int | None = None, **options: Any) -> CacheConfig:
    """Return the configuration of a cache for a model; reads the file's header only.

    Raises
    ------
    ModelFileError
        As `read_params`.
    """
    return read_params(file).cache_config(n_ctx, **options)


def read_params(file: GGUFFile) -> LlamaParams:
    """Read a model's sizes and rope.

    Raises
    ------
    ModelFileError
        If a key is missing, impossible, or asks for something that this runner does not do.
    """
    keys = Keys(file, ARCHITECTURE)
    keys.refuse_what_is_not_done(_NOT_DONE)
    n_embd, n_head = keys.count("embedding_length"), keys.count("attention.head_count")
    n_head_kv = keys.count("attention.head_count_kv", n_head)
    if n_head % n_head_kv:
        raise keys.fail("attention.head_count_kv", n_head_kv, f"a divisor of {n_head} heads")
    head_dim = keys.count("attention.key_length", n_embd // n_head)
    return LlamaParams(
        n_layer=keys.count("block_count"),
        n_embd=n_embd,
        n_ff=keys.count("feed_forward_length"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        head_dim_v=keys.count("attention.value_length", head_dim),
        n_ctx_train=keys.count("context_length"),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(keys, head_dim),
    )


def _read_rope(keys: Keys, head_dim: int) -> RopeConfig:
    n_rot = keys.count("rope.dimension_count", head_dim)
    if n_rot > head_dim:
        raise keys.fail("rope.dimension_count", n_rot, f"at most {head_dim}, the size of a head,")
    kind = keys.get("rope.scaling.type", "none")
    given: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        given["freq_scale"] = 1 / _scaling_factor(keys)
    elif kind != "none":
        raise keys.fail("rope.scaling.type", kind, "'none', 'linear' or 'yarn'")
    if kind == "yarn":
        given |= {
            "ext_factor": keys.number("rope.scaling.yarn_ext_factor", 1.0),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
            "n_ctx_orig": keys.count(
                "rope.scaling.original_context_length", keys.count("context_length")
            ),
        }
    try:
        return RopeConfig(
            n_rot=n_rot,
            pairing="normal",
            freq_base=keys.number("rope.freq_base", 10000.0),
            attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
            freq_factors=_read_freq_factors(keys.file, n_rot),
            **given,
        )
    except ConfigError as error:
        raise ModelFileError(f"{keys.file.path}: {ARCHITECTURE}.rope: {error}") from None


def _scaling_factor(keys: Keys) -> float:
    key = "rope.scaling.factor"
    if not keys.has(key):
        key = "rope.scale_linear"  # what files of 2023 have instead
    factor = keys.number(key, 1.0)
    if factor == 0:
        raise keys.fail(key, factor, "a number above 0")
    return factor


def _read_freq_factors(file: GGUFFile, n_rot: int) -> tuple[float, ...] | None:
    if _FREQ_FACTORS not in file.tensors:
        return None
    factors = decode(read_rows(file, _FREQ_FACTORS)).reshape(-1)
    if len(factors) != n_rot // 2 or not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelFileError(
            f"{file.path}: tensor {_FREQ_FACTORS} has {len(factors)} values; "
            f"{n_rot // 2} above 0 wanted (half of {ARCHITECTURE}.rope.dimension_count)"
        )
    return tuple(float(f) for f in factors)
