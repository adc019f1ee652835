"""Context shift: its arithmetic, its refusals, and that list and memory agree after it."""

from __future__ import annotations

import numpy as np
import pytest
from fed import MAKERS, SHIFTS, check_holds, feed, frozen
from hypothesis import given
from hypothesis import strategies as st

from kvnumba.batch import Batch
from kvnumba.branches import fork
from kvnumba.checkpoints import Checkpoints
from kvnumba.errors import CannotShiftError, ConfigError, SequenceError, ShapeError, StepError
from kvnumba.prefill import ContextShift, must_shift, plan_context_shift, plan_prompt_cut

HELD = list(range(100, 120))


@pytest.fixture(params=list(MAKERS))
def memory(request):
    with MAKERS[request.param]() as one:
        yield one


@pytest.mark.parametrize(
    ("args", "options", "want"),
    [
        ((100, 101, 10), {}, (10, 45)),
        ((100, 101, 10), {"has_bos": True}, (11, 44)),
        ((100, 101, 10, 0), {}, (10, 45)),
        ((100, 101, 10, 7), {}, (10, 7)),
        ((100, 101, 10, 90), {}, (10, 89)),  # one of the others stays
        ((100, 101, 10, 10**6), {}, (10, 89)),
        ((100, 101, 98), {}, (97, 1)),  # room for four
        ((100, 101, -1), {"n_prompt": 30}, (30, 35)),
        ((100, 101, -1), {"n_prompt": 30, "has_bos": True}, (31, 34)),
        ((100, 101, -1), {"n_prompt": 300}, (97, 1)),
        ((7, 8, 0), {}, (0, 3)),
    ],
)
def test_the_arithmetic_of_a_context_shift(args, options, want):
    plan = plan_context_shift(*args, **options)
    assert (plan.n_keep, plan.n_discard) == want
    assert plan.n_left == args[0] - want[1]
    assert str(plan).startswith(f"{want[1]} of {args[0]} tokens after the first {want[0]}")


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((100, 101, -1), "give n_prompt"),
        ((100, 4, 0), "n_ctx 4 must be more than 4"),
        ((1, 101, 0), "nothing to discard"),
        ((11, 101, 10), "nothing to discard"),
        ((5, 101, 10), "nothing to discard"),
        ((100, 101, 10, -5), "n_discard -5"),
        ((100, 101, 10, 0.5), "n_discard 0.5"),
        ((100, 101, 1.5), "n_keep 1.5"),
        ((100.0, 101, 1), "n_tokens 100.0"),
    ],
)
def test_a_context_shift_that_cannot_be(args, match):
    with pytest.raises(ConfigError, match=match):
        plan_context_shift(*args)


def test_one_shift_and_not_one_per_token():
    """The token list shrinks with the cells, so the context is not full again at once."""
    memory = MAKERS["unified"]()
    n_ctx, tokens, n_shifts = 32, [], 0
    for token in range(100):
        if must_shift(len(tokens), n_ctx):
            plan = plan_context_shift(len(tokens), n_ctx, 4)
            tokens = plan.apply(memory, 0, tokens).tolist()
            n_shifts += 1
            check_holds(memory, tokens)
        feed(memory, [token])
        tokens.append(token)
        assert memory.seq_pos_max(0) + 1 == len(tokens) < n_ctx
    check_holds(memory, tokens)
    assert n_shifts == 6
    assert tokens[:4] == [0, 1, 2, 3]


def test_must_shift_leaves_room_for_one():
    assert [must_shift(n, 8) for n in (6, 7, 8)] == [False, True, True]


@pytest.mark.parametrize("name", SHIFTS)
def test_a_shift_moves_what_was_kept_and_the_list_follows(name):
    memory = MAKERS[name]()
    feed(memory, [1, 2, 3], 1)
    feed(memory, HELD)
    plan = ContextShift(20, 4, 6)
    tokens = plan.apply(memory, 0, [*HELD, 55])  # one more was sampled already
    assert tokens.tolist() == [*HELD[:4], *HELD[10:], 55]
    check_holds(memory, tokens[:-1])
    check_holds(memory, [1, 2, 3], 1)
    feed(memory, [55])
    check_holds(memory, tokens)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fixed", "cannot be rotated"),
        ("window", "tokens before position [0-9]+ are lost"),
        ("recurrent", "in the same state"),
        ("rewinds", "in the same state"),
        ("hybrid", "in the same state"),
        ("hybrid-window", "in the same state|lost"),
    ],
)
def test_a_shift_is_refused_before_anything_is_done(name, why):
    memory = MAKERS[name]()
    tokens = list(range(40))
    feed(memory, tokens)
    before = frozen(memory)
    plan = plan_context_shift(40, 41, 4)
    assert plan.refusal(memory, 0)
    with pytest.raises(CannotShiftError, match=why):
        plan.apply(memory, 0, tokens)
    assert frozen(memory) == before


