"""Half precision: every half, and random floats, against NumPy and plain integer arithmetic."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from kvnumba.kernels import half, simd
from kvnumba.kernels.jit import JIT

ALL_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


@intrinsic
def _f16_to_f32_by_bits(typingctx, bits):
    def emit(context, builder, signature, args):
        return simd.half_to_float(builder, half.KIND_F16, args[0], native=False)

    return types.float32(types.uint16), emit


@intrinsic
def _f32_to_f16_by_bits(typingctx, value):
    def emit(context, builder, signature, args):
        return simd.float_to_half(builder, half.KIND_F16, args[0], native=False)

    return types.uint16(types.float32), emit


@numba.njit
def _widen_by_bits(src, out):
    for j in range(src.shape[0]):
        out[j] = _f16_to_f32_by_bits(src[j])


@numba.njit
def _narrow_by_bits(src, out):
    for j in range(src.shape[0]):
        out[j] = _f32_to_f16_by_bits(src[j])


needs_jit = pytest.mark.skipif(not JIT, reason="LLVM code only exists when Numba compiles")
WIDEN = [half.f16_to_f32_kernel, pytest.param(_widen_by_bits, marks=needs_jit)]
NARROW = [half.f32_to_f16_kernel, pytest.param(_narrow_by_bits, marks=needs_jit)]


def _floats(n: int) -> np.ndarray:
    """Random bit patterns, values near each half and each midpoint, and the awkward ones."""
    rng = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        near = ALL_HALVES.view(np.float16).astype(np.float32)
        middle = ((near[:-1].astype(np.float64) + near[1:]) / 2).astype(np.float32)
        beside = [np.nextafter(middle, np.float32(s) * np.inf).astype(np.float32) for s in (-1, 1)]
    edge = [0.0, -0.0, 65504, 65519.996, 65520, 2**-24, 2**-25, 2**-14, 3e38, np.inf, -np.inf]
    random = rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    picked = [v if JIT else v[::31] for v in (near, middle, *beside)]
    return np.concatenate([random, *picked, np.array(edge + [np.nan], np.float32)])


@pytest.mark.parametrize("kernel", WIDEN)
def test_every_f16_widens_as_in_numpy(kernel):
    out = np.empty(ALL_HALVES.size, np.float32)
    kernel(ALL_HALVES, out)
    with np.errstate(invalid="ignore"):
        expected = ALL_HALVES.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(out), nan)
    np.testing.assert_array_equal(out[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("kernel", NARROW)
def test_floats_round_to_f16_as_in_numpy(kernel):
    src = _floats(200_000 if JIT else 1000)
    out = np.empty(src.size, np.uint16)
    kernel(src, out)
    with np.errstate(all="ignore"):
        expected = src.astype(np.float16)
    nan = np.isnan(src)
    assert np.isnan(out[nan].view(np.float16)).all()
    np.testing.assert_array_equal(out[~nan], expected[~nan].view(np.uint16))


def test_every_bf16_is_the_upper_half_of_a_float():
    out = np.empty(ALL_HALVES.size, np.float32)
    half.bf16_to_f32_kernel(ALL_HALVES, out)
    np.testing.assert_array_equal(out.view(np.uint32) >> 16, ALL_HALVES)
    assert not (out.view(np.uint32) & 0xFFFF).any()


def test_floats_round_to_nearest_even_bf16():
    src = _floats(200_000 if JIT else 1000)
    out = np.empty(src.size, np.uint16)
    half.f32_to_bf16_kernel(src, out)
    nan = np.isnan(src)
    assert np.isnan((out[nan].astype(np.uint32) << 16).view(np.float32)).all()
    bits = src[~nan].view(np.uint32).astype(np.uint64)
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
    np.testing.assert_array_equal(out[~nan], (high + up).astype(np.uint16))


def test_kinds_are_ggml_ids():
    assert [half.kind_id(k) for k in ("f32", "f16", "bf16", 0, 1, 30)] == [0, 1, 30, 0, 1, 30]
    with pytest.raises(KeyError):
        half.kind_id("q8_0")
