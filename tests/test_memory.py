"""What all caches share: statuses, extents, the step loop, and warnings about gaps."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvnumba import (
    CacheConfig,
    HybridCache,
    HybridConfig,
    RecurrentCache,
    RecurrentConfig,
    StreamsCache,
    UnifiedCache,
    WindowCache,
    WindowConfig,
)
from kvnumba.admission import find_gap
from kvnumba.batch import Batch
from kvnumba.errors import (
    CacheFullError,
    ConfigError,
    InUseError,
    NoSlotError,
    PositionError,
    SequenceError,
    ShapeError,
    StepError,
)
from kvnumba.memory import Extent, Memory, Status, combine_status

S = Status


def small(**options):
    sizes = {"n_layer": 1, "n_ctx": 8, "n_head_kv": 1, "head_dim": 2, "n_seq_max": 2}
    return UnifiedCache(CacheConfig(**sizes | options))


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (S.SUCCESS, S.SUCCESS, S.SUCCESS),
        (S.SUCCESS, S.NO_UPDATE, S.SUCCESS),
        (S.NO_UPDATE, S.SUCCESS, S.SUCCESS),
        (S.NO_UPDATE, S.NO_UPDATE, S.NO_UPDATE),
        (S.FAILED_COMPUTE, S.FAILED_PREPARE, S.FAILED_COMPUTE),
        (S.SUCCESS, S.FAILED_PREPARE, S.FAILED_PREPARE),
    ],
)
def test_two_statuses_combine_as_in_the_reference(a, b, both):
    assert combine_status(a, b) == both


def test_the_numbers_are_the_references():
    assert [int(s) for s in Status] == [0, 1, 2, 3]


def test_a_batch_without_room_is_a_status_and_places_nothing():
    cache = small()
    with cache.prepare(Batch(range(6)))[0]:
        pass
    before = [a.copy() for a in cache.cells.state]
    steps = cache.try_prepare(Batch(range(3), seq_ids=1))
    assert steps.status == Status.FAILED_PREPARE
    assert isinstance(steps.error, NoSlotError)
    assert list(steps) == []
    assert all((a == b).all() for a, b in zip(before, cache.cells.state, strict=True))
    assert cache.try_prepare(Batch(range(9))).error.__class__ is CacheFullError
    assert cache.try_prepare(Batch(range(2), seq_ids=1)).status == Status.SUCCESS


def test_a_third_part_that_does_not_fit_places_nothing_of_the_first_two():
    cache = small(n_ctx=5)
    with pytest.raises(NoSlotError):
        cache.prepare(Batch(range(6)), n_ubatch=2)
    cache = small(n_ctx=7)
    with cache.prepare(Batch([1, 2], seq_ids=1))[0]:
        pass
    with pytest.raises(NoSlotError):
        cache.prepare(Batch(range(6)), n_ubatch=2)
    assert cache.used == 2
    assert cache.seq_pos_max(0) == -1


def test_a_failed_computation_is_a_status_and_leaves_the_earlier_steps():
    cache = small()
    steps = cache.prepare(Batch(range(4)), n_ubatch=2)
    with steps[0]:
        pass
    with pytest.raises(ZeroDivisionError), steps[1]:
        _ = 1 // 0
    assert steps.status == Status.FAILED_COMPUTE
    assert cache.used == 2


def test_with_the_whole_batch_an_exception_undoes_all_of_it():
    cache = small()

    def compute():
        with cache.prepare(Batch(range(4)), n_ubatch=2) as steps:
            for n, step in enumerate(steps):
                with step:
                    assert cache.used == 2 * n + 2
                    _ = 1 // (1 - n)

    with pytest.raises(ZeroDivisionError):
        compute()
    assert cache.used == 0
    assert cache.n_pending == 0


def test_extents():
    cache = small(n_ctx=600, flash_attn=True)
    assert cache.init_full() == Extent(0, 600, 600, True)
    (step,) = cache.prepare(Batch(range(300)), n_ubatch=300)
    with step:
        assert step.extent == Extent(0, 512, 600)


def test_a_gap_is_found_in_every_sequence_of_a_token():
    held = {0: 4, 1: 9}
    assert find_gap(Batch([1, 1], [5, 6], 0), held.get) is None
    assert find_gap(Batch([1, 1], [5, 7], 0), held.get) == (1, 0, 6)
    assert find_gap(Batch([1, 1], [6, 7], 0), held.get) == (0, 0, 5)
    assert find_gap(Batch([1, 1], [5, 10], [[0], [0, 1]]), held.get) == (1, 0, 6)
    assert find_gap(Batch([1, 1, 1], [5, 10, 6], [0, 1, 0]), held.get) is None


def test_positions_that_do_not_follow_on_are_taken_with_a_warning(caplog):
    cache = small()
    with caplog.at_level(logging.WARNING):
        with cache.prepare(Batch([7, 8], [0, 1]))[0]:
            pass
        assert not caplog.records
        with cache.prepare(Batch([9], [5]))[0]:
            pass
    assert "token 0 has position 5 in sequence 0, 2 would follow on" in caplog.text
    assert cache.seq_pos_max(0) == 5


def test_steps_of_a_batch_that_failed_cannot_be_rolled_back_after_other_changes():
    cache = small()
    steps = cache.prepare(Batch(range(4)), n_ubatch=2)
    with steps[0]:
        pass
    cache.seq_rm(0, 1, 2)
    with pytest.raises(StepError, match="changed since"):
        steps.rollback()


def test_a_step_can_be_prepared_by_someone_elses_split():
    from kvnumba.splitting import split_simple

    cache = small()
    batch = Batch(range(5), range(5))
    steps = cache.prepare_ubatches(batch, split_simple(batch, 3))
    assert [s.n_tokens for s in steps] == [3, 2]
    assert np.array_equal(steps[1].ubatch.index, [3, 4])


ATTENTION = CacheConfig(
    n_layer=2, n_ctx=32, n_head_kv=1, head_dim=2, n_seq_max=3, n_batch=16, n_ubatch=4, shared="copy"
)
STATES = RecurrentConfig(1, 2, 3, n_seq_max=3, n_rewind=1, n_batch=16, n_ubatch=4)
WINDOWS = WindowConfig(ATTENTION, 6, (False, True))
MAKERS = {
    "unified": lambda path: UnifiedCache(ATTENTION, path),
    "recurrent": lambda path: RecurrentCache(replace(STATES, shared="copy"), path),
    "window": lambda path: WindowCache(WINDOWS, path),
    "hybrid": lambda path: HybridCache(HybridConfig(ATTENTION, STATES, (False, True, False)), path),
    "hybrid-window": lambda path: HybridCache(
        HybridConfig(WINDOWS, STATES, (False, True, False)), path
    ),
    "streams": lambda path: StreamsCache(ATTENTION, 3, path),
}


def compute(step):
    """Write something in every layer, whatever it is."""
    for il in range(3):
        try:
            r, s = step.read(il)
        except (AttributeError, ConfigError):
            try:
                step.write(il, *np.ones((2, step.n_tokens, 2), np.float32))
            except ConfigError:
                break
        else:
            n_states = min(step.ubatch.n_seq_tokens, 2)
            step.write(il, *(np.repeat(a[:, None] + 1, n_states, 1) for a in (r, s)))
            if not hasattr(step, "attend"):
                break


@pytest.fixture(params=list(MAKERS))
def memory(request):
    with MAKERS[request.param](None) as made:
        yield made


def feed(memory, n, seq_id=0):
    steps = memory.prepare(Batch(range(n), seq_ids=seq_id))
    for step in steps:
        with step:
            compute(step)
    memory.check()
    return steps


def ends(memory):
    return [(memory.seq_pos_min(s), memory.seq_pos_max(s)) for s in range(3)]


def test_every_cache_is_a_memory(memory):
    assert isinstance(memory, Memory)
    assert memory.init_full().is_full
    assert not memory.update()


def test_counting_on_and_cutting_back_mean_the_same_everywhere(memory):
    feed(memory, 5)
    low, high = ends(memory)[0]
    assert high == 4
    assert ends(memory)[1:] == [(-1, -1), (-1, -1)]
    assert memory.refusal(0, low + 1) is None
    if low:
        before = ends(memory)
        assert memory.refusal(0, low)
        assert not memory.seq_rm(0, low)
        assert ends(memory) == before
    assert memory.seq_rm(0, high)
    assert memory.seq_pos_max(0) == 3
    feed(memory, 1)
    assert memory.seq_pos_max(0) == 4
    assert memory.seq_rm(0)
    assert ends(memory)[0] == (-1, -1)
    memory.check()


def test_a_failed_step_and_a_failed_batch_leave_no_trace(memory):
    feed(memory, 3)
    before = ends(memory)
    steps = memory.prepare(Batch(range(10)))
    with steps[0]:
        compute(steps[0])
    with pytest.raises(ZeroDivisionError), steps[1]:
        _ = 1 // 0
    assert steps.status == Status.FAILED_COMPUTE
    assert memory.seq_pos_max(0) == 2 + steps[0].n_tokens
    steps.rollback()
    assert ends(memory) == before
    memory.check()
    for step in steps:  # it can be tried again
        if step.state == "planned":
            break
        with pytest.raises(StepError):
            step.apply()


def test_all_sequences_at_once(memory):
    for s in range(3):
        feed(memory, 3, s)
    assert memory.seq_rm(-1, 2, -1)
    assert [high for _, high in ends(memory)] == [1, 1, 1]
    memory.seq_keep(1)
    assert [high for _, high in ends(memory)] == [-1, 1, -1]
    memory.seq_cp(1, 2)
    assert memory.seq_rm(-1)
    assert ends(memory) == [(-1, -1)] * 3
    feed(memory, 2, 2)
    memory.clear()
    assert ends(memory) == [(-1, -1)] * 3
    memory.check()


def test_a_fork_goes_its_own_way(memory):
    feed(memory, 4)
    memory.seq_cp(0, 2)
    feed(memory, 2, 2)
    assert [high for _, high in ends(memory)] == [3, -1, 5]
    feed(memory, 1, 0)
    memory.seq_add(0, 0, -1, 3)
    memory.check()
    assert memory.seq_pos_max(0) == 7


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m: m.seq_rm(3), SequenceError),
        (lambda m: m.seq_rm(0, 0.5), PositionError),
        (lambda m: m.refusal(-2), SequenceError),
        (lambda m: m.seq_cp(0, 3), SequenceError),
        (lambda m: m.seq_cp(-1, 0), SequenceError),
        (lambda m: m.seq_keep(-1), SequenceError),
        (lambda m: m.seq_add(3, 0, -1, 1), SequenceError),
        (lambda m: m.seq_add(0, 0, -1, 2**31), PositionError),
        (lambda m: m.seq_add(0, 0, -1, 2**31 - 2), PositionError),
        (lambda m: m.seq_div(0, 0, -1, 0), PositionError),
        (lambda m: m.seq_pos_max(3), SequenceError),
        (lambda m: m.prepare(Batch([1], seq_ids=3)), SequenceError),
        (lambda m: m.prepare(Batch(range(17))), ShapeError),
        (lambda m: m.prepare(Batch([1]), 0), ConfigError),
        (lambda m: m.prepare(Batch([1]), True), ConfigError),
    ],
)
def test_bad_arguments_raise_and_change_nothing(memory, call, error):
    feed(memory, 4)
    before = ends(memory)
    with pytest.raises(error):
        call(memory)
    assert ends(memory) == before
    memory.check()


def test_verbs_are_refused_while_tokens_are_pending(memory):
    feed(memory, 2)
    (step,) = memory.prepare(Batch([1]))
    step.apply()
    for call in (
        lambda: memory.seq_rm(0),
        lambda: memory.seq_cp(0, 1),
        lambda: memory.seq_keep(0),
        lambda: memory.seq_add(0, 0, -1, 1),
        lambda: memory.seq_div(0, 0, -1, 2),
        lambda: memory.prepare(Batch([1])),
        memory.update,
    ):
        with pytest.raises(StepError, match="pending"):
            call()
    memory.rollback()
    assert memory.seq_pos_max(0) == 1
    with pytest.raises(StepError):
        step.commit()


def test_a_prepared_batch_is_stale_after_any_change(memory):
    feed(memory, 3)
    steps = memory.prepare(Batch([1]))
    memory.seq_rm(0)
    with pytest.raises(StepError, match="changed"):
        steps[0].apply()


def test_a_second_thread_gets_a_clear_error(memory):
    import threading

    errors = []

    def intrude():
        try:
            memory.seq_rm(0)
        except InUseError as error:
            errors.append(error)

    with memory.guard:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(errors) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="files need Linux")
@pytest.mark.parametrize("kind", list(MAKERS))
def test_every_cache_works_in_mapped_files(kind, tmp_path):
    with MAKERS[kind](tmp_path / "cache") as memory:
        feed(memory, 10)
        memory.seq_cp(0, 1)
        feed(memory, 1, 1)
        assert memory.size_bytes > 0
    assert any(p.is_file() for p in (tmp_path / "cache").rglob("*"))


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (UnifiedCache, "CacheConfig"),
        (RecurrentCache, "RecurrentConfig"),
        (WindowCache, "WindowConfig"),
        (HybridCache, "HybridConfig"),
        (lambda config: StreamsCache(config, 1), "CacheConfig"),
    ],
)
def test_a_cache_is_made_from_its_own_configuration(make, wanted):
    with pytest.raises(ConfigError, match=f"a {wanted} is wanted, not dict"):
        make({"n_layer": 1})
