"""Reuse of chunks that are held at other positions: any plan gives the wanted prefix."""

from __future__ import annotations

import numpy as np
import pytest
from fed import MAKERS, SHIFTS, check_holds, feed, frozen
from hypothesis import given
from hypothesis import strategies as st

from kvnumba.branches import fork
from kvnumba.errors import CannotShiftError, ConfigError, StepError
from kvnumba.prefill import plan_chunk_reuse

HELD = list(range(100, 120))


@pytest.fixture(params=list(MAKERS))
def memory(request):
    with MAKERS[request.param]() as one:
        yield one


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
