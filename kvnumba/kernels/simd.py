"""LLVM building blocks of the vector kernels: target, half conversions, loads, exp2.

Everything here emits plain LLVM IR, which every target can compile. What the host supports only
decides the width of vectors and whether half conversions are one instruction or a bit trick.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import codegen, config

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
FUSE = ("contract",)
"""Float operations of kernels may fuse, but never assume finite values."""


def _target_features() -> frozenset[str]:
    """Return the CPU features that Numba compiles for, without their plus signs."""
    features = config.CPU_FEATURES
    if features is None:
        features = codegen.get_host_cpu_features()
    return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))


FEATURES = _target_features()
_ARM64 = llvm.get_process_triple().startswith(("aarch64", "arm64"))

HAS_F16 = _ARM64 or "f16c" in FEATURES
"""False where LLVM would call a library function, absent from the process, to convert a half."""

LANES = 16 if "avx512f" in FEATURES else 8 if "avx" in FEATURES else 4
"""float32 values of one vector register."""

N_REGISTERS = 32 if _ARM64 or "avx512f" in FEATURES else 16
"""Vector registers there are to keep accumulators in."""


def lanes_of(value):
    """Return how many lanes an LLVM value has; 0 for a scalar."""
    return value.type.count if isinstance(value.type, ir.VectorType) else 0


def vector_type(element, n):
    """Return the vector type of `n` elements, or the element itself for n = 0."""
    return ir.VectorType(element, n) if n else element


def constant(element, value, n):
    """Return a constant of `n` equal lanes, or a scalar for n = 0."""
    return ir.Constant(vector_type(element, n), [value] * n if n else value)


def half_to_float(builder, kind, bits, native=HAS_F16):
    """Emit the conversion of f16 (kind 1) or bf16 (kind 30) bits to float32."""
    n = lanes_of(bits)
    f32, i32 = vector_type(F32, n), vector_type(I32, n)
    if kind == 1 and native:
        return builder.fpext(builder.bitcast(bits, vector_type(ir.HalfType(), n)), f32)
    wide = builder.zext(bits, i32)
    if kind == 30:
        return builder.bitcast(builder.shl(wide, constant(I32, 16, n)), f32)
    # The 15 lower bits, moved to float32's fields, are the value times 2**-112 (subnormals too);
    # only the largest exponent, infinity and NaN, does not scale and is put in by hand.
    low = builder.shl(builder.and_(wide, constant(I32, 0x7FFF, n)), constant(I32, 13, n))
    scaled = builder.fmul(builder.bitcast(low, f32), constant(F32, 2.0**112, n))
    special = builder.icmp_unsigned(">=", low, constant(I32, 0x0F800000, n))
    body = builder.select(
        special,
        builder.or_(low, constant(I32, 0x7F800000, n)),
        builder.bitcast(scaled, i32),
    )
    sign = builder.shl(builder.and_(wide, constant(I32, 0x8000, n)), constant(I32, 16, n))
    return builder.bitcast(builder.or_(body, sign), f32)


def float_to_half(builder, kind, value, native=HAS_F16):
    """Emit the conversion of float32 to f16 (kind 1) or bf16 (kind 30) bits, ties to even."""
    n = lanes_of(value)
    i16, i32 = vector_type(I16, n), vector_type(I32, n)
    if kind == 1 and native:
        return builder.bitcast(builder.fptrunc(value, vector_type(ir.HalfType(), n)), i16)
    bits = builder.bitcast(value, i32)
    if kind == 30:
        return builder.trunc(_round_to_bf16(builder, bits, n), i16)
    return builder.trunc(_round_to_f16(builder, bits, n), i16)


def _round_to_bf16(builder, bits, n):
    odd = builder.and_(builder.lshr(bits, constant(I32, 16, n)), constant(I32, 1, n))
    rounded = builder.add(builder.add(bits, constant(I32, 0x7FFF, n)), odd)
    absolute = builder.and_(bits, constant(I32, 0x7FFFFFFF, n))
    is_nan = builder.icmp_unsigned(">", absolute, constant(I32, 0x7F800000, n))
    # Rounding could carry a NaN over into infinity or zero; the quiet bit keeps it a NaN.
    quiet = builder.or_(bits, constant(I32, 0x00400000, n))
    return builder.lshr(builder.select(is_nan, quiet, rounded), constant(I32, 16, n))


def _round_to_f16(builder, bits, n):
    absolute = builder.and_(bits, constant(I32, 0x7FFFFFFF, n))
    odd = builder.and_(builder.lshr(absolute, constant(I32, 13, n)), constant(I32, 1, n))
    rebias = constant(I32, (0xFFF - (112 << 23)) & 0xFFFFFFFF, n)
    normal = builder.lshr(builder.add(builder.add(absolute, rebias), odd), constant(I32, 13, n))
    # Adding 0.5 makes the adder round to the step of half's subnormals, 2**-24.
    shifted = builder.fadd(builder.bitcast(absolute, vector_type(F32, n)), constant(F32, 0.5, n))
    small = builder.sub(builder.bitcast(shifted, vector_type(I32, n)), constant(I32, 0x3F000000, n))
    payload = builder.and_(builder.lshr(absolute, constant(I32, 13, n)), constant(I32, 0x3FF, n))
    nan = builder.or_(payload, constant(I32, 0x7E00, n))
    is_nan = builder.icmp_unsigned(">", absolute, constant(I32, 0x7F800000, n))
    is_big = builder.icmp_unsigned(">=", absolute, constant(I32, 0x47800000, n))
    is_small = builder.icmp_unsigned("<", absolute, constant(I32, 0x38800000, n))
    body = builder.select(is_big, constant(I32, 0x7C00, n), normal)
    body = builder.select(is_small, small, body)
    body = builder.select(is_nan, nan, body)
    sign = builder.and_(builder.lshr(bits, constant(I32, 16, n)), constant(I32, 0x8000, n))
    return builder.or_(body, sign)


def item_pointer(context, builder, array_type, array, kind, index):
    """Return the pointer to item `index` of an array's data, read as items of `kind`."""
    item = F32 if kind == 0 else I16
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, item.as_pointer()), [index])