@pytest.mark.parametrize("name", SHIFTS)
def test_cells_of_others_never_move_along(name):
    memory = MAKERS[name]()
    feed(memory, HELD)
    fork(memory, 0, [1])
    feed(memory, [5], 0)
    plan = ContextShift(21, 4, 6)
    if name == "copies":
        tokens = plan.apply(memory, 0, [*HELD, 5])
        check_holds(memory, tokens)
    else:
        before = frozen(memory)
        with pytest.raises(CannotShiftError, match="held by other sequences too"):
            plan.apply(memory, 0, [*HELD, 5])
        assert frozen(memory) == before
    check_holds(memory, HELD, 1)
    memory.seq_rm(1)
    if name != "copies":
        check_holds(memory, plan.apply(memory, 0, [*HELD, 5]))


def test_a_checkpoint_of_the_start_does_not_hinder_a_shift():
    memory = MAKERS["unified"]()
    checkpoints = Checkpoints(memory, [1, 2], spacing=1)
    feed(memory, HELD[:4])
    checkpoints.save(0, HELD[:4])
    feed(memory, HELD[4:])
    checkpoints.save(0, HELD)
    plan = ContextShift(20, 4, 6)
    assert "checkpoints" in plan.refusal(memory, 0)
    checkpoints.erase_beyond(plan.n_keep)
    check_holds(memory, plan.apply(memory, 0, HELD))
    check_holds(memory, HELD[:4], 1)


def test_room_for_copies_is_counted_beforehand():
    memory = MAKERS["copies"]()
    feed(memory, range(40))
    fork(memory, 0, [1])
    feed(memory, range(6), 0)
    tokens = [*range(40), *range(6)]
    before = frozen(memory)
    with pytest.raises(CannotShiftError, match=r"33 cells to move .* 18 are free"):
        ContextShift(46, 4, 3).apply(memory, 0, tokens)
    assert frozen(memory) == before
    check_holds(memory, ContextShift(46, 4, 18).apply(memory, 0, tokens))
    check_holds(memory, range(40), 1)


def test_cells_that_the_removal_frees_are_room_for_copies():
    memory = MAKERS["copies"]()
    feed(memory, range(34))
    fork(memory, 0, [1])
    memory.seq_rm(1, 0, 30)
    feed(memory, range(30), 0)
    assert memory.n_free == 0
    tokens = [*range(34), *range(30)]
    assert ContextShift(64, 27, 2).refusal(memory, 0)
    assert ContextShift(64, 26, 4).refusal(memory, 0) is None
    left = ContextShift(64, 26, 4).apply(memory, 0, tokens)
    check_holds(memory, left)


def test_a_shift_of_something_else_is_refused(memory):
    feed(memory, HELD)
    before = frozen(memory)
    with pytest.raises(StepError, match="20 tokens, planned was 19"):
        ContextShift(19, 4, 6).apply(memory, 0, HELD)
    with pytest.raises(ShapeError, match="19 tokens are given"):
        ContextShift(20, 4, 6).apply(memory, 0, HELD[:19])
    with pytest.raises(SequenceError):
        ContextShift(20, 4, 6).apply(memory, 9, HELD)
    assert ContextShift(20, 4, 0).apply(memory, 0, HELD).tolist() == HELD
    assert frozen(memory) == before


@pytest.mark.parametrize("name", SHIFTS)
def test_nothing_shifts_while_tokens_are_pending(name):
    memory = MAKERS[name]()
    feed(memory, HELD)
    memory.prepare(Batch([5]))[0].apply()
    before = frozen(memory)
    with pytest.raises(StepError):
        ContextShift(21, 4, 6).apply(memory, 0, [*HELD, 5])
    assert frozen(memory) == before


@pytest.mark.parametrize(
    ("args", "options", "want"),
    [
        ((99, 100, 10), {}, (10, 0)),
        ((100, 100, 10), {}, (10, 45)),
        ((144, 100, 10), {}, (10, 45)),
        ((145, 100, 10), {}, (10, 90)),
        ((1000, 100, 10), {}, (10, 945)),
        ((1000, 100, 10), {"has_bos": True}, (11, 44 * 21)),
        ((1000, 100, -1), {}, (96, 902)),
        ((5, 100, 10), {}, (5, 0)),
        ((6, 5, 0), {}, (0, 4)),
    ],
)
def test_a_prompt_that_is_too_long_is_cut_before_it_is_read(args, options, want):
    plan = plan_prompt_cut(*args, **options)
    assert (plan.n_keep, plan.n_discard) == want
    prompt = np.arange(args[0])
    cut = plan.cut(prompt)
    assert len(cut) < args[1]
    assert cut[-1] == prompt[-1]
    assert cut[: want[0]].tolist() == prompt[: want[0]].tolist()


@given(st.integers(1, 500), st.integers(5, 120), st.integers(-1, 130), st.booleans())
def test_a_cut_prompt_always_fits_and_ends_as_it_did(n_prompt, n_ctx, n_keep, has_bos):
    cut = plan_prompt_cut(n_prompt, n_ctx, n_keep, has_bos=has_bos).cut(np.arange(n_prompt))
    assert 0 < len(cut) < n_ctx
    assert cut[-1] == n_prompt - 1
    assert len(cut) == n_prompt or len(cut) >= n_ctx // 2
