"""Products with stored weights for many tokens.

Tokens are packed side by side into panels, ``[n_in][PANEL]``. A thread decodes a block of weight
rows into its second-level cache once and multiplies it with every panel; within a tile of ROWS
weights by PANEL tokens all sums stay in registers. No BLAS: its threads and OpenMP's would fight
for the cores, and this is as fast.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.jit import JIT, njit
from kvnumba.kernels.loops import LANES, Pointers, add_product, every, zeros
from kvnumba.runner.kernels.blocks import decode_row

_VECTORS = 2
PANEL = _VECTORS * LANES
"""Tokens side by side."""
ROWS = 6 if simd.N_REGISTERS == 16 else 12
"""Weight rows of a tile; times _VECTORS they leave 4 of 16 registers for loads."""


if JIT:

    @intrinsic
    def panel_products(typingctx, w, n_rows, n_in, panels, start, sums):
        """Multiply float32 rows with the panel that begins at `start`.

        Writes ``sums[r * PANEL + t]`` for all rows, `n_rows` rounded up to a multiple of ROWS.
        """

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            zero = simd.I64(0)
            weights, panel = at(0, KIND_F32, zero), at(3, KIND_F32, args[4])
            to, n_in, step = at(5, KIND_F32, zero), args[2], simd.I64(PANEL)
            with cgutils.for_range_slice(builder, zero, args[1], simd.I64(ROWS)) as (r, _):
                rows = every(builder, builder.gep(weights, [builder.mul(r, n_in)]), n_in, ROWS)
                totals = [zeros(builder, _VECTORS, LANES) for _ in rows]
                with cgutils.for_range(builder, n_in) as loop:
                    column = builder.gep(panel, [builder.mul(loop.index, step)])
                    tokens = [
                        simd.load(
                            builder, KIND_F32, builder.gep(column, [simd.I64(j * LANES)]), LANES
                        )
                        for j in range(_VECTORS)
                    ]
                    for row, slots in zip(rows, totals, strict=True):
                        weight = simd.load(builder, KIND_F32, builder.gep(row, [loop.index]), 0)
                        weight = simd.splat(builder, weight, LANES)
                        for slot, values in zip(slots, tokens, strict=True):
                            add_product(builder, slot, weight, values)
                first = builder.gep(to, [builder.mul(r, step)])
                for j, slot in enumerate(s for slots in totals for s in slots):
                    place = builder.gep(first, [simd.I64(j * LANES)])
                    simd.store(builder, builder.load(slot), place)
            return context.get_dummy_value()

        i = types.intp
        return types.void(w, i, i, panels, i, sums), emit

else:

    def panel_products(w, n_rows, n_in, panels, start, sums):
        rows = w[: n_rows * n_in].reshape(n_rows, n_in)
        panel = panels[start : start + n_in * PANEL].reshape(n_in, PANEL)
        with np.errstate(invalid="ignore"):
            sums[: n_rows * PANEL] = (rows @ panel).reshape(-1)


@njit(parallel=True)
def pack_panels_kernel(panels, x, n_parts):
    """Pack the tokens ``x[n, n_in]`` into panels; tokens that are missing in the last become 0.

    Parameters
    ----------
    panels : ndarray of float32, shape (at least ceil(n / PANEL) * n_in * PANEL,)
    """
    n, n_in = x.shape
    n_panels = (n + PANEL - 1) // PANEL
    for part in prange(n_parts):
        for p in range(n_panels * part // n_parts, n_panels * (part + 1) // n_parts):
            rows = x[p * PANEL : (p + 1) * PANEL]
            _pack_panel(panels[p * n_in * PANEL : (p + 1) * n_in * PANEL], rows)


@njit()
def _pack_panel(panel, rows):
    n, n_in = rows.shape
    for d in range(n_in):
        column = panel[d * PANEL : (d + 1) * PANEL]
        if n == PANEL:
            for t in range(PANEL):
                column[t] = rows[t, d]
        else:
            column[:] = 0
            for t in range(n):
                column[t] = rows[t, d]


def block_size(n_block: int, n_in: int) -> int:
    """Return the float32 values of working memory for blocks of `n_block` rows of `n_in`."""
    return (n_block + ROWS) * (n_in + PANEL)


@njit(parallel=True)
def multiply_panels_kernel(out, work, panels, w, kind, w_row_bytes, n_in, n_block, n_parts):
    """Multiply all panels with a matrix.

    Parameters
    ----------
    out : ndarray of float32, shape (n, n_rows)
        Result.
    work : ndarray of float32, shape (at least n_parts, at least `block_size`)
        Scratch.
    panels : ndarray of float32
        From `pack_panels_kernel`.
    w : ndarray of uint8
        Rows of `n_in` weights.
    kind, w_row_bytes : int
        ggml id and bytes per row.
    n_in : int
    n_block : int
        Rows decoded at a time, a multiple of ROWS.
    n_parts : int
        Into how many parts the rows are split; at most one thread works on each.
    """
    n_rows = out.shape[1]
    for part in prange(n_parts):
        r0, r1 = n_rows * part // n_parts, n_rows * (part + 1) // n_parts
        for first in range(r0, r1, n_block):
            n = min(n_block, r1 - first)
            _multiply_block(out, work[part], panels, w, kind, w_row_bytes, n_in, first, n)


@njit()
def _multiply_block(out, work, panels, w, kind, w_row_bytes, n_in, first, n):
    n_full = (n + ROWS - 1) // ROWS * ROWS
    weights, sums = work[: n_full * n_in], work[n_full * n_in : n_full * (n_in + PANEL)]
    for r in range(n):
        decode_row(kind, w, (first + r) * w_row_bytes, n_in, weights, r * n_in)
    for r in range(n * n_in, n_full * n_in):
        weights[r] = 0
    for t0 in range(0, out.shape[0], PANEL):
        panel_products(weights, n_full, n_in, panels, t0 * n_in, sums)
        for t in range(min(PANEL, out.shape[0] - t0)):
            row = out[t0 + t, first : first + n]
            for r in range(n):
                row[r] = sums[r * PANEL + t]
