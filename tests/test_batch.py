"""Batches: several ways to write them, and refusals that name token and field."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.errors import PositionError, SequenceError, ShapeError


def test_one_id_for_all_one_each_or_several():
    assert Batch([1, 2], seq_ids=3).ids.tolist() == [3, 3]
    assert Batch([1, 2], seq_ids=[3, 4]).ids.tolist() == [3, 4]
    batch = Batch([1, 2, 3], [5, 6, 7], [[0], [0, 2], [1]])
    assert batch.ids.tolist() == [0, 0, 2, 1]
    assert batch.id_start.tolist() == [0, 1, 3, 4]
    assert batch.first_ids().tolist() == [0, 0, 1]


def test_part_keeps_ids():
    part = Batch([1, 2, 3], [5, 6, 7], [[0], [0, 2], [1]]).part(1, 3)
    assert part.tokens.tolist() == [2, 3]
    assert part.pos.tolist() == [6, 7]
    assert part.id_start.tolist() == [0, 2, 3]
    assert part.ids.tolist() == [0, 2, 1]


def test_empty_batch():
    batch = Batch([])
    assert batch.n_tokens == 0
    assert batch.first_ids().tolist() == []


@pytest.mark.parametrize(
    ("args", "error", "named"),
    [
        (([1.5],), ShapeError, "tokens"),
        (([[1]],), ShapeError, "tokens"),
        (([2**31],), ShapeError, "tokens"),
        (([1, 2], [0]), ShapeError, "pos"),
        (([1], [-1]), PositionError, "token 0 is -1"),
        (([1, 2], [0, 2**31 - 1]), PositionError, "token 1"),
        (([1, 2], None, [0]), ShapeError, "seq_ids"),
        (([1, 2], None, [[0], []]), SequenceError, "token 1 has no"),
        (([1, 2], None, [[0], [1, 1]]), SequenceError, "token 1 names a sequence twice"),
        (([1], None, 1.5), ShapeError, "seq_ids"),
    ],
)
def test_refusals(args, error, named):
    with pytest.raises(error, match=named):
        Batch(*args)


def test_int64_input_is_narrowed():
    assert Batch(np.array([1, 2], np.int64)).tokens.dtype == np.int32
