"""Splitting: what holds for every way, each way against a plain model, and what was mended."""

from __future__ import annotations

import naive_splitting as naive
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvnumba.batch import Batch
from kvnumba.errors import ConfigError, SequenceError, ShapeError
from kvnumba.splitting import (
    Ubatch,
    in_batch_order,
    output_index,
    split_equal,
    split_for,
    split_seed,
    split_seq,
    split_simple,
)

SHARED = [[0], [1], [2], [0, 1], [1, 0], [0, 1, 2], [2, 3], [5]]
n_ubatches = st.integers(1, 9)
plain_ids = st.lists(st.integers(0, 4).map(lambda s: [s]), max_size=24)
shared_ids = st.lists(
    st.tuples(st.sampled_from(SHARED), st.integers(1, 4)), min_size=0, max_size=8
).map(lambda runs: [ids for ids, n in runs for _ in range(n)])
any_ids = st.one_of(plain_ids, shared_ids)


def _batch(ids, pos=None, **kwargs):
    return Batch(np.arange(len(ids)) + 100, pos, ids, **kwargs)


def _told(ubatches):
    return [(u.index.tolist(), u.n_seqs, u.n_seq_tokens, u.is_equal) for u in ubatches]


def _ways(batch, n_ubatch):
    """Every way of splitting that keeps each sequence in order."""
    yield split_simple(batch, n_ubatch)
    for keep_tail in range(min(3, n_ubatch)):
        yield split_equal(batch, n_ubatch, keep_tail=keep_tail)
        if not batch.is_coupled:
            yield split_equal(batch, n_ubatch, sequential=True, keep_tail=keep_tail)
    yield split_seq(batch, n_ubatch)
    yield split_seq(batch, n_ubatch, same_ids=True)
    if not batch.is_coupled:
        yield split_seed(batch, n_ubatch)
        yield split_seed(batch, n_ubatch, "seq")


def _is_in_order(ids, ubatches):
    order = [t for u in ubatches for t in u[0]]
    for s in {s for token in ids for s in token}:
        mine = [t for t in order if s in ids[t]]
        if mine != sorted(mine):
            return False
    return True


# -- what holds for every way -------------------------------------------------------------------


@given(any_ids, n_ubatches)
@example([], 1)
@example([[0], [0, 1], [1]], 2)
@example([[0, 1], [1], [0, 1]], 2)
def test_every_token_once_in_order_and_never_too_many(ids, n_ubatch):
    for ubatches in _ways(_batch(ids), n_ubatch):
        told = _told(ubatches)
        assert sorted(t for u in told for t in u[0]) == list(range(len(ids)))
        assert all(1 <= len(u[0]) <= n_ubatch for u in told)
        assert _is_in_order(ids, told)


