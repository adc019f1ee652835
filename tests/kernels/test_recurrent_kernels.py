"""Kernels of recurrent states: rows read, written, copied; cells placed and moved."""

from __future__ import annotations

import numpy as np
import pytest
from reference import narrow, widen

from kvnumba.kernels import half, recurrent, states
from kvnumba.kernels.recurrent import FIRST, KEPT, PAST, POS, RING, SRC
from kvnumba.kernels.recurrent_moves import check_states_kernel, move_positions_kernel

WIDTHS = (1, 20, 192)


def storage(kind, shape, seed=0):
    rng = np.random.default_rng(seed)
    return narrow(kind, rng.standard_normal(shape).astype(np.float32))


def rows_of(*rows):
    return np.array(rows, np.int32)


@pytest.mark.parametrize("kind", half.KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gather_reads_rows_and_zeros(kind, width):
    src = storage(kind, (9, width))
    rows = rows_of(8, -1, 0, 0, 3)
    out = np.full((5, width), np.nan, np.float32)
    states.gather_states(kind, src, rows, out)
    want = widen(kind, src)[rows]
    want[1] = 0
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("kind", half.KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_scatter_writes_listed_rows_only(kind, width):
    dst = storage(kind, (9, width))
    new = np.random.default_rng(1).standard_normal((4, width)).astype(np.float32)
    want = dst.copy()
    want[[7, 0, 2]] = narrow(kind, new)[[0, 1, 3]]
    states.scatter_states(half.KINDS[kind], dst, rows_of(7, 0, -1, 2), new)
    np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize("kind", half.KINDS)
def test_rows_are_zeroed_and_copied_in_list_order(kind):
    dst = storage(kind, (8, 24))
    want = dst.copy()
    states.zero_rows_kernel(dst, rows_of(3, -1, 5))
    want[[3, 5]] = 0
    np.testing.assert_array_equal(dst, want)
    # a chain that reads what it wrote, zeros, a copy onto itself, one to nowhere
    to, source = rows_of(0, 1, 2, 6, -1), rows_of(4, 0, -1, 6, 2)
    for a, b in ((0, 4), (1, 0)):
        want[a] = want[b]
    want[2] = 0
    states.copy_states_kernel(dst, to, source)
    np.testing.assert_array_equal(dst, want)


def empty(n_cells, depth, n_seq_max):
    table = np.full((n_cells, RING + 2 * depth), -1, np.int32)
    table[:, KEPT] = 0
    return table, np.full(n_seq_max, -1, np.int32)


def place(table, tail, sets, pos, n_seq_tokens=1, n_states=1, start=0, slack=None, rows=None):
    """Place sets of sequences; return (head, n_kv, zero_cell, copy sources, sources, targets)."""
    n_seqs = len(sets)
    set_start = np.concatenate([[0], np.cumsum([len(ids) for ids in sets])])
    rows = np.arange(100, 100 + n_seqs * n_states) if rows is None else rows
    count, copy_sources = np.empty((2, len(table)), np.int32)
    source_rows = np.empty(n_seqs, np.int32)
    target_rows = np.empty((n_seqs, n_states), np.int32)
    head, n_kv, zero_cell = recurrent.place_states_kernel(
        table,
        tail,
        set_start,
        np.array([s for ids in sets for s in ids], np.int32),
        np.asarray(pos, np.int32),
        np.asarray(rows, np.int32),
        n_seq_tokens,
        start,
        2 * n_seqs if slack is None else slack,
        count,
        copy_sources,
        source_rows,
        target_rows,
    )
    return head, n_kv, zero_cell, copy_sources[:n_kv].tolist(), source_rows.tolist(), target_rows


def ring(table, i):
    depth = (table.shape[1] - RING) // 2
    kept = table[i, KEPT]
    line = table[i, RING:].tolist()
    return list(zip(line[:kept], line[depth : depth + kept], strict=True))


def test_new_sequences_lie_side_by_side_and_start_from_the_zero_cell():
    table, tail = empty(4, 1, 4)
    got = place(table, tail, [(2,), (0, 3)], [0, 0])
    assert got[:5] == (0, 2, 0, [0, 0], [-1, -1])
    assert got[5].tolist() == [[100], [101]]
    assert tail.tolist() == [1, -1, 0, 1]
    assert table[:, SRC].tolist() == [0, 1, -1, -1]


def test_the_one_shared_state_is_split_and_both_keep_the_ring():
    table, tail = empty(3, 2, 3)
    place(table, tail, [(0, 1)], [0, 1, 2], 3, 2, rows=[7, 8])
    assert ring(table, 0) == [(8, 2), (7, 1)]
    got = place(table, tail, [(1,)], [3], rows=[9])
    assert got[:5] == (1, 1, 1, [0], [8])
    assert tail.tolist() == [0, 1, -1]
    assert ring(table, 0) == [(8, 2), (7, 1)]
    assert ring(table, 1) == [(9, 3), (8, 2)]
    assert table[1, FIRST] == 0


def test_without_an_empty_cell_nothing_outside_the_arrays_is_touched():
    """More sequences than cells, which a cache's configuration forbids."""
    table, tail = empty(2, 1, 4)
    place(table, tail, [(0,), (1,)], [0, 0])
    for sets in ([(2,)], [(0,), (2,)], [(2,), (3,)]):
        assert place(table.copy(), tail.copy(), sets, [1] * len(sets))[:3] == (-1, 0, -1)
    assert recurrent.next_empty_kernel(tail, 1, np.empty(2, np.int32)) == -1


@pytest.mark.parametrize(("start", "slack", "cell"), [(3, 3, 3), (3, 2, 3), (3, 1, 1), (0, 9, 1)])
def test_the_search_starts_anew_when_it_is_far_beyond_the_cells_in_use(start, slack, cell):
    table, tail = empty(4, 1, 4)
    place(table, tail, [(0,)], [0])
    assert place(table, tail, [(1,)], [0], start=start, slack=slack)[0] == cell


def test_the_search_goes_around():
    table, tail = empty(4, 1, 4)
    place(table, tail, [(0,)], [0])
    head, n_kv, *_ = place(table, tail, [(1,), (2,), (3,)], [0, 0, 0], start=2, slack=9)
    assert (head, n_kv) == (1, 3)
    assert tail.tolist() == [0, 1, 2, 3]


def test_a_sequence_that_joins_another_frees_its_cell():
    table, tail = empty(3, 1, 3)
    place(table, tail, [(0,), (1,), (2,)], [0, 0, 0])
    place(table, tail, [(0, 2)], [1])
    assert tail.tolist() == [0, 1, 0]
    assert table[2].tolist() == [-1, -1, -1, -1, 0, -1, -1]


@pytest.mark.parametrize(
    ("before", "pos", "want", "past"),
    [
        ([], [0, 1, 2, 3, 4], [4, 3, 2], -1),
        ([], [0, 1], [1, 0], -1),
        ([0, 1], [2], [2, 1, 0], -1),
        ([0, 1, 2, 3], [4], [4, 3, 2], -1),
        ([0, 1, 2, 3], [4, 5], [5, 4, 3], -1),
        ([0, 1, 2, 3], [9], [9, 3, 2], -1),
        ([0, 1, 2, 3], [3], [3], 3),
        ([0, 1, 2, 3], [1, 2], [2, 1], 3),
        ([0, 1, 2, 3], [4, 5, 1], [1], 5),
        ([0, 1, 2, 3], [4, 1, 7], [7, 1], 4),
        ([0, 1, 2, 3], [7, 1, 2, 3, 4, 5], [5, 4, 3], 7),
        ([], [7, 1, 2], [2, 1], 7),
    ],
)
def test_kept_states_are_those_whose_positions_ascend_to_the_last(before, pos, want, past):
    table, tail = empty(1, 3, 1)
    for tokens, first_row in ((before, 10), (pos, 50)):
        if tokens:
            k = min(3, len(tokens))
            place(table, tail, [(0,)], tokens, len(tokens), k, rows=range(first_row, first_row + k))
    assert [p for _, p in ring(table, 0)] == want
    n_new = min(len(pos), 3)
    assert [r for r, _ in ring(table, 0)][:n_new] == list(range(50, 50 + n_new))[::-1][: len(want)]
    assert table[0, POS] == pos[-1]
    assert table[0, FIRST] == min(before + pos)
    assert table[0, PAST] == past
    assert check_states_kernel(table, tail, 60, False, np.empty(1, np.int32)) == (0, -1)


@pytest.mark.parametrize(
    ("p0", "p1", "delta", "d", "kept", "first", "past"),
    [
        (0, 100, 3, 1, [10, 9, 8, 7], 3, -1),
        (0, 100, -5, 1, [2, 1, 0], 0, -1),  # 7 tokens lie below 0 now, a state among them
        (6, 100, 5, 1, [12, 11, 5, 4], 0, -1),
        (0, 6, -2, 1, [7, 6, 3, 2], 0, -1),
        (6, 100, -2, 1, [5, 4], 0, 5),
        (7, 100, -7, 1, [0], 0, 6),
        (5, 6, 4, 1, [7, 6], 0, 9),
        (2, 3, 9, 1, [7, 6, 5, 4], 0, 11),
        (0, 100, 0, 2, [3], 0, 3),
        (6, 100, 0, 2, [3], 0, 5),
        (100, 200, 5, 1, [7, 6, 5, 4], 0, -1),
    ],
)
def test_moved_positions_drop_what_can_no_longer_be_told_apart(p0, p1, delta, d, kept, first, past):
    table, tail = empty(1, 4, 1)
    place(table, tail, [(0,)], range(8), 8, 4)
    move_positions_kernel(table[0], p0, p1, delta, d, False, 1000)
    assert [p for _, p in ring(table, 0)] == kept
    assert (table[0, POS], table[0, FIRST], table[0, PAST]) == (kept[0], first, past)
    if kept[0] >= 0:
        assert check_states_kernel(table, tail, 200, False, np.empty(1, np.int32)) == (0, -1)


def test_rows_of_kept_states_are_named():
    table, tail = empty(2, 2, 2)
    place(table, tail, [(0,), (1,)], [0, 1, 0, 1], 2, 2, rows=[0, 63, 64, 130])
    bits = np.zeros(3, np.uint64)
    recurrent.name_rows_kernel(table, bits)
    recurrent.set_bits_kernel(rows_of(1), bits)
    assert bits.tolist() == [1 | 2 | 1 << 63, 1, 1 << 2]
    recurrent.free_cell_kernel(table, 0)
    bits[:] = 0
    recurrent.name_rows_kernel(table, bits)
    assert bits.tolist() == [0, 1, 1 << 2]
