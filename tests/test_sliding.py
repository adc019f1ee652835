"""Cells that a window hides: their new use, what is lost by it, and undoing it."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, NoSlotError, StepError, WindowLostError
from kvnumba.unified import UnifiedCache

SIZES = {"n_layer": 2, "n_head_kv": 1, "head_dim": 2, "type_k": "f32", "type_v": "f32"}


def windowed(n_ctx=12, window=8, n_seq_max=3, **options):
    options = {"n_ctx": n_ctx, "window": window, "n_seq_max": n_seq_max} | options
    return UnifiedCache(CacheConfig(**SIZES, **options))


def rows(pos, il):
    """Rows that tell their position and layer."""
    return np.stack([pos + 100.0 * il, np.ones(len(pos))], 1).astype(np.float32)


def feed(cache, n, seq_id=0, n_ubatch=4):
    steps = cache.prepare(Batch(np.arange(n), seq_ids=seq_id), n_ubatch)
    for step in steps:
        with step:
            for il in range(2):
                step.write(il, rows(step.pos, il), rows(step.pos, il))
    return steps


def held(cache, seq_id=0):
    return sorted(cache.cells.pos[cache.cells.members(seq_id)].tolist())


def everything(cache):
    arrays = [*cache.cells.state, cache.sliding.lost, cache.layers.k[0], cache.layers.v[1]]
    return [a.copy() for a in arrays]


def assert_same(before, cache):
    for n, (a, b) in enumerate(zip(before, everything(cache), strict=True)):
        if n < 7:
            assert np.array_equal(a, b)
        else:  # rows: of cells in use
            used = np.flatnonzero(cache.cells.pos[: cache.cells.n_cells] >= 0)
            assert np.array_equal(a[used], b[used])


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [("standard", [0, 1, 2]), ("chunked", [0, 1, 2, 3, 4, 5, 6, 7]), ("symmetric", [*range(6)])],
)
def test_which_positions_a_token_does_not_see(kind, hidden):
    cache = windowed(window_kind=kind)
    pos = np.arange(11)
    seen = 10
    assert pos[cache.sliding.hides(pos, seen)].tolist() == hidden


def test_hidden_cells_are_used_anew_oldest_first_and_no_gap_is_left():
    cache = windowed()
    feed(cache, 12)
    assert held(cache) == list(range(12))
    feed(cache, 2)
    assert held(cache) == list(range(2, 14))
    assert cache.sliding.lost[0] == 1
    assert cache.seq_pos_min(0) == 8  # a token at 9 sees 2 to 9
    cells = cache.cells.members(0)
    assert np.array_equal(cache.layers.k[1][cells, 0], cache.cells.pos[cells] + 100)


def test_cells_of_another_sequence_are_used_anew_only_where_that_one_is_blind():
    cache = windowed()
    feed(cache, 12, seq_id=1)
    with pytest.raises(NoSlotError):
        cache.prepare(Batch(range(6), seq_ids=0))  # 12 sees 5 to 11
    feed(cache, 4, seq_id=0)
    assert held(cache, 1) == list(range(4, 12))
    assert held(cache, 0) == [0, 1, 2, 3]


def test_shared_cells_are_never_used_anew():
    cache = windowed()
    feed(cache, 12)
    cache.seq_cp(0, 1)
    with pytest.raises(NoSlotError):
        cache.prepare(Batch([1], seq_ids=0))
    assert cache.seq_rm(1)
    feed(cache, 1)


def test_what_is_dropped_before_a_used_cell_is_lost_too():
    cache = windowed(window=4)
    feed(cache, 6)
    cache.seq_cp(0, 1, 0, 1)  # position 0 is shared, and stays with sequence 1
    feed(cache, 6)
    feed(cache, 3)
    assert held(cache, 1) == [0]
    assert held(cache) == list(range(4, 15))
    assert cache.sliding.lost.tolist() == [3, -1, -1]


def test_a_trial_that_fails_half_way_brings_everything_back():
    """The reference loses the positions that the trial's first parts have purged."""
    cache = windowed()
    feed(cache, 12)
    before = everything(cache)
    with pytest.raises(NoSlotError):
        cache.prepare(Batch([1] * 12, seq_ids=[0] * 6 + [1] * 6), n_ubatch=2)
    assert_same(before, cache)


