"""Attention beside recurrent states: cuts, refusals that change nothing, failing batches."""

from __future__ import annotations

import numpy as np
import pytest
from judged_hybrid import IS_RECURRENT, JudgedHybrid, state_of

from kvnumba.batch import Batch
from kvnumba.composite_config import HybridConfig
from kvnumba.config import CacheConfig
from kvnumba.errors import (
    ConfigError,
    NoSlotError,
    PositionError,
    SequenceError,
    ShapeError,
    SharedCellError,
    StepError,
)
from kvnumba.hybrid import HybridCache
from kvnumba.recurrent_config import RecurrentConfig


def fed(n=10, n_rewind=0, one_by_one=False, **options):
    judged = JudgedHybrid(n_rewind=n_rewind, **options)
    judged.feed(n, n_ubatch=1 if one_by_one else 64)
    return judged


def held(judged, seq_id=0):
    return sorted(judged.oracle.positions(seq_id).values())


# -- T24: cuts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("n_window", [0, 12])
@pytest.mark.parametrize(
    ("n_rewind", "p0", "p1", "done"),
    [
        (0, 5, -1, False),
        (0, 2, 5, False),
        (0, 10, -1, True),
        (0, 9, -1, False),
        (0, 8, -1, False),
        (0, 0, 5, False),
        (0, 0, -1, True),
        (0, -1, -1, True),
        (2, 9, -1, True),
        (2, 8, -1, True),
        (2, 7, -1, False),
        (2, 5, -1, False),
        (2, 2, 5, False),
        (2, 8, 9, False),
        (2, 8, 10, True),
        (2, 0, 10, True),
    ],
)
def test_what_can_be_cut(n_rewind, p0, p1, done, n_window, one_by_one):
    judged = fed(n_rewind=n_rewind, n_window=n_window, one_by_one=one_by_one)
    assert judged.seq_rm(0, p0, p1) is done  # states and cells are compared byte for byte
    judged.compare()
    n_left = {(True, True): 10, (True, False): max(0, p0)}.get((done, p0 >= 10), 10)
    assert judged.cache.seq_pos_max(0) == n_left - 1
    judged.feed(3)


def test_a_cut_gives_just_the_state_of_before():
    """Whether the tokens came one by one or at once."""
    for one_by_one in (False, True):
        judged = fed(n_rewind=2, one_by_one=one_by_one)
        judged.seq_rm(0, 8, -1)
        r, s = judged.cache.recurrent.state(0, 0)
        assert [a.tobytes() for a in (r, s)] == [a.tobytes() for a in state_of((*range(8),), 0)]
        assert judged.cache.seq_pos_min(0) == 7
        assert judged.seq_rm(0, 7, -1) is False


def test_tokens_one_by_one_renew_what_is_kept():
    judged = fed(4, n_rewind=2)
    judged.feed(1)
    assert judged.cache.seq_pos_min(0) == 2
    judged.feed(1)
    assert judged.cache.seq_pos_min(0) == 3
    assert judged.seq_rm(0, 4, -1) is True
    judged.feed(1)
    assert judged.cache.seq_pos_min(0) == 3
    assert judged.seq_rm(0, 3, -1) is False


def test_the_window_part_may_be_the_one_that_refuses():
    judged = fed(20, n_rewind=7, n_window=12, window=8, one_by_one=True)
    assert judged.cache.attention.seq_pos_min(0) == 14
    assert judged.cache.recurrent.seq_pos_min(0) == 12
    assert judged.cache.seq_pos_min(0) == 14
    assert judged.seq_rm(0, 14, -1) is False
    assert "window lost" in judged.cache.refusal(0, 14)
    assert judged.cache.recurrent.refusal(0, 14) is None
    assert judged.seq_rm(0, 15, -1) is True
    judged.compare()


def test_the_reason_names_the_part():
    judged = fed(n_rewind=0)
    assert judged.cache.refusal(0, 5).startswith("recurrent: ")
    assert judged.cache.refusal(0, 10) is None
    assert judged.cache.refusal(3, 0, 5) is None
    for bad in (4, -2, "0"):
        with pytest.raises(SequenceError):
            judged.cache.refusal(bad)
        with pytest.raises(SequenceError):
            judged.cache.seq_rm(bad)


def test_all_sequences_at_once():
    judged = fed(n_rewind=2)
    judged.feed(4, 1)
    assert judged.seq_rm(-1, 3, -1) is False  # 1 could, 0 cannot
    assert judged.cache.seq_pos_max(1) == 3
    assert judged.seq_rm(-1, 9, -1) is True
    assert judged.seq_rm(-1, -1, -1) is True
    judged.compare()
    assert judged.cache.attention.used == judged.cache.recurrent.used == 0


# -- forks -------------------------------------------------------------------------------------


def test_each_fork_goes_back_on_its_own():
    judged = fed(n_rewind=2)
    judged.call("seq_cp", 0, 1, -1, -1)
    judged.feed(2, 1)
    assert judged.seq_rm(0, 8, -1) is True
    judged.compare()
    assert held(judged, 1) == list(range(12))
    assert judged.seq_rm(1, 10, -1) is True
    judged.feed(1, 0)
    judged.feed(1, 1)
    assert judged.seq_rm(1, 10, -1) is True