@given(any_ids, n_ubatches)
def test_an_equal_ubatch_is_sequence_after_sequence(ids, n_ubatch):
    for ubatches in (*_ways(_batch(ids), n_ubatch), split_seed(_batch(ids), n_ubatch)):
        for u in ubatches:
            assert u.n_tokens == u.n_seqs * u.n_seq_tokens == u.batch.n_tokens
            if not u.is_equal:
                assert u.seq_sets == ()
                continue
            assert len(u.seq_sets) == u.n_seqs
            for k, t in enumerate(u.index.tolist()):
                assert u.seq_sets[k // u.n_seq_tokens] == tuple(sorted(ids[t]))
            flat = [s for ids_of_one in u.seq_sets for s in ids_of_one]
            assert len(set(flat)) == len(flat)


@given(any_ids, n_ubatches, st.data())
def test_a_ubatch_has_all_that_its_tokens_had(ids, n_ubatch, data):
    n = len(ids)
    pos = np.arange(3 * n).reshape(3, n)
    flags = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    vectors = np.arange(2.0 * n).reshape(n, 2)
    batch = _batch(ids, pos, embeddings=vectors, outputs=flags)
    for ubatches in _ways(batch, n_ubatch):
        for u in ubatches:
            assert u.index.dtype == np.int64
            assert u.batch.tokens.tolist() == (u.index + 100).tolist()
            assert u.batch.sections.tolist() == pos[:, u.index].tolist()
            assert u.batch.pos.tolist() == pos[0, u.index].tolist()
            assert u.batch.embeddings.tolist() == vectors[u.index].tolist()
            assert u.batch.outputs.tolist() == [flags[t] for t in u.index]
            # also the order of a token's ids
            assert [list(u.batch.ids_of(k)) for k in range(u.n_tokens)] == [ids[t] for t in u.index]


@given(any_ids, n_ubatches, st.data())
def test_results_come_back_into_batch_order(ids, n_ubatch, data):
    n = len(ids)
    flags = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    batch = _batch(ids, outputs=flags)
    for ubatches in (*_ways(batch, n_ubatch), split_seed(batch, n_ubatch)):
        rows = [[t, -t] for u in ubatches for t in u.index.tolist() if flags[t]]
        assert output_index(ubatches).tolist() == [t for t, _ in rows]
        ordered = in_batch_order(np.array(rows).reshape(-1, 2), ubatches)
        assert ordered.tolist() == [[t, -t] for t in range(n) if flags[t]]


# -- each way against the plain model -------------------------------------------------------------


@given(any_ids, n_ubatches)
def test_simple_is_as_the_model(ids, n_ubatch):
    assert _told(split_simple(_batch(ids), n_ubatch)) == naive.split_simple(ids, n_ubatch)


@given(any_ids, n_ubatches, st.booleans(), st.integers(0, 4))
@example([[0]] * 7, 3, False, 2)
@example([[0], [0], [2], [1], [2]], 8, True, 0)
@example([[0, 1]] * 5 + [[0], [1]] * 3, 4, False, 3)
@example([[1], [2], [1], [2], [1], [2], [2]], 6, False, 2)
def test_equal_is_as_the_model(ids, n_ubatch, sequential, keep_tail):
    sequential = sequential and all(len(token) == 1 for token in ids)
    keep_tail = min(keep_tail, n_ubatch - 1)
    got = split_equal(_batch(ids), n_ubatch, sequential, keep_tail)
    assert _told(got) == naive.split_equal(ids, n_ubatch, sequential, keep_tail)


@given(any_ids, n_ubatches, st.booleans())
def test_seq_is_as_the_model(ids, n_ubatch, same_ids):
    got = split_seq(_batch(ids), n_ubatch, same_ids)
    assert _told(got) == naive.split_seq(ids, n_ubatch, same_ids)


@given(any_ids, n_ubatches, st.sampled_from(["simple", "equal", "seq"]), st.data())
def test_seed_is_as_the_model(ids, n_ubatch, kind, data):
    n = len(ids)
    pos = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=n, max_size=n))
    got = split_seed(_batch(ids, pos), n_ubatch, kind)
    assert _told(got) == naive.split_seed(ids, pos or [0] * n, n_ubatch, kind)


@given(any_ids, n_ubatches, st.booleans())
def test_only_what_was_wrong_is_mended(ids, n_ubatch, sequential):
    """Where llama.cpp neither takes too many tokens nor overtakes, the split is its own."""
    sequential = sequential and all(len(token) == 1 for token in ids)
    old = naive.split_equal(ids, n_ubatch, sequential, old=("one set too many", "overtake"))
    if all(len(u[0]) <= n_ubatch for u in old) and _is_in_order(ids, old):
        assert _told(split_equal(_batch(ids), n_ubatch, sequential)) == old
    old = naive.split_seq(ids, n_ubatch, old=("overtake",))
    if _is_in_order(ids, old):
        got = split_seq(_batch(ids), n_ubatch)
        assert [u.index.tolist() for u in got] == [u[0] for u in old]


# -- what was mended ------------------------------------------------------------------------------


def test_no_more_sequences_than_tokens_fit():
    ids = [[0], [1], [2], [3]]
    old = naive.split_equal(ids, 2, old=("one set too many",))
    assert [len(u[0]) for u in old] == [3, 1]
    assert [u.n_tokens for u in split_equal(_batch(ids), 2)] == [2, 2]


