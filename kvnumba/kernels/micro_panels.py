"""Micro-kernels of prefill: products of float32 tiles with a panel of query rows.

A panel is PANEL query rows side by side: its queries are stored ``[dk][PANEL]`` and its scores
``[cells][PANEL]``. So the scores of a tile are K tile times panel without transposing K, softmax
runs down the columns without leaving a lane, and the weights of neighbouring rows lie together
for the product with V. Accumulators fill the registers: 4 x 3 and 6 x 2 vectors of 16.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.jit import JIT
from kvnumba.kernels.loops import LANES, Pointers, add_product, count, every, loop, zeros

PANEL_VECTORS, COLUMN_VECTORS = 3, 2
PANEL = PANEL_VECTORS * LANES
"""Query rows of a panel."""
COLUMNS = COLUMN_VECTORS * LANES
"""V values that lie together: a V tile is stored ``[dv / COLUMNS][cells][COLUMNS]``."""
CELLS = 4 if simd.N_REGISTERS == 16 else 8
"""Cells whose scores are computed at once."""
ROWS = 6 if simd.N_REGISTERS == 16 else 12
"""Query rows whose weighted sums are computed at once; divides PANEL."""


if JIT:

    @intrinsic
    def panel_scores(typingctx, k_tile, k_start, n, dk, panel, p_start, s, s_start):
        """Write the scores ``[n][PANEL]`` of `n` K rows, `n` rounded up to a multiple of CELLS."""

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            k, q, to = (at(a, KIND_F32, args[a + 1]) for a in (0, 4, 6))
            dk = args[3]
            step = simd.I64(CELLS)
            with loop(builder, simd.I64(0), args[2], step) as i:
                rows = every(builder, builder.gep(k, [builder.mul(i, dk)]), dk, CELLS)
                sums = [zeros(builder, PANEL_VECTORS, LANES) for _ in rows]
                with count(builder, dk) as d:
                    vectors = _load_vectors(
                        builder, q, builder.mul(d, simd.I64(PANEL)), PANEL_VECTORS
                    )
                    _add_outer_product(builder, [builder.gep(r, [d]) for r in rows], vectors, sums)
                first = builder.gep(to, [builder.mul(i, simd.I64(PANEL))])
                for r, row in enumerate(every(builder, first, simd.I64(PANEL), CELLS)):
                    for j, slot in enumerate(sums[r]):
                        pointer = builder.gep(row, [simd.I64(j * LANES)])
                        simd.store(builder, builder.load(slot), pointer)
            return context.get_dummy_value()

        i = types.intp
        return types.void(k_tile, i, i, i, panel, i, s, i), emit

    @intrinsic
    def panel_softmax(typingctx, s, s_start, n, maxima, totals, factors, start):
        """Turn the scores ``[n][PANEL]`` to weights and bring maxima and totals up to date.

        Column j's maximum, total and factor are at ``start + j``; what was summed before must be
        multiplied by the factor.
        """

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            first = at(0, KIND_F32, args[1])
            state = [at(a, KIND_F32, args[6]) for a in (3, 4, 5)]
            for j in range(PANEL_VECTORS):
                offset = [simd.I64(j * LANES)]
                column = builder.gep(first, offset)
                _emit_column_softmax(
                    builder, column, args[2], *(builder.gep(x, offset) for x in state)
                )
            return context.get_dummy_value()

        i = types.intp
        return types.void(s, i, i, maxima, totals, factors, i), emit

    @intrinsic
    def panel_mix(typingctx, s, s_start, n, v_tile, v_start, v_step, acc, a_start, width, factors):
        """Scale the sums ``[PANEL][width]`` by the panel's factors and add the weighted V rows.

        `width` is a multiple of COLUMNS; V's columns lie in groups `v_step` apart. Row j's factor
        is ``factors[j]``.
        """

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            s, v, acc = (at(a, KIND_F32, args[a + 1]) for a in (0, 3, 6))
            factor = at(9, KIND_F32, simd.I64(0))
            n, v_step, width = args[2], args[5], args[8]
            groups = builder.sdiv(width, simd.I64(COLUMNS))
            with count(builder, groups) as group:
                tile = builder.gep(v, [builder.mul(group, v_step)])
                column = builder.mul(group, simd.I64(COLUMNS))
                rows = simd.I64(PANEL), simd.I64(ROWS)
                with loop(builder, simd.I64(0), *rows) as r:
                    to = builder.gep(acc, [builder.add(builder.mul(r, width), column)])
                    _emit_row_sums(
                        builder, builder.gep(s, [r]), n, tile, to, width, builder.gep(factor, [r])
                    )
            return context.get_dummy_value()

        i = types.intp
        return types.void(s, i, i, v_tile, i, i, acc, i, i, factors), emit

else:

    def panel_scores(k_tile, k_start, n, dk, panel, p_start, s, s_start):
        n = -(-n // CELLS) * CELLS
        keys = k_tile[k_start : k_start + n * dk].reshape(n, dk)
        queries = panel[p_start : p_start + dk * PANEL].reshape(dk, PANEL)
        scores = s[s_start : s_start + n * PANEL].reshape(n, PANEL)
        scores[:] = (keys[:, :, None] * queries).sum(axis=1)

    def panel_softmax(s, s_start, n, maxima, totals, factors, start):
        scores = s[s_start : s_start + n * PANEL].reshape(n, PANEL)
        m, total, factor = (x[start : start + PANEL] for x in (maxima, totals, factors))
        old = m.copy()
        for row in scores:
            np.copyto(m, row, where=row > m)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            factor[:] = np.where(old - m < -126, 0, np.exp2(old - m))
            scores[:] = np.where(scores - m < -126, 0, np.exp2(scores - m))
        total[:] = total * factor + scores.sum(axis=0)

    def panel_mix(s, s_start, n, v_tile, v_start, v_step, acc, a_start, width, factors):
        weights = s[s_start : s_start + n * PANEL].reshape(n, PANEL)
        sums = acc[a_start : a_start + PANEL * width].reshape(PANEL, width)
        sums *= factors[:PANEL, None]
        for group in range(width // COLUMNS):
            v = v_tile[v_start + group * v_step :][: n * COLUMNS].reshape(n, COLUMNS)
            added = (weights[:, :, None] * v[:, None, :]).sum(axis=0)
            sums[:, group * COLUMNS : (group + 1) * COLUMNS] += added


def _load_vectors(builder, first, index, n):
    pointers = [builder.gep(first, [builder.add(index, simd.I64(j * LANES))]) for j in range(n)]
    return [simd.load(builder, KIND_F32, p, LANES) for p in pointers]


def _add_outer_product(builder, scalars, vectors, sums):
    for pointer, slots in zip(scalars, sums, strict=True):
        factor = simd.splat(builder, builder.load(pointer), LANES)
        for vector, slot in zip(vectors, slots, strict=True):
            add_product(builder, slot, factor, vector)


def _emit_row_sums(builder, weights, n, tile, to, width, factors):
    """Emit ROWS x COLUMNS sums over `n` cells, added to the scaled sums at `to`."""
    sums = [zeros(builder, COLUMN_VECTORS, LANES) for _ in range(ROWS)]
    with count(builder, n) as t:
        vectors = _load_vectors(builder, tile, builder.mul(t, simd.I64(COLUMNS)), COLUMN_VECTORS)
        first = builder.gep(weights, [builder.mul(t, simd.I64(PANEL))])
        scalars = [builder.gep(first, [simd.I64(r)]) for r in range(ROWS)]
        _add_outer_product(builder, scalars, vectors, sums)
    for r, row in enumerate(every(builder, to, width, ROWS)):
        factor = builder.load(builder.gep(factors, [simd.I64(r)]))
        factor = simd.splat(builder, factor, LANES)
        for j, slot in enumerate(sums[r]):
            pointer = builder.gep(row, [simd.I64(j * LANES)])
            old = simd.load(builder, KIND_F32, pointer, LANES)
            simd.store(builder, simd.fma(builder, old, factor, builder.load(slot)), pointer)


def _emit_column_softmax(builder, column, n, maximum, total, factor):
    old = simd.load(builder, KIND_F32, maximum, LANES)
    largest, added = zeros(builder, 2, LANES)
    builder.store(old, largest)
    with count(builder, n) as t:
        pointer = builder.gep(column, [builder.mul(t, simd.I64(PANEL))])
        value = simd.load(builder, KIND_F32, pointer, LANES)
        builder.store(simd.larger(builder, value, builder.load(largest)), largest)
    m = builder.load(largest)
    with count(builder, n) as t:
        pointer = builder.gep(column, [builder.mul(t, simd.I64(PANEL))])
        value = simd.load(builder, KIND_F32, pointer, LANES)
        y = simd.exp2(builder, builder.fsub(value, m))
        simd.store(builder, y, pointer)
        builder.store(builder.fadd(builder.load(added), y), added)
    scale = simd.exp2(builder, builder.fsub(old, m))
    before = simd.load(builder, KIND_F32, total, LANES)
    simd.store(builder, simd.fma(builder, before, scale, builder.load(added)), total)
    simd.store(builder, m, maximum)
    simd.store(builder, scale, factor)