@pytest.mark.parametrize("v_trans", [False, True])
def test_rolling_back_brings_rows_and_positions_back(v_trans):
    cache = windowed(v_trans=v_trans)
    feed(cache, 12)
    before = [*cache.cells.state, *cache.layers.k, *cache.layers.v, cache.sliding.lost]
    before = [a.copy() for a in before]
    steps = feed(cache, 10)
    assert held(cache) == list(range(10, 22))
    steps.rollback()
    after = [*cache.cells.state, *cache.layers.k, *cache.layers.v, cache.sliding.lost]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_rolling_back_goes_from_the_last_step_backwards():
    cache = windowed()
    feed(cache, 12)
    before = everything(cache)
    steps = cache.prepare(Batch(range(8)), 4)
    for step in steps:
        step.apply()
        step.write(0, rows(step.pos, 0), rows(step.pos, 0))
    with pytest.raises(StepError, match="last one first"):
        steps[0].rollback()
    with pytest.raises(StepError, match="last one first"):
        cache.rollback()
    steps[1].rollback()
    assert cache.seq_pos_max(0) == 15
    steps[0].rollback()
    assert_same(before, cache)


def test_a_cut_that_would_bring_a_hole_into_sight_is_refused():
    cache = windowed()
    feed(cache, 16)  # 0 to 3 are lost
    before = everything(cache)
    assert cache.seq_pos_min(0) == 10
    assert "window lost" in cache.refusal(0, 10)
    assert cache.seq_rm(0, 10) is False
    assert cache.seq_rm(-1, 10) is False
    assert_same(before, cache)
    assert cache.refusal(0, 11) is None
    assert cache.seq_rm(0, 11)
    assert cache.seq_pos_max(0) == 10
    assert cache.seq_rm(0, 5, 8)  # a hole of the user's own making
    assert cache.seq_rm(0)
    assert cache.sliding.lost[0] == -1
    assert cache.seq_pos_min(0) == -1


def test_a_copy_that_would_go_on_in_a_hole_is_refused():
    cache = windowed()
    feed(cache, 16)
    with pytest.raises(WindowLostError, match="window lost"):
        cache.seq_cp(0, 1, 0, 8)
    assert held(cache, 1) == []
    cache.seq_cp(0, 1)
    assert cache.seq_pos_min(1) == 10
    assert "window lost" in cache.refusal(1, 9)


def test_a_shift_takes_along_what_is_lost():
    cache = windowed(rope=None)
    feed(cache, 16)
    cache.seq_add(0, 0, -1, -2)
    assert cache.sliding.lost[0] == 1
    assert cache.seq_pos_min(0) == 8
    with pytest.raises(WindowLostError):
        cache.seq_add(0, 3, -1, -8)
    with pytest.raises(WindowLostError):
        cache.seq_div(0, 0, -1, 4)


def test_keeping_one_sequence_forgets_what_others_have_lost():
    cache = windowed()
    feed(cache, 16)
    cache.seq_cp(0, 1)
    cache.seq_keep(1)
    assert cache.sliding.lost.tolist() == [-1, 3, -1]
    cache.clear()
    assert cache.sliding.lost.tolist() == [-1, -1, -1]


def test_a_window_wants_scattered_cells():
    with pytest.raises(ConfigError, match="scatter"):
        windowed(placement="ring")


def test_attention_of_a_windowed_cache_uses_its_window():
    cache = windowed()
    feed(cache, 12)
    (step,) = cache.prepare(Batch([1]))
    with step:
        for il in range(2):
            step.write(il, np.zeros((1, 2), np.float32), np.full((1, 2), 50, np.float32))
        out = step.attend(0, np.zeros((1, 1, 2), np.float32))
    # Equal scores: the mean of V over the eight positions 5 to 12.
    assert out[0, 0, 0] == pytest.approx((sum(range(5, 12)) + 50) / 8)