@pytest.mark.parametrize(
    ("ids", "wrong", "right"),
    [
        ([[0], [0, 1], [1]], [[0, 2], [1]], [[0], [1], [2]]),
        ([[0, 1], [1], [0, 1]], [[0, 2], [1]], [[0], [1], [2]]),
    ],
)
def test_no_token_overtakes_an_earlier_one_of_its_sequence(ids, wrong, right):
    old = naive.split_equal(ids, 2, old=("overtake",))
    assert [u[0] for u in old] == wrong
    assert [u.index.tolist() for u in split_equal(_batch(ids), 2)] == right


def test_no_token_overtakes_in_a_sequence_by_itself():
    ids = [[0], [0, 1], [0]]
    assert [u[0] for u in naive.split_seq(ids, 4, old=("overtake",))] == [[0, 2], [1]]
    assert [u.index.tolist() for u in split_seq(_batch(ids), 4)] == [[0], [1, 2]]


def test_a_ubatch_whose_ids_dwindle_is_not_one_sequence():
    ids = [[0, 1], [0, 1], [0]]
    (narrowing,) = split_seq(_batch(ids), 4)
    assert (narrowing.is_equal, narrowing.seq_sets) == (False, ())
    same = split_seq(_batch(ids), 4, same_ids=True)
    assert [u.seq_sets for u in same] == [((0, 1),), ((0,),)]


def test_a_sequential_split_of_shared_tokens_is_refused_with_the_token():
    batch = _batch([[0], [1], [3, 2], [1]])
    with pytest.raises(SequenceError, match=r"token 2: seq_ids \[3, 2\]"):
        split_equal(batch, 4, sequential=True)
    with pytest.raises(SequenceError, match="token 0"):  # also where all tokens are alike
        split_equal(_batch([[0, 1], [0, 1]]), 4, sequential=True)


@pytest.mark.parametrize("keep_tail", [4, 5])
def test_a_tail_that_fills_a_ubatch_is_refused(keep_tail):
    with pytest.raises(ConfigError, match=f"keep_tail {keep_tail} must be less than n_ubatch 4"):
        split_equal(_batch([[0]] * 6), 4, keep_tail=keep_tail)


# -- the rules by example -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "n_ubatch", "keep_tail", "lengths"),
    [
        (8, 4, 0, [4, 4]),
        (9, 4, 0, [4, 4, 1]),
        (9, 4, 2, [4, 3, 2]),
        (9, 4, 3, [4, 2, 3]),
        (10, 4, 3, [4, 3, 3]),
        (11, 4, 3, [4, 4, 3]),
        (5, 4, 3, [2, 3]),
        (4, 4, 3, [4]),
    ],
)
def test_the_tail_of_one_sequence_stays_together(n_tokens, n_ubatch, keep_tail, lengths):
    got = split_equal(_batch([[7]] * n_tokens), n_ubatch, keep_tail=keep_tail)
    assert [u.n_tokens for u in got] == lengths
    assert all(u.seq_sets == ((7,),) for u in got)
    assert np.concatenate([u.index for u in got]).tolist() == list(range(n_tokens))


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(2, 12), st.data())
def test_the_last_tokens_of_each_sequence_are_in_one_ubatch(ids, n_ubatch, data):
    keep_tail = data.draw(st.integers(1, n_ubatch - 1))
    got = split_equal(Batch(ids, seq_ids=ids), n_ubatch, keep_tail=keep_tail)
    for s in set(ids):
        last = max(j for j, u in enumerate(got) if s in u.batch.ids)
        assert got[last].n_seq_tokens >= min(keep_tail, ids.count(s))


def test_sets_that_would_lose_their_tail_wait():
    # Two tokens of each fit; sequence 1 would be left with one.
    ids = [[0], [1], [0], [1], [0], [1], [0]]
    got = _told(split_equal(_batch(ids), 4, keep_tail=2))
    assert got == [([0, 2], 1, 2, True), ([1, 3, 5], 1, 3, True), ([4, 6], 1, 2, True)]


