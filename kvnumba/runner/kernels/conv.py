"""The causal convolution of state space models: a few taps per channel, then silu.

A token sees itself and the `d_conv - 1` tokens before it; those before the batch come from the
state r. Every token's arithmetic is the same wherever in a batch it stands.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.jit import JIT, njit
from kvnumba.kernels.loops import LANES, Pointers, vectors_then_rest
from kvnumba.runner.kernels.gates import emit_silu

BLOCK = 64
"""Channels worked on together: their rows stay in the first-level cache."""


if JIT:

    @intrinsic
    def silu_values(typingctx, a):
        """Set the neighbouring values of the 1-D array `a` to ``a / (1 + e**-a)``."""

        def emit(context, builder, signature, args):
            first = Pointers(context, builder, signature, args)(0, KIND_F32, simd.I64(0))
            n = builder.extract_value(context.make_array(a)(context, builder, args[0]).shape, 0)
            for j, lanes in vectors_then_rest(builder, n, (LANES, 0)):
                place = builder.gep(first, [j])
                x = simd.load(builder, KIND_F32, place, lanes)
                simd.store(builder, emit_silu(builder, x, lanes), place)
            return context.get_dummy_value()

        return types.void(a), emit

else:

    def silu_values(a):
        with np.errstate(over="ignore"):
            a[:] = a / (np.float32(1) + np.exp(-a))


@njit(fastmath={"contract"})
def _add_products(total, weights, values):
    for j in range(total.shape[0]):
        total[j] += weights[j] * values[j]


@njit()
def _convolve_block(out, states, history, r, x, weights, bias, d0, d1):
    """Do channels d0 to below d1 of one sequence."""
    n, n_before = x.shape[0], weights.shape[0] - 1
    for d in range(d0, d1):
        for k in range(n_before):
            history[k, d] = r[d * n_before + k]
    for t in range(n):
        row = out[t, d0:d1]
        row[:] = bias[d0:d1]
        for k in range(n_before + 1):
            source = t + k - n_before
            if source < 0:
                _add_products(row, weights[k, d0:d1], history[source + n_before, d0:d1])
            else:
                _add_products(row, weights[k, d0:d1], x[source, d0:d1])
        silu_values(row)
    for i in range(states.shape[0]):
        first = n - states.shape[0] + i + 1 - n_before  # the oldest token that is still seen
        for k in range(n_before):
            row = history[first + k + n_before] if first + k < 0 else x[first + k]
            for d in range(d0, d1):
                states[i, d * n_before + k] = row[d]


@njit(parallel=True)
def convolve_kernel(out, states, history, r, x, weights, bias, n_parts):
    """Convolve the tokens of several sequences of equal length, then apply silu.

    Parameters
    ----------
    out : ndarray of float32, shape (n_seqs * n_seq_tokens, d_inner)
        Result, token order as `x`.
    states : ndarray of float32, shape (n_seqs, n_states, d_inner * (d_conv - 1))
        Result: r after each of a sequence's last `n_states` tokens, in token order.
    history : ndarray of float32, shape (n_seqs, d_conv - 1, d_inner)
        Scratch.
    r : ndarray of float32, shape (n_seqs, d_inner * (d_conv - 1))
        The inputs of the tokens before the batch, ``[d_inner, d_conv - 1]`` of each sequence.
    x : ndarray of float32, shape (n_seqs * n_seq_tokens, d_inner)
        Inputs, sequence by sequence.
    weights : ndarray of float32, shape (d_conv, d_inner)
        The last row is the token's own.
    bias : ndarray of float32, shape (d_inner,)
    n_parts : int
        Into how many parts the channels are split; at most one thread works on each.

    Notes
    -----
    Gu and Dao, "Mamba" (arXiv 2312.00752), section 3.4.
    """
    n_seqs, d_inner = r.shape[0], x.shape[1]
    n, n_blocks = x.shape[0] // n_seqs, (d_inner + BLOCK - 1) // BLOCK
    for part in prange(n_parts):
        n_tasks = n_seqs * n_blocks
        for task in range(n_tasks * part // n_parts, n_tasks * (part + 1) // n_parts):
            q, d0 = task // n_blocks, task % n_blocks * BLOCK
            t0, t1 = q * n, (q + 1) * n
            _convolve_block(
                out[t0:t1], states[q], history[q], r[q], x[t0:t1], weights, bias,
                d0, min(d0 + BLOCK, d_inner),
            )  # fmt: skip
