"""Sampling: greedy, temperature and top-p against what they mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnumba.errors import ConfigError, ShapeError
from kvnumba.runner.sampling import Sampler


def logits_of(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, np.float64)).astype(np.float32) + np.float32(3)


def draws(sampler: Sampler, logits: np.ndarray, n: int) -> list[int]:
    return [sampler.sample(logits) for _ in range(n)]


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.array([0.5, 2.0, -1.0, 2.0], np.float32)
    assert Sampler().sample(logits) == 1
    assert Sampler(temperature=0, top_p=0.5, seed=3).sample(logits) == 1


def test_equal_arguments_give_equal_tokens() -> None:
    logits = np.random.default_rng(1).normal(size=500).astype(np.float32)
    one = draws(Sampler(1.0, 0.9, seed=7), logits, 50)
    assert one == draws(Sampler(1.0, 0.9, seed=7), logits, 50)
    assert one != draws(Sampler(1.0, 0.9, seed=8), logits, 50)
    assert len(set(one)) > 10


def test_a_sampler_goes_on_where_another_stopped() -> None:
    logits = np.random.default_rng(2).normal(size=100).astype(np.float32)
    whole = draws(Sampler(0.8, seed=4), logits, 20)
    first = Sampler(0.8, seed=4)
    assert draws(first, logits, 8) == whole[:8]
    assert first.n_drawn == 8
    assert draws(Sampler(0.8, seed=4, n_drawn=8), logits, 12) == whole[8:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    counts = np.bincount(draws(Sampler(temperature, seed=5), logits_of(*p), 4000), minlength=4)
    expected = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    np.testing.assert_allclose(counts / 4000, expected, atol=4 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [(0.2, {2}), (0.5, {2}), (0.53, {0, 2}), (0.79, {0, 2}), (0.9, {0, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_likely_set(top_p: float, allowed: set[int]) -> None:
    logits = logits_of(0.2801, 0.04, 0.52, 0.1599)
    assert set(draws(Sampler(1.0, top_p, seed=6), logits, 500)) == allowed


@given(
    st.integers(0, 2**32),
    st.floats(0.01, 1.0),
    st.integers(1, 60),
    st.floats(0.05, 4.0),
)
def test_top_p_agrees_with_the_plain_way(seed: int, top_p: float, n: int, t: float) -> None:
    logits = np.random.default_rng(seed).normal(size=n).astype(np.float32) * 4
    p = np.exp((logits.astype(np.float64) - logits.max()) / t)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-9)) + 2
    assert set(draws(Sampler(t, top_p, seed=seed), logits, 5)) <= set(order[:n_kept].tolist())


def test_impossible_tokens_are_never_drawn() -> None:
    logits = logits_of(0, 0.5, 0, 0.5, 0)
    for top_p in (0.99, 1.0):
        assert set(draws(Sampler(1.5, top_p, seed=9), logits, 300)) == {1, 3}


def test_extreme_values_do_not_break_it() -> None:
    logits = np.array([-3e38, 3e38, 0, 3e38], np.float32)
    assert set(draws(Sampler(1e-3, 0.9, seed=1), logits, 50)) == {1, 3}
    assert set(draws(Sampler(5e-324, seed=1), logits, 50)) == {1, 3}
    assert Sampler(1e-300, 0.5).sample(np.array([1, 2], np.float32)) == 1
    for top_p in (1e-300, 5e-324):
        assert Sampler(1.0, top_p).sample(np.array([1, 2, 2], np.float32)) == 1


def test_nan_gives_the_same_token_each_time() -> None:
    logits = np.array([1, np.nan, 2, np.nan], np.float32)
    assert draws(Sampler(1.0, 0.9), logits, 5) == [1] * 5
    assert Sampler().sample(logits) == 1
    assert Sampler(1.0).sample(np.full(3, -np.inf, np.float32)) == 0


def test_logits_are_not_changed() -> None:
    logits = np.random.default_rng(3).normal(size=50)
    before = logits.copy()
    Sampler(0.7, 0.9).sample(logits)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"n_drawn": -1}, "n_drawn"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Sampler(**options)


@pytest.mark.parametrize("shape", [(0,), (1, 4), ()])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        Sampler(1.0).sample(np.zeros(shape, np.float32))