def load(builder, kind, pointer, n):
    """Emit the load of `n` neighbouring items of `kind` (0: one) as float32."""
    item = pointer.type.pointee
    value = builder.load(
        builder.bitcast(pointer, vector_type(item, n).as_pointer()), align=4 if kind == 0 else 2
    )
    return value if kind == 0 else half_to_float(builder, kind, value)


def store(builder, value, pointer):
    """Emit the store of a float32 value or vector at a float32 pointer."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def splat(builder, value, n):
    """Emit a vector of `n` copies of a scalar."""
    vector = ir.VectorType(value.type, n)
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, n), [0] * n))


def pack_lanes(builder, scalars):
    """Emit the vector that consists of the given scalars."""
    vector = ir.Constant(ir.VectorType(scalars[0].type, len(scalars)), ir.Undefined)
    for j, scalar in enumerate(scalars):
        vector = builder.insert_element(vector, scalar, I32(j))
    return vector


def shuffle(builder, a, b, lanes):
    """Emit a vector of the chosen lanes of `a` followed by `b`."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def fma(builder, a, b, c):
    """Emit ``a * b + c``, one rounding where the target can, two elsewhere."""
    return builder.fadd(builder.fmul(a, b, flags=FUSE), c, flags=FUSE)


def larger(builder, a, b):
    """Emit the larger of two values; `b` where `a` is a NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


_EXP2 = (
    0.00015345811589716207,
    0.001339993121587172,
    0.009618488958645782,
    0.055503287769754606,
    0.2402264689061996,
    0.6931472057372609,
    1.0,
)
"""2**r on [-1/2, 1/2], highest power first; relative error 8e-8 in float32 (Lawson fit)."""


def exp2(builder, x):
    """Emit 2**x for x <= 127: 0 below -126, NaN for NaN. Numba on PyPI has no vector exp."""
    n = lanes_of(x)
    f32, i32 = vector_type(F32, n), vector_type(I32, n)
    # Adding 1.5 * 2**23 rounds x to a whole number and leaves it in the lowest bits. These two
    # sums carry no flags: reordered, they would cancel.
    magic = constant(F32, 12582912.0, n)
    shifted = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(shifted, magic))
    y = constant(F32, _EXP2[0], n)
    for c in _EXP2[1:]:
        y = fma(builder, y, r, constant(F32, c, n))
    exponent = builder.shl(builder.bitcast(shifted, i32), constant(I32, 23, n))
    scale = builder.bitcast(builder.add(exponent, constant(I32, 0x3F800000, n)), f32)
    tiny = builder.fcmp_ordered("<", x, constant(F32, -126.0, n))
    return builder.select(tiny, constant(F32, 0.0, n), builder.fmul(y, scale))


def sum_lanes4(builder, vectors):
    """Emit the four sums over the lanes of four vectors, as one vector of 4."""
    a, b, c, d = vectors
    n = lanes_of(a)
    blocks = range(0, n, 4)
    low = [j + k for j in blocks for k in (0, n, 1, n + 1)]
    high = [j + k for j in blocks for k in (2, n + 2, 3, n + 3)]
    ab = builder.fadd(shuffle(builder, a, b, low), shuffle(builder, a, b, high))
    cd = builder.fadd(shuffle(builder, c, d, low), shuffle(builder, c, d, high))
    low = [j + k for j in blocks for k in (0, 1, n, n + 1)]
    high = [j + k for j in blocks for k in (2, 3, n + 2, n + 3)]
    total = builder.fadd(shuffle(builder, ab, cd, low), shuffle(builder, ab, cd, high))
    while n > 4:  # each block of four lanes now holds a part of the four sums
        n //= 2
        lower = shuffle(builder, total, total, list(range(n)))
        total = builder.fadd(lower, shuffle(builder, total, total, list(range(n, 2 * n))))
    return total
