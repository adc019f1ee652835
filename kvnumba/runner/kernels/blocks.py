"""Weights as GGUF files store them, decoded 32 values at a time into vector registers.

A block is 32 values in the file's own bytes: plain float32, f16 or bf16, or one of ggml's
quantized blocks, which begin with an f16 scale (and minimum). Decoding is exact: every product of
a scale and a stored integer fits float32, so only the sum with a minimum rounds, once.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_BF16, KIND_F16, KIND_F32
from kvnumba.kernels.jit import JIT

KIND_Q4_0, KIND_Q4_1, KIND_Q8_0 = 2, 3, 8
BLOCK = 32
BLOCK_BYTES = {
    KIND_F32: 128,
    KIND_F16: 64,
    KIND_BF16: 64,
    KIND_Q4_0: 18,
    KIND_Q4_1: 20,
    KIND_Q8_0: 34,
}
"""Bytes of 32 values of each kind that kernels decode, by ggml id."""
_ITEM_BYTES = {KIND_F32: 4, KIND_F16: 2, KIND_BF16: 2}
"""Kinds whose rows need not be a multiple of 32 values long."""
LANES = min(16, simd.LANES)
_I8 = ir.IntType(8)


def row_bytes(kind: int, n: int) -> int:
    """Return the bytes of a row of `n` values; a multiple of 32 where the kind has blocks."""
    if kind in _ITEM_BYTES:
        return n * _ITEM_BYTES[kind]
    return n // BLOCK * BLOCK_BYTES[kind]


def byte_pointer(context, builder, signature, args, a, index):
    """Return the pointer to byte `index` of array argument `a`, an ndarray of uint8."""
    data = context.make_array(signature.args[a])(context, builder, args[a]).data
    return builder.gep(builder.bitcast(data, _I8.as_pointer()), [index])


def emit_cases(builder, kind):
    """Yield each kind while the builder stands in the branch for it."""
    for known in BLOCK_BYTES:
        with builder.if_then(builder.icmp_signed("==", kind, simd.I64(known))):
            yield known


def emit_each_block(builder, kind, n):
    """Yield, in a loop over the whole blocks of `n` values, first value, first byte, and True.

    Then, for kinds that may have them, in a loop over the values left, the same with False.
    """
    whole = builder.and_(n, simd.I64(-BLOCK))
    with cgutils.for_range_slice(builder, simd.I64(0), whole, simd.I64(BLOCK)) as (j, count):
        yield j, builder.mul(count, simd.I64(BLOCK_BYTES[kind])), True
    if kind in _ITEM_BYTES:
        with cgutils.for_range_slice(builder, whole, n, simd.I64(1)) as (j, _):
            yield j, builder.mul(j, simd.I64(_ITEM_BYTES[kind])), False


def emit_block(builder, kind, pointer):
    """Emit the decoding of the block at a byte pointer: a list of vectors, in order."""
    if kind in _ITEM_BYTES:
        step = LANES * _ITEM_BYTES[kind]
        return [emit_items(builder, kind, pointer, j * step, LANES) for j in range(BLOCK // LANES)]
    if kind == KIND_Q8_0:
        scale = _emit_halves(builder, pointer, 1)[0]
        quants = [_emit_bytes(builder, pointer, 2 + j) for j in range(0, BLOCK, LANES)]
        wide = [builder.sext(q, simd.vector_type(simd.I32, LANES)) for q in quants]
        return [builder.fmul(scale, _to_float(builder, q)) for q in wide]
    if kind == KIND_Q4_1:
        scale, minimum = _emit_halves(builder, pointer, 2)
        nibbles = _emit_nibbles(builder, pointer, 4)
        return [simd.fma(builder, scale, _to_float(builder, q), minimum) for q in nibbles]
    scale = _emit_halves(builder, pointer, 1)[0]
    eight = simd.constant(simd.I32, 8, LANES)
    centred = [builder.sub(q, eight) for q in _emit_nibbles(builder, pointer, 2)]
    return [builder.fmul(scale, _to_float(builder, q)) for q in centred]


def emit_items(builder, kind, pointer, offset, lanes):
    """Emit the load of `lanes` plain items (0: one), `offset` bytes on, as float32."""
    item = simd.F32 if kind == KIND_F32 else simd.I16
    pointer = builder.gep(pointer, [simd.I64(offset)])
    items = builder.bitcast(pointer, simd.vector_type(item, lanes).as_pointer())
    value = builder.load(items, align=1)
    return value if kind == KIND_F32 else simd.half_to_float(builder, kind, value)


def _emit_halves(builder, pointer, n):
    """Emit the load of `n` f16 values, each spread over all lanes."""
    halves = builder.bitcast(pointer, simd.vector_type(simd.I16, n).as_pointer())
    values = simd.half_to_float(builder, KIND_F16, builder.load(halves, align=1))
    return [simd.shuffle(builder, values, values, [j] * LANES) for j in range(n)]


def _emit_bytes(builder, pointer, offset):
    place = builder.gep(pointer, [simd.I64(offset)])
    return builder.load(builder.bitcast(place, simd.vector_type(_I8, LANES).as_pointer()), align=1)


def _emit_nibbles(builder, pointer, offset):
    """Emit 32 integers of 4 bits: the low halves of 16 bytes, then the high halves."""
    i32 = simd.vector_type(simd.I32, LANES)
    wide = [
        builder.zext(_emit_bytes(builder, pointer, offset + j), i32) for j in range(0, 16, LANES)
    ]
    low = [builder.and_(w, simd.constant(simd.I32, 15, LANES)) for w in wide]
    return low + [builder.lshr(w, simd.constant(simd.I32, 4, LANES)) for w in wide]


def _to_float(builder, integers):
    return builder.sitofp(integers, simd.vector_type(simd.F32, LANES))


if JIT:

    @intrinsic
    def decode_row(typingctx, kind, w, start, n, out, out_start):
        """Decode the `n` weights that begin at byte `start` of `w` to float32 values of `out`."""

        def emit(context, builder, signature, args):
            for kind in emit_cases(builder, args[0]):
                source = byte_pointer(context, builder, signature, args, 1, args[2])
                to = simd.item_pointer(
                    context, builder, signature.args[4], args[4], KIND_F32, args[5]
                )
                for j, offset, is_block in emit_each_block(builder, kind, args[3]):
                    place = builder.gep(source, [offset])
                    if is_block:
                        values, lanes = emit_block(builder, kind, place), LANES
                    else:
                        values, lanes = [emit_items(builder, kind, place, 0, 0)], 0
                    for v, value in enumerate(values):
                        simd.store(
                            builder, value, builder.gep(to, [builder.add(j, simd.I64(v * lanes))])
                        )
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, w, i, i, out, i), emit

else:

    def decode_row(kind, w, start, n, out, out_start):
        out.reshape(-1)[out_start : out_start + n] = decode_plain(
            kind, w[start : start + row_bytes(kind, n)]
        )


def decode_plain(kind, data):
    """Decode whole rows with NumPy: the plain twin of the vector code.

    Parameters
    ----------
    kind : int
    data : ndarray of uint8, shape (n_bytes,)

    Returns
    -------
    ndarray of float32, shape (n,)
    """
    if kind == KIND_F32:
        return data.view(np.float32)
    if kind == KIND_F16:
        return data.view(np.float16).astype(np.float32)
    if kind == KIND_BF16:
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    blocks = data.reshape(-1, BLOCK_BYTES[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == KIND_Q8_0:
        return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(-1)
    packed = blocks[:, -16:]
    quants = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    if kind == KIND_Q4_1:
        minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        return (scale * quants + minimum).reshape(-1)
    return (scale * (quants - 8)).reshape(-1)