@pytest.mark.parametrize("n_window", [0, 12])
def test_a_copy_is_whole_or_refused(n_window):
    judged = fed(n_rewind=1, n_window=n_window)
    judged.feed(3, 1)
    before = judged.frozen()
    for p0, p1 in ((0, 5), (1, -1), (0, 9)):
        with pytest.raises(PositionError):
            judged.cache.seq_cp(0, 1, p0, p1)
        assert judged.frozen() == before
    judged.call("seq_cp", 0, 1, 4, 2)  # an empty range: nothing
    judged.call("seq_cp", 0, 1, 0, 10)
    judged.compare()
    assert held(judged, 1) == list(range(10))
    judged.call("seq_cp", 3, 1, -1, -1)  # of an empty one
    assert judged.cache.seq_pos_max(1) == -1
    judged.compare()


def test_keeping_one():
    judged = fed(n_rewind=2)
    judged.call("seq_cp", 0, 1, -1, -1)
    judged.feed(2, 2)
    judged.seq_rm(0, 9, -1)
    judged.call("seq_keep", 0)
    judged.compare()
    judged.feed(1, 1)
    assert np.array_equal(judged.cache.recurrent.state(0, 1)[0], state_of((12,), 0)[0])


def test_a_token_of_sequences_with_different_pasts_is_refused():
    judged = fed(3)
    before = judged.frozen()
    for s in (1, 2):
        with pytest.raises(SequenceError):
            judged.cache.prepare(Batch([50], None, [[0, s]]))
        assert judged.frozen() == before
        judged.feed(3, 2)
        before = judged.frozen()
    judged.call("seq_cp", 0, 1, -1, -1)
    assert judged.run([[0, 1]] * 2)


# -- moves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_window", [0, 12])
def test_moving_a_whole_sequence(n_window):
    judged = fed(n_rewind=2, n_window=n_window)
    judged.call("seq_add", 0, -1, -1, 5)
    judged.compare()
    assert judged.cache.seq_pos_max(0) == 14
    assert judged.cache.seq_pos_min(0) == 12
    assert judged.seq_rm(0, 13, -1) is True
    judged.call("seq_div", 0, -1, -1, 2)
    judged.compare()
    judged.feed(1)


def test_a_move_that_would_drop_the_first_tokens_is_refused():
    """The state cannot forget them; dropping all is possible."""
    judged = fed(n_rewind=2)
    before = judged.frozen()
    for p0, p1, delta in ((-1, -1, -1), (0, 3, -2), (-1, -1, -9)):
        with pytest.raises(PositionError):
            judged.cache.seq_add(0, p0, p1, delta)
        assert judged.frozen() == before
    judged.call("seq_add", 0, -1, -1, -10)
    judged.compare()
    assert judged.cache.seq_pos_max(0) == -1


def test_a_move_that_changes_which_token_is_last_is_refused():
    judged = fed(n_rewind=2)
    before = judged.frozen()
    for call in (
        lambda c: c.seq_add(0, 0, 5, 20),
        lambda c: c.seq_add(0, 9, -1, -5),
        lambda c: c.seq_div(0, 9, -1, 4),
    ):
        with pytest.raises(PositionError):
            call(judged.cache)
        assert judged.frozen() == before
    judged.call("seq_add", 0, 3, -1, 4)
    judged.compare()


@pytest.mark.parametrize("delta", [1, 2])
@pytest.mark.parametrize("n_more", [1, 2])
def test_moving_what_a_fork_still_shares_in_one_part_only(n_more, delta):
    """The fork has a state of its own by now, but its first cells are the moved sequence's too."""
    judged = fed(n_rewind=2, shared="move")
    judged.call("seq_cp", 0, 1, -1, -1)
    judged.feed(n_more, 1)
    judged.call("seq_add", 0, -1, -1, delta)
    judged.compare()
    judged.seq_rm(1, 10, -1)
    judged.compare()
    judged.call("seq_add", 1, -1, -1, delta)
    judged.compare()


def test_a_refused_move_of_shared_tokens():
    judged = fed(n_rewind=2, shared="refuse")
    judged.call("seq_cp", 0, 1, -1, -1)
    before = judged.frozen()
    with pytest.raises(SharedCellError):
        judged.cache.seq_add(0, -1, -1, 1)
    assert judged.frozen() == before


# -- batches that fail -------------------------------------------------------------------------


def test_a_batch_that_fits_one_part_only_is_placed_in_none():
    judged = fed(30)
    before = judged.frozen()
    for seq_ids in ([[0]] * 3, [[0], [1], [2]], [[3]] * 8):
        with pytest.raises(NoSlotError):
            judged.cache.prepare(Batch(range(len(seq_ids)), seq_ids=seq_ids), n_ubatch=1)
        assert judged.frozen() == before
    judged.feed(2)


