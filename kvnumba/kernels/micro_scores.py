"""Micro-kernels over scores in float32: exponentials, row maxima, soft cap.

Scores are in units of log2: the caller multiplies q by log2(e), so that every exponential is a
power of two.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.jit import JIT
from kvnumba.kernels.loops import LANES, Pointers, vectors_then_rest, zeros

MASKED = np.float32(-3e38)
"""Score of a cell that a query must not see: its weight is exactly 0, even beside NO_MAXIMUM."""

NO_MAXIMUM = np.float32(-1e30)
"""Running maximum of a row that has seen no cell yet."""


if JIT:

    @intrinsic
    def power_of_two(typingctx, x):
        """Return 2**x for x <= 127; 0 below -126, NaN for NaN."""

        def emit(context, builder, signature, args):
            return simd.exp2(builder, args[0])

        return types.float32(types.float32), emit

    @intrinsic
    def softmax_row(typingctx, s, start, n, maximum):
        """Replace `n` scores by ``2**(score - m)`` and return ``(m, their sum)``.

        `m` is the larger of `maximum` and the largest score; a NaN score stays a NaN.
        """

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            row = at(0, KIND_F32, args[1])
            m = _emit_maximum(builder, row, args[2], args[3])
            total = _emit_exponentials(builder, row, args[2], m)
            return context.make_tuple(builder, signature.return_type, [m, total])

        f = types.float32
        return types.UniTuple(f, 2)(s, types.intp, types.intp, f), emit

    @intrinsic
    def soft_cap_row(typingctx, s, start, n, cap):
        """Replace each of `n` scores x by ``cap * tanh(x)``; |error| < 2e-7 cap."""

        def emit(context, builder, signature, args):
            row = Pointers(context, builder, signature, args)(0, KIND_F32, args[1])
            for d, lanes in vectors_then_rest(builder, args[2], (LANES, 0)):
                pointer = builder.gep(row, [d])
                y = _emit_tanh(builder, simd.load(builder, KIND_F32, pointer, lanes))
                factor = simd.splat(builder, args[3], lanes) if lanes else args[3]
                simd.store(builder, builder.fmul(y, factor), pointer)
            return context.get_dummy_value()

        return types.void(s, types.intp, types.intp, types.float32), emit

else:

    def power_of_two(x):
        return np.float32(0) if x < -126 else np.exp2(np.float32(x))

    def softmax_row(s, start, n, maximum):
        row = s[start : start + n]
        m = maximum
        for x in row:
            m = x if x > m else m
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            row[:] = np.where(row - m < -126, 0, np.exp2(row - m))
        return m, row.sum(dtype=np.float32)

    def soft_cap_row(s, start, n, cap):
        s[start : start + n] = cap * np.tanh(s[start : start + n])


def _emit_maximum(builder, row, n, floor):
    largest, rest = zeros(builder, 1, LANES)[0], zeros(builder, 1, 0)[0]
    builder.store(simd.splat(builder, floor, LANES), largest)
    builder.store(floor, rest)
    for d, lanes in vectors_then_rest(builder, n, (LANES, 0)):
        slot = largest if lanes else rest
        value = simd.load(builder, KIND_F32, builder.gep(row, [d]), lanes)
        builder.store(simd.larger(builder, value, builder.load(slot)), slot)
    vector, m = builder.load(largest), builder.load(rest)
    for j in range(LANES):
        m = simd.larger(builder, builder.extract_element(vector, simd.I32(j)), m)
    return m


def _emit_exponentials(builder, row, n, m):
    total, rest = zeros(builder, 1, LANES)[0], zeros(builder, 1, 0)[0]
    for d, lanes in vectors_then_rest(builder, n, (LANES, 0)):
        slot = total if lanes else rest
        pointer = builder.gep(row, [d])
        value = simd.load(builder, KIND_F32, pointer, lanes)
        shift = simd.splat(builder, m, lanes) if lanes else m
        y = simd.exp2(builder, builder.fsub(value, shift))
        simd.store(builder, y, pointer)
        builder.store(builder.fadd(builder.load(slot), y), slot)
    vector, result = builder.load(total), builder.load(rest)
    for j in range(LANES):
        result = builder.fadd(result, builder.extract_element(vector, simd.I32(j)))
    return result


def _emit_tanh(builder, x):
    """Emit tanh as ``(1 - e) / (1 + e)`` with ``e = exp(-2 |x|)``, which cannot overflow."""
    n = simd.lanes_of(x)
    i32 = simd.vector_type(simd.I32, n)
    bits = builder.bitcast(x, i32)
    absolute = builder.bitcast(builder.and_(bits, simd.constant(simd.I32, 0x7FFFFFFF, n)), x.type)
    e = simd.exp2(
        builder, builder.fmul(absolute, simd.constant(simd.F32, -2 * 1.4426950408889634, n))
    )
    one = simd.constant(simd.F32, 1.0, n)
    y = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    sign = builder.and_(bits, simd.constant(simd.I32, -0x80000000, n))
    return builder.bitcast(builder.or_(builder.bitcast(y, i32), sign), x.type)
