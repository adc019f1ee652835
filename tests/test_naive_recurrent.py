"""The oracle of recurrent caches is right: it replays what a real llama.cpp did, and by hand."""

from __future__ import annotations

import gzip
import json

import pytest
from naive_recurrent import BadArgumentError, NaiveStates, PendingError, advance, state_of
from naive_recurrent_seed import SeedCells

GOLDEN_TRACES, GOLDEN_OPS = 37, 1850


def run(cells, op):
    """Run one operation of a trace; returns what the reference's call returned, or None."""
    kind, s, p = op["op"], op.get("seq_id"), (op.get("p0"), op.get("p1"))
    if kind == "decode":
        cells.decode([(pos, *ids) for pos, ids in zip(op["pos"], op["seq_ids"], strict=True)])
        return 0
    if kind == "seq_rm":
        return cells.seq_rm(s, *p)
    if kind == "seq_cp":
        cells.seq_cp(op["seq_id_src"], op["seq_id_dst"])
    elif kind == "seq_keep":
        cells.seq_keep(s)
    elif kind == "seq_add":
        cells.move(s, *p, lambda pos: pos + op["delta"])
    elif kind == "seq_div":
        cells.move(s, *p, lambda pos: pos // op["d"])
    elif kind == "clear":
        cells.clear()
    else:
        assert kind == "defrag"  # means nothing here
    return None


def seen(cells):
    """What the recorder looked at; positions only of cells in use."""
    length, start = cells.longest_hole()
    both = zip(cells.cells, cells.slip, strict=True)
    return {
        "pos": [c.pos + slip if c.seqs else None for c, slip in both],
        "seq_mask": [sum(1 << s for s in c.seqs) for c in cells.cells],
        "used": cells.used,
        "n_tokens": cells.n_tokens,
        "max_contiguous": length,
        "max_contiguous_idx": start,
    }


def recorded(cells):
    """The record, less the positions of cells that are not in use."""
    both = zip(cells["pos"], cells["seq_mask"], strict=True)
    return {**cells, "pos": [p if mask else None for p, mask in both]}


def replay(trace):
    """Replay one trace and compare after each operation; returns their number."""
    cells = SeedCells(trace["n_cells"])
    for number, op in enumerate(trace["ops"]):
        where = f"seed {trace['seed']}, op {number}: {op['op']}"
        assert run(cells, op) == op.get("result"), where
        assert seen(cells) == recorded(op["cells"]), where
        if "cells_before_update" in op:
            assert seen(cells) == recorded(op["cells_before_update"]), where
        # The reference looks for the maximum from 0 on: neither empty nor below 0 shows.
        pos_max = [max(0, cells.seq_pos_max(s)) for s in range(trace["n_seq_max"])]
        assert pos_max == op["seq_pos_max"], where
    return len(trace["ops"])


def test_the_oracle_replays_all_recurrent_traces(golden):
    n_traces = n_ops = 0
    for path in sorted((golden / "traces").glob("recurrent_*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for line in lines:
                n_ops += replay(json.loads(line))
                n_traces += 1
    assert (n_traces, n_ops) == (GOLDEN_TRACES, GOLDEN_OPS)


# -- what a recurrent cache should do ------------------------------------------------------------


def feed(states, s, tokens):
    """Give one sequence its next tokens, in one step that is accepted."""
    pos = states.counted_on([[s]] * len(tokens))
    states.begin()
    states.place([(s,)], [tokens], [pos])
    states.accept(0)


def with_ten(n_rewind, one_by_one=False):
    states = NaiveStates(4, n_rewind)
    for tokens in [[t] for t in range(10)] if one_by_one else [list(range(10))]:
        feed(states, 0, tokens)
    return states


def test_no_two_lists_of_tokens_have_one_state():
    lists = [[], [0], [0, 0], [1], [0, 1], [1, 0], [0, 1, 2], [1, 0, 2], [2, 1, 0]]
    found = {state_of(t, il, kind) for t in lists for il in (0, 1) for kind in (0, 1)}
    assert len(found) == 4 * (len(lists) - 1) + 1
    assert advance(state_of([5, 6], 1, 0), 7, 1, 0) == state_of([5, 6, 7], 1, 0)
    assert max(found) < 2**64


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("n_rewind", "p0", "p1", "left"),
    [
        (0, 5, -1, None),
        (0, 2, 5, None),
        (0, 10, -1, 10),
        (0, 9, -1, None),
        (0, 8, -1, None),
        (0, 0, -1, 0),
        (2, 9, -1, 9),
        (2, 8, -1, 8),
        (2, 7, -1, None),
        (2, 5, -1, None),
        (2, 8, 9, None),
        (2, 0, 5, None),
        (2, 0, 10, 0),
    ],
)
def test_what_can_be_taken_back(n_rewind, one_by_one, p0, p1, left):
    states = with_ten(n_rewind, one_by_one)
    assert states.seq_rm(0, p0, p1) is (left is not None)
    left = 10 if left is None else left
    assert states.state(0, 0, 0) == state_of(range(left), 0, 0)
    assert states.seq_pos_max(0) == left - 1
    assert states.seq_pos_min(0) == max(-1, 9 - n_rewind if left else -1)


def test_what_was_taken_back_cannot_be_taken_back_twice():
    states = with_ten(2)
    assert states.seq_rm(0, 9, -1)
    assert states.seq_rm(0, 8, -1)
    assert not states.seq_rm(0, 7, -1)
    feed(states, 0, [50])
    assert states.seq_rm(0, 8, -1)
    assert not states.seq_rm(0, 7, -1)
    assert states.state(0, 1, 1) == state_of(range(8), 1, 1)


def test_copies_have_the_way_back_and_go_it_alone():
    states = with_ten(2)
    states.seq_cp(0, 1, -1, -1)
    assert states.groups() == [[0, 1]]
    assert states.seq_rm(0, 8, -1)
    assert states.groups() == [[0], [1]]
    states.seq_cp(0, 2, 0, 8)
    assert [states.seq_pos_max(s) for s in range(4)] == [7, 9, 7, -1]
    assert states.seq_rm(-1, 8, -1)
    assert [states.seq_pos_max(s) for s in range(4)] == [7, 7, 7, -1]
    with pytest.raises(BadArgumentError):
        states.seq_cp(0, 3, 0, 7)


def test_a_sequence_that_was_dropped_leaves_nothing_to_a_new_one():
    for drop in (("seq_keep", 1), ("seq_rm", 0, 0, 20), ("seq_cp", 3, 0, -1, -1)):
        states = with_ten(2)
        states.seq_rm(0, 8, -1)
        getattr(states, drop[0])(*drop[1:])
        assert states.seq_pos_max(0) == -1
        feed(states, 0, [5])
        assert states.state(0, 0, 0) == state_of([5], 0, 0)
        assert not states.refuses(0, 0, -1)
        assert states.seq_pos_min(0) == 0


def test_all_or_nothing_for_all_sequences():
    states = with_ten(2)
    feed(states, 1, [3] * 12)
    assert not states.seq_rm(-1, 8, -1)
    assert [states.seq_pos_max(s) for s in range(2)] == [9, 11]
    assert states.seq_rm(-1, 10, -1) is True
    assert [states.seq_pos_max(s) for s in range(2)] == [9, 9]


def test_tokens_of_several_sequences_go_on_from_the_first():
    states = with_ten(1)
    states.place([(0, 1)], [[70, 71]], [[10, 11]])
    with pytest.raises(PendingError):
        states.seq_keep(0)
    states.accept(1)
    assert states.groups() == [[0, 1]]
    assert states.state(1, 0, 0) == state_of([*range(10), 70, 71], 0, 0)
    states.undo_from(0)
    assert states.groups() == []


@pytest.mark.parametrize(
    ("p0", "p1", "delta", "d", "pos", "n_kept"),
    [
        (0, -1, 5, 1, [5, 6, 7, 8], 3),
        (3, -1, 5, 1, [0, 1, 2, 8], 3),
        (0, 3, 5, 1, [5, 6, 7, 3], 1),
        (0, -1, -2, 1, [0, 0, 0, 1], 2),
        (0, -1, 0, 2, [0, 0, 1, 1], 1),
        (2, 3, 1, 1, [0, 1, 3, 3], 1),
        (3, 4, -3, 1, [0, 1, 2, 0], 1),
        (0, -1, -4, 1, None, None),
    ],
)
def test_moved_positions_and_the_states_that_are_left(p0, p1, delta, d, pos, n_kept):
    states = NaiveStates(2, 2)
    feed(states, 0, [1, 2, 3, 4])
    states.seq_cp(0, 1, -1, -1)
    states.move(0, p0, p1, delta, d)
    if pos is None:
        assert states.lives == {}
        return
    assert (states.lives[1].pos, states.lives[1].n_kept) == (pos, n_kept)
    assert states.state(0, 0, 0) == state_of([1, 2, 3, 4], 0, 0)


def test_a_cache_need_not_know_where_each_token_is():
    states = NaiveStates(1, 3)
    feed(states, 0, [1, 2])
    states.begin()
    states.place([(0,)], [[3]], [[9]])
    life = states.lives[0]
    assert life.is_exact
    assert not life.is_known(4, 6)
    assert life.is_known(4, -1)
    assert life.left_without(4, -1) == 2
    assert not life.moved(1, 5, 1, 1).is_exact
    assert life.moved(0, -1, 1, 1).is_exact