@pytest.mark.parametrize("n_window", [0, 12])
@pytest.mark.parametrize("n_rewind", [0, 2])
@pytest.mark.parametrize("n_done", [1, 2, 3])
def test_a_whole_batch_goes_back_committed_steps_too(n_done, n_rewind, n_window):
    judged = fed(n_rewind=n_rewind, n_window=n_window)
    judged.feed(2, 1)
    low = judged.cache.seq_pos_min(0)
    assert judged.run([[0], [1], [0], [0], [1], [0]], 2, "all back", n_done)
    assert [judged.cache.seq_pos_max(s) for s in (0, 1)] == [9, 1]
    assert judged.cache.seq_pos_min(0) == low
    assert judged.run([[0], [1], [0]], 2)


@pytest.mark.parametrize("n_window", [0, 12])
def test_a_step_whose_computation_fails_is_undone_in_both_parts(n_window):
    judged = fed(n_rewind=2, n_window=n_window)
    with pytest.raises(ZeroDivisionError), judged.cache.prepare(Batch(range(3)))[0]:
        _ = 1 // 0
    judged.compare()
    assert judged.run([[0]] * 3, 2, "rollback", 1)
    judged.feed(1)


def test_steps_go_back_last_one_first():
    judged = fed(n_rewind=2)
    steps = judged.cache.prepare(Batch(range(4)), 2)
    for step in steps:
        step.apply()
    with pytest.raises(StepError):
        steps[0].rollback()
    with pytest.raises(StepError):
        judged.cache.seq_rm(0)
    judged.cache.rollback()
    judged.compare()


# -- layers and configurations -----------------------------------------------------------------


def test_layers_are_numbered_as_in_the_model():
    judged = fed()
    assert [judged.cache.route(il) for il in range(4)] == [(1, 0), (0, 0), (1, 1), (0, 1)]
    (step,) = judged.cache.prepare(Batch([1]))
    with step:
        for il, is_recurrent in enumerate(IS_RECURRENT):
            wrong = step.attend if is_recurrent else step.read
            args = (np.zeros((1, 1, 4), np.float32),) if is_recurrent else ()
            with pytest.raises(ConfigError):
                wrong(il, *args)
            with pytest.raises((ShapeError, TypeError)):
                step.write(il, np.zeros((1, 99), np.float32), np.zeros((1, 99), np.float32))
        with pytest.raises(ConfigError):
            step.read(4)


def test_parts_must_agree():
    attention = CacheConfig(n_layer=2, n_ctx=8, n_head_kv=1, head_dim=2, n_seq_max=2)
    for n_layer, n_seq_max, flags in (
        (2, 2, (True, False)),
        (1, 2, (True, False, True)),
        (2, 3, (True, False, True, False)),
        (2, 2, (True, False, True, True)),
        (2, 2, (True,) * 4),
    ):
        with pytest.raises(ConfigError):
            HybridConfig(attention, RecurrentConfig(n_layer, 1, 1, n_seq_max), flags)


def test_mapped_files_of_both_parts(tmp_path):
    attention = CacheConfig(n_layer=1, n_ctx=8, n_head_kv=1, head_dim=2)
    config = HybridConfig(attention, RecurrentConfig(1, 2, 3), (True, False))
    with HybridCache(config, tmp_path / "both") as cache, cache.prepare(Batch([1, 2]))[0] as step:
        step.write(0, np.ones((1, 2), np.float32), np.ones((1, 3), np.float32))
        step.write(1, np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    folders = {p.parent.name for p in tmp_path.rglob("*") if p.is_file()}
    assert {"attention", "recurrent"} <= folders


def test_sequence_ids_at_the_edges_of_words():
    judged = JudgedHybrid(n_ctx=64, n_seq_max=130, n_rewind=1)
    for s in (0, 63, 64, 129):
        judged.feed(3, s)
    assert judged.run([[63], [64], [129], [0]], 3)
    assert judged.seq_rm(64, 3, -1) is True
    judged.call("seq_cp", 129, 63, -1, -1)
    judged.compare()
    assert [judged.cache.seq_pos_max(s) for s in (0, 63, 64, 129)] == [3, 3, 2, 3]


def test_sharers_that_are_cut_back_at_once_still_share_their_state():
    """One by one they would get cells of their own, and could not be moved together any more."""
    config = RecurrentConfig(1, 2, 1, n_seq_max=2, n_rewind=2)
    attention = CacheConfig(n_layer=1, n_ctx=16, n_head_kv=1, head_dim=2, n_seq_max=2)
    cache = HybridCache(HybridConfig(attention, config, (False, True)))
    for step in cache.prepare(Batch([1, 2, 3], seq_ids=[[0, 1]] * 3), 1):
        with step:
            step.write(0, *np.ones((2, 1, 2), np.float32))
            step.write(1, np.ones((1, 2), np.float32), np.ones((1, 1), np.float32))
    assert cache.seq_rm(-1, 2, -1)
    cache.check()
    assert cache.recurrent.used == 1
    cache.seq_add(0, 0, -1, 3)
    cache.check()
    assert [cache.seq_pos_max(s) for s in (0, 1)] == [4, 4]
