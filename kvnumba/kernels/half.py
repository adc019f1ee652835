"""float16 and bfloat16, kept as their 16 bits, from and to float32.

Numba cannot compute with ``float16``. LLVM can convert it, in one instruction where the target
has F16C (or is 64-bit ARM) and by integer arithmetic elsewhere; simd.py chooses.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.jit import JIT, njit

KIND_F32, KIND_F16, KIND_BF16 = 0, 1, 30
KINDS = {"f32": KIND_F32, "f16": KIND_F16, "bf16": KIND_BF16}
"""ggml's names and ids of the element types that kernels read and write."""


def kind_id(kind: str | int) -> int:
    """Return the ggml id of an element type given by name or id.

    Raises
    ------
    KeyError
        If kernels do not know the type.
    """
    return KINDS[kind] if isinstance(kind, str) else kind


if JIT:

    @intrinsic
    def f16_to_f32(typingctx, bits):
        def emit(context, builder, signature, args):
            return simd.half_to_float(builder, KIND_F16, args[0])

        return types.float32(types.uint16), emit

    @intrinsic
    def bf16_to_f32(typingctx, bits):
        def emit(context, builder, signature, args):
            return simd.half_to_float(builder, KIND_BF16, args[0])

        return types.float32(types.uint16), emit

    @intrinsic
    def f32_to_f16(typingctx, value):
        def emit(context, builder, signature, args):
            return simd.float_to_half(builder, KIND_F16, args[0])

        return types.uint16(types.float32), emit

    @intrinsic
    def f32_to_bf16(typingctx, value):
        def emit(context, builder, signature, args):
            return simd.float_to_half(builder, KIND_BF16, args[0])

        return types.uint16(types.float32), emit

else:

    def f16_to_f32(bits):
        return np.float32(np.uint16(bits).view(np.float16))

    def bf16_to_f32(bits):
        return (np.uint32(bits) << np.uint32(16)).view(np.float32)

    def f32_to_f16(value):
        with np.errstate(over="ignore"):
            return np.float32(value).astype(np.float16).view(np.uint16)

    def f32_to_bf16(value):
        bits = int(np.float32(value).view(np.uint32))
        if bits & 0x7FFFFFFF > 0x7F800000:
            return np.uint16(bits >> 16 | 0x40)
        return np.uint16(bits + 0x7FFF + (bits >> 16 & 1) >> 16)


@njit()
def f16_to_f32_kernel(src, out):
    """Convert f16 bits ``src[n]`` (uint16) to ``out[n]`` (float32), exactly."""
    for j in range(src.shape[0]):
        out[j] = f16_to_f32(src[j])


@njit()
def bf16_to_f32_kernel(src, out):
    """Convert bf16 bits ``src[n]`` (uint16) to ``out[n]`` (float32), exactly."""
    for j in range(src.shape[0]):
        out[j] = bf16_to_f32(src[j])


@njit()
def f32_to_f16_kernel(src, out):
    """Round ``src[n]`` (float32) to f16 bits ``out[n]`` (uint16), ties to even, NaN stays NaN."""
    for j in range(src.shape[0]):
        out[j] = f32_to_f16(src[j])


@njit()
def f32_to_bf16_kernel(src, out):
    """Round ``src[n]`` (float32) to bf16 bits ``out[n]`` (uint16), ties to even, NaN stays NaN."""
    for j in range(src.shape[0]):
        out[j] = f32_to_bf16(src[j])
