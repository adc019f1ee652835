"""When checkpoints are made, which go for them, and that a restored sequence is what it was."""

from __future__ import annotations

import fed
import numpy as np
import pytest
from fed import MAKERS, check_holds, feed, frozen
from hypothesis import given
from hypothesis import strategies as st

from kvnumba.batch import Batch
from kvnumba.branches import can_rewind
from kvnumba.checkpoints import (
    Checkpoint,
    Checkpoints,
    checkpoint_stops,
    choose_checkpoint,
    plan_checkpoint,
)
from kvnumba.errors import ConfigError, SequenceError, ShapeError, StepError


def made(n_tokens, task=0, seq_id=1):
    """A checkpoint that no memory holds."""
    return Checkpoint(seq_id, np.arange(n_tokens, dtype=np.int32), 0, task)


def counts(checkpoints):
    return [c.n_tokens for c in checkpoints]


@pytest.fixture(params=[name for name in MAKERS if name != "fixed"])
def memory(request):
    with MAKERS[request.param]() as one:
        yield one


# -- planning ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "n_tokens", "forced", "is_due"),
    [
        ([], 1, False, True),
        ([100], 149, False, False),
        ([100], 149, True, True),
        ([100], 150, False, True),
        ([100, 140], 150, False, False),
        ([140, 100], 150, False, False),
        ([200], 150, False, True),  # only those before it count
        ([], 0, True, False),
    ],
)
def test_the_spacing_rule(held, n_tokens, forced, is_due):
    plan = plan_checkpoint([made(n) for n in held], n_tokens, 50, 8, is_forced=forced)
    assert plan.is_due is is_due
    assert plan.drop == ()
    assert plan.reason


def test_one_after_as_many_tokens_is_replaced():
    held = [made(100), made(200)]
    plan = plan_checkpoint(held, 200, 50, 2, is_forced=True)
    assert plan.drop == (held[1],)


def test_a_full_list_loses_the_oldest():
    held = [made(300), made(100), made(200)]
    assert plan_checkpoint(held, 400, 50, 3).drop == (held[0],)
    assert plan_checkpoint(held, 400, 50, 2).drop == (held[0], held[1])


def test_those_of_other_tasks_that_are_too_close_go_before_the_oldest():
    held = [made(100, 7), made(200, 7), made(220, 7), made(230, 8), made(300, 7)]
    assert plan_checkpoint(held, 400, 50, 5, task=8).drop == (held[2],)
    assert plan_checkpoint(held, 400, 50, 4, task=8).drop == (held[2], held[0])
    assert plan_checkpoint(held, 400, 50, 5, task=7).drop == (held[3],)
    assert plan_checkpoint(held, 400, 15, 5, task=7).drop == (held[3],)
    assert plan_checkpoint(held, 400, 10, 5, task=7).drop == (held[0],)


def test_without_room_none_is_made():
    assert not plan_checkpoint([], 100, 50, 0, is_forced=True).is_due


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.booleans()), max_size=40))
def test_there_are_never_too_many_nor_two_alike(steps):
    held = []
    for n_tokens, task, forced in steps:
        plan = plan_checkpoint(held, n_tokens, 5, 4, task, forced)
        assert set(map(id, plan.drop)) <= set(map(id, held))
        if plan.is_due:
            held = [c for c in held if c not in plan.drop] + [made(n_tokens, task)]
        else:
            assert not plan.drop
        assert len(held) <= 4
        assert len(set(counts(held))) == len(held)


def test_the_longest_one_that_begins_the_tokens_is_chosen():
    held = [made(5), made(9), made(7), made(5, seq_id=2)]
    tokens = np.arange(20, dtype=np.int32)
    assert choose_checkpoint(held, tokens) is held[1]
    assert choose_checkpoint(held, tokens[:8]) is held[2]
    assert choose_checkpoint(held, tokens[:7]) is held[2]
    assert choose_checkpoint(held, tokens[:6]) is held[3]
    assert choose_checkpoint(held, tokens[:4]) is None
    tokens[6] = 50
    assert choose_checkpoint(held, tokens) is held[3]
    assert choose_checkpoint([], tokens) is None


