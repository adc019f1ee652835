"""What all caches share: statuses, extents, the step loop, and warnings about gaps."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig
from kvnumba.continuity import find_gap
from kvnumba.errors import CacheFullError, NoSlotError, StepError
from kvnumba.memory import Extent, Status, combine_status
from kvnumba.unified import UnifiedCache

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
