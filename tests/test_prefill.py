"""Reuse of a prompt, chunk reuse and context shift: the plans, and what the memory holds after."""

from __future__ import annotations

import numpy as np
import pytest
from fed import CUTS_ANYWHERE, MAKERS, check_holds, feed, frozen
from hypothesis import given
from hypothesis import strategies as st

from kvnumba.batch import Batch
from kvnumba.branches import fork
from kvnumba.checkpoints import Checkpoints
from kvnumba.errors import CannotShiftError, ConfigError, SequenceError, ShapeError, StepError
from kvnumba.prefill import (
    ContextShift,
    must_shift,
    plan_chunk_reuse,
    plan_context_shift,
    plan_prompt_cut,
    plan_reuse,
)

HELD = list(range(100, 120))
SHIFTS = ("unified", "copies", "wide", "streams")


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


# -- reuse of a prefix ------------------------------------------------------------------------


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


# -- context shift ----------------------------------------------------------------------------


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


# -- reuse of chunks --------------------------------------------------------------------------


def steps_of(plan):
    return [(m.removed, m.moved, m.delta) for m in plan.moves]


def test_splice_with_a_gap_in_two_places():
    """a b c d e f g h j becomes a b e f h j."""
    held, prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5, 6, 8, 9, 0]
    plan = plan_chunk_reuse(held, prompt, 2)
    assert steps_of(plan) == [((2, 4), (4, 6), -2), ((4, 7), (7, 9), -3)]
    assert (plan.n_prefix, plan.n_reused, plan.n_end, plan.n_to_compute) == (2, 6, 9, 1)
    memory = MAKERS["unified"]()
    feed(memory, held)
    plan.apply(memory, 0)
    cells = memory.cells.members(0)
    cells = cells[np.argsort(memory.cells.pos[cells])]
    assert memory.cells.shift[cells].tolist() == [0, 0, -2, -2, -3, -3]
    assert memory.used == 6
    check_holds(memory, prompt[:6])


def test_moving_all_that_follows_needs_ranges_that_moved_as_well():
    """With the second removal where the tokens used to be, the last two go as well."""
    for second, want in (((4, 5, -1), [1, 2, 5, 6, 8, 9]), ((4, 7, -3), [1, 2, 5, 6])):
        memory = MAKERS["unified"]()
        feed(memory, range(1, 10))
        memory.seq_rm(0, 2, 4)
        memory.seq_add(0, 4, -1, -2)
        memory.seq_rm(0, *second[:2])
        memory.seq_add(0, second[1], -1, second[2])
        check_holds(memory, want)


@pytest.mark.parametrize(
    ("held", "prompt", "n_min", "n_prefix", "steps", "n_reused"),
    [
        ("abcdefgh", "abcdefgh", 1, None, [], 7),
        ("abcdefgh", "abxdefgh", 3, None, [], 2),  # x is nowhere: the walk ends there
        ("abcdefgh", "abefghx", 4, None, [((2, 4), (4, 8), -2)], 6),
        ("abcdefgh", "abefghx", 5, None, [], 2),
        ("abcdefgh", "abefgh", 4, None, [((2, 4), (4, 7), -2)], 5),  # the last one is computed
        ("abcdefgh", "abh", 1, None, [], 2),
        ("abcdefgh", "efghx", 2, None, [((0, 4), (4, 8), -4)], 4),
        ("abcdefgh", "abefghx", 0, None, [], 2),
        ("aabaabaac", "aabaac", 3, None, [], 5),
        ("aabaabaac", "aabaacx", 3, None, [((5, 8), (8, 9), -3)][:0], 5),
        ("abcabd", "abdx", 1, None, [((2, 5), (5, 6), -3)], 3),
        ("abcdef", "abcdefx", 2, 2, [], 6),  # in place already
        ("abXcdef", "abcdefx", 3, 1, [((1, 3), (3, 7), -2)][:0], 1),
        ("", "abc", 1, None, [], 0),
        ("abc", "a", 1, None, [], 0),
    ],
)
def test_chunks_by_example(held, prompt, n_min, n_prefix, steps, n_reused):
    codes = [[ord(c) for c in text] for text in (held, prompt)]
    plan = plan_chunk_reuse(*codes, n_min, n_prefix)
    assert steps_of(plan) == steps
    assert plan.n_reused == n_reused


def walked(held, prompt, n_min, n_prefix):
    """The walk, token by token: the moves, and what is reused with them."""
    p0 = p1 = n_prefix
    moves = []
    while p1 < len(held) and p0 < len(prompt):
        n = 0
        while p1 + n < len(held) and p0 + n < len(prompt) and held[p1 + n] == prompt[p0 + n]:
            n += 1
        if n >= n_min:
            moves.append((p0, p1, n))
            p0, p1 = p0 + n, p1 + n
        else:
            p1 += 1
    return moves, min(p0, len(prompt) - 1)


def moved(model, removed, where, delta):
    """Remove and move tokens of a list of (position, token)."""
    model = [(p, t) for p, t in model if not removed[0] <= p < removed[1]]
    return [(p + delta if where[0] <= p < where[1] else p, t) for p, t in model]


