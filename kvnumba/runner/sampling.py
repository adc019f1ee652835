"""Choosing the next token from the logits."""

from __future__ import annotations

import math

import numpy as np

from kvnumba.errors import ConfigError, ShapeError


class Sampler:
    """Greedy, or temperature and top-p sampling.

    The random number of a draw depends on the seed and on how many draws came before, so equal
    arguments give equal tokens.

    Parameters
    ----------
    temperature : float, default 0.0
        Divides the logits; 0 takes the largest logit, the first of equals.
    top_p : float, default 1.0
        Draw only among the likeliest tokens that together have this probability.
    seed : int, default 0
    n_drawn : int, default 0
        Draws to count as made: to go on where an earlier sampler stopped.

    Raises
    ------
    ConfigError
        If a value cannot be right.
    """

    def __init__(
        self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, n_drawn: int = 0
    ):
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ConfigError(f"temperature is {temperature}; 0 (greedy) or more is possible")
        if not 0 < top_p <= 1:
            raise ConfigError(f"top_p is {top_p}; it must be above 0 and at most 1")
        for name, value in (("seed", seed), ("n_drawn", n_drawn)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is {value!r}; a whole number of at least 0 is wanted")
        self.temperature, self.top_p, self.seed = float(temperature), float(top_p), seed
        self.n_drawn = n_drawn

    def sample(self, logits: np.ndarray) -> int:
        """Return the next token.

        Parameters
        ----------
        logits : ndarray of shape (n_vocab,), float
            NaN anywhere makes the draw greedy, so that the same token comes each time.

        Raises
        ------
        ShapeError
            If it is empty or has another number of dimensions.
        """
        if logits.ndim != 1 or not len(logits):
            raise ShapeError(f"logits have shape {logits.shape}; (n_vocab,) is wanted")
        best = int(np.argmax(logits))
        if self.temperature == 0 or not np.isfinite(logits[best]):
            return best
        weights = logits.astype(np.float64)
        weights -= weights[best]
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, which exp makes 0
            weights /= self.temperature
        np.exp(weights, out=weights)
        tokens = self._candidates(weights)
        bounds = np.cumsum(weights if tokens is None else weights[tokens])
        uniform = np.random.default_rng((self.seed, self.n_drawn)).random()
        self.n_drawn += 1
        i = int(np.searchsorted(bounds, uniform * bounds[-1], side="right"))
        return i if tokens is None else int(tokens[i])

    def _candidates(self, weights: np.ndarray) -> np.ndarray | None:
        """Return the likeliest tokens that reach `top_p`, most likely first; None for all."""
        if self.top_p == 1:
            return None
        total = weights.sum()
        # Tokens below this weight have less than 1 - top_p together: they need not be sorted.
        limit = min((1 - self.top_p) * total / len(weights), weights.max())
        tokens = np.flatnonzero(weights >= limit)
        tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
        reached = np.searchsorted(np.cumsum(weights[tokens]), self.top_p * total)
        kept: np.ndarray = tokens[: reached + 1]
        return kept
