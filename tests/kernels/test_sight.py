"""The ends of what a query sees, and what is concluded from them, against the rules in words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import is_hidden

from kvnumba.kernels.sight import (
    ALL,
    NOTHING,
    WINDOW_IDS,
    gather_seen,
    seen_run,
    sees,
    sight_bounds,
    sight_of,
)

MAX_POS = 2**31 - 2
KINDS = list(WINDOW_IDS)
around = st.integers(0, 40) | st.integers(MAX_POS - 40, MAX_POS) | st.integers(0, MAX_POS)
rules = st.fixed_dictionaries(
    {
        "window": st.integers(0, 20) | st.sampled_from([2**31 - 1, 2**33]),
        "window_kind": st.sampled_from(KINDS),
        "causal": st.booleans(),
    }
)


def bounds(q_pos, rule):
    low, high = np.full((2, len(q_pos)), 7, np.int32)
    kind = WINDOW_IDS[rule["window_kind"]]
    sight_bounds(np.array(q_pos, np.int32), rule["window"], kind, rule["causal"], low, high)
    return low, high


@given(st.lists(around, min_size=1, max_size=5), st.lists(around, min_size=1, max_size=20), rules)
def test_a_range_says_the_same_as_the_rule(q_pos, cell_pos, rule):
    low, high = bounds(q_pos, rule)
    for t, q in enumerate(q_pos):
        for p in cell_pos:
            assert sees(p, low[t], high[t]) == (not is_hidden(p, q, **rule)), (p, q)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    rules,
)
def test_conclusions_about_many_at_once(q_pos, cell_pos, rule):
    low, high = bounds(q_pos, rule)
    pos = np.array(cell_pos, np.int32)
    seen = np.array([[not is_hidden(p, q, **rule) for p in cell_pos] for q in q_pos])
    sight = sight_of(pos, low, high)
    assert sight != ALL or seen.all()
    assert sight != NOTHING or not seen.any()
    if len(q_pos) == 1 or len(cell_pos) == 1:
        assert (sight == ALL) == seen.all()

    lists = np.full((2, len(pos)), -7, np.int32)
    cells = np.arange(len(pos), dtype=np.int32) + 100
    n = gather_seen(lists, cells, pos, low, high)
    some = np.flatnonzero(seen.any(axis=0))
    assert lists[0, :n].tolist() == (some + 100).tolist()
    assert lists[1, :n].tolist() == pos[some].tolist()

    found, start = [], 0
    while start < len(pos):
        start, stop = seen_run(pos, low[0], high[0], start)
        found += range(start, stop)
        start = stop
    assert found == np.flatnonzero(seen[0]).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_ahead_and_behind(kind):
    low, high = bounds([20, 21], {"window": 4, "window_kind": kind, "causal": True})
    assert sight_of(np.array([5, 6], np.int32), low, high) == NOTHING
    assert sight_of(np.array([22, 30], np.int32), low, high) == NOTHING
    assert sight_of(np.array([20], np.int32), low, high) == ALL