def test_sequential_takes_neighbours_only():
    batch = _batch([[0], [2], [1], [2], [0]])
    got = split_equal(batch, 8, sequential=True)
    assert [u.seq_sets for u in got] == [((0,), (1,), (2,)), ((2,),), ((0,),)]
    assert split_equal(batch, 8)[0].seq_sets == ((0,), (2,), (1,))


def test_the_seed_takes_shared_prompts_first_and_then_greater_ids():
    ids = [[0], [0], [1], [1], [2], [2], [0, 1, 2], [0, 1]]
    got = split_seed(_batch(ids), 16)
    assert [u.seq_sets for u in got] == [((0, 1, 2),), ((0, 1),), ((2,), (1,), (0,))]
    assert [u.index.tolist() for u in got] == [[6], [7], [4, 5, 2, 3, 0, 1]]


def test_the_seed_takes_shorter_groups_first():
    ids = [[0], [1], [1], [2], [2], [2]]
    got = split_seed(_batch(ids), 3)
    assert _told(got) == [([0, 1, 3], 3, 1, True), ([2, 4], 2, 1, True), ([5], 1, 1, True)]
    one_by_one = split_seed(_batch(ids), 2, "seq")
    assert [u.index.tolist() for u in one_by_one] == [[0], [1, 2], [3, 4], [5]]


def test_the_seed_orders_a_group_by_position():
    got = split_seed(_batch([[0]] * 3, [5, 3, 4]), 2)
    assert [u.index.tolist() for u in got] == [[1, 2], [0]]


@pytest.mark.parametrize(
    ("kind", "is_pooled", "like"),
    [
        ("attention", False, lambda b: split_simple(b, 3)),
        ("recurrent", False, lambda b: split_equal(b, 3, keep_tail=2)),
        ("hybrid", False, lambda b: split_equal(b, 3, keep_tail=2)),
        ("attention", True, lambda b: split_seq(b, 3)),
        ("recurrent", True, lambda b: split_seq(b, 3, same_ids=True)),
        ("hybrid", True, lambda b: split_seq(b, 3, same_ids=True)),
    ],
)
def test_each_kind_of_cache_has_its_way(kind, is_pooled, like):
    batch = _batch([[0, 1]] * 2 + [[0], [1]] * 3)
    got = split_for(batch, 3, kind, is_pooled=is_pooled, keep_tail=2)
    assert _told(got) == _told(like(batch))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda b: split_simple(b, 0), "n_ubatch 0"),
        (lambda b: split_equal(b, 1.5), "n_ubatch 1.5"),
        (lambda b: split_seq(b, True), "n_ubatch True"),
        (lambda b: split_seed(b, -1), "n_ubatch -1"),
        (lambda b: split_equal(b, 2, keep_tail=-1), "keep_tail -1"),
        (lambda b: split_seed(b, 2, "other"), "kind 'other'"),
        (lambda b: split_for(b, 2, "other"), "kind 'other'"),
    ],
)
def test_impossible_options(call, named):
    with pytest.raises(ConfigError, match=named):
        call(_batch([[0], [1]]))


@pytest.mark.parametrize("rows", [np.zeros((1, 4)), np.zeros((3, 4)), np.float32(1)])
def test_rows_that_are_not_one_an_output(rows):
    ubatches = split_simple(_batch([[0]] * 3, outputs=[1, 0, 1]), 2)
    with pytest.raises(ShapeError, match="for 2 outputs"):
        in_batch_order(rows, ubatches)


def test_no_tokens_make_no_ubatches():
    for ubatches in (*_ways(_batch([]), 4), split_for(_batch([]), 4, "recurrent")):
        assert ubatches == []
    assert output_index([]).tolist() == []
    assert in_batch_order(np.zeros((0, 5)), []).shape == (0, 5)


def test_a_ubatch_cannot_be_changed():
    (u,) = split_simple(_batch([[0]]), 1)
    assert isinstance(u, Ubatch)
    with pytest.raises(AttributeError):
        u.n_seqs = 2
