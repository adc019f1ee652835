"""Hypothesis strategies for cache sizes, sequence ids, positions, ranges and batches.

Values cluster around what breaks bitmaps and ranges: multiples of 64, both ends of the positions,
negative bounds. Ids and ranges are mostly taken from what a cache holds, so that operations meet.
"""

from __future__ import annotations

from hypothesis import strategies as st

MAX_POS = 2**31 - 2
EDGE_IDS = [0, 63, 64, 127, 255, 1, 2, 3]

SIZES = {
    "one word": [16, 33, 5, 63, 64, 1],
    "two": [65, 100, 127, 128],
    "three": [129, 140, 192],
}
"""Cells of a cache, by the 64-bit words of its bitmaps."""

n_seq_max = st.sampled_from([256, 4, 65, 1])
prefilled = st.sampled_from([0.5, 0.3, 0.0, 0.9, 1.0])
"""Share of the cells to fill before anything else happens."""


pinnings = st.sampled_from(["none", "none", "used", "half", "some"])
"""Which cells the last durable commit names."""


def one_in(n):
    """True once in `n` times; False is the simpler value."""
    return st.integers(0, n - 1).map(lambda k: k == n - 1)


def mostly(usual, rare, n=16):
    """Draw from `rare` once in `n` times."""
    return one_in(n).flatmap(lambda now: rare if now else usual)


def seq_ids(n_max):
    """Valid sequence ids: a handful, so that sequences meet."""
    return st.sampled_from([s for s in EDGE_IDS if s < n_max][:5])


def bad_seq_ids(n_max):
    """Whole numbers that are no sequence id, nor the -1 that means all."""
    return st.sampled_from([-2, -64, n_max, n_max + 63, 2**31, -(2**40)])


def ids_around(held, n_max):
    """Mostly an id of `held`; seldom one that is empty, or impossible."""
    valid = seq_ids(n_max)
    if not held:
        return valid
    return mostly(mostly(st.sampled_from(held), valid, 6), bad_seq_ids(n_max), 20)


def id_lists(n_max):
    """Sequences of one token: mostly one, sometimes several."""
    one = seq_ids(n_max).map(lambda s: [s])
    several = st.lists(seq_ids(n_max), min_size=1, max_size=3, unique=True)
    return st.one_of(one, one, several)


positions = mostly(st.integers(0, 40), st.sampled_from([MAX_POS - 3, MAX_POS]), 30)
bounds = st.one_of(
    st.integers(-3, 45), st.sampled_from([-1, MAX_POS, MAX_POS + 1, -(2**31), 2**40])
)


def ranges_around(held):
    """A pair of bounds: one of the positions `held`, from one to another, an end, or anything."""
    anything = st.tuples(bounds, bounds)
    if not held:
        return anything
    near = st.sampled_from(held).flatmap(lambda p: st.sampled_from([p, p, p + 1, p - 1]))
    single = st.sampled_from(held).map(lambda p: (p, p + 1))
    span = st.tuples(near, near).map(lambda p: (min(p), max(p) + 1))
    end = near.map(lambda p: (p, -1))
    whole = st.sampled_from([(-1, -1), (0, MAX_POS), (0, MAX_POS + 1)])
    return mostly(st.one_of(span, single, end, span, whole), anything, 12)


def deltas_around(held):
    """Steps of a few positions, one to around zero, one to the last position, or any."""
    few = st.sampled_from([1, -1, 2, -2, 5, -5, 40])
    to_zero = st.sampled_from(held or [0]).flatmap(lambda p: st.sampled_from([-p, -p - 1, -p + 1]))
    to_end = [MAX_POS - max(held, default=0), MAX_POS - max(held, default=0) + 1]
    rare = st.sampled_from([*to_end, 0, MAX_POS, -MAX_POS, MAX_POS + 1, -MAX_POS - 1])
    return mostly(st.one_of(few, few, to_zero), rare, 8)


divisors = mostly(st.sampled_from([2, 3, 5]), st.sampled_from([1, MAX_POS, 0, -2, MAX_POS + 1]), 8)


def batch_sizes(n, n_free):
    """Tokens of a batch: a few, near a word's end, all that fits, too many."""
    small = st.integers(1, max(1, min(9, n_free)))
    edges = [k for k in (2, 31, 63, 64, 65, n_free // 2, n_free - 1, n_free) if 0 < k <= n_free]
    large = st.sampled_from(edges) if edges else small
    return mostly(st.one_of(small, small, large), st.sampled_from([0, n_free + 1, n, n + 1]), 10)


@st.composite
def tokens(draw, n, n_free, n_max):
    """Return positions and lists of ids for a batch: runs of positions, ids in turn."""
    n_tokens = draw(batch_sizes(n, n_free))
    start = draw(positions)
    step = draw(st.sampled_from([1, 1, 1, 2, 0]))
    ids = draw(st.lists(id_lists(n_max), min_size=1, max_size=3))
    pos = [min(start + step * t, MAX_POS) for t in range(n_tokens)]
    return pos, [ids[t % len(ids)] for t in range(n_tokens)]
