"""SwiGLU, vectorised: Numba from PyPI has no vector exp."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.jit import JIT
from kvnumba.kernels.loops import LANES, Pointers, vectors_then_rest

_LOG2_E = 1.4426950408889634


if JIT:

    @intrinsic
    def gate_values(typingctx, a, a_start, b, b_start, n):
        """Set `n` neighbouring values of `a` to ``silu(a) * b``; silu(x) is ``x / (1 + e**-x)``."""

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            gate, up = at(0, KIND_F32, args[1]), at(2, KIND_F32, args[3])
            for j, lanes in vectors_then_rest(builder, args[4], (LANES, 0)):
                place = builder.gep(gate, [j])
                x = simd.load(builder, KIND_F32, place, lanes)
                y = simd.load(builder, KIND_F32, builder.gep(up, [j]), lanes)
                simd.store(builder, builder.fmul(emit_silu(builder, x, lanes), y), place)
            return context.get_dummy_value()

        i = types.intp
        return types.void(a, i, b, i, i), emit

else:

    def gate_values(a, a_start, b, b_start, n):
        gate, up = a.reshape(-1)[a_start : a_start + n], b.reshape(-1)[b_start : b_start + n]
        with np.errstate(over="ignore"):
            gate[:] = gate / (np.float32(1) + np.exp(-gate)) * up


def emit_silu(builder, x, lanes):
    """Emit ``x / (1 + e**-x)`` for a scalar (0 lanes) or a vector."""
    power = builder.fmul(x, simd.constant(simd.F32, -_LOG2_E, lanes))
    # exp2 takes no more than 127; x / 2**126 is as good as 0
    most = simd.constant(simd.F32, 126.0, lanes)
    power = builder.select(builder.fcmp_ordered(">", power, most), most, power)
    one = simd.constant(simd.F32, 1.0, lanes)
    return builder.fdiv(x, builder.fadd(one, simd.exp2(builder, power)))
