"""Positions filled in, and the strict rules: each refusal names token, field and reason."""

from __future__ import annotations

from types import SimpleNamespace

import naive_splitting as naive
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvnumba import CacheConfig, UnifiedCache
from kvnumba.batch import MAX_POS, Batch
from kvnumba.errors import PositionError, SequenceError, ShapeError

# -- positions filled in -----------------------------------------------------------------------


def _held(bounds, n_seq_max=8, **config):
    """A cache of which only the positions matter: {sequence: (first, last)}."""
    return SimpleNamespace(
        seq_pos_min=lambda s: bounds.get(s, (-1, -1))[0],
        seq_pos_max=lambda s: bounds.get(s, (-1, -1))[1],
        config=SimpleNamespace(n_seq_max=n_seq_max, **config),
    )


ID_LISTS = [[0], [1], [2], [0, 1], [1, 0], [2, 0, 1]]
some_ids = st.lists(st.sampled_from(ID_LISTS), min_size=1, max_size=10)
plain_ids = st.lists(st.sampled_from(ID_LISTS[:3]), min_size=1, max_size=10)
last_positions = st.dictionaries(st.integers(0, 2), st.integers(0, 4))


@given(st.one_of(some_ids, plain_ids), last_positions, st.booleans())
def test_missing_positions_count_on(ids, last, by_first_id):
    batch = Batch([0] * len(ids), None, ids)
    filled = batch.filled(lambda s: last.get(s, -1), by_first_id)
    assert filled.pos.tolist() == naive.fill(ids, last, by_first_id)
    assert filled.pos.dtype == np.int32
    assert batch.pos is None


def test_positions_that_were_given_stay():
    batch = Batch([1, 2], [9, 3])
    assert batch.filled(lambda s: 100).pos.tolist() == [9, 3]


@pytest.mark.parametrize("seq_ids", [0, [0, 0, 1], [[0, 1]] * 3])
def test_no_position_beyond_the_last(seq_ids):
    batch = Batch([1, 2, 3], None, seq_ids)
    with pytest.raises(PositionError, match=f"token 1 would be at position {MAX_POS + 1}"):
        batch.filled(lambda s: MAX_POS - 1)


# -- strict rules ------------------------------------------------------------------------------