def test_one_with_unknown_tokens_is_never_chosen():
    tokens = np.array([1, -1, 2], np.int32)
    assert choose_checkpoint([Checkpoint(1, tokens, 0)], tokens) is None


@pytest.mark.parametrize(
    ("args", "stops"),
    [
        ((1000, 512), {484: True, 996: True}),
        ((1000, 512, [30, 600]), {30: False, 484: True, 600: True, 996: True}),
        ((1000, 512, [600, 30], 500), {600: True, 996: True}),
        ((1000, 512, [], 996), {}),
        ((4, 2), {}),
        ((5, 2), {1: True}),
        ((10, 2, [0, 10]), {4: True, 6: True}),
        ((10, 2, [4]), {4: True, 6: True}),
    ],
)
def test_where_the_reading_of_a_prompt_stops(args, stops):
    assert checkpoint_stops(*args) == stops
    assert list(checkpoint_stops(*args)) == sorted(stops)


# -- making and restoring ---------------------------------------------------------------------


def test_a_restored_sequence_is_what_it_was(memory):
    checkpoints = Checkpoints(memory, [1, 2], spacing=5)
    tokens = list(range(100, 130))
    for start in range(0, 30, 5):
        feed(memory, tokens[start : start + 5])
        assert checkpoints.save(0, tokens[: start + 5]).is_due
    assert counts(checkpoints.held) == [25, 30]
    feed(memory, [1, 2, 3, 4, 5, 6, 7])
    one = checkpoints.choose([*tokens[:28], 9])
    assert one.n_tokens == 25
    assert one.pos_max == 24
    checkpoints.restore(one, 0)
    check_holds(memory, tokens[:25])
    assert counts(checkpoints.held) == [25]
    feed(memory, [8] * 9)
    check_holds(memory, tokens[:25] + [8] * 9)
    check_holds(memory, tokens[:25], one.seq_id)
    checkpoints.restore(one, 0)
    check_holds(memory, tokens[:25])
    checkpoints.clear()
    assert checkpoints.held == ()
    assert memory.seq_pos_max(1) == memory.seq_pos_max(2) == -1
    memory.check()


def test_a_checkpoint_copies_nothing(memory):
    feed(memory, range(30))
    used = [part.used for part in fed.parts_of(memory)]
    Checkpoints(memory, [1], spacing=5).save(0, range(30))
    assert [part.used for part in fed.parts_of(memory)] == used


@pytest.mark.parametrize("name", ["window", "hybrid-window"])
def test_a_window_that_is_full_goes_on_beside_its_checkpoints(name):
    """Shared cells are not used anew: a checkpoint holds no more of them than it needs."""
    memory = MAKERS[name]()
    checkpoints = Checkpoints(memory, [2, 3], spacing=8)
    tokens = list(range(60))
    for n in range(0, 60, 4):
        feed(memory, tokens[n : n + 4])
        checkpoints.save(0, tokens[: n + 4])
    assert counts(checkpoints.held) == [52, 60]
    part = fed.parts_of(memory)[1]
    assert part.n_free == 0
    assert len(part.cells.members(2)) == fed.WINDOW - 1
    checkpoints.restore(checkpoints.held[0], 0)
    check_holds(memory, tokens[:52])
    feed(memory, tokens[52:])
    check_holds(memory, tokens)


def test_a_checkpoint_of_a_window_does_not_claim_what_it_let_go_of():
    memory = MAKERS["window"]()
    feed(memory, range(20))
    checkpoints = Checkpoints(memory, [2])
    checkpoints.save(0, range(20))
    assert memory.seq_pos_min(0) == 0
    assert checkpoints.held[0].pos_min == memory.seq_pos_min(2) == 19
    assert memory.refusal(2, 19, -1)
    checkpoints.restore(checkpoints.held[0], 0)
    assert memory.refusal(0, 19, -1)


