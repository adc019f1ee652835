"""The oracle of window pairs on hand-made cases: rules 2.2, 2.3, 2.7 of the reference, and ours."""

from __future__ import annotations

import naive
import pytest
from naive_window import (
    NaiveWindow,
    WindowCells,
    WindowLostError,
    is_masked,
    n_window_cells,
    split_equal,
    split_simple,
)


def visible(kind, n, p1):
    return [p0 for p0 in range(p1 + 1) if not is_masked(kind, n, p0, p1)]


def test_what_each_kind_of_window_shows():
    assert visible("standard", 4, 9) == [6, 7, 8, 9]
    assert visible("standard", 4, 2) == [0, 1, 2]
    assert visible("standard", 1, 5) == [5]
    assert visible("chunked", 4, 7) == [4, 5, 6, 7]
    assert visible("chunked", 4, 8) == [8]
    assert visible("symmetric", 4, 9) == [7, 8, 9]
    assert visible("symmetric", 5, 9) == [7, 8, 9]
    assert visible("standard", 0, 3) == [0, 1, 2, 3]
    assert is_masked("symmetric", 4, 12, 9)  # it looks ahead as far as back
    assert not is_masked("symmetric", 4, 11, 9)


def test_the_size_rule():
    assert n_window_cells(4096, 512, 4, 512) == 2560
    assert n_window_cells(4096, 8, 1, 4) == 256
    assert n_window_cells(4096, 250, 1, 7) == 512
    assert n_window_cells(100, 8, 1, 4) == 100
    assert n_window_cells(4096, 512, 4, 512, full_size=True) == 4096


def test_splits():
    ids = [[0], [1], [0], [1], [0], [2]]
    assert split_simple(ids, 4) == [[0, 1, 2, 3], [4, 5]]
    assert split_equal(ids, 4) == [[0, 1, 5], [2, 3], [4]]
    assert split_equal(ids, 2) == [[0, 1], [2, 3], [4, 5]]
    assert split_equal([[7]] * 3, 2) == [[0, 1], [2]]


def fed(n, n_cells=6, window=4, order="ring", **options):
    """Return cells with positions 0 to n - 1 of sequence 0, which came one by one."""
    cells = WindowCells(n_cells, 3, window, order=order, **options)
    for p in range(n):
        cells.overwrite(cells.find_usable(1), [p], [[0]])
    return cells


def positions(cells, seq_id=0):
    return sorted(cells.cells[i].pos for i in cells.members(seq_id))


@pytest.mark.parametrize("order", ["ring", "behind"])
def test_a_cell_is_usable_once_its_owner_is_past_it(order):
    cells = fed(6, order=order)
    # The next token is at 6 and sees 3, 4, 5: cells 0, 1, 2 are hidden.
    assert [i for i in range(6) if cells.is_usable(i)] == [0, 1, 2]
    assert cells.find_usable(3) == [0, 1, 2]
    with pytest.raises(naive.NoSlotError):
        cells.find_usable(4)
    assert positions(cells) == [0, 1, 2, 3, 4, 5]


def test_a_shared_cell_is_never_usable():
    cells = fed(6)
    cells.seq_cp(0, 1, 0, 2)
    assert [i for i in range(6) if cells.is_usable(i)] == [2]
    cells.seq_rm(0, 0, 2)  # now sequence 1 alone holds 0 and 1, and still sees them
    assert [i for i in range(6) if cells.is_usable(i)] == [2]


def test_overwriting_drops_what_lies_before():
    cells = fed(6)
    cells.search_start = 1  # the search meets position 1 first
    where = cells.find_usable(1)
    assert where == [1]
    cells.overwrite(where, [6], [[0]])
    assert positions(cells) == [2, 3, 4, 5, 6]
    assert cells.used == 5
    assert cells.search_start == 2


def test_overwriting_takes_the_owner_out_of_shared_cells_before_it():
    cells = fed(6)
    cells.seq_cp(0, 1, 0, 1)
    cells.overwrite(cells.find_usable(1), [6], [[0]])
    assert positions(cells) == [2, 3, 4, 5, 6]
    assert positions(cells, 1) == [0]


def test_the_search_of_a_ring():
    cells = fed(2)
    assert cells.search_start == 2
    assert cells.find_usable(3) == [2, 3, 4]
    cells.search_start = 5  # beyond used + 2 n for one token: the search begins at 0
    assert cells.find_usable(1) == [2]
    assert cells.find_usable(2) == [5, 2]
    cells.search_start = 6
    assert cells.find_usable(2) == [2, 3]


def test_those_furthest_behind_go_first():
    cells = WindowCells(8, 2, 2, order="behind")
    cells.overwrite([0, 1, 2], [0, 1, 2], [[1]] * 3)
    cells.overwrite([3, 4, 5, 6], [0, 1, 2, 3], [[0]] * 4)
    # 0 is 3 behind, then 0 of sequence 0 at 1 (2 behind), then sequence 1 at 0 (2 behind).
    assert cells.find_usable(4) == [7, 3, 4, 0]


@pytest.mark.parametrize("order", ["ring", "behind"])
def test_a_trial_brings_back_what_it_purged(order):
    cells = fed(6, order=order)
    before = [(c.pos, c.seqs, c.tag) for c in cells.cells], cells.search_start
    ubatches = [([6, 7], [[0]] * 2), ([0, 1], [[1]] * 2), ([8, 9, 10], [[0]] * 3)]
    with pytest.raises(naive.NoSlotError):
        cells.plan(ubatches)
    assert ([(c.pos, c.seqs, c.tag) for c in cells.cells], cells.search_start) == before
    assert len(cells.plan(ubatches[:1])) == 1
    assert ([(c.pos, c.seqs, c.tag) for c in cells.cells], cells.search_start) == before


