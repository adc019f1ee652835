"""Dot products of stored weight rows with a few float32 vectors, each row read once."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.jit import JIT
from kvnumba.kernels.loops import add_product, zeros
from kvnumba.runner.kernels.blocks import (
    BLOCK,
    LANES,
    byte_pointer,
    decode_plain,
    emit_block,
    emit_cases,
    emit_each_block,
    emit_items,
    row_bytes,
)

_GROUP = 4
"""Dot products that are summed over their lanes together: 4 rows by 1 vector, or 1 row by 4."""

_AHEAD = 2048
"""Bytes between the block that is used and the one that is fetched: a few rows on."""


if JIT:

    @intrinsic
    def dot_rows(typingctx, kind, w, w_row_bytes, r0, r1, n_in, x, n, out, out_step):
        """Write ``out[t * out_step + r]``, the product of row r of `w` and vector t of `x`.

        Rows r from `r0` to below `r1` have `n_in` weights in `w_row_bytes` bytes; the `n` vectors
        lie one after the other. No bounds are checked.
        """

        def emit(context, builder, signature, args):
            # 18 loops that gain nothing from their caller: copies would only be compiled again
            builder.function.attributes.add("noinline")
            out = simd.item_pointer(
                context, builder, signature.args[8], args[8], KIND_F32, simd.I64(0)
            )
            vectors = simd.item_pointer(
                context, builder, signature.args[6], args[6], KIND_F32, simd.I64(0)
            )
            weights = byte_pointer(context, builder, signature, args, 1, simd.I64(0))
            for kind in emit_cases(builder, args[0]):
                for r, t, n_vectors in _emit_groups(builder, args[3], args[4], args[7]):
                    _emit_group(
                        builder, kind, (weights, args[2], r, args[4]), (vectors, args[5], t),
                        n_vectors, (out, args[9]),
                    )  # fmt: skip
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, w, i, i, i, i, x, i, out, i), emit

else:

    def dot_rows(kind, w, w_row_bytes, r0, r1, n_in, x, n, out, out_step):
        vectors, to = x.reshape(-1)[: n * n_in].reshape(n, n_in), out.reshape(-1)
        for r in range(r0, r1):
            row = decode_plain(kind, w[r * w_row_bytes :][: row_bytes(kind, n_in)])
            for t in range(n):
                to[t * out_step + r] = (row * vectors[t]).sum()


def _emit_groups(builder, r0, r1, n):
    """Yield first row, first vector and number of vectors of each group, in loops over them.

    A few rows are used for all vectors before the next: they stay in the first-level cache.
    """
    with cgutils.for_range_slice(builder, r0, r1, simd.I64(_GROUP)) as (r, _):
        stop = builder.add(r, simd.I64(_GROUP))
        stop = builder.select(builder.icmp_signed("<", stop, r1), stop, r1)
        start = simd.I64(0)
        for n_vectors in (_GROUP, 1):
            n_rows = simd.I64(_GROUP // n_vectors)
            rest = builder.srem(builder.sub(n, start), simd.I64(n_vectors))
            end = builder.sub(n, rest)
            with (
                cgutils.for_range_slice(builder, start, end, simd.I64(n_vectors)) as (t, _),
                cgutils.for_range_slice(builder, r, stop, n_rows) as (row, _),
            ):
                yield row, t, n_vectors
            start = end


def _emit_group(builder, kind, rows, vectors, n_vectors, out):
    """Emit the products of up to ``_GROUP // n_vectors`` rows with `n_vectors` vectors."""
    weights, w_row_bytes, r, r1 = rows
    x, n_in, t = vectors
    to, out_step = out
    xs = [
        builder.gep(x, [builder.mul(builder.add(t, simd.I64(j)), n_in)]) for j in range(n_vectors)
    ]
    sums = _array(builder, simd.vector_type(simd.F32, LANES))
    totals = _array(builder, simd.F32)
    n_rows = builder.sub(r1, r)
    most = simd.I64(_GROUP // n_vectors)
    n_rows = builder.select(builder.icmp_signed("<", n_rows, most), n_rows, most)
    with cgutils.for_range(builder, n_rows) as loop:
        row = builder.gep(weights, [builder.mul(builder.add(r, loop.index), w_row_bytes)])
        first = builder.mul(loop.index, simd.I64(n_vectors))
        for j, total in enumerate(_emit_dots(builder, kind, row, n_in, xs)):
            builder.store(total, builder.gep(sums, [builder.add(first, simd.I64(j))]))
    four = [builder.load(builder.gep(sums, [simd.I64(j)])) for j in range(_GROUP)]
    simd.store(builder, simd.sum_lanes4(builder, four), totals)
    with cgutils.for_range(builder, n_rows) as loop:
        first = builder.mul(loop.index, simd.I64(n_vectors))
        for j in range(n_vectors):
            value = builder.load(builder.gep(totals, [builder.add(first, simd.I64(j))]))
            place = builder.mul(builder.add(t, simd.I64(j)), out_step)
            place = builder.add(builder.add(place, r), loop.index)
            builder.store(value, builder.gep(to, [place]))


def _array(builder, element):
    """Return _GROUP zeroed stack slots in a row."""
    slots = cgutils.alloca_once(builder, element, _GROUP)
    zero = ir.Constant(element, None)
    for j in range(_GROUP):
        builder.store(zero, builder.gep(slots, [simd.I64(j)]))
    return slots


def _emit_dots(builder, kind, row, n, xs):
    """Emit the products of a row with the vectors at `xs`, not yet summed over their lanes."""
    n_vectors = BLOCK // LANES
    n_sums = n_vectors if len(xs) == 1 else 2
    sums = [zeros(builder, n_sums, LANES) for _ in xs]
    for j, offset, is_block in emit_each_block(builder, kind, n):
        place = builder.gep(row, [offset])
        if not is_block:
            weight = emit_items(builder, kind, place, 0, 0)
            for t, x in enumerate(xs):
                product = builder.fmul(weight, builder.load(builder.gep(x, [j])))
                old = builder.load(sums[t][0])
                lane = simd.I32(0)
                total = builder.fadd(builder.extract_element(old, lane), product)
                builder.store(builder.insert_element(old, total, lane), sums[t][0])
            continue
        if len(xs) == 1:  # more vectors leave the processor's own prefetching time enough
            _emit_prefetch(builder, builder.gep(place, [simd.I64(_AHEAD)]))
        for v, weights in enumerate(emit_block(builder, kind, place)):
            at = builder.add(j, simd.I64(v * LANES))
            for t, x in enumerate(xs):
                values = simd.load(builder, KIND_F32, builder.gep(x, [at]), LANES)
                add_product(builder, sums[t][v % n_sums], weights, values)
    return [_emit_sum(builder, s) for s in sums]


def _emit_prefetch(builder, pointer):
    """Emit the hint to bring the byte's cache line; one beyond the weights is no error."""
    i32 = simd.I32
    hint = builder.module.declare_intrinsic(
        "llvm.prefetch",
        [pointer.type],
        ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32]),
    )
    builder.call(hint, [pointer, i32(0), i32(3), i32(1)])  # read, first level, data


def _emit_sum(builder, slots):
    """Emit the sum of some accumulators, lane by lane."""
    values = [builder.load(s) for s in slots]
    while len(values) > 1:
        values = [builder.fadd(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
