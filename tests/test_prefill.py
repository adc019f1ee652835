"""Reuse of what is held for a prompt that begins alike: the plan, and what is held after."""

from __future__ import annotations

import pytest
from fed import CUTS_ANYWHERE, MAKERS, check_holds, feed, frozen
from hypothesis import given
from hypothesis import strategies as st

from kvnumba.checkpoints import Checkpoints
from kvnumba.errors import ConfigError, SequenceError, ShapeError, StepError
from kvnumba.prefill import plan_reuse

HELD = list(range(100, 120))


@pytest.fixture(params=list(MAKERS))
def memory(request):
    with MAKERS[request.param]() as one:
        yield one


def removals(memory, monkeypatch):
    """Return a list that every removal from now on is noted in."""
    calls, seq_rm = [], type(memory).seq_rm

    def noted(self, *args):
        if self is memory:
            calls.append(args)
        return seq_rm(self, *args)

    monkeypatch.setattr(type(memory), "seq_rm", noted)
    return calls


def test_a_prompt_that_goes_on_reuses_all_and_removes_nothing(memory, monkeypatch):
    feed(memory, HELD)
    calls = removals(memory, monkeypatch)
    plan = plan_reuse(memory, 0, HELD, [*HELD, 1, 2])
    assert (plan.n_reused, plan.n_to_compute, plan.source) == (20, 2, "cache")
    assert str(plan) == "20 of 22 tokens reused from cache: the prompt continues all that is held"
    plan.apply(memory)
    assert calls == []
    check_holds(memory, HELD)


def test_an_empty_memory_is_not_asked_to_remove_anything(memory, monkeypatch):
    calls = removals(memory, monkeypatch)
    plan = plan_reuse(memory, 0, [], HELD)
    assert (plan.n_reused, plan.source, plan.reason) == (0, "nothing", "nothing is held")
    plan.apply(memory)
    assert calls == []


def test_planning_changes_nothing(memory):
    feed(memory, HELD)
    before = frozen(memory)
    for prompt in (HELD, HELD[:7], [1], [*HELD[:9], 3, 4]):
        plan_reuse(memory, 0, HELD, prompt)
    assert frozen(memory) == before


@pytest.mark.parametrize("name", CUTS_ANYWHERE)
def test_the_same_prompt_goes_back_by_just_one_token(name):
    memory = MAKERS[name]()
    feed(memory, HELD)
    plan = plan_reuse(memory, 0, HELD, HELD)
    assert (plan.n_common, plan.n_reused, plan.n_to_compute, plan.source) == (20, 19, 1, "cache")
    plan.apply(memory)
    check_holds(memory, HELD[:19])
    feed(memory, HELD[19:])
    check_holds(memory, HELD)


@pytest.mark.parametrize(("name", "n"), [("rewinds", 3), ("hybrid-rewinds", 3), ("window", 12)])
def test_a_memory_with_a_bounded_way_back_uses_it(name, n):
    memory = MAKERS[name]()
    feed(memory, [*range(20), *HELD])  # 40 tokens: the window has slid
    tokens = [*range(20), *HELD]
    assert memory.seq_pos_min(0) > 0
    n_least = memory.seq_pos_min(0) + 1
    for keep in (39, n_least):
        plan = plan_reuse(memory, 0, tokens, [*tokens[:keep], 7, 7])
        assert (plan.n_reused, plan.source) == (keep, "cache")
    plan.apply(memory)
    check_holds(memory, tokens[:n_least])
    assert 40 - n_least >= n


def test_what_cannot_be_cut_back_to_is_computed_again_and_it_says_why():
    for name, why in (
        ("recurrent", "the state before position 9 is not kept"),
        ("rewinds", "raise n_rewind"),
        ("hybrid", "recurrent: "),
        ("window", "window lost"),
        ("hybrid-window", "window lost"),
    ):
        memory = MAKERS[name]()
        tokens = [*HELD, *range(20)]
        feed(memory, tokens)
        plan = plan_reuse(memory, 0, tokens, [*tokens[:9], 1])
        assert (plan.n_common, plan.n_reused, plan.source) == (9, 0, "nothing"), name
        assert why in plan.reason
        plan.apply(memory)
        check_holds(memory, [])
        feed(memory, [*tokens[:9], 1])
        check_holds(memory, [*tokens[:9], 1])


def test_stored_logits_leave_nothing_to_compute(memory, monkeypatch):
    feed(memory, HELD)
    calls = removals(memory, monkeypatch)
    plan = plan_reuse(memory, 0, HELD, HELD, has_logits=True)
    assert (plan.n_reused, plan.n_to_compute, plan.source) == (20, 0, "logits")
    plan.apply(memory)
    assert calls == []
    check_holds(memory, HELD)
    for prompt in (HELD[:19], [*HELD, 1]):  # those are not the logits of the last token held
        assert plan_reuse(memory, 0, HELD, prompt, has_logits=True).source != "logits"
    assert plan_reuse(memory, 0, [*HELD, 5], [*HELD, 5], has_logits=True).n_reused == 20


