"""Bitmaps over cells: counting, finding and ranges of bits in uint64 words.

A bitmap of ``n`` cells has ``ceil(n / 64)`` words; bit ``i % 64`` of word ``i // 64`` is cell
``i``. Bits of cells that do not exist are never set.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvnumba.kernels.jit import JIT, njit

WORD_BITS = 64
ONE = np.uint64(1)
ZERO = np.uint64(0)
FULL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


def n_words(n_cells: int) -> int:
    """Return how many words a bitmap of `n_cells` takes."""
    return (n_cells + WORD_BITS - 1) // WORD_BITS


if JIT:

    @intrinsic
    def popcount(typingctx, word):
        """Return the number of set bits of a uint64."""

        def codegen(context, builder, signature, args):
            return builder.ctpop(args[0])

        return types.uint64(types.uint64), codegen

    @intrinsic
    def trailing_zeros(typingctx, word):
        """Return the index of the lowest set bit of a uint64; 64 for zero."""

        def codegen(context, builder, signature, args):
            return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

        return types.uint64(types.uint64), codegen

    @intrinsic
    def leading_zeros(typingctx, word):
        """Return the number of zero bits above the highest set bit of a uint64; 64 for zero."""

        def codegen(context, builder, signature, args):
            return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

        return types.uint64(types.uint64), codegen

else:

    def popcount(word):
        """Return the number of set bits of a uint64."""
        return np.uint64(int(word).bit_count())

    def trailing_zeros(word):
        """Return the index of the lowest set bit of a uint64; 64 for zero."""
        word = int(word)
        return np.uint64((word & -word).bit_length() - 1 if word else WORD_BITS)

    def leading_zeros(word):
        """Return the number of zero bits above the highest set bit of a uint64; 64 for zero."""
        return np.uint64(WORD_BITS - int(word).bit_length())


@njit()
def _bits_from(j):
    """Return a word with the bits ``j`` and above set; `j` in ``[0, 64)``."""
    return FULL << np.uint64(j)


@njit()
def _next_set(a, b, start, stop):
    """Return the first cell in ``[start, stop)`` set in ``a | b``, or `stop`."""
    if start >= stop:
        return stop
    w = start // WORD_BITS
    word = (a[w] | b[w]) & _bits_from(start % WORD_BITS)
    while word == ZERO:
        w += 1
        if w * WORD_BITS >= stop:
            return stop
        word = a[w] | b[w]
    return min(stop, w * WORD_BITS + np.int64(trailing_zeros(word)))


@njit()
def _next_clear(a, b, start, stop):
    """Return the first cell in ``[start, stop)`` clear in ``a | b``, or `stop`."""
    if start >= stop:
        return stop
    w = start // WORD_BITS
    word = ~(a[w] | b[w]) & _bits_from(start % WORD_BITS)
    while word == ZERO:
        w += 1
        if w * WORD_BITS >= stop:
            return stop
        word = ~(a[w] | b[w])
    return min(stop, w * WORD_BITS + np.int64(trailing_zeros(word)))


@njit()
def _last_set(bits):
    """Return the highest set cell of a bitmap, or -1."""
    for w in range(bits.shape[0] - 1, -1, -1):
        if bits[w] != ZERO:
            return w * WORD_BITS + 63 - np.int64(leading_zeros(bits[w]))
    return np.int64(-1)


@njit()
def count_kernel(bits):
    """Return the number of set bits of a bitmap, shape ``(n_words,)``, uint64."""
    n = np.int64(0)
    for w in range(bits.shape[0]):
        n += np.int64(popcount(bits[w]))
    return n


@njit()
def list_kernel(bits, out):
    """Write the set cells of a bitmap in ascending order.

    Parameters
    ----------
    bits : ndarray, shape (n_words,), uint64
    out : ndarray, shape (at least the number of set bits,), int32
        Written from its start.

    Returns
    -------
    n : int
        How many cells were written.
    """
    n = 0
    for w in range(bits.shape[0]):
        word = bits[w]
        while word != ZERO:
            out[n] = w * WORD_BITS + np.int64(trailing_zeros(word))
            word &= word - ONE
            n += 1
    return n
