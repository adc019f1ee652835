"""Loops, branches and accumulators that micro-kernels are emitted with."""

from __future__ import annotations

from contextlib import contextmanager

from llvmlite import ir
from numba.core import cgutils

from kvnumba.kernels import simd
from kvnumba.kernels.half import KINDS

LANES = simd.LANES
MAX_ROWS = 3 if simd.N_REGISTERS == 16 else 4
"""Most query rows at once: 4 cells times 3 rows leave 4 of 16 registers for loads."""
_ROW_STEPS = (1, 2, MAX_ROWS)


class Pointers:
    """Pointers to float32 or half items of an intrinsic's array arguments."""

    def __init__(self, context, builder, signature, args):
        self._given = context, builder, signature.args, args

    def __call__(self, a, kind, index):
        context, builder, array_types, args = self._given
        return simd.item_pointer(context, builder, array_types[a], args[a], kind, index)


def cases(builder, kind, n_rows=None):
    """Yield each element type (and row count) while the builder stands in the branch for it."""
    for known in KINDS.values():
        is_kind = builder.icmp_signed("==", kind, simd.I64(known))
        with builder.if_then(is_kind):
            if n_rows is None:
                yield known, 1
                continue
            for rows in _ROW_STEPS:
                with builder.if_then(builder.icmp_signed("==", n_rows, simd.I64(rows))):
                    yield known, rows


@contextmanager
def loop(builder, start, stop, step):
    """Emit a loop over ``range(start, stop, step)`` and give its index.

    The body is written as it shall run. LLVM is told not to unroll or vectorise it once more,
    which would only multiply the code, and the time to compile it.
    """
    before = builder.block
    body, after = builder.append_basic_block("loop"), builder.append_basic_block("loop.end")
    builder.cbranch(builder.icmp_signed("<", start, stop), body, after)
    builder.position_at_end(body)
    index = builder.phi(simd.I64)
    index.add_incoming(start, before)
    yield index
    following = builder.add(index, step)
    index.add_incoming(following, builder.block)
    more = builder.cbranch(builder.icmp_signed("<", following, stop), body, after)
    more.set_metadata("llvm.loop", _as_written(builder.module))
    builder.position_at_end(after)


def _as_written(module):
    """Return the metadata of one loop; it names itself first, as LLVM asks."""
    unroll = [ir.MetaDataString(module, "llvm.loop.unroll.disable")]
    vectorise = [ir.MetaDataString(module, "llvm.loop.vectorize.enable"), ir.IntType(1)(0)]
    node = module.add_metadata([simd.I64(len(module.metadata))])  # unlike any other
    node.operands = (node, module.add_metadata(unroll), module.add_metadata(vectorise))
    return node


def count(builder, n):
    """Emit a loop over ``range(n)``; see `loop`."""
    return loop(builder, simd.I64(0), n, simd.I64(1))


def vectors_then_rest(builder, n, steps):
    """Yield index and lanes in a loop of whole vectors, then in one of the values left.

    `steps` lists the lanes of each loop, widest first; 0 is the scalar loop.
    """
    start = simd.I64(0)
    for lanes in steps:
        step = simd.I64(max(lanes, 1))
        stop = builder.sub(n, builder.srem(builder.sub(n, start), step))
        with loop(builder, start, stop, step) as d:
            yield d, lanes
        start = stop


def every(builder, first, step, n):
    """Return `n` pointers, `step` items apart."""
    pointers = [first]
    for _ in range(n - 1):
        pointers.append(builder.gep(pointers[-1], [step]))
    return pointers


def zeros(builder, n, lanes):
    """Return `n` accumulators set to 0; LLVM turns these stack slots into registers."""
    zero = simd.constant(simd.F32, 0.0, lanes)
    slots = [cgutils.alloca_once(builder, zero.type) for _ in range(n)]
    for slot in slots:
        builder.store(zero, slot)
    return slots


def add_product(builder, slot, a, b):
    builder.store(simd.fma(builder, a, b, builder.load(slot)), slot)
