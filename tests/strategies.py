"""Hypothesis strategies for cache sizes, sequence ids, positions, ranges and batches.

Values cluster around what breaks bitmaps and ranges: multiples of 64, both ends of the positions,
negative bounds. Small values dominate, so that operations meet each other.
"""

from __future__ import annotations

from hypothesis import strategies as st

MAX_POS = 2**31 - 2

n_cells = st.sampled_from([1, 5, 16, 33, 63, 64, 65, 100, 127, 128, 129, 140, 192])
n_seq_max = st.sampled_from([1, 4, 65, 256])
EDGE_IDS = [0, 63, 64, 127, 255, 1, 2, 3]


def seq_ids(n_max):
    """Valid sequence ids: a handful, so that sequences meet."""
    return st.sampled_from([s for s in EDGE_IDS if s < n_max][:5])


def bad_seq_ids(n_max):
    """Whole numbers that are no sequence id, nor the -1 that means all."""
    return st.sampled_from([-2, -64, n_max, n_max + 63, 2**31, -(2**40)])


def any_seq_ids(n_max):
    """Mostly valid ids."""
    return st.integers(0, 15).flatmap(lambda k: seq_ids(n_max) if k else bad_seq_ids(n_max))


def id_lists(n_max):
    """Sequences of one token: mostly one, sometimes several."""
    one = seq_ids(n_max).map(lambda s: [s])
    several = st.lists(seq_ids(n_max), min_size=1, max_size=3, unique=True)
    return st.one_of(one, one, several)


positions = st.one_of(
    st.integers(0, 40), st.integers(0, 200), st.sampled_from([MAX_POS, MAX_POS - 3, 0])
)
bounds = st.one_of(
    st.integers(-3, 45),
    st.integers(-3, 200),
    st.sampled_from([-1, MAX_POS, MAX_POS + 1, -(2**31), 2**40]),
)
deltas = st.one_of(
    st.integers(-45, 45), st.sampled_from([-1, 1, MAX_POS, -MAX_POS, MAX_POS + 1, -MAX_POS - 1])
)
divisors = st.sampled_from([2, 3, 2, 3, 1, 7, MAX_POS, 0, -2, MAX_POS + 1])


def ranges():
    """A pair of bounds: everything, one position, or anything."""
    single = st.integers(0, 45).map(lambda p: (p, p + 1))
    span = st.tuples(st.integers(0, 45), st.integers(0, 45)).map(lambda p: (min(p), max(p)))
    return st.one_of(single, span, span, st.just((-1, -1)), st.tuples(bounds, bounds))


def batch_sizes(n):
    """Tokens of a batch for a cache of `n` cells: small, near a word's end, or the whole cache."""
    edges = [k for k in (1, 2, 31, 62, 63, 64, 65, n // 2, n - 1, n) if 0 <= k <= n]
    return st.one_of(st.integers(0, min(9, n)), st.sampled_from(edges), st.just(n + 1))


@st.composite
def tokens(draw, n, n_max):
    """Return positions and lists of ids for a batch: runs of positions, ids in turn."""
    n_tokens = draw(batch_sizes(n))
    start = draw(positions)
    step = draw(st.sampled_from([1, 1, 1, 2, 0]))
    ids = draw(st.lists(id_lists(n_max), min_size=1, max_size=3))
    pos = [min(start + step * t, MAX_POS) for t in range(n_tokens)]
    return pos, [ids[t % len(ids)] for t in range(n_tokens)]