STRICT = {
    "no tokens": (Batch([]), {}, ShapeError, "tokens: the batch has none"),
    "beyond the vocabulary": (Batch([9, 10, 3]), {}, ShapeError, "token 1: tokens is 10.* 0 to 9"),
    "unknown sequence": (
        Batch([1, 2], None, [[0], [1, 8]]),
        {},
        SequenceError,
        "token 1: seq_ids has 8.* 0 to 7",
    ),
    "behind the cache": (
        Batch([1, 2], [4, 5], 3),
        {3: (0, 4)},
        PositionError,
        "token 0: pos is 4 in sequence 3, which the cache holds up to 4; it must be 5",
    ),
    "ahead of the cache": (
        Batch([1, 2, 3], [0, 6, 7], [1, 3, 3]),
        {3: (0, 4)},
        PositionError,
        "token 1: pos is 6 in sequence 3, which the cache holds up to 4; it must be 5",
    ),
    "a gap": (
        Batch([1, 2, 3], [5, 6, 8]),
        {},
        PositionError,
        "token 2: pos is 8 in sequence 0, after 6 at token 1; .*no gaps",
    ),
    "no gap where a shared token follows": (
        Batch([1, 2, 3, 4], [0, 0, 1, 2], [0, 1, [0, 1], 1]),
        {},
        None,
        "",
    ),
    "a gap that another sequence fills": (
        Batch([1, 2, 3], [0, 1, 2], [0, 1, 0]),
        {},
        PositionError,
        "token 2: pos is 2 in sequence 0, after 0 at token 0; .*no gaps",
    ),
    "decreasing": (
        Batch([1, 2, 3], [1, 2, 1]),
        {},
        PositionError,
        "token 2: pos is 1 in sequence 0, after 2 at token 1; .*not decrease",
    ),
    "coupled, one is longer": (
        Batch([1, 2], [5, 5], [2, [2, 1]]),
        {1: (0, 4), 2: (0, 3)},
        SequenceError,
        "token 1: seq_ids couples 1 with 2, .* 0 to 4 of 1 and 0 to 3 of 2",
    ),
    "coupled, one starts later": (
        Batch([1], None, [[1, 2]]),
        {1: (0, 4), 2: (2, 4)},
        SequenceError,
        "token 0: seq_ids couples 2 with 1, .* 2 to 4 of 2 and 0 to 4 of 1",
    ),
    "coupled, one is empty": (
        Batch([1], None, [[1, 2]]),
        {1: (0, 4)},
        SequenceError,
        "token 0: seq_ids couples 2 with 1, .*none of 2",
    ),
    "the same position twice": (Batch([1, 2], [5, 5]), {0: (0, 4)}, None, ""),
    "an empty cache, anywhere": (Batch([1, 2], [50, 51]), {}, None, ""),
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_rules(name):
    batch, bounds, error, reason = STRICT[name]
    before = {key: str(value) for key, value in vars(batch).items()}
    if error is None:
        assert batch.validate(_held(bounds), n_vocab=10).n_tokens == batch.n_tokens
    else:
        with pytest.raises(error, match=reason):
            batch.validate(_held(bounds), n_vocab=10)
    assert {key: str(value) for key, value in vars(batch).items()} == before


several = [[5, 5, 8], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("batch", "last", "n_pos", "reason"),
    [
        (Batch([1, 2, 3], several), 4, 4, None),  # gaps are allowed
        (Batch([1, 2, 3], several), 5, 4, "token 0: pos is 5 .* up to 5; it must be 6 or more"),
        (Batch(embeddings=np.eye(3), pos=several), 5, 4, None),
        (Batch(embeddings=np.eye(3), pos=several), 6, 4, "token 0: pos is 5 .* must be 6 or more"),
        (Batch([1, 2, 3], [5, 7, 6]), 4, 3, "token 2: pos is 6 .*not decrease"),
        (Batch([1, 2, 3], [5, 7, 8]), 2, 3, None),
        (Batch([1, 2, 3]), 2, 3, None),
        (Batch(embeddings=np.eye(3)), 2, 3, "token 0: pos has one position for an embedding"),
        (Batch(embeddings=np.eye(3)), 2, 1, None),
        (Batch([1, 2, 3], several), 4, 1, "token 0: pos has 3 positions a token"),
        (Batch([1, 2, 3], [5, 6, 8]), 4, 1, "token 2: pos is 8 .*no gaps"),
    ],
)
def test_strict_rules_where_a_token_has_several_positions(batch, last, n_pos, reason):
    memory = _held({0: (0, last)}, n_pos=n_pos)
    if reason is None:
        assert batch.validate(memory).pos is not None
        return
    with pytest.raises(PositionError, match=reason):
        batch.validate(memory)


@given(
    st.one_of(some_ids, plain_ids),
    st.dictionaries(st.integers(0, 2), st.sampled_from([(0, 1), (0, 2), (1, 2)])),
    st.booleans(),
    st.booleans(),
    st.data(),
)
@example([[0], [1], [0, 1]], {}, False, False, None)
def test_validate_accepts_what_the_model_accepts(ids, bounds, has_sections, is_embedded, data):
    n = len(ids)
    pos = naive.fill(ids, {s: b[1] for s, b in bounds.items()}, by_first_id=True)
    if data is not None and data.draw(st.booleans()):
        moves = st.sampled_from([0, 0, 0, 1, -1])
        pos = [max(0, p + data.draw(moves)) for p in pos]
    given_pos = [pos, [0] * n, [0] * n] if has_sections else pos
    content = {"embeddings": np.ones((n, 2))} if is_embedded else {"tokens": [0] * n}
    batch = Batch(pos=given_pos, seq_ids=ids, **content)
    if naive.accepts(ids, pos, bounds, 3, has_sections, is_embedded):
        assert batch.validate(_held(bounds, n_seq_max=3)).pos.tolist() == pos
    else:
        with pytest.raises((PositionError, SequenceError)):
            batch.validate(_held(bounds, n_seq_max=3))


def test_shared_tokens_without_positions_follow_on_their_first_id():
    ids = [[0], [1], [1], [0, 1]]
    batch = Batch([1] * 4, None, ids)
    assert batch.validate(_held({})).pos.tolist() == [0, 0, 1, 1]
    assert batch.filled(lambda s: -1).pos.tolist() == [0, 0, 1, 2]


def test_a_cache_takes_what_was_validated_and_is_not_touched_by_it():
    config = CacheConfig(n_layer=1, n_ctx=16, n_head_kv=1, head_dim=8, n_seq_max=4)
    cache = UnifiedCache(config)
    row = np.zeros((3, 8), np.float32)
    for first in (0, 3):
        batch = Batch([1, 2, 3], None, 2).validate(cache, n_vocab=100)
        assert batch.pos.tolist() == [first, first + 1, first + 2]
        (step,) = cache.prepare(batch)
        with step:
            step.write(0, row, row)
    with pytest.raises(PositionError, match="token 0: pos is 9 in sequence 2"):
        Batch([1], [9], 2).validate(cache)
    with pytest.raises(SequenceError, match="token 0: seq_ids has 4"):
        Batch([1], None, 4).validate(cache)
    assert cache.seq_pos_max(2) == 5
    cache.check()
