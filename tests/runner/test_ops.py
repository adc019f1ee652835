"""Norm, rope and gate against float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.config import RopeConfig
from kvnumba.runner import ops

N_EMBD = 48


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.fixture(params=[1, 3], ids=["one part", "three parts"])
def n_threads(request, monkeypatch):
    monkeypatch.setattr(ops, "MIN_VALUES", 1)
    return request.param


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("with_add", [False, True])
def test_rms_norm(n, with_add, n_threads):
    x, add, weight = _random(n, N_EMBD), _random(n, N_EMBD) * 2, _random(N_EMBD)
    before, out = x.copy(), np.empty_like(x)
    ops.rms_norm(x, weight, 1e-3, out, n_threads, add if with_add else None)
    total = before.astype(np.float64) + (add if with_add else 0)
    np.testing.assert_allclose(x, total, rtol=1e-6, atol=1e-7)
    want = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-7)


def test_rms_norm_of_zeros_and_of_nan():
    x = np.zeros((2, N_EMBD), np.float32)
    x[1, 3] = np.nan
    out = np.empty_like(x)
    ops.rms_norm(x, np.ones(N_EMBD, np.float32), 1e-5, out)
    assert (out[0] == 0).all()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("n_rot", [16, 8])
@pytest.mark.parametrize("n", [1, 5])
def test_rotate_turns_pairs_as_complex_numbers(neox, n_rot, n, n_threads):
    head_dim, rope = 16, RopeConfig(n_rot, "neox" if neox else "normal", attn_factor=1.5)
    q, k = _random(n, 4 * head_dim), _random(n, 2 * head_dim)
    pos = np.arange(100, 100 + 7 * n, 7, dtype=np.int32)
    expected = []
    for x in (q, k):
        heads = x.astype(np.float64).reshape(n, -1, head_dim)
        half = n_rot // 2
        first, second = (
            (slice(0, half), slice(half, n_rot))
            if neox
            else (slice(0, n_rot, 2), slice(1, n_rot, 2))
        )
        turned = (heads[..., first] + 1j * heads[..., second]) * 1.5
        turned *= np.exp(1j * pos[:, None, None] * rope.theta())
        heads[..., first], heads[..., second] = turned.real, turned.imag
        expected.append(heads.reshape(n, -1))
    ops.rotate(q, k, ops.rope_tables(rope, pos), head_dim, neox, n_threads)
    np.testing.assert_allclose(q, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(k, expected[1], rtol=1e-5, atol=1e-6)


def test_rope_tables_stay_exact_at_far_positions():
    rope = RopeConfig(8, freq_base=1e5)
    cos, sin = ops.rope_tables(rope, np.array([1_000_003], np.int32))
    angle = 1_000_003 * rope.theta()
    np.testing.assert_allclose(cos[0], np.cos(angle), atol=1e-7)
    np.testing.assert_allclose(sin[0], np.sin(angle), atol=1e-7)


def test_without_rope_nothing_turns():
    q, k = _random(2, 32), _random(2, 16)
    before = q.copy(), k.copy()
    ops.rotate(q, k, ops.rope_tables(None, np.arange(2, dtype=np.int32)), 16, False)
    np.testing.assert_array_equal(q, before[0])
    np.testing.assert_array_equal(k, before[1])


@pytest.mark.parametrize("n", [1, 7, 8, 33])
def test_swiglu(n, n_threads):
    gate, up = _random(3, n) * 6, _random(3, n)
    want = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    ops.swiglu(gate, up, n_threads)
    np.testing.assert_allclose(gate, want, rtol=1e-6, atol=1e-9)


def test_swiglu_at_the_ends():
    gate = np.array([[-1e30, -200, -100, -0.0, 0, 100, 1e30, np.inf, np.nan, -87]], np.float32)
    ops.swiglu(gate, np.ones_like(gate))
    assert np.abs(gate[0, :5]).max() < 1e-5
    np.testing.assert_array_equal(gate[0, 5:8], np.array([100, 1e30, np.inf], np.float32))
    assert np.isnan(gate[0, 8])
    assert abs(gate[0, 9]) < 1e-30


def test_little_work_is_not_split():
    assert ops.n_parts(ops.MIN_VALUES - 1, 8) == 1
    assert ops.n_parts(ops.MIN_VALUES * 3, 2) == 2