# -- the pair --------------------------------------------------------------------------------


def pair(n=0, n_base=64, n_window=12, window=8, n_ubatch=4, n_seq_max=3, **options):
    out = NaiveWindow(n_base, n_window, n_seq_max, window, **options)
    feed(out, n, n_ubatch=n_ubatch)
    return out


def feed(oracle, n, seq_id=0, n_ubatch=4):
    seq_ids = [[seq_id]] * n
    pos, steps = oracle.prepare(None, seq_ids, n_ubatch)
    for step in steps:
        oracle.apply(step, pos, seq_ids, [-1] * n)
        oracle.commit()
        oracle.check()


@pytest.mark.parametrize("order", ["ring", "behind"])
def test_the_pair_of_t22(order):
    oracle = pair(40, order=order)
    assert positions(oracle.base) == list(range(40))
    assert positions(oracle.window) == list(range(28, 40))
    assert oracle.seq_pos_max(0) == 39
    assert oracle.seq_pos_min(0) == 34  # a token at 35 sees 28 to 35


def test_how_far_a_sequence_can_be_cut_back():
    for p0 in range(41):
        oracle = pair(40)
        assert oracle.seq_rm(0, p0, -1) == (p0 == 0 or p0 >= 35)
        oracle.check()
        assert oracle.seq_pos_max(0) == (39 if 0 < p0 < 35 else p0 - 1)


def test_a_cut_of_a_short_sequence_is_free():
    oracle = pair(12)
    assert oracle.seq_pos_min(0) == 0
    assert oracle.seq_rm(0, 1, -1)
    assert oracle.seq_pos_max(0) == 0


def test_without_its_first_tokens_a_sequence_begins_later():
    oracle = pair(40)
    assert oracle.seq_rm(0, 0, 30)
    assert oracle.seq_pos_min(0) == 30
    assert oracle.seq_rm(0, 31, -1)
    assert positions(oracle.window) == positions(oracle.base) == [30]


def test_the_chunked_window():
    oracle = pair(21, kind="chunked", n_window=12)
    assert positions(oracle.window) == list(range(9, 21))
    assert oracle.seq_pos_min(0) == 15  # a token at 16 begins a chunk; one at 15 sees 8
    assert not oracle.seq_rm(0, 15, -1)
    assert oracle.seq_rm(0, 16, -1)


def test_the_symmetric_window():
    oracle = pair(21, kind="symmetric", n_window=12)
    assert positions(oracle.window) == list(range(9, 21))
    assert oracle.seq_pos_min(0) == 12  # a token at 13 sees 9 to 13


def test_copies_that_cannot_go_on_are_refused():
    oracle = pair(16)
    assert positions(oracle.window) == list(range(4, 16))
    with pytest.raises(WindowLostError):
        oracle.seq_cp(0, 1, 0, 8)
    assert oracle.seq_pos_max(1) == -1
    oracle.seq_cp(0, 1, 0, 11)
    assert oracle.seq_pos_min(1) == 10
    oracle.check()


def test_a_context_shift_that_brings_nothing_into_sight():
    oracle = pair(16)
    assert oracle.seq_rm(0, 4, 8)
    oracle.seq_add(0, 8, -1, -4)
    assert positions(oracle.base) == list(range(12))
    assert positions(oracle.window) == list(range(4, 12))
    oracle = pair(16)
    assert oracle.seq_rm(0, 2, 10)
    with pytest.raises(WindowLostError):
        oracle.seq_add(0, 10, -1, -8)  # a token at 8 would see 0 and 1
    assert positions(oracle.base) == [0, 1, *range(10, 16)]
    oracle.check()


def test_a_shared_start_that_one_sequence_has_lost_does_not_move():
    oracle = pair(4, n_window=12, window=4)
    oracle.seq_cp(0, 1, -1, -1)
    feed(oracle, 9)
    assert positions(oracle.window, 1) == [0, 1, 2, 3]
    assert oracle.held(oracle.base, 0) >= oracle.held(oracle.base, 1)
    assert positions(oracle.window)[0] > 3
    with pytest.raises(WindowLostError):
        oracle.seq_add(0, 0, 4, 1)  # the base would move them for sequence 1 too
    oracle.check()


def test_a_step_is_undone_in_both_parts():
    oracle = pair(12)
    before = [part.snapshot()[0] for part in oracle.parts]
    seq_ids = [[0]] * 6
    pos, steps = oracle.prepare(None, seq_ids, 4)
    for step in steps:
        oracle.apply(step, pos, seq_ids, [-1] * 6)
    assert positions(oracle.window) == list(range(6, 18))
    with pytest.raises(naive.PendingError):
        oracle.seq_keep(0)
    oracle.rollback()
    oracle.rollback()
    after = [part.snapshot()[0] for part in oracle.parts]
    for old, new in zip(before, after, strict=True):
        assert [vars(c) for c in old] == [vars(c) for c in new]


def test_a_batch_that_fits_only_in_equal_parts():
    oracle = NaiveWindow(64, 6, 2, 2)
    feed(oracle, 3, 0, 3)
    feed(oracle, 3, 1, 3)
    seq_ids = [[0]] * 4 + [[1]] * 4
    with pytest.raises(naive.NoSlotError):
        oracle.prepare(None, seq_ids, 5, [split_simple(seq_ids, 5)])
    steps = oracle.prepare(None, seq_ids, 5)[1]
    assert [tokens for tokens, _, _ in steps] == [[0, 1, 4, 5], [2, 3, 6, 7]]
