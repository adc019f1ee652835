"""The cache's protocol: steps, refusals that change nothing, pinned cells, attention, sizes."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from kvnumba.batch import MAX_POS, Batch
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import (
    CacheFullError,
    CannotShiftError,
    ConfigError,
    DamagedError,
    InUseError,
    KVCacheError,
    NoSlotError,
    PositionError,
    SequenceError,
    ShapeError,
    SharedCellError,
    StepError,
)
from kvnumba.unified import UnifiedCache

N_HEAD_KV, HEAD_DIM = 2, 8
WIDTH = N_HEAD_KV * HEAD_DIM


def make(n_ctx=16, **changes):
    values = {
        "n_layer": 2,
        "n_head_kv": N_HEAD_KV,
        "head_dim": HEAD_DIM,
        "n_seq_max": 4,
        "type_k": "f32",
        "type_v": "f32",
        "rope": RopeConfig(HEAD_DIM),
        "n_ubatch": 4,
    }
    return UnifiedCache(CacheConfig(n_ctx=n_ctx, **{**values, **changes}))


def fill(cache, n, seq_ids=0, pos=None, seed=0):
    """Place n tokens with random rows; return the cells."""
    rng = np.random.default_rng(seed)
    cells = []
    for step in cache.prepare(Batch(np.arange(n) + 100, pos, seq_ids)):
        with step:
            for il in range(cache.config.n_layer):
                k, v = rng.standard_normal((2, step.n_tokens, WIDTH), np.float32)
                step.write(il, k, v)
        cells += step.cells.tolist()
    return cells


def state(cache):
    """All that a refused operation must leave as it was, as bytes."""
    arrays = [*cache.cells.state, cache.cells.pinned, *cache.layers.k, *cache.layers.v]
    return [a.tobytes() for a in arrays], cache.search_start, cache.has_shift


# -- steps --------------------------------------------------------------------------------------


def test_positions_continue_each_sequence():
    cache = make()
    fill(cache, 3)
    fill(cache, 2, seq_ids=1)
    steps = cache.prepare(Batch([1, 2, 3], seq_ids=[[0], [1], [0, 1]]))
    assert steps.batch.pos.tolist() == [3, 2, 4]


def test_batch_is_split_and_committed_step_by_step():
    cache = make()
    steps = cache.prepare(Batch(np.arange(10)))
    assert [s.n_tokens for s in steps] == [4, 4, 2]
    assert cache.used == 0
    for n, step in enumerate(steps):
        step.apply()
        assert cache.n_pending == step.n_tokens
        step.commit()
        assert cache.used == [4, 8, 10][n]
    assert cache.cells.tokens_of(0).tolist() == list(range(10))


def test_step_rolls_back_on_an_exception():
    cache = make()
    fill(cache, 3)
    before = state(cache)
    (step,) = cache.prepare([1, 2])
    with pytest.raises(ZeroDivisionError), step:
        raise ZeroDivisionError
    assert state(cache) == before
    assert step.state == "rolled back"


def test_whole_batch_rolls_back_after_a_later_failure():
    cache = make()
    fill(cache, 2)
    before = state(cache)
    steps = cache.prepare(np.arange(8))
    steps[0].apply()
    steps[0].commit()
    steps[1].apply()
    steps.rollback()
    assert state(cache)[0][:6] == before[0][:6]
    assert cache.n_pending == 0
    steps.rollback()  # nothing left to undo


@pytest.mark.parametrize("placement", ["scatter", "ring"])
def test_a_batch_that_does_not_fit_places_nothing(placement):
    cache = make(placement=placement)
    fill(cache, 10)
    before = state(cache)[0]
    with pytest.raises(NoSlotError) as caught:
        cache.prepare(np.arange(7))
    assert caught.value.n_wanted == (7 if placement == "scatter" else 3)
    assert caught.value.n_free == 6 or placement == "ring"
    assert state(cache)[0] == before
    with pytest.raises(CacheFullError):
        cache.prepare(np.arange(17))
    assert state(cache)[0] == before


def test_calls_out_of_order_are_refused():
    cache = make()
    step, later = cache.prepare(np.arange(8))
    row = np.zeros((4, WIDTH), np.float32)
    for call in (step.commit, step.rollback, lambda: step.write(0, row, row)):
        with pytest.raises(StepError, match="planned"):
            call()
    step.apply()
    with pytest.raises(StepError, match="applied"):
        step.apply()
    for verb in (lambda: cache.seq_rm(0), lambda: cache.seq_cp(0, 1), cache.update):
        with pytest.raises(StepError, match="pending"):
            verb()
    with pytest.raises(StepError, match="pending"):
        cache.prepare([1])
    step.commit()
    cache.seq_rm(0)
    with pytest.raises(StepError, match="changed"):
        later.apply()


def test_of_two_prepared_batches_only_the_first_may_be_placed():
    cache = make()
    first, second = cache.prepare(np.arange(6)), cache.prepare(Batch([1, 2], seq_ids=1))
    with first[0]:
        pass
    with pytest.raises(StepError, match="changed"):
        second[0].apply()
    with first[1]:
        pass
    assert (cache.used, cache.seq_pos_max(1)) == (6, -1)
    cache.check()


@pytest.mark.parametrize("end", ["rollback", "clear", "commit"])
def test_a_step_whose_tokens_are_gone_touches_nobody_else_s(end):
    cache = make()
    (step,) = cache.prepare([1, 2])
    step.apply()
    getattr(cache, end)()
    if end == "commit":
        cache.seq_rm(0)
    fill(cache, 2, seq_ids=1)
    before = state(cache)
    row = np.zeros((2, WIDTH), np.float32)
    for call in (step.rollback, step.commit, lambda: step.write(0, row, row)):
        with pytest.raises(StepError, match="no longer pending"):
            call()
    assert state(cache) == before


def test_a_batch_is_not_rolled_back_under_a_later_one():
    cache = make()
    first = cache.prepare([1, 2])
    with first[0]:
        pass
    fill(cache, 2)
    before = state(cache)
    with pytest.raises(StepError, match="changed"):
        first.rollback()
    assert state(cache) == before


def test_a_refused_batch_leaves_deferred_work_undone():
    cache = make()
    fill(cache, 12)
    cache.seq_rm(0, 2, 4)
    cache.seq_add(0, 4, -1, -2)
    cache.defrag()
    before = state(cache)
    with pytest.raises(NoSlotError):
        cache.prepare(np.arange(7))
    assert state(cache) == before


def test_place_by_hand_commit_and_rollback():
    cache = make()
    cells = cache.find_slot(3)
    cache.place(cells, [5, 6, 7], [[0], [1], [0, 3]], [9, 8, 7])
    cache.commit()
    assert (cache.used, cache.n_tokens) == (3, 4)
    cache.place(cache.find_slot(2), [8, 9], 0)
    cache.rollback()
    assert cache.cells.tokens_of(0).tolist() == [9, 7]
    cache.check()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (([0, 0], [1, 2], 0), ShapeError),
        (([0, 16], [1, 2], 0), ShapeError),
        (([-1], [1], 0), ShapeError),
        (([0], [1, 2], 0), ShapeError),
        (([0], [-1], 0), PositionError),
        (([0], [1], 4), SequenceError),
        (([0], [1], 0, [1, 2]), ShapeError),
        (([5], [1], 0), NoSlotError),
    ],
)
def test_place_refuses_and_changes_nothing(args, error):
    cache = make()
    cache.place([5], [0], 0)
    cache.commit()
    before = state(cache)
    with pytest.raises(error):
        cache.place(*args)
    assert state(cache) == before


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.seq_rm(4), SequenceError),
        (lambda c: c.seq_rm(-2), SequenceError),
        (lambda c: c.seq_rm("0"), SequenceError),
        (lambda c: c.seq_rm(True), SequenceError),
        (lambda c: c.seq_rm(0, 0.5), PositionError),
        (lambda c: c.seq_cp(0, 4), SequenceError),
        (lambda c: c.seq_cp(-1, 0), SequenceError),
        (lambda c: c.seq_keep(-1), SequenceError),
        (lambda c: c.seq_add(0, 0, -1, MAX_POS), PositionError),
        (lambda c: c.seq_add(0, 0, -1, 1.5), PositionError),
        (lambda c: c.seq_add(0, 0, -1, 1 << 40), PositionError),
        (lambda c: c.seq_div(0, 0, -1, 0), PositionError),
        (lambda c: c.seq_div(0, 0, -1, -2), PositionError),
        (lambda c: c.seq_pos_max(4), SequenceError),
        (lambda c: c.seq_add(0, 0, -1, True), PositionError),
        (lambda c: c.find_slot(True), ShapeError),
        (lambda c: c.defrag_plan("x"), ConfigError),
        (lambda c: c.defrag_plan(-1), ConfigError),
        (lambda c: c.defrag_sched(None), ConfigError),
        (lambda c: c.view(10**12), SequenceError),
        (lambda c: c.attend(0, [[[0.0] * 8] * 2], [0]), ShapeError),
        (lambda c: c.attend(0.0, np.zeros((1, 2, 8), np.float32), [0]), ConfigError),
        (lambda c: c.attend(0, np.zeros((1, 0, 8), np.float32), [0]), ShapeError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8), np.float32), [0], window=-1), ConfigError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8), np.float32), [0], window=1.5), ConfigError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8), np.float32), [0], soft_cap=-1), ConfigError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8), np.float32), [0], scale="a"), ConfigError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8), np.float32), [0], out=[0]), ShapeError),
        (lambda c: c.find_slot(-1), ShapeError),
        (lambda c: c.find_slot(17), CacheFullError),
        (lambda c: c.prepare([1], n_ubatch=0), ConfigError),
        (lambda c: c.prepare(Batch([1], seq_ids=4)), SequenceError),
        (lambda c: c.prepare(np.arange(3000)), ShapeError),
        (lambda c: c.view(-1), SequenceError),
        (lambda c: c.defrag(-1), ConfigError),
        (lambda c: c.attend(2, np.zeros((1, 2, 8), np.float32), [0]), ConfigError),
        (lambda c: c.attend(0, np.zeros((1, 3, 8), np.float32), [0]), ShapeError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8)), [0]), ShapeError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8), np.float32), [0, 1]), ShapeError),
        (lambda c: c.attend(0, np.zeros((1, 2, 8), np.float32), [0], 9), SequenceError),
    ],
)
def test_bad_arguments_raise_our_error_and_change_nothing(call, error):
    cache = make()
    fill(cache, 6)
    before = state(cache)
    with pytest.raises(error) as caught:
        call(cache)
    assert isinstance(caught.value, KVCacheError)
    assert state(cache) == before


def test_errors_are_also_the_builtins_a_caller_expects():
    cache = make()
    with pytest.raises(IndexError, match=r"seq_id 7 is outside \[0, 4\)"):
        cache.seq_rm(7)
    with pytest.raises(ValueError, match="token 0"):
        Batch([1], [-3])


def test_no_shift_when_the_model_forbids_it():
    cache = make(can_shift=False)
    fill(cache, 3)
    before = state(cache)
    for call in (lambda: cache.seq_add(0, 0, -1, 1), lambda: cache.seq_div(0, 0, -1, 2)):
        with pytest.raises(CannotShiftError):
            call()
    assert state(cache) == before
    assert not cache.can_shift


@pytest.mark.parametrize("s", [0, 63, 64, 127, 255])
def test_every_sequence_id_behaves_alike(s):
    cache = make(n_ctx=130, n_seq_max=256, n_ubatch=130)
    other = (s + 1) % 256
    fill(cache, 130, seq_ids=s)
    cache.seq_cp(s, other, 60, 70)
    cache.seq_rm(s, 64, 66)
    assert cache.used == 130
    assert cache.n_tokens == 138
    cache.seq_rm(other, 60, 65)
    assert cache.used == 129
    assert cache.seq_pos_min(other) == 65
    cache.seq_keep(other)
    assert (cache.used, cache.seq_pos_max(s), cache.seq_pos_max(other)) == (5, -1, 69)
    cache.check()


# -- shared cells -------------------------------------------------------------------------------


def test_refused_shift_of_shared_cells_changes_nothing():
    cache = make(shared="refuse")
    fill(cache, 6)
    cache.seq_cp(0, 1, 0, 3)
    before = state(cache)
    for call in (lambda: cache.seq_add(0, 2, -1, 1), lambda: cache.seq_div(1, 0, -1, 2)):
        with pytest.raises(SharedCellError):
            call()
    assert state(cache) == before
    cache.seq_add(0, 3, -1, 1)  # not shared


def test_copies_of_shared_cells_need_room():
    cache = make(n_ctx=8, shared="copy")
    fill(cache, 6)
    cache.seq_cp(0, 1, 0, 3)
    before = state(cache)
    with pytest.raises(NoSlotError):
        cache.seq_add(0, 0, -1, 1)
    assert state(cache) == before
    cache.seq_add(0, 1, -1, 1)
    k_shared = cache.layers.k[0][:3].copy()
    cache.update()
    assert cache.seq_pos_max(1) == 2
    assert cache.view().pos[cache.cells.members(0)].tolist().count(1) == 0
    np.testing.assert_array_equal(cache.layers.k[0][:3], k_shared)
    cache.check()


# -- pinned cells (what the last durable commit names) ------------------------------------------


def pin(cache):
    cache.cells.pinned[:] = cache.cells.used


def test_pinned_cells_are_not_given_out():
    cache = make(n_ctx=8)
    fill(cache, 8)
    pin(cache)
    cache.seq_rm(0, 5, -1)
    with pytest.raises(NoSlotError, match="3 freed ones wait for a session commit") as caught:
        cache.find_slot(1)
    assert (caught.value.n_free, caught.value.n_waiting) == (0, 3)
    with pytest.raises(NoSlotError):
        cache.place([6], [5], 0)
    pin(cache)
    assert cache.find_slot(3).tolist() == [5, 6, 7]


@pytest.mark.parametrize("change", ["shift", "divide", "defrag"])
def test_pinned_rows_are_never_overwritten(change):
    cache = make(n_ctx=12, n_spare=12)
    fill(cache, 8)
    if change == "defrag":
        cache.seq_rm(0, 1, 3)
    pin(cache)
    pinned = cache.cells.members(0)
    k, v = cache.layers.k[1][pinned].copy(), cache.layers.v[1][pinned].copy()
    if change == "shift":
        cache.seq_add(0, 2, -1, 5)
    elif change == "divide":
        cache.seq_div(0, 0, -1, 2)
    else:
        cache.defrag()
    assert cache.update()
    np.testing.assert_array_equal(cache.layers.k[1][pinned], k)
    np.testing.assert_array_equal(cache.layers.v[1][pinned], v)
    assert not cache.cells.shift.any()
    cache.check()


def test_a_shift_without_spare_cells_is_refused_whole():
    cache = make(n_ctx=8)
    fill(cache, 8)
    pin(cache)
    cache.seq_add(0, 0, -1, 3)
    before = state(cache)
    with pytest.raises(NoSlotError):
        cache.update()
    assert state(cache) == before


# -- deferred work ------------------------------------------------------------------------------


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("type_k", ["f32", "f16", "bf16"])
def test_defrag_moves_rows_and_a_second_run_moves_nothing(v_trans, type_k):
    cache = make(type_k=type_k, v_trans=v_trans, type_v="f16")
    fill(cache, 12)
    v_rows = [v.T if v_trans else v for v in cache.layers.v]
    rows = {p: (cache.layers.k[1][p].copy(), v_rows[1][p].copy()) for p in range(12)}
    cache.seq_rm(0, 1, 4)
    cache.seq_rm(0, 6, 8)
    cache.defrag()
    assert cache.update()
    assert cache.cell_max() == cache.used == 7
    for i in cache.cells.members(0):
        k, v = rows[int(cache.cells.pos[i])]
        np.testing.assert_array_equal(cache.layers.k[1][i], k)
        np.testing.assert_array_equal(v_rows[1][i], v)
    cache.defrag()
    assert not cache.update()


def test_fragmentation_and_schedule_follow_the_reference():
    cache = make(n_ctx=4096, n_ubatch=4096, n_batch=4096, flash_attn=False)
    assert cache.padding == 32
    assert cache.fragmentation() == 0
    fill(cache, 4000)
    cache.seq_rm(0, 100, 3990)
    assert cache.fragmentation() == pytest.approx(1 - (110 + 32) / 4000)
    assert not cache.defrag_sched(0.99)
    assert not cache.defrag_sched(0)
    assert cache.defrag_sched(0.5)
    assert cache.update()
    assert cache.fragmentation() == 0
    assert make().fragmentation() == 0  # padding is no hole


def test_shift_is_applied_before_the_next_batch():
    cache = make()
    fill(cache, 6)
    cache.seq_rm(0, 0, 2)
    cache.seq_add(0, 2, -1, -2)
    assert cache.has_shift
    steps = cache.prepare([1])
    assert not cache.has_shift
    assert steps.batch.pos.tolist() == [4]


def test_clear_forgets_everything():
    cache = make()
    fill(cache, 6)
    cache.seq_add(0, 2, -1, 3)
    cache.defrag()
    cache.clear(data=True)
    assert (cache.used, cache.pos_max(), cache.cell_max(), cache.has_shift) == (0, -1, 0, False)
    assert not any(a.any() for a in (*cache.layers.k, *cache.layers.v))
    assert not cache.update()
    assert cache.find_slot(16).tolist() == list(range(16))


def test_clear_keeps_rows_unless_asked():
    cache = make()
    fill(cache, 6)
    rows = cache.layers.k[0][:6].copy()
    cache.clear()
    np.testing.assert_array_equal(cache.layers.k[0][:6], rows)


# -- queries ------------------------------------------------------------------------------------


def test_view_lists_at_most_n_owners():
    cache = make()
    fill(cache, 2)
    for s in (1, 2, 3):
        cache.seq_cp(0, s, 0, 1)
    view = cache.view(n_seq_max=2)
    assert view.seq_ids[:3].tolist() == [[0, 1], [0, -1], [-1, -1]]
    assert (view.used, view.n_tokens, view.max_contiguous, view.max_contiguous_idx) == (2, 5, 14, 2)
    assert cache.view(0).seq_ids.shape == (16, 0)
    cache.seq_add(0, 1, -1, 5)
    assert cache.view().pos[:2].tolist() == [0, 6]  # a pending shift counts once


def test_padding_and_n_kv():
    cache = make(n_ctx=1000, n_ubatch=1000)
    assert (cache.padding, cache.n_kv()) == (256, 256)
    fill(cache, 257)
    assert cache.n_kv() == 512
    fill(cache, 743)
    assert cache.n_kv() == 1000


def test_sizes_and_repr():
    cache = make()
    assert cache.size_k_bytes == cache.size_v_bytes == 2 * 16 * WIDTH * 4
    assert cache.size_bytes == 2 * cache.size_k_bytes
    assert "0/16 cells used" in repr(cache)


def test_check_names_the_broken_cell():
    cache = make()
    fill(cache, 3)
    cache.cells.pos[7] = 5
    with pytest.raises(DamagedError, match="cell 7"):
        cache.check()


# -- attention ----------------------------------------------------------------------------------


def naive_attention(cache, il, q, pos, seq_ids):
    k, v = (
        a[il].astype(np.float64).reshape(-1, N_HEAD_KV, HEAD_DIM)
        for a in (cache.layers.k, cache.layers.v)
    )
    out = np.zeros(q.shape)
    for t, (p, s) in enumerate(zip(pos, seq_ids, strict=True)):
        cells = [i for i in cache.cells.members(s) if cache.cells.pos[i] <= p]
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // N_HEAD_KV)
            if cells:
                x = k[cells, g] @ q[t, h].astype(np.float64) / np.sqrt(HEAD_DIM)
                w = np.exp(x - x.max())
                out[t, h] = (w / w.sum()) @ v[cells, g]
    return out


def test_attention_sees_its_sequence_up_to_its_position_and_nothing_else():
    cache = make(n_ctx=70, n_ubatch=70)
    fill(cache, 30, seq_ids=0)
    fill(cache, 30, seq_ids=1, seed=1)
    cache.seq_cp(0, 2, 0, 10)
    cache.seq_rm(0, 3, 6)
    free = np.flatnonzero(cache.cells.pos[:70] < 0)
    for rows in (*cache.layers.k, *cache.layers.v):
        rows[free] = np.nan
    q = np.random.default_rng(0).standard_normal((5, 4, HEAD_DIM), np.float32)
    pos, seq_ids = [29, 4, 29, 0, 20], [0, 1, 2, 3, 0]
    out = cache.attend(1, q, pos, seq_ids)
    np.testing.assert_allclose(out, naive_attention(cache, 1, q, pos, seq_ids), atol=2e-6)
    assert not out[3].any()  # sequence 3 is empty


def test_step_attends_to_its_own_tokens_too():
    cache = make()
    fill(cache, 3)
    rng = np.random.default_rng(5)
    (step,) = cache.prepare(Batch([1, 2, 3], seq_ids=[1, 0, 1]))
    with step:
        k, v = rng.standard_normal((2, 3, WIDTH), np.float32)
        step.write(0, k, v)
        q = rng.standard_normal((3, 2, HEAD_DIM), np.float32)
        out = np.full((3, 2, HEAD_DIM), np.nan, np.float32)
        assert step.attend(0, q, out) is out
    want = naive_attention(cache, 0, q, step.pos, [1, 0, 1])
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_attention_of_the_cache_between_two_of_a_step_changes_nothing():
    cache = make()
    fill(cache, 5, seq_ids=1)
    rng = np.random.default_rng(5)
    (step,) = cache.prepare(Batch([1, 2, 3]))
    with step:
        for il in range(2):
            step.write(il, *rng.standard_normal((2, 3, WIDTH), np.float32))
        q = rng.standard_normal((3, 2, HEAD_DIM), np.float32)
        want = step.attend(1, q)
        cache.attend(0, q[:1], [4], 1)
        np.testing.assert_array_equal(step.attend(1, q), want)


# -- one thread of one process ------------------------------------------------------------------


def test_a_second_thread_gets_an_error():
    cache = make()
    fill(cache, 3)
    errors = []

    def intrude():
        for call in (lambda: cache.seq_rm(0), lambda: cache.prepare([1]), cache.clear):
            try:
                call()
            except InUseError as error:
                errors.append(error)

    before = state(cache)
    with cache.guard:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(errors) == 3
    assert state(cache) == before
    cache.seq_rm(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_not_change_the_cache():
    cache = make()
    fill(cache, 3)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            cache.seq_rm(0)
        except InUseError:
            code = 0 if cache.used == 3 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.seq_rm(0)
