"""How the K rows of a layer are rotated, and the angles that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnumba.config_fields import entries, number, put_choice, put_count, put_number
from kvnumba.errors import ConfigError

PAIRINGS = ("normal", "neox", "none")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the K rows.

    Attributes
    ----------
    n_rot : int
        Values of each head that are rotated, starting at `first`; even. The rest is untouched.
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
    first : int
        The first rotated value of each head; ``head_dim - n_rot`` where latent rows (MLA) carry
        the rotated part at their end.

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
    first: int = 0

    def __post_init__(self) -> None:
        put_choice(self, "pairing", PAIRINGS)
        put_count(self, "n_rot", 0)
        put_count(self, "n_ctx_orig", 0)
        put_count(self, "first", 0)
        if self.n_rot % 2:
            raise ConfigError(f"n_rot {self.n_rot} must be even and at least 0")
        for name in ("freq_base", "freq_scale", "attn_factor", "beta_fast", "beta_slow"):
            put_number(self, name, above_0=name.startswith("freq"))
        put_number(self, "ext_factor")
        if self.ext_factor:
            self._check_yarn()
        if self.freq_factors is not None:
            factors = entries(self.freq_factors, "freq_factors")
            values = tuple(number(f, "freq_factors", above_0=True) for f in factors)
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


def ropes_from(value: Any) -> Any:
    """Return what stands for ropes in a JSON file as `RopeConfig`, and anything else as it is."""
    if isinstance(value, Mapping):
        try:
            return RopeConfig(**value)
        except TypeError as error:
            raise ConfigError(f"rope: {error}") from None
    if isinstance(value, (list, tuple)):
        # One level only: a list within the list is refused by CacheConfig.
        return tuple(ropes_from(v) if isinstance(v, Mapping) else v for v in value)
    return value
