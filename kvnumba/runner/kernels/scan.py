"""The selective scan of state space models, several sequences at once.

Channels are independent: they are worked on in blocks whose states stay in the first-level cache,
and the blocks are split over threads. Lanes run over the values of a channel's state. Every
token's arithmetic is the same wherever in a batch it stands, so the states left on the way are,
bit for bit, those of a batch that ends there.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.half import KIND_F32
from kvnumba.kernels.jit import JIT, njit
from kvnumba.kernels.loops import LANES, Pointers, add_product, loop, vectors_then_rest, zeros
from kvnumba.runner.kernels.elementary import emit_exp, emit_softplus, softplus
from kvnumba.runner.kernels.gates import emit_silu

BLOCK = 64
"""Channels whose states are worked on together; 4 KiB of 16 values each, and as much of `a`."""
_GROUP = 4
"""Channels whose outputs are summed over their lanes together."""


if JIT:

    @intrinsic
    def step_values(typingctx, step, taken, dt, bias, x, n):
        """Set ``step = softplus(dt + bias)`` and ``taken = step * x``, `n` values of each."""

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            first = [at(a, KIND_F32, simd.I64(0)) for a in range(5)]
            for j, lanes in vectors_then_rest(builder, args[5], (LANES, 0)):
                to, also, *sources = [builder.gep(p, [j]) for p in first]
                raw, more, x = [simd.load(builder, KIND_F32, p, lanes) for p in sources]
                value = emit_softplus(builder, builder.fadd(raw, more))
                simd.store(builder, value, to)
                simd.store(builder, builder.fmul(value, x), also)
            return context.get_dummy_value()

        return types.void(step, taken, dt, bias, x, types.intp), emit

    @intrinsic
    def scan_values(typingctx, y, s, a, b, c, step, taken, n, d_state):
        """Take one token into the states of `n` channels, ``s[n * d_state]``.

        ``s = s * e**(step * a) + b * taken``, and ``y`` is the product of `s` and `c`.
        """

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            first = [at(k, KIND_F32, simd.I64(0)) for k in range(7)]
            start = simd.I64(0)
            for n_channels in (_GROUP, 1):
                width = simd.I64(n_channels)
                stop = builder.sub(args[7], builder.srem(builder.sub(args[7], start), width))
                with loop(builder, start, stop, width) as d:
                    _emit_channels(builder, first, d, n_channels, args[8])
                start = stop
            return context.get_dummy_value()

        i = types.intp
        return types.void(y, s, a, b, c, step, taken, i, i), emit

    @intrinsic
    def finish_values(typingctx, y, x, skip, z, n):
        """Set `n` neighbouring values of `y` to ``(y + skip * x) * silu(z)``."""

        def emit(context, builder, signature, args):
            at = Pointers(context, builder, signature, args)
            first = [at(k, KIND_F32, simd.I64(0)) for k in range(4)]
            for j, lanes in vectors_then_rest(builder, args[4], (LANES, 0)):
                places = [builder.gep(p, [j]) for p in first]
                y, x, skip, z = [simd.load(builder, KIND_F32, p, lanes) for p in places]
                total = simd.fma(builder, skip, x, y)
                value = builder.fmul(total, emit_silu(builder, z, lanes))
                simd.store(builder, value, places[0])
            return context.get_dummy_value()

        return types.void(y, x, skip, z, types.intp), emit

else:

    def step_values(step, taken, dt, bias, x, n):
        step[:n] = softplus(dt + bias)
        taken[:n] = step[:n] * x

    def scan_values(y, s, a, b, c, step, taken, n, d_state):
        state, rate = s[: n * d_state].reshape(n, d_state), a[: n * d_state].reshape(n, d_state)
        with np.errstate(over="ignore", invalid="ignore"):
            state *= np.exp(step[:n, None] * rate)
            state += taken[:n, None] * b
            y[:n] = (state * c).sum(1)

    def finish_values(y, x, skip, z, n):
        with np.errstate(over="ignore", invalid="ignore"):
            y[:n] = (y[:n] + skip * x) * (z / (np.float32(1) + np.exp(-z)))


def _emit_channels(builder, first, d, n_channels, d_state):
    """Emit one token of the channels from `d` on."""
    y, s, a, b, c, step, taken = first
    channels = [builder.add(d, simd.I64(i)) for i in range(n_channels)]
    starts = [builder.mul(channel, d_state) for channel in channels]
    factors = [
        [builder.load(builder.gep(p, [channel])) for p in (step, taken)] for channel in channels
    ]
    sums = {lanes: zeros(builder, n_channels, lanes) for lanes in (LANES, 0)}
    for j, lanes in vectors_then_rest(builder, d_state, (LANES, 0)):
        given = simd.load(builder, KIND_F32, builder.gep(b, [j]), lanes)
        wanted = simd.load(builder, KIND_F32, builder.gep(c, [j]), lanes)
        spread = [[simd.splat(builder, f, lanes) if lanes else f for f in pair] for pair in factors]
        places, rates = [], []
        for start, (length, _) in zip(starts, spread, strict=True):
            index = builder.add(start, j)
            rate = simd.load(builder, KIND_F32, builder.gep(a, [index]), lanes)
            rates.append(builder.fmul(length, rate))
            places.append(builder.gep(s, [index]))
        for place, kept, (_, amount), slot in zip(
            places, _emit_exps(builder, rates), spread, sums[lanes], strict=True
        ):
            old = simd.load(builder, KIND_F32, place, lanes)
            new = simd.fma(builder, old, kept, builder.fmul(amount, given))
            simd.store(builder, new, place)
            add_product(builder, slot, wanted, new)
    vectors = [builder.load(slot) for slot in sums[LANES]]
    vectors += [simd.constant(simd.F32, 0.0, LANES)] * (_GROUP - n_channels)
    totals = simd.sum_lanes4(builder, vectors)
    for i, channel in enumerate(channels):
        total = builder.extract_element(totals, simd.I32(i))
        total = builder.fadd(total, builder.load(sums[0][i]))
        simd.store(builder, total, builder.gep(y, [channel]))


def _emit_exps(builder, values):
    """Emit e**x of one value or vector, or of four side by side.

    As one long vector their operations alternate: a processor that looks ahead over two dozen of
    them finds four that do not wait for each other.
    """
    n = simd.lanes_of(values[0])
    if len(values) == 1 or not n:
        return [emit_exp(builder, x) for x in values]
    p, q, r, s = values
    low = simd.shuffle(builder, p, q, list(range(2 * n)))
    high = simd.shuffle(builder, r, s, list(range(2 * n)))
    power = emit_exp(builder, simd.shuffle(builder, low, high, list(range(4 * n))))
    return [simd.shuffle(builder, power, power, list(range(k, k + n))) for k in range(0, 4 * n, n)]


@njit()
def _scan_block(out, states, work, s, dt, x, z, b, c, a, skip, bias, d0, d1):
    """Do channels d0 to below d1 of one sequence."""
    n, n_states, d_state = x.shape[0], states.shape[0], a.shape[1]
    first, stop, width = d0 * d_state, d1 * d_state, d1 - d0
    rates, step, taken = a.reshape(-1)[first:stop], work[0], work[1]
    state = states[n_states - 1, first:stop]
    state[:] = s[first:stop]
    for t in range(n):
        y, row = out[t, d0:d1], x[t, d0:d1]
        step_values(step, taken, dt[t, d0:d1], bias[d0:d1], row, width)
        scan_values(y, state, rates, b[t], c[t], step, taken, width, d_state)
        finish_values(y, row, skip[d0:d1], z[t, d0:d1], width)
        kept = t - (n - n_states)
        if 0 <= kept < n_states - 1:
            states[kept, first:stop] = state


@njit(parallel=True)
def scan_kernel(out, states, work, s, dt, x, z, b, c, a, skip, bias, n_parts):
    """Scan the tokens of several sequences of equal length.

    For each token and channel, with ``h = softplus(dt + bias)``: the state becomes
    ``s * e**(h * a) + b * h * x``, and the output is ``(s . c + skip * x) * silu(z)``.

    Parameters
    ----------
    out : ndarray of float32, shape (n_seqs * n_seq_tokens, d_inner)
        Result.
    states : ndarray of float32, shape (n_seqs, n_states, d_inner * d_state)
        Result: s after each of a sequence's last `n_states` tokens, in token order.
    work : ndarray of float32, shape (at least n_parts, 2, at least BLOCK)
        Scratch.
    s : ndarray of float32, shape (n_seqs, d_inner * d_state)
        The states before.
    dt, x, z : ndarray of float32, shape (n_seqs * n_seq_tokens, d_inner)
        Time step, input and gate of each token, sequence by sequence.
    b, c : ndarray of float32, shape (n_seqs * n_seq_tokens, d_state)
        How the input enters the state, and how the state is read.
    a : ndarray of float32, shape (d_inner, d_state)
        Rates of decay, negative.
    skip, bias : ndarray of float32, shape (d_inner,)
    n_parts : int
        Into how many parts the channels are split; at most one thread works on each.

    Notes
    -----
    Gu and Dao, "Mamba" (arXiv 2312.00752), section 3.2, with the recurrence of their released
    code (``b * h`` in place of the exact zero-order hold).
    """
    n_seqs, d_inner = s.shape[0], x.shape[1]
    n, n_blocks = x.shape[0] // n_seqs, (d_inner + BLOCK - 1) // BLOCK
    for part in prange(n_parts):
        n_tasks = n_seqs * n_blocks
        for task in range(n_tasks * part // n_parts, n_tasks * (part + 1) // n_parts):
            q, d0 = task // n_blocks, task % n_blocks * BLOCK
            t0, t1 = q * n, (q + 1) * n
            _scan_block(
                out[t0:t1], states[q], work[part], s[q], dt[t0:t1], x[t0:t1], z[t0:t1],
                b[t0:t1], c[t0:t1], a, skip, bias, d0, min(d0 + BLOCK, d_inner),
            )  # fmt: skip
