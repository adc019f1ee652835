"""Masks of attention: for each token and cell, whether the one sees the other, or how far it is.

Out comes as storage items: float32, uint16 (the bits of float16), or uint8 (0 and 1). Words of the
sequences' bitmaps that are empty are filled without a look at positions.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from kvnumba.kernels import simd
from kvnumba.kernels.bits import FULL, ONE, WORD_BITS, ZERO
from kvnumba.kernels.half import KIND_F16, f32_to_f16
from kvnumba.kernels.jit import JIT, njit

FARTHEST_F16 = 65504
"""The greatest float16: a distance beyond it must not become infinite, which would hide a cell."""


if JIT:

    @intrinsic
    def _item_of(typingctx, value, like):
        """Return a float32 as a storage item of the type of `like`."""

        def emit(context, builder, signature, args):
            if signature.return_type == types.uint16:
                return simd.float_to_half(builder, KIND_F16, args[0])
            return args[0]

        item = types.uint16 if like == types.uint16 else types.float32
        return item(types.float32, like), emit

else:

    def _item_of(value, like):
        """Return a float32 as a storage item of the type of `like`."""
        return f32_to_f16(value) if like.dtype == np.uint16 else value


@njit()
def _fill_seen(lanes, word, pos, low, high, shown, hidden):
    """Fill the lanes of a word: `shown` for its members at positions in ``[low, high]``.

    Of a full word there may be any number in a row.
    """
    if word == FULL:
        for j in range(lanes.shape[0]):
            lanes[j] = shown if (low <= pos[j]) & (pos[j] <= high) else hidden
        return
    for j in range(lanes.shape[0]):
        is_member = (word >> np.uint64(j)) & ONE != ZERO
        lanes[j] = shown if is_member & (low <= pos[j]) & (pos[j] <= high) else hidden


@njit()
def _fill_distances(lanes, word, pos, low, high, q, hidden):
    """As `_fill_seen`, with minus the distance from position `q` where a cell is seen."""
    farthest = np.float32(FARTHEST_F16 if lanes.itemsize == 2 else 1 << 31)
    for j in range(lanes.shape[0]):
        # asked first, it makes a loop of its own, without shifts, for full words
        is_member = word == FULL or (word >> np.uint64(j % WORD_BITS)) & ONE != ZERO
        # fits in 32 bits, for neither is below -1; eight lanes go at once then
        distance = min(abs(np.float32(np.int32(pos[j] - q))), farthest)
        item = _item_of(np.float32(0) - distance, hidden)
        lanes[j] = item if is_member & (low <= pos[j]) & (pos[j] <= high) else hidden


@njit()
def _hide_later(lanes, pos, x, y, q, q_x, q_y, hidden):
    """Hide cells at position `q` itself that come after the token in reading order."""
    for j in range(lanes.shape[0]):
        if pos[j] == q and (y[j] > q_y or (y[j] == q_y and x[j] > q_x)):
            lanes[j] = hidden


@njit()
def _fill_row(row, members, pos, cell_xy, q, q_xy, low, high, is_alibi, shown, hidden):
    """Fill the mask of one token; `cell_xy` without columns means one position a cell."""
    has_xy = cell_xy.shape[1] > 0
    stop, n_kv = 0, row.shape[0]
    while stop < n_kv:
        first, word = stop, members[stop // WORD_BITS]
        stop = min(n_kv, first + WORD_BITS)
        while stop < n_kv and word in (ZERO, FULL) and members[stop // WORD_BITS] == word:
            stop = min(n_kv, stop + WORD_BITS)
        lanes = row[first:stop]
        if word == ZERO:
            lanes[:] = hidden
            continue
        if is_alibi:
            _fill_distances(lanes, word, pos[first:stop], low, high, q, hidden)
        else:
            _fill_seen(lanes, word, pos[first:stop], low, high, shown, hidden)
        if has_xy:
            x, y = cell_xy[0, first:stop], cell_xy[1, first:stop]
            _hide_later(lanes, pos[first:stop], x, y, q, q_xy[0], q_xy[1], hidden)


@njit()
def fill_mask_kernel(
    seq, pos, cell_xy, first_ids, q_pos, q_xy, low, high, is_alibi, items, out
):  # fmt: skip
    """Fill ``out[n_tokens, n_kv]``, one token after the other.

    Parameters
    ----------
    seq : ndarray of uint64, shape (n_seq_max, n_words)
        Bitmaps of the sequences over the cells.
    pos : ndarray of int32, shape (at least n_kv,)
        Position of each cell.
    cell_xy : ndarray of int32, shape (2, at least n_kv) or (2, 0)
        Second coordinates of each cell, x and y; with them, of the cells at a token's own position
        those are hidden that come later row by row (greater y, or the same y and greater x).
    first_ids, q_pos : ndarray of int32, shape (n_tokens,)
        Sequence through which each token looks, and its position.
    q_xy : ndarray of int32, shape (n_tokens, 2)
        x and y of each token; read only where `cell_xy` has columns.
    low, high : ndarray of int32, shape (n_tokens,)
        Least and greatest position that each token sees, see `kvnumba.kernels.sight`.
    is_alibi : bool
        Minus the distance of the positions stands where a cell is seen.
    items : ndarray, shape (2,), dtype of `out`
        What stands for seen and for hidden.
    out : ndarray of float32, uint16 or uint8, shape (n_tokens, n_kv)
        Result.
    """
    shown, hidden = items[0], items[1]
    for t in range(out.shape[0]):
        _fill_row(
            out[t], seq[first_ids[t]], pos, cell_xy, q_pos[t], q_xy[t], low[t], high[t], is_alibi,
            shown, hidden,
        )  # fmt: skip


@njit(parallel=True)
def fill_mask_parallel_kernel(
    seq, pos, cell_xy, first_ids, q_pos, q_xy, low, high, is_alibi, items, out
):  # fmt: skip
    """As `fill_mask_kernel`, with the tokens dealt out to the threads."""
    shown, hidden = items[0], items[1]
    for t in prange(out.shape[0]):
        _fill_row(
            out[t], seq[first_ids[t]], pos, cell_xy, q_pos[t], q_xy[t], low[t], high[t], is_alibi,
            shown, hidden,
        )  # fmt: skip


@njit()
def position_buckets_kernel(pos, q_pos, table, out):
    """Write the bucket of the distance from each token back to each cell.

    Parameters
    ----------
    pos : ndarray of int32, shape (at least n_kv,)
        Position of each cell, -1 for an empty one.
    q_pos : ndarray of int32, shape (n_tokens,)
    table : ndarray of int32, shape (n,)
        Bucket of each distance; the last entry serves all greater ones.
    out : ndarray of int32, shape (n_tokens, n_kv)
        Result. A cell ahead of the token counts as at its position.
    """
    last = np.int64(table.shape[0] - 1)
    for t in range(out.shape[0]):
        row, q = out[t], np.int64(q_pos[t])
        for i in range(row.shape[0]):
            row[i] = table[min(last, max(np.int64(0), q - pos[i]))]
