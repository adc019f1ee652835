"""Batches: several ways to write them, and refusals that name token and field."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.errors import ConfigError, PositionError, SequenceError, ShapeError
from kvnumba.runner.prompt import parse_token_list


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
        (([3, -7],), ShapeError, "token 1 of tokens is -7"),
        (([True, 2],), ShapeError, "tokens"),
        (([1, 2], [0, True]), ShapeError, "pos"),
        (([1, 2], None, [0, 0.9]), ShapeError, "token 1 is 0.9"),
        (([1], None, [True]), ShapeError, "token 0 is True"),
        (([1, 2], None, [0, True]), ShapeError, "token 1 is True"),
        (([1], None, True), ShapeError, "seq_ids"),
        (([1, 2], None, "01"), ShapeError, "seq_ids"),
        (([1, 2], None, ["0", "1"]), ShapeError, "token 0 is '0'"),
        (([1, 2], None, [[0], "1"]), ShapeError, "token 1 is '1'"),
        (([1], None, [None]), ShapeError, "token 0 is None"),
        (([1], None, [["a"]]), ShapeError, "token 0 is 'a'"),
        (([1], None, [[[0]]]), ShapeError, "token 0"),
        (([1], None, [10**30]), ShapeError, "seq_ids"),
        (([1], None, [[2**31]]), ShapeError, "seq_ids"),
        (([1], None, 2**31), ShapeError, "seq_ids"),
        (([1], None, np.array([np.nan])), ShapeError, "seq_ids"),
        (([1], None, np.array([[0.0]])), ShapeError, "token 0 is 0.0"),
        (([1], None, np.array([True])), ShapeError, "seq_ids"),
        (([1], None, np.array([None])), ShapeError, "seq_ids"),
        (([1], None, np.zeros((1, 1, 1), int)), ShapeError, "dimensions"),
        (([1], None, np.array(0)), ShapeError, "dimensions"),
        (([1, 2], None, -1), SequenceError, "token 0 has sequence id -1"),
        (([1, 2], None, [0, -1]), SequenceError, "token 1 has sequence id -1"),
        (([1, 2], None, np.array([0, -2])), SequenceError, "token 1 has sequence id -2"),
        (([1, 2, 3], None, [[0, 1], 2, [3, -2]]), SequenceError, "token 2 has sequence id -2"),
    ],
)
def test_refusals(args, error, named):
    with pytest.raises(error, match=named):
        Batch(*args)


def test_int64_input_is_narrowed():
    assert Batch(np.array([1, 2], np.int64)).tokens.dtype == np.int32


@pytest.mark.parametrize(
    "seq_ids",
    [
        [3, 4],
        (3, 4),
        np.array([3, 4], np.int32),
        np.array([3, 4], np.uint8),
        [np.int32(3), 4],
        [np.uint8(3), np.int64(4)],
        [[3], 4],
        [(3,), np.array([4])],
        np.array([[3], [4]]),
        iter([3, 4]),
        range(3, 5),
    ],
)
def test_one_id_a_token_in_many_shapes(seq_ids):
    batch = Batch([1, 2], seq_ids=seq_ids)
    assert batch.ids.tolist() == [3, 4]
    assert batch.ids.dtype == np.int32
    assert batch.id_start.tolist() == [0, 1, 2]
    assert batch.id_start.dtype == np.int64


def test_a_batch_does_not_change_with_the_arrays_it_was_made_from():
    given = [np.array([1, 2], np.int32) for _ in range(3)]
    batch = Batch(*given)
    for array in given:
        array[:] = -1
    assert [a.tolist() for a in (batch.tokens, batch.pos, batch.ids)] == [[1, 2]] * 3


# -- embeddings, outputs, several positions ----------------------------------------------------


def test_embeddings_alone_have_no_tokens():
    batch = Batch(embeddings=[[1, 2], [3, 4], [5, 6]], seq_ids=2)
    assert not batch.has_tokens
    assert batch.tokens.tolist() == [-1, -1, -1]
    assert batch.embeddings.dtype == np.float32
    assert batch.part(1, 3).embeddings.tolist() == [[3, 4], [5, 6]]
    assert not batch.part(1, 3).has_tokens
    assert not batch.take([0]).has_tokens


def test_embeddings_beside_tokens():
    batch = Batch([7, 8], embeddings=np.eye(2))
    assert batch.has_tokens
    assert batch.take([1]).embeddings.tolist() == [[0, 1]]
    assert Batch([7]).embeddings is None


@pytest.mark.parametrize(
    ("outputs", "want"),
    [
        (None, [False, False, True]),
        ("all", [True, True, True]),
        ([True, False, False], [True, False, False]),
        ([0, 1, 1], [False, True, True]),
        (np.zeros(3, np.int8), [False, False, False]),
    ],
)
def test_output_flags(outputs, want):
    batch = Batch([1, 2, 3], outputs=outputs)
    assert batch.outputs.dtype == np.bool_
    assert batch.outputs.tolist() == want
    assert batch.part(0, 2).outputs.tolist() == want[:2]


def test_no_token_has_no_output():
    assert Batch([]).outputs.tolist() == []
    assert Batch([], outputs=[]).outputs.tolist() == []


def test_several_positions_a_token():
    rows = [[0, 0, 0, 3], [0, 0, 1, 3], [0, 1, 0, 3]]
    batch = Batch([1, 2, 3, 4], rows)
    assert batch.pos.tolist() == rows[0]
    assert batch.sections.tolist() == rows
    assert batch.sections.dtype == np.int32
    assert batch.part(1, 3).sections.tolist() == [row[1:3] for row in rows]
    assert batch.take([3, 0]).sections.tolist() == [[row[3], row[0]] for row in rows]
    assert Batch([1], [[0]] * 4).sections.shape == (4, 1)
    assert Batch([1], [5]).sections is None


@pytest.mark.parametrize("seq_ids", [0, [4, 0, 2], [[0], [3, 1], [1, 2, 0]]])
@pytest.mark.parametrize("index", [[2, 0], [1], [0, 1, 2], []])
def test_take_keeps_what_each_token_has(seq_ids, index):
    batch = Batch([1, 2, 3], [5, 6, 7], seq_ids, outputs=[1, 0, 1])
    taken = batch.take(index)
    assert taken.tokens.tolist() == [t + 1 for t in index]
    assert taken.pos.tolist() == [t + 5 for t in index]
    assert taken.outputs.tolist() == [t != 1 for t in index]
    assert taken.n_tokens == len(index)
    assert [taken.ids_of(k) for k in range(len(index))] == [batch.ids_of(t) for t in index]
    assert taken.first_ids().tolist() == [batch.ids_of(t)[0] for t in index]


def test_ids_stay_in_the_order_given():
    batch = Batch([1, 2], None, [[2, 0, 1], [5]])
    assert batch.ids_of(0) == (2, 0, 1)
    assert batch.is_coupled
    assert not batch.part(1, 2).is_coupled
    assert not batch.take([1]).is_coupled


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({}, "neither tokens nor embeddings"),
        ({"embeddings": [1.0, 2.0]}, "embeddings has shape"),
        ({"embeddings": np.zeros((2, 0))}, "embeddings has shape"),
        ({"embeddings": [["a", "b"]]}, "embeddings has dtype"),
        ({"embeddings": [[True, False]]}, "embeddings has dtype"),
        ({"embeddings": [[1.0], [1.0, 2.0]]}, "embeddings cannot be read"),
        ({"tokens": [1, 2], "embeddings": [[1.0]]}, "embeddings has 1 rows for 2 tokens"),
        ({"tokens": [1, 2], "outputs": [1]}, "outputs has shape"),
        ({"tokens": [1, 2], "outputs": [0, 2]}, "outputs of token 1 is 2"),
        ({"tokens": [1, 2], "outputs": [0.0, 1.0]}, "outputs has dtype"),
        ({"tokens": [1, 2], "outputs": "last"}, "outputs is 'last'"),
        ({"tokens": [1, 2], "outputs": [[1], [0, 1]]}, "outputs cannot be read"),
        ({"tokens": [1, 2], "pos": [[0, 1]]}, "pos has 1 rows"),
        ({"tokens": [1, 2], "pos": np.zeros((5, 2), int)}, "pos has 5 rows"),
        ({"tokens": [1, 2], "pos": np.zeros((3, 1), int)}, "pos has 1 entries for 2 tokens"),
        ({"tokens": [1], "pos": np.zeros((1, 1, 1), int)}, "pos has 3 dimensions"),
    ],
)
def test_refused_fields(kwargs, named):
    with pytest.raises(ShapeError, match=named):
        Batch(**kwargs)


def test_a_section_below_zero_is_refused():
    with pytest.raises(PositionError, match="token 1 is -1"):
        Batch([1, 2], [[0, 1], [0, -1], [0, 0]])


def test_token_lists_that_were_typed():
    assert parse_token_list("5, 6 ,7", 10).tolist() == [5, 6, 7]
    assert parse_token_list("007", 10).tolist() == [7]


@pytest.mark.parametrize(
    "text", ["", "1,", "1_0", "\uff11", "+1", "1.0", "0x1", "1\n", "\t1", "1 2", "9" * 5000, "1;2"]
)
def test_token_lists_that_are_none(text):
    with pytest.raises(ConfigError, match="whole numbers"):
        parse_token_list(text, 100)


@pytest.mark.parametrize("text", ["-1", "1,100", "4294967297"])
def test_token_lists_outside_the_vocabulary(text):
    with pytest.raises(ConfigError, match=r"outside|32 bits"):
        parse_token_list(text, 100)
