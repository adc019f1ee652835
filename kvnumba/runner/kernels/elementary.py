"""exp and softplus as vector code, and their plain twins; Numba from PyPI has neither.

`kvnumba.kernels.simd.exp2` is good enough for a softmax. Here the argument is reduced in two parts
of ln 2, so that the relative error stays small for large arguments as well: a time step is
softplus of a number of about -7, and multiplies everything that a state takes in.
"""

from __future__ import annotations

import numpy as np

from kvnumba.kernels import simd

_MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to a whole number, left in the lowest bits
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 10 bits: its product with a whole number below 2**14 is exact
_LN2_LOW = -2.12194440054690583e-4
_LEAST, _MOST = -88.02969, 88.72283  # -127 and 128 times ln 2: the scales 0 and infinity
_EXP = (
    0.0013814467238262296,
    0.008368780836462975,
    0.04166839271783829,
    0.1666651964187622,
    0.4999999403953552,
    1.0,
    1.0,
)
"""e**r for abs(r) <= ln(2) / 2, highest power first; relative error 3e-9 (Lawson fit)."""
_ATANH = (0.28012341260910034, 0.2800174057483673, 0.4002152979373932, 0.666664183139801)
"""(2 * atanh(z) - 2 * z) / z**3 in z**2 for 0 <= z <= 1/3; relative error 4e-9 (Lawson fit)."""


def emit_exp(builder, x):
    """Emit e**x, at most 2 units in the last place off.

    0 below -87.7, infinite above 88.4, NaN for NaN.
    """
    n = simd.lanes_of(x)

    def constant(value):
        return simd.constant(simd.F32, value, n)

    x = simd.larger(builder, constant(_LEAST), x)
    most = constant(_MOST)
    x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
    shifted = simd.fma(builder, x, constant(_LOG2_E), constant(_MAGIC))
    # no flags: reordered, the two sums with _MAGIC would cancel
    whole = builder.fsub(shifted, constant(_MAGIC))
    r = simd.fma(builder, whole, constant(-_LN2_HIGH), x)
    r = simd.fma(builder, whole, constant(-_LN2_LOW), r)
    y = constant(_EXP[0])
    for c in _EXP[1:]:
        y = simd.fma(builder, y, r, constant(c))
    i32 = simd.vector_type(simd.I32, n)
    exponent = builder.shl(builder.bitcast(shifted, i32), simd.constant(simd.I32, 23, n))
    bits = builder.add(exponent, simd.constant(simd.I32, 0x3F800000, n))
    return builder.fmul(y, builder.bitcast(bits, x.type))


def emit_softplus(builder, x):
    """Emit ``log(1 + e**x)``, at most 4 units in the last place off; `x` itself above 17."""
    n = simd.lanes_of(x)
    zero, two = simd.constant(simd.F32, 0.0, n), simd.constant(simd.F32, 2.0, n)
    i32 = simd.vector_type(simd.I32, n)
    sign = simd.constant(simd.I32, 0x80000000, n)
    minus = builder.bitcast(builder.or_(builder.bitcast(x, i32), sign), x.type)
    power = emit_exp(builder, minus)
    # log(1 + p) = 2 * atanh(p / (2 + p)) keeps the digits of a small p
    z = builder.fdiv(power, builder.fadd(power, two))
    square = builder.fmul(z, z)
    y = simd.constant(simd.F32, _ATANH[0], n)
    for c in _ATANH[1:]:
        y = simd.fma(builder, y, square, simd.constant(simd.F32, c, n))
    y = builder.fmul(y, square)
    log = simd.fma(builder, z, two, builder.fmul(y, z))
    return builder.fadd(simd.larger(builder, zero, x), log)


def softplus(x):
    """Return ``log(1 + e**x)`` of a float32 array: the plain twin."""
    return np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))
