"""K-shift against float64 NumPy: pairings, partial rotation, rounding, moves, round trips."""

from __future__ import annotations

import numpy as np
import pytest
from reference import STEP, narrow, widen

from kvnumba.kernels.half import KINDS
from kvnumba.kernels.rope import shift_rows

HEAD_DIM, N_HEAD_KV, N_CELLS = 16, 2, 8


def angles(n_rot: int) -> np.ndarray:
    return 10000.0 ** (-np.arange(0, n_rot, 2) / max(n_rot, 1))


def rotated(rows: np.ndarray, delta: float, n_rot: int, neox: bool) -> np.ndarray:
    """Rotate float64 rows [n, n_head_kv * head_dim] by `delta` positions."""
    heads = rows.reshape(-1, N_HEAD_KV, HEAD_DIM).astype(np.float64)
    half = n_rot // 2
    first = np.arange(half) if neox else np.arange(0, n_rot, 2)
    second = first + (half if neox else 1)
    cos, sin = np.cos(delta * angles(n_rot)), np.sin(delta * angles(n_rot))
    out = heads.copy()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return out.reshape(rows.shape)


def storage(kind: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return narrow(kind, rng.uniform(-1, 1, (N_CELLS, N_HEAD_KV * HEAD_DIM)).astype(np.float32))


def shift(kind, k, src, dst, delta, n_rot=HEAD_DIM, neox=True):
    lists = (np.array(a, np.int32) for a in (src, dst, delta))
    shift_rows(kind, k, *lists, N_HEAD_KV, HEAD_DIM, n_rot, neox, angles(n_rot))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("n_rot", [HEAD_DIM, 8, 2, 0])
def test_against_float64(kind, neox, n_rot):
    k = storage(kind)
    before = k.copy()
    cells, deltas = [1, 2, 5, 6], [-3, -3, 70000, 1]
    shift(kind, k, cells, cells, deltas, n_rot, neox)
    for i, delta in zip(cells, deltas, strict=True):
        expected = rotated(widen(kind, before[i]), delta, n_rot, neox)
        # half a step of the type for values below 2, and float32 rounding on the way
        np.testing.assert_allclose(
            widen(kind, k[i]), expected, rtol=0, atol=0.51 * STEP[kind] + 3e-7
        )
    others = np.setdiff1d(np.arange(N_CELLS), cells)
    np.testing.assert_array_equal(k[others], before[others])
    kept = np.arange(n_rot, HEAD_DIM)
    heads = (N_CELLS, N_HEAD_KV, HEAD_DIM)
    np.testing.assert_array_equal(k.reshape(heads)[..., kept], before.reshape(heads)[..., kept])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_types_round_to_nearest_even(kind):
    k = storage(kind)
    before = k.copy()
    shift(kind, k, [0], [0], [7])
    exact = rotated(widen(kind, before[0]), 7, HEAD_DIM, True)
    nearest = narrow(kind, exact.astype(np.float32))
    # float32 may lean the other way only on a near tie
    assert (k[0] == nearest).mean() > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_moved_rows_leave_their_source(kind):
    k = storage(kind)
    before = k.copy()
    shift(kind, k, [0, 1, 2], [4, 5, 2], [9, 0, 0])
    twin = before.copy()
    shift(kind, twin, [0], [0], [9])
    np.testing.assert_array_equal(k[4], twin[0])
    np.testing.assert_array_equal(k[5], before[1])
    np.testing.assert_array_equal(k[[0, 1, 2, 3, 6, 7]], before[[0, 1, 2, 3, 6, 7]])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_delta_zero_keep_every_bit(kind):
    k = storage(kind)
    k.view(np.uint16)[3] = 0x7C01 if kind == "f16" else 0x7F81  # signalling NaN
    before = k.copy()
    shift(kind, k, [3, 3, 1], [3, 4, 1], [0, 0, 0])
    np.testing.assert_array_equal(k[4].view(np.uint16), before[3].view(np.uint16))
    np.testing.assert_array_equal(k[3].view(np.uint16), before[3].view(np.uint16))
    np.testing.assert_array_equal(k[1], before[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("neox", [True, False])
def test_there_and_back(kind, neox):
    k = storage(kind)
    before = widen(kind, k)
    cells = np.arange(N_CELLS)
    shift(kind, k, cells, cells, np.full(N_CELLS, 123), neox=neox)
    shift(kind, k, cells, cells, np.full(N_CELLS, -123), neox=neox)
    np.testing.assert_allclose(widen(kind, k), before, rtol=0, atol=1.5 * STEP[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_ten_shifts_keep_lengths_and_angles(kind):
    k = storage(kind)
    before = widen(kind, k)
    cells = np.arange(N_CELLS)
    for _ in range(10):
        shift(kind, k, cells, cells, np.full(N_CELLS, -11))
    expected = rotated(before, -110, HEAD_DIM, True)
    error = widen(kind, k) - expected
    # each pass adds at most 0.71 of half a step per pair; they add up like a random walk
    assert np.sqrt(np.mean(error**2)) < np.sqrt(10) * 0.5 * STEP[kind]
    assert np.abs(error).max() < 10 * 0.75 * STEP[kind]
