"""Forks for parallel completions, and drafts that are accepted up to the first wrong token."""

from __future__ import annotations

import fed
import numpy as np
import pytest
from fed import MAKERS, check_holds, feed, frozen

from kvnumba.batch import Batch
from kvnumba.branches import Draft, can_rewind, cut, fork, plan_accept, plan_fork
from kvnumba.errors import ConfigError, NoSlotError, SequenceError, StepError

PROMPT = list(range(100, 110))


@pytest.fixture(params=list(MAKERS))
def memory(request):
    with MAKERS[request.param]() as made:
        yield made


# -- forks ------------------------------------------------------------------------------------


def test_children_drop_what_they_held_and_go_their_own_ways(memory):
    feed(memory, PROMPT)
    feed(memory, [1, 2, 3], 2)
    plan = plan_fork(memory, 0, [1, 2])
    assert (plan.parent, plan.children, plan.dropped, plan.n_tokens) == (0, (1, 2), (2,), 10)
    check_holds(memory, [1, 2, 3], 2)
    plan.apply(memory)
    for s in range(3):
        check_holds(memory, PROMPT, s)
    feed(memory, [7], 0)
    feed(memory, [8, 8], 1)
    memory.seq_rm(0)
    check_holds(memory, [*PROMPT, 8, 8], 1)
    check_holds(memory, PROMPT, 2)


def test_no_row_is_copied_by_a_fork(memory):
    feed(memory, PROMPT)
    used = [part.used for part in fed.parts_of(memory)]
    fork(memory, 0, [1, 2])
    assert [part.used for part in fed.parts_of(memory)] == used


def test_the_fork_of_an_empty_sequence_is_empty(memory):
    feed(memory, PROMPT, 2)
    fork(memory, 0, [1, 2])
    assert [memory.seq_pos_max(s) for s in range(3)] == [-1, -1, -1]
    memory.check()


@pytest.mark.parametrize(
    ("parent", "children"),
    [(5, [1]), (-1, [1]), (0, [1, 5]), (0, [1, -1]), (0, [0]), (0, [1, 2, 1]), (0, [1, 0.5])],
)
def test_impossible_forks_change_nothing(memory, parent, children):
    feed(memory, PROMPT)
    feed(memory, [1], 1)
    before = frozen(memory)
    with pytest.raises(SequenceError):
        fork(memory, parent, children)
    assert frozen(memory) == before


def test_a_fork_while_tokens_are_pending_changes_nothing(memory):
    feed(memory, PROMPT)
    feed(memory, [1], 1)
    steps = memory.prepare(Batch([5]))
    steps[0].apply()
    before = frozen(memory)
    for children in ([1, 2], [2]):
        with pytest.raises(StepError):
            fork(memory, 0, children)
    assert frozen(memory) == before


def test_children_in_another_stream_get_one_copy_between_them():
    memory = MAKERS["streams"]()
    feed(memory, PROMPT)
    fork(memory, 0, [3, 1, 4])
    assert [part.used for part in memory.streams] == [10, 10]
    for s in (0, 1, 3, 4):
        check_holds(memory, PROMPT, s)


def test_a_stream_without_room_is_known_beforehand():
    memory = MAKERS["streams"]()
    feed(memory, range(40))
    feed(memory, range(30), 3)
    feed(memory, range(20), 4)
    before = frozen(memory)
    with pytest.raises(NoSlotError, match="40 cells, stream 1 has room for 34"):
        fork(memory, 0, [4, 1])
    assert frozen(memory) == before
    fork(memory, 0, [4, 3])  # what the children hold goes first
    check_holds(memory, range(40), 3)
    check_holds(memory, range(40), 4)


def test_a_cut_removes_the_end_and_nothing_else(memory):
    feed(memory, PROMPT)
    cut(memory, 0, 10)
    cut(memory, 0, 11)
    cut(memory, 1, 0)
    check_holds(memory, PROMPT)
    if can_rewind(memory, 2):
        cut(memory, 0, 8)
        check_holds(memory, PROMPT[:8])
    cut(memory, 0, 0)
    check_holds(memory, [])


def test_a_cut_that_is_refused_changes_nothing():
    memory = MAKERS["recurrent"]()
    feed(memory, PROMPT)
    with pytest.raises(StepError, match=r"cannot be cut to 9 tokens: .*position 9 is not kept"):
        cut(memory, 0, 9)
    check_holds(memory, PROMPT)


def test_nothing_is_removed_where_nothing_is(memory, monkeypatch):
    """Some memories refuse even an empty removal."""
    calls = []
    seq_rm = type(memory).seq_rm
    monkeypatch.setattr(
        type(memory), "seq_rm", lambda *args: calls.append(args[1:]) or seq_rm(*args)
    )
    cut(memory, 0, 0)
    fork(memory, 0, [1, 2])
    feed(memory, PROMPT)
    cut(memory, 0, 10)
    fork(memory, 0, [1])
    assert not [c for c in calls if c[0] in (0, 1, 2)]


# -- drafts -----------------------------------------------------------------------------------