few = st.integers(0, 3)


@given(st.lists(few, max_size=40), st.lists(few, min_size=1, max_size=40), st.integers(1, 5))
def test_any_plan_gives_the_wanted_prefix(held, prompt, n_min):
    plan = plan_chunk_reuse(held, prompt, n_min)
    want, n_reused = walked(held, prompt, n_min, plan_chunk_reuse(held, prompt, 0).n_reused)
    assert plan.n_reused == n_reused
    model = [(p, t) for p, t in enumerate(held) if p < plan.n_end]
    for move in plan.moves:
        assert any(move.p0 <= p < move.p1 for p, _ in model), "an empty removal"
        model = moved(model, move.removed, move.moved, move.delta)
    assert sorted(model) == list(enumerate(prompt[:n_reused]))
    assert len(plan.moves) <= len(want)


def spliced(held, runs):
    """Return a prompt made of runs of a held list: (tokens to skip, tokens to take, a new one?)."""
    prompt, start = [], 0
    for skip, take, is_new in runs:
        start += skip
        prompt += held[start : start + take] + [9] * is_new
        start += take
    return [*prompt[:43], 8]


lengths = st.integers(0, 9)
splices = st.lists(st.tuples(lengths, lengths, st.booleans()), max_size=5)


@pytest.mark.parametrize("name", SHIFTS)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=44), splices, st.integers(1, 4))
def test_after_reuse_the_cache_holds_just_the_prefix(name, held, runs, n_min):
    prompt = spliced(held, runs)
    memory = MAKERS[name]()
    feed(memory, held)
    feed(memory, [50, 51], 1)
    plan = plan_chunk_reuse(held, prompt, n_min)
    plan.apply(memory, 0)
    check_holds(memory, prompt[: plan.n_reused])
    check_holds(memory, [50, 51], 1)
    feed(memory, prompt[plan.n_reused :])
    check_holds(memory, prompt)


@pytest.mark.parametrize("name", ["copies", "unified"])
def test_a_fork_keeps_its_chunks_where_they_are(name):
    held, prompt = list(range(9)), [0, 1, 4, 5, 7, 8, 50]
    memory = MAKERS[name]()
    feed(memory, held)
    fork(memory, 0, [1])
    plan = plan_chunk_reuse(held, prompt, 2)
    if name == "copies":
        plan.apply(memory, 0)
        check_holds(memory, prompt[:6])
    else:
        before = frozen(memory)
        with pytest.raises(CannotShiftError, match="held by other sequences"):
            plan.apply(memory, 0)
        assert frozen(memory) == before
    check_holds(memory, held, 1)


@pytest.mark.parametrize("name", sorted(set(MAKERS) - set(SHIFTS)))
def test_chunks_are_refused_before_anything_is_done(name):
    memory = MAKERS[name]()
    held = list(range(40))
    feed(memory, held)
    before = frozen(memory)
    plan = plan_chunk_reuse(held, [0, 1, *range(20, 40), 50], 4)
    assert plan.moves
    with pytest.raises(CannotShiftError, match="no reuse of chunks"):
        plan.apply(memory, 0)
    assert frozen(memory) == before


def test_a_plan_without_chunks_needs_no_shift():
    memory = MAKERS["fixed"]()
    feed(memory, HELD)
    plan = plan_chunk_reuse(HELD, [*HELD[:5], 1], 4)
    assert str(plan) == "5 of 6 tokens reused: 5 in place, 0 in 0 chunks that move"
    plan.apply(memory, 0)
    check_holds(memory, HELD[:5])
    plan_chunk_reuse(HELD[:5], [*HELD[:5], 1], 4).apply(memory, 0)
    check_holds(memory, HELD[:5])


def test_unknown_tokens_are_in_no_chunk():
    plan = plan_chunk_reuse([1, 2, 3, -1, 4, 5], [1, 3, -1, 4, 5, 6], 1)
    assert steps_of(plan) == [((1, 2), (2, 3), -1)]
    assert plan.n_reused == 2


def test_a_long_run_and_a_far_chunk_are_found():
    rng = np.random.default_rng(3)
    held = rng.integers(0, 1000, 5000)
    prompt = np.concatenate([held[:10], held[3000:4500], [1001]])
    plan = plan_chunk_reuse(held, prompt, 256)
    assert steps_of(plan) == [((10, 3000), (3000, 4500), -2990)]
    assert plan.n_reused == 1510


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (([1], [], 1), "empty"),
        (([1], [1], -1), "n_min"),
        (([1], [1], True), "n_min"),
        (([1, 2], [1, 3], 1, 2), "only 1 first tokens are common"),
        (([1, 2], [1, 3], 1, -1), "n_prefix"),
    ],
)
def test_impossible_chunks(args, match):
    with pytest.raises(ConfigError, match=match):
        plan_chunk_reuse(*args)


def test_chunks_of_something_else_are_refused(memory):
    feed(memory, HELD)
    plan = plan_chunk_reuse(HELD[:19], HELD, 2)
    with pytest.raises(StepError, match="20 tokens, planned was 19"):
        plan.apply(memory, 0)
    check_holds(memory, HELD)
