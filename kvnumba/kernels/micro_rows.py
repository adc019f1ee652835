"""Micro-kernels that read K and V rows where they lie: dot products, weighted sums, copies.

Storage comes in as uint16 items whatever its element type (float32 rows viewed as pairs), and the
element type as a number, so that one compiled kernel serves all of them; offsets and steps count
items of the element type. An intrinsic branches once on the type and the number of query rows
and then runs a loop made for the two. Each has a plain twin for ``NUMBA_DISABLE_JIT=1``. No
bounds are checked.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F16, KIND_F32
from kvnumba.kernels.jit import JIT
from kvnumba.kernels.loops import (
    LANES,
    Pointers,
    add_product,
    cases,
    count,
    every,
    loop,
    vectors_then_rest,
    zeros,
)

_VECTORS = {1: 8, 2: 4, 3: 4, 4: 4}
"""Vectors of V values that a weighted sum keeps in registers, by its number of rows."""


if JIT:

    @intrinsic
    def dots(typingctx, kind, n_rows, k, o0, o1, o2, o3, n, q, q_start, q_step, s, s_start, s_step):
        """Multiply 4 rows of K with 1, 2 or MAX_ROWS rows of q, each of `n` values.

        The rows of K begin at items `o0` to `o3`, row r of q at ``q_start + r * q_step``. The 4
        scores of row r are written to `s` from ``s_start + r * s_step``.
        """

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            for kind, rows in cases(builder, args[0], args[1]):
                k_rows = [at(2, kind, o) for o in args[3:7]]
                q_rows = every(builder, at(8, KIND_F32, args[9]), args[10], rows)
                s_rows = every(builder, at(11, KIND_F32, args[12]), args[13], rows)
                _emit_dots(builder, kind, k_rows, args[7], q_rows, s_rows)
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, i, k, i, i, i, i, i, q, i, i, s, i, i), emit

    @intrinsic
    def mix(
        typingctx, kind, n_rows, v, v_start, v_step, width, cells, n, p, p_start, p_step, acc,
        acc_start, acc_step,
    ):  # fmt: skip
        """Add V rows, weighted by 1, 2 or MAX_ROWS rows of p, to as many rows of acc.

        Row t of V has `width` values from item ``v_start + cells[t] * v_step``, for t below `n`;
        its weight in row r is ``p[p_start + r * p_step + t]``; row r of the sums begins at
        ``acc[acc_start + r * acc_step]``.
        """

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            cell = context.make_array(signature.args[6])(context, builder, args[6]).data
            for kind, rows in cases(builder, args[0], args[1]):
                source = (kind, at(2, kind, args[3]), args[4], cell, args[7])
                p_rows = every(builder, at(8, KIND_F32, args[9]), args[10], rows)
                sums = every(builder, at(11, KIND_F32, args[12]), args[13], rows)
                _emit_mix(builder, source, args[5], p_rows, sums)
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, i, v, i, i, i, cells, i, p, i, i, acc, i, i), emit

    @intrinsic
    def widen(typingctx, kind, items, start, n, out, out_start):
        """Convert `n` neighbouring items to float32 and write them to `out`."""

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            for kind, _ in cases(builder, args[0]):
                source, to = at(1, kind, args[2]), at(4, KIND_F32, args[5])
                for d, lanes in vectors_then_rest(builder, args[3], (LANES, 0)):
                    value = simd.load(builder, kind, builder.gep(source, [d]), lanes)
                    simd.store(builder, value, builder.gep(to, [d]))
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, items, i, i, out, i), emit

    @intrinsic
    def gather(typingctx, kind, items, start, cells, n, out, out_start, out_step):
        """Convert the items ``start + cells[t]`` and write them `out_step` apart to `out`."""

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            cell = context.make_array(signature.args[3])(context, builder, args[3]).data
            for kind, _ in cases(builder, args[0]):
                source, to = at(1, kind, args[2]), at(5, KIND_F32, args[6])
                with count(builder, args[4]) as t:
                    index = builder.sext(builder.load(builder.gep(cell, [t])), simd.I64)
                    value = simd.load(builder, kind, builder.gep(source, [index]), 0)
                    simd.store(builder, value, builder.gep(to, [builder.mul(t, args[7])]))
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, items, i, cells, i, out, i, i), emit

    @intrinsic
    def prefetch(typingctx, items, start, n):
        """Ask for `n` bytes from byte `start` to be brought to the second-level cache."""

        def emit(context, builder, signature, args):
            byte = ir.IntType(8).as_pointer()
            i32 = simd.I32
            hint = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
            )
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            first = builder.gep(builder.bitcast(data, byte), [args[1]])
            with loop(builder, simd.I64(0), args[2], simd.I64(64)) as d:
                # read; not the first level, which a stream would flush
                builder.call(hint, [builder.gep(first, [d]), i32(0), i32(2), i32(1)])
            return context.get_dummy_value()

        i = types.intp
        return types.void(items, i, i), emit

else:

    def _plain(kind, items, start, n):
        flat = items.reshape(-1)
        if kind == KIND_F32:
            return flat.view(np.float32)[start : start + n]
        if kind == KIND_F16:
            return flat[start : start + n].view(np.float16).astype(np.float32)
        return (flat[start : start + n].astype(np.uint32) << np.uint32(16)).view(np.float32)

    def dots(kind, n_rows, k, o0, o1, o2, o3, n, q, q_start, q_step, s, s_start, s_step):
        rows = np.stack([_plain(kind, k, o, n) for o in (o0, o1, o2, o3)])
        for r in range(n_rows):
            first = q_start + r * q_step
            s[s_start + r * s_step :][:4] = (rows * q[first : first + n]).sum(axis=1)

    def mix(
        kind, n_rows, v, v_start, v_step, width, cells, n, p, p_start, p_step, acc,
        acc_start, acc_step,
    ):  # fmt: skip
        for t in range(n):
            row = _plain(kind, v, v_start + int(cells[t]) * v_step, width)
            for r in range(n_rows):
                acc[acc_start + r * acc_step :][:width] += p[p_start + r * p_step + t] * row

    def widen(kind, items, start, n, out, out_start):
        out[out_start : out_start + n] = _plain(kind, items, start, n)

    def gather(kind, items, start, cells, n, out, out_start, out_step):
        for t in range(n):
            out[out_start + t * out_step] = _plain(kind, items, start + int(cells[t]), 1)[0]

    def prefetch(items, start, n):
        pass


def _emit_dots(builder, kind, k_rows, n, q_rows, s_rows):
    sums = zeros(builder, 4 * len(q_rows), LANES)
    rest = zeros(builder, len(q_rows), 4)
    for d, lanes in vectors_then_rest(builder, n, (LANES, 0)):
        # The rows of q stay in registers for one cell after the other: 12 sums, 3 rows and one
        # cell are all the registers there are.
        factors = [simd.load(builder, KIND_F32, builder.gep(row, [d]), lanes) for row in q_rows]
        cells = (simd.load(builder, kind, builder.gep(row, [d]), lanes) for row in k_rows)
        if lanes:
            for c, cell in enumerate(cells):
                for r, factor in enumerate(factors):
                    add_product(builder, sums[4 * r + c], factor, cell)
        else:
            four = simd.pack_lanes(builder, list(cells))
            for r, factor in enumerate(factors):
                add_product(builder, rest[r], simd.splat(builder, factor, 4), four)
    for r, to in enumerate(s_rows):
        total = simd.sum_lanes4(builder, [builder.load(s) for s in sums[4 * r : 4 * r + 4]])
        simd.store(builder, builder.fadd(total, builder.load(rest[r])), to)


def _emit_mix(builder, source, width, p_rows, sums):
    n_vectors = _VECTORS[len(p_rows)]
    for d, lanes in vectors_then_rest(builder, width, (n_vectors * LANES, LANES, 0)):
        n = n_vectors if lanes > LANES else 1
        lanes = min(lanes, LANES)
        totals = [zeros(builder, n, lanes) for _ in p_rows]
        _emit_weighted_sums(builder, source, d, p_rows, totals, lanes)
        for r, first in enumerate(sums):
            for j in range(n):
                to = builder.gep(first, [builder.add(d, simd.I64(j * lanes))])
                old = simd.load(builder, KIND_F32, to, lanes)
                simd.store(builder, builder.fadd(old, builder.load(totals[r][j])), to)


def _emit_weighted_sums(builder, source, d, p_rows, totals, lanes):
    """Add the columns from `d` of all V rows to ``totals[row][vector]``."""
    kind, first, step, cell, n_cells = source
    with count(builder, n_cells) as t:
        index = builder.sext(builder.load(builder.gep(cell, [t])), simd.I64)
        v_row = builder.gep(first, [builder.add(builder.mul(index, step), d)])
        weights = [builder.load(builder.gep(p, [t])) for p in p_rows]
        if lanes:
            weights = [simd.splat(builder, weight, lanes) for weight in weights]
        for j in range(len(totals[0])):
            pointer = builder.gep(v_row, [simd.I64(j * lanes)])
            value = simd.load(builder, kind, pointer, lanes)
            for r, weight in enumerate(weights):
                add_product(builder, totals[r][j], weight, value)