def test_a_window_that_hides_all_leaves_the_last_token():
    memory = fed.WindowCache(fed.replace(fed.WINDOWS, kind="chunked"))
    feed(memory, range(16))  # the next token begins a chunk
    checkpoints = Checkpoints(memory, [2])
    checkpoints.save(0, range(16))
    memory.check()
    assert memory.seq_pos_max(2) == 15
    assert len(memory.window.cells.members(2)) == 1


def test_the_same_point_is_kept_once(memory):
    checkpoints = Checkpoints(memory, [1, 2, 3], spacing=5)
    feed(memory, range(10))
    checkpoints.save(0, range(10))
    assert not checkpoints.save(0, range(10)).is_due or counts(checkpoints.held) == [10]
    assert checkpoints.save(0, range(10), is_forced=True).is_due
    assert counts(checkpoints.held) == [10]
    assert sum(memory.seq_pos_max(s) >= 0 for s in (1, 2, 3)) == 1


def test_one_that_is_not_due_changes_nothing(memory):
    checkpoints = Checkpoints(memory, [1, 2], spacing=5)
    feed(memory, range(10))
    checkpoints.save(0, range(10))
    feed(memory, [10])
    before = frozen(memory)
    plan = checkpoints.save(0, range(11))
    assert not plan.is_due
    assert "1 tokens before, the spacing is 5" in plan.reason
    assert frozen(memory) == before


def test_what_is_not_possible_changes_nothing(memory):
    feed(memory, range(10))
    feed(memory, [1], 3)
    for seq_ids, error in (([1, 1], SequenceError), ([3], SequenceError), ([5], SequenceError)):
        with pytest.raises(error):
            Checkpoints(memory, seq_ids)
    for options in ({"spacing": -1}, {"n_max": 3}, {"n_max": True}, {"spacing": 1.5}):
        with pytest.raises(ConfigError):
            Checkpoints(memory, [1, 2], **options)
    checkpoints = Checkpoints(memory, [1, 2], spacing=5)
    checkpoints.save(0, range(10))
    before = frozen(memory)
    with pytest.raises(ShapeError, match="has 10 tokens, 9 are given"):
        checkpoints.save(0, range(9))
    with pytest.raises(SequenceError, match="spare"):
        checkpoints.save(1, range(10))
    with pytest.raises(SequenceError, match="spare"):
        checkpoints.restore(checkpoints.held[0], 2)
    with pytest.raises(SequenceError, match="not held"):
        checkpoints.restore(made(10), 0)
    with pytest.raises(SequenceError):
        checkpoints.restore(checkpoints.held[0], 5)
    assert frozen(memory) == before
    assert counts(checkpoints.held) == [10]


def test_nothing_is_done_while_tokens_are_pending(memory):
    feed(memory, range(10))
    checkpoints = Checkpoints(memory, [1, 2], spacing=1)
    checkpoints.save(0, range(10))
    step = memory.prepare(Batch([10]))[0]
    step.apply()
    before = frozen(memory)
    for call in (
        lambda: checkpoints.save(0, range(11)),
        lambda: checkpoints.restore(checkpoints.held[0], 0),
        lambda: checkpoints.clear(),
    ):
        with pytest.raises(StepError):
            call()
        assert frozen(memory) == before
        assert counts(checkpoints.held) == [10]


@given(st.data())
def test_any_history_can_be_gone_back_to(data):
    memory = MAKERS[
        data.draw(st.sampled_from(["recurrent", "hybrid", "hybrid-window", "window"]))
    ]()
    checkpoints = Checkpoints(memory, [2, 3, 4], spacing=3)
    tokens, next_token = [], 0
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) and len(tokens) < 40:
            new = list(range(next_token, next_token + data.draw(st.integers(1, 6))))
            next_token = new[-1] + 1
            feed(memory, new)
            tokens += new
            checkpoints.save(0, tokens, is_forced=data.draw(st.booleans()))
        elif checkpoints.held:
            one = data.draw(st.sampled_from(checkpoints.held))
            checkpoints.restore(one, 0)
            tokens = one.tokens.tolist()
        check_holds(memory, tokens)
        for one in checkpoints.held:
            check_holds(memory, one.tokens, one.seq_id)
    assert can_rewind(memory, 0) or memory