@pytest.mark.parametrize("name", ["recurrent", "hybrid", "window", "hybrid-window"])
def test_a_checkpoint_takes_the_place_of_a_state_that_is_gone(name):
    memory = MAKERS[name]()
    checkpoints = Checkpoints(memory, [2, 3, 4], spacing=1)
    tokens = list(range(40))
    for n in (10, 16, 40):
        feed(memory, tokens[memory.seq_pos_max(0) + 1 : n])
        checkpoints.save(0, tokens[:n])
    plan = plan_reuse(memory, 0, tokens, [*tokens[:17], 99, 98], checkpoints)
    assert (plan.n_common, plan.n_reused, plan.source) == (17, 16, "checkpoint")
    assert "was kept after 16 tokens" in plan.reason
    plan.apply(memory, checkpoints)
    check_holds(memory, tokens[:16])
    assert [c.n_tokens for c in checkpoints.held] == [10, 16]
    feed(memory, [*tokens[16:17], 99, 98])
    check_holds(memory, [*tokens[:17], 99, 98])


def test_the_same_prompt_on_a_state_uses_what_was_kept_near_its_end():
    memory = MAKERS["recurrent"]()
    checkpoints = Checkpoints(memory, [1, 2])
    feed(memory, HELD[:16])
    checkpoints.save(0, HELD[:16], is_forced=True)
    feed(memory, HELD[16:])
    checkpoints.save(0, HELD, is_forced=True)
    plan = plan_reuse(memory, 0, HELD, HELD, checkpoints.held)
    assert (plan.n_reused, plan.source) == (16, "checkpoint")
    plan.apply(memory)
    assert len(checkpoints.held) == 2
    check_holds(memory, HELD[:16])


def test_one_token_alone_and_a_prompt_that_differs_at_once(memory):
    feed(memory, HELD)
    plan = plan_reuse(memory, 0, HELD, HELD[:1])
    assert (plan.n_common, plan.n_reused) == (1, 0)
    assert "one token" in plan.reason
    plan = plan_reuse(memory, 0, HELD, [1, *HELD])
    assert (plan.n_common, plan.n_reused) == (0, 0)
    assert "differs from what is held at token 0" in plan.reason
    plan.apply(memory)
    check_holds(memory, [])


def test_tokens_without_a_cell_and_cells_without_a_token_are_not_reused():
    memory = MAKERS["unified"]()
    feed(memory, HELD)
    assert plan_reuse(memory, 0, [*HELD, 5], [*HELD, 5, 6]).n_reused == 20
    plan = plan_reuse(memory, 0, HELD[:15], [*HELD, 5])
    assert plan.n_reused == 15
    plan.apply(memory)
    check_holds(memory, HELD[:15])


def test_unknown_tokens_are_like_no_other():
    memory = MAKERS["unified"]()
    feed(memory, HELD)
    tokens = [*HELD[:4], -1, *HELD[5:]]
    assert plan_reuse(memory, 0, tokens, tokens).n_reused == 4
    assert not plan_reuse(memory, 0, tokens, tokens, has_logits=True).n_reused > 4


def test_a_stale_plan_is_refused(memory):
    checkpoints = Checkpoints(memory, [1])
    feed(memory, HELD)
    checkpoints.save(0, HELD)
    feed(memory, [1, 2, 3, 4])
    plan = plan_reuse(memory, 0, [*HELD, 1, 2, 3, 4], [*HELD, 7], checkpoints)
    checkpoints.clear()
    if plan.source == "checkpoint":
        with pytest.raises(StepError, match="dropped since"):
            plan.apply(memory)
    feed(memory, [5])
    with pytest.raises(StepError, match="changed since"):
        plan.apply(memory)
    check_holds(memory, [*HELD, 1, 2, 3, 4, 5])


def test_impossible_questions(memory):
    with pytest.raises(ConfigError, match="empty"):
        plan_reuse(memory, 0, HELD, [])
    with pytest.raises(SequenceError):
        plan_reuse(memory, 5, HELD, HELD)
    with pytest.raises(ShapeError):
        plan_reuse(memory, 0, HELD, [1.5])


@given(st.data())
def test_whatever_is_asked_next_the_memory_ends_up_with_it(data):
    """Prompts, one after the other: the end is as if each had been read from the start."""
    memory = MAKERS[data.draw(st.sampled_from(sorted(MAKERS)))]()
    checkpoints = Checkpoints(memory, [1, 2], spacing=6)
    token = st.integers(0, 1)
    held = []
    for _ in range(data.draw(st.integers(1, 6))):
        keep = data.draw(st.integers(0, len(held)))
        prompt = held[:keep] + data.draw(st.lists(token, min_size=1, max_size=12))
        prompt = prompt[:30]
        plan = plan_reuse(memory, 0, held, prompt, checkpoints)
        assert 0 <= plan.n_reused < len(prompt)
        assert plan.n_reused <= plan.n_common
        plan.apply(memory, checkpoints)
        check_holds(memory, prompt[: plan.n_reused])
        half = (plan.n_reused + len(prompt)) // 2
        for start, end in ((plan.n_reused, half), (half, len(prompt))):
            if start < end:
                feed(memory, prompt[start:end])
                checkpoints.save(0, prompt[:end])
        check_holds(memory, prompt)
        held = prompt