def test_what_can_be_taken_back_for_sure():
    can = {name: [can_rewind(make(), n) for n in (0, 3, 4)] for name, make in MAKERS.items()}
    always, never = [True] * 3, [False] * 3
    assert can == {
        "unified": always,
        "copies": always,
        "fixed": always,
        "window": never,
        "wide": never,
        "recurrent": [True, False, False],
        "rewinds": [True, True, False],
        "hybrid": [True, False, False],
        "hybrid-rewinds": [True, True, False],
        "hybrid-window": never,
        "streams": always,
    }


@pytest.mark.parametrize("n_accepted", range(5))
def test_a_draft_leaves_what_was_accepted(memory, n_accepted):
    feed(memory, PROMPT)
    draft = Draft(memory, 0, spare=2)
    draft.open(4)
    assert draft.is_open
    feed(memory, [11, 12, 13, 14])
    n_again = draft.accept(n_accepted)
    held = (PROMPT + [11, 12, 13, 14])[: 10 + n_accepted]
    check_holds(memory, held[: len(held) - n_again])
    feed(memory, held[len(held) - n_again :])
    check_holds(memory, held)
    assert memory.seq_pos_max(2) == -1
    assert not draft.is_open


@pytest.mark.parametrize("name", ["unified", "rewinds", "hybrid-rewinds"])
def test_no_token_is_computed_twice_where_the_memory_goes_back(name):
    memory = MAKERS[name]()
    feed(memory, PROMPT)
    draft = Draft(memory, 0, spare=2)
    for n_accepted in (0, 3, 1, 2):
        draft.open(3)
        assert memory.seq_pos_max(2) == -1
        feed(memory, [1, 2, 3])
        assert draft.accept(n_accepted) == 0
    check_holds(memory, [*PROMPT, 1, 2, 3, 1, 1, 2])


def test_a_fork_is_kept_where_it_may_not():
    memory = MAKERS["recurrent"]()
    feed(memory, PROMPT)
    draft = Draft(memory, 0, spare=2)
    draft.open(3)
    check_holds(memory, PROMPT, 2)
    feed(memory, [1, 2, 3])
    plan = draft.plan_accept(2)
    assert (plan.source, plan.backup, plan.n_kept, plan.n_again) == ("backup", 2, 12, 2)
    assert "not kept" in plan.reason
    check_holds(memory, [*PROMPT, 1, 2, 3])
    assert draft.accept(2) == 2
    check_holds(memory, PROMPT)


def test_without_a_spare_sequence_all_is_computed_again():
    memory = MAKERS["recurrent"]()
    feed(memory, PROMPT)
    draft = Draft(memory, 0)
    draft.open(3)
    feed(memory, [1, 2, 3])
    assert draft.plan_accept(3).source == "all"
    plan = draft.plan_accept(1)
    assert (plan.source, plan.n_again) == ("nothing", 11)
    assert draft.accept(1) == 11
    check_holds(memory, [])


def test_an_older_sequence_serves_as_backup_but_not_one_with_rejected_tokens():
    memory = MAKERS["recurrent"]()
    feed(memory, PROMPT[:6])
    fork(memory, 0, [1])
    feed(memory, PROMPT[6:])
    fork(memory, 0, [2])
    assert plan_accept(memory, 0, 2, 1, backup=1).n_again == 3
    assert plan_accept(memory, 0, 2, 1, backup=2).source == "nothing"
    assert plan_accept(memory, 0, 2, 1, backup=3).source == "nothing"
    assert plan_accept(memory, 0, 2, 1, backup=1).apply(memory) == 3
    check_holds(memory, PROMPT[:6])


def test_rounds_of_guesses_end_as_if_nobody_had_guessed(memory):
    rng = np.random.default_rng(5)
    truth = rng.integers(0, 50, 60).tolist()
    draft = Draft(memory, 0, spare=1)
    n = 0
    while n < 44:
        draft.open(4)
        n_right = int(rng.integers(0, 4))
        feed(memory, truth[n : n + 1 + n_right] + [99] * (3 - n_right))
        n += 1 + n_right
        n_again = draft.accept(1 + n_right)
        feed(memory, truth[n - n_again : n])
        check_holds(memory, truth[:n])


def test_misuse_of_a_draft_changes_nothing(memory):
    feed(memory, PROMPT)
    feed(memory, [1], 3)
    for spare in (0, 3):
        with pytest.raises(SequenceError, match="must be another one, and empty"):
            Draft(memory, 0, spare)
    with pytest.raises(SequenceError):
        Draft(memory, 5)
    draft = Draft(memory, 0, 1)
    with pytest.raises(StepError, match="no draft is open"):
        draft.accept(0)
    draft.open()
    with pytest.raises(StepError, match="still open"):
        draft.open()
    feed(memory, [1, 2])
    before = frozen(memory)
    for n in (3, -1, 1.0, True):
        with pytest.raises(ConfigError):
            draft.accept(n)
    assert frozen(memory) == before
    memory.seq_rm(0)
    with pytest.raises(StepError, match="lost tokens"):
        draft.accept(0)
