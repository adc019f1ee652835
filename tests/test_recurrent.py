"""The recurrent cache: states in rows, rings of kept states, cells numbered as in the reference."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvnumba.batch import MAX_POS, Batch
from kvnumba.errors import (
    ConfigError,
    DamagedError,
    NoSlotError,
    PositionError,
    SequenceError,
    SessionError,
    ShapeError,
    StepError,
)
from kvnumba.recurrent import RecurrentCache
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.splitting import Ubatch

WIDTH_R, WIDTH_S = 3, 5


def make(n_seq_max=4, n_rewind=0, n_layer=1, path=None, rules="today", **options):
    config = RecurrentConfig(n_layer, WIDTH_R, WIDTH_S, n_seq_max, n_rewind=n_rewind, **options)
    return RecurrentCache(config, path, rules)


def advance(state, token, il=0):
    """One token of a toy recurrence over whole numbers that every element type holds exactly."""
    d = np.arange(state.shape[-1])
    return ((3 * state + token + d * d + il) % 251).astype(np.float32)


def after(tokens, il=0):
    """The states r and s after these tokens, from nothing."""
    states = np.zeros(WIDTH_R, np.float32), np.zeros(WIDTH_S, np.float32)
    for token in tokens:
        states = tuple(advance(state, token, il) for state in states)
    return states


def compute(cache, step):
    """What a model does: read, go on token by token, write the last states of each sequence."""
    tokens = step.batch.tokens.reshape(step.n_seqs, step.n_seq_tokens)
    for il in range(cache.config.n_layer):
        written = []
        for start in step.read(il):
            state, states = start, []
            for t in range(step.n_seq_tokens):
                state = advance(state, tokens[:, t : t + 1], il)
                states.append(state)
            written.append(np.stack(states[-step.n_states :], axis=1))
        step.write(il, *written)


def feed(cache, tokens, seq_ids=0, pos=None, n_ubatch=None):
    steps = cache.prepare(Batch(tokens, pos, seq_ids), n_ubatch)
    for step in steps:
        with step:
            compute(cache, step)
        cache.check()
    return steps


def holds(cache, seq_id, tokens):
    """Whether a sequence's state is, bit for bit, the one after these tokens."""
    return all(
        got.tobytes() == want.tobytes()
        for il in range(cache.config.n_layer)
        for got, want in zip(cache.state(il, seq_id), after(tokens, il), strict=True)
    )


def everything(cache):
    arrays = [*cache.cells.state, cache.rows.pinned, *cache.rows.r, *cache.rows.s]
    return [a.tobytes() for a in arrays], cache.search_start


def one_ubatch(tokens, pos, sets):
    """A ubatch made by hand: one token of each set."""
    batch = Batch(tokens, pos, [list(ids) for ids in sets])
    return batch, [
        Ubatch(batch, np.arange(len(tokens)), len(sets), 1, True, tuple(tuple(i) for i in sets))
    ]


def place(cache, pos, sets):
    """Place one token of each set, in this order; return the step."""
    batch, ubatches = one_ubatch([7] * len(sets), pos, sets)
    (step,) = cache.prepare_ubatches(batch, ubatches)
    with step:
        compute(cache, step)
    cache.check()
    return step


# -- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rewind", [0, 2])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("in_files", [False, True])
def test_states_go_on_from_each_other_however_the_tokens_come(n_rewind, kind, in_files, tmp_path):
    path = tmp_path / "states" if in_files else None
    options = {"n_layer": 2, "type_r": kind, "type_s": kind, "path": path}
    with make(2, n_rewind, **options) as cache:
        tokens = list(range(10, 21))
        feed(cache, tokens[:4])
        feed(cache, tokens[4:9], n_ubatch=2)
        for token in tokens[9:]:
            feed(cache, [token])
        assert holds(cache, 0, tokens)
        assert holds(cache, 1, [])
        assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (10 - n_rewind, 10)


def test_a_new_sequence_reads_zeros_also_where_another_has_been():
    cache = make(2)
    for _ in range(5):
        feed(cache, [1, 2, 3], 0)
        cache.seq_rm(0)
    (step,) = cache.prepare(Batch([1], seq_ids=1))
    with step:
        assert all(not state.any() for state in step.read(0))
        compute(cache, step)


def test_sequences_of_one_batch_are_computed_together():
    cache = make(3)
    (step,) = feed(cache, [5, 6, 7, 8, 9, 10], [0, 1, 2, 0, 1, 2])
    assert (step.n_seqs, step.n_seq_tokens, step.n_states) == (3, 2, 1)
    assert all(holds(cache, s, [5 + s, 8 + s]) for s in range(3))
    assert step.extent == (0, 3, 3, False)
    assert cache.init_full() == (0, 3, 3, True)


def test_layers_may_differ_in_width_and_s_may_be_missing():
    cache = RecurrentCache(RecurrentConfig(2, [2, 4], [6, 0]))
    (step,) = cache.prepare([1])
    with step:
        assert [a.shape for il in range(2) for a in step.read(il)] == [
            (1, 2),
            (1, 6),
            (1, 4),
            (1, 0),
        ]
        step.write(0, np.ones((1, 2), np.float32), np.ones((1, 1, 6), np.float32))
        step.write(1, np.full((1, 4), 2, np.float32))
    assert cache.state(0, 0)[1].tolist() == [1] * 6
    assert cache.state(1, 0)[0].tolist() == [2] * 4


def test_impossible_states_are_refused_and_nothing_is_written():
    cache = make(n_rewind=1)
    (step,) = cache.prepare([1, 2, 3])
    r, s = np.ones((1, 2, WIDTH_R), np.float32), np.ones((1, 2, WIDTH_S), np.float32)
    step.apply()
    before = everything(cache)
    for bad in [(r[:, :1], s), (r, s[:, :1]), (r[0], s), (r.astype(np.float64), s), (r, None)]:
        with pytest.raises(ShapeError):
            step.write(0, *bad)
    for il in (-1, 1, 0.0):
        with pytest.raises(ConfigError):
            step.write(il, r, s)
        with pytest.raises(ConfigError):
            step.read(il)
    assert everything(cache) == before
    step.write(0, r, s)
    step.commit()


# -- taking tokens back -------------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("n_rewind", [0, 2])
@pytest.mark.parametrize("in_files", [False, True])
def test_t24(one_by_one, n_rewind, in_files, tmp_path):
    tokens = list(range(40, 50))

    def fresh():
        path = tmp_path / str(len(list(tmp_path.iterdir()))) if in_files else None
        cache = make(2, n_rewind, n_layer=2, path=path)
        for part in [[t] for t in tokens] if one_by_one else [tokens]:
            feed(cache, part)
        return cache

    wanted = {(5, -1): False, (2, 5): False, (10, -1): True, (9, -1): False, (8, -1): False}
    wanted |= {(7, -1): False, (0, -1): True}
    if n_rewind:
        wanted |= {(9, -1): True, (8, -1): True}
    for (p0, p1), answer in wanted.items():
        cache = fresh()
        before = everything(cache)
        assert (cache.refusal(0, p0, p1) is None) == answer
        assert cache.seq_rm(0, p0, p1) is answer, (p0, p1)
        cache.check()
        left = tokens[: min(p0, 10)] if answer else tokens
        assert holds(cache, 0, left)
        assert cache.seq_pos_max(0) == len(left) - 1
        if not answer or p0 == 10:
            assert everything(cache) == before
        feed(cache, [99])
        assert holds(cache, 0, [*left, 99])
        cache.close()


def test_rewinds_may_follow_each_other_while_states_are_kept():
    cache = make(n_rewind=3)
    feed(cache, [1, 2, 3, 4, 5, 6])
    assert cache.seq_pos_min(0) == 2
    for p in (5, 4, 3):
        assert cache.seq_rm(0, p, -1)
        assert holds(cache, 0, [1, 2, 3, 4, 5, 6][:p])
        assert cache.seq_pos_min(0) == 2
    assert not cache.seq_rm(0, 2, -1)
    assert "oldest is after 2" in cache.refusal(0, 2)
    feed(cache, [7, 8])
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (2, 4)
    assert cache.seq_rm(0, 3, -1)
    assert holds(cache, 0, [1, 2, 3])


def test_what_was_not_kept_is_never_restored():
    """After a ubatch of one token the older rows of the ring are those of before: no more."""
    cache = make(n_rewind=3)
    feed(cache, [1, 2])
    assert cache.seq_pos_min(0) == 0
    assert not cache.refusal(0, 1)
    assert cache.seq_rm(0, 0, -1)  # all of it: no state is needed
    feed(cache, [3])
    assert cache.cells.n_kept.tolist() == [1, 0, 0, 0]
    assert cache.seq_pos_min(0) == 0


def test_prefixes_and_middles_stay():
    cache = make(n_rewind=5)
    feed(cache, range(6))
    before = everything(cache)
    for p0, p1 in ((0, 5), (0, 1), (2, 4), (4, 5), (-1, 3)):
        assert cache.seq_rm(0, p0, p1) is False
        assert "same state" in cache.refusal(0, p0, p1)
    for p0, p1 in ((3, 3), (4, 2), (6, -1), (6, 9)):
        assert cache.seq_rm(0, p0, p1) is True
    assert everything(cache) == before
    assert cache.seq_rm(1, 2, 4)


def test_a_sequence_that_starts_later_is_whole_from_there():
    cache = make()
    feed(cache, [1, 2], pos=[5, 6])
    assert cache.seq_rm(0, 0, 5)
    assert holds(cache, 0, [1, 2])
    assert cache.seq_rm(0, 6, -1) is False
    assert cache.seq_rm(0, 5, -1)
    assert cache.used == 0


def test_all_sequences_are_removed_at_once_or_none():
    cache = make(n_rewind=1)
    feed(cache, [1, 2, 3], 0)
    feed(cache, [4, 5, 6], 1)
    cache.seq_cp(1, 2)
    feed(cache, [7, 8, 9, 10], 3)
    assert cache.seq_rm(-1, 1, -1) is False
    assert cache.refusal(-1, 1).startswith("sequence 0")
    assert cache.seq_rm(-1, 2, -1) is False  # sequence 3 has no state after position 1
    assert cache.seq_pos_max(0) == 2
    assert cache.seq_rm(3)
    assert cache.seq_rm(-1, 2, -1)
    assert cache.used == 2  # 1 and 2 have gone back together
    assert [cache.seq_pos_max(s) for s in range(4)] == [1, 1, 1, -1]
    assert all(holds(cache, s, [4, 5]) for s in (1, 2))
    assert cache.seq_rm(-1)
    assert cache.used == 0
    assert (cache.cells.tail == -1).all()
    cache.check()


# -- the holes of the reference's rollback (spec 2.6) -------------------------------------------


def test_hole_a_no_stale_state_after_a_decode_of_one_token():
    """There, planes of an earlier ubatch pass for states of this one."""
    cache = make(n_rewind=3)
    feed(cache, range(1, 8))
    assert cache.seq_rm(0, 5, -1)
    feed(cache, [50])
    assert cache.seq_rm(0, 5, -1)
    assert holds(cache, 0, range(1, 6))
    feed(cache, [51])
    assert cache.seq_rm(0, 4, -1) is False or holds(cache, 0, range(1, 5))


def test_hole_b_a_copy_takes_the_rewind_along():
    cache = make(n_rewind=3)
    feed(cache, [1, 2, 3, 4, 5])
    assert cache.seq_rm(0, 3, -1)
    cache.seq_cp(0, 1)
    assert holds(cache, 1, [1, 2, 3])
    feed(cache, [9], 1)
    assert holds(cache, 1, [1, 2, 3, 9])
    assert holds(cache, 0, [1, 2, 3])
    assert cache.seq_rm(1, 2, -1)  # and the states kept before: across the fork
    assert holds(cache, 1, [1, 2])


@pytest.mark.parametrize("remove", [lambda c: c.seq_keep(1), lambda c: c.seq_rm(0, 0, 100)])
def test_hole_c_a_new_sequence_under_a_dropped_id_starts_from_nothing(remove):
    cache = make(n_rewind=3)
    feed(cache, [1, 2, 3, 4, 5])
    feed(cache, [8], 1)
    assert cache.seq_rm(0, 3, -1)
    remove(cache)
    assert cache.seq_pos_max(0) == -1
    feed(cache, [6], 0)
    assert holds(cache, 0, [6])
    assert holds(cache, 1, [8])


def test_hole_d_sequences_that_share_a_state_may_go_back_differently():
    cache = make(n_rewind=3)
    feed(cache, [1, 2, 3, 4, 5])
    cache.seq_cp(0, 1)
    cache.seq_cp(0, 2)
    assert cache.seq_rm(1, 4, -1)
    assert cache.seq_rm(2, 3, -1)
    cache.check()
    assert [cache.seq_pos_max(s) for s in range(3)] == [4, 3, 2]
    assert all(holds(cache, s, [1, 2, 3, 4, 5][: 5 - s]) for s in range(3))
    assert cache.used == 3
    assert cache.cells.src.tolist() == [0, 1, 2, -1]
    # No state was copied: the rows are the same ones.
    assert cache.cells.row[cache.cells.tail[1], 0] == cache.cells.row[cache.cells.tail[0], 1]


# -- the quirks of the reference's old cache (spec 1.3) -----------------------------------------


def test_quirk_two_new_sequences_at_once_lose_nobodys_state():
    """There, a new one was not led along by the swap, and took another's cell."""
    cache = make(6)
    for s in range(5):
        place(cache, [0], [(s,)])
    cache.seq_rm(0)
    cache.cells.search_start = 5
    step = place(cache, [0, 0], [(0,), (5,)])  # cell 5, and around to cell 0
    assert (step.head, step.n_kv) == (0, 6)
    assert cache.used == 6
    assert all(holds(cache, s, [7]) for s in range(6))
    assert cache.cells.tail[[0, 5]].tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(30))
def test_quirk_no_order_of_sequences_loses_a_state(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    cache, tokens = make(n), {s: [] for s in range(n)}
    for _ in range(25):
        some = rng.permutation(n)[: rng.integers(1, n + 1)].tolist()
        if rng.random() < 0.4:
            for s in some:
                assert cache.seq_rm(s)
                tokens[s] = []
        else:
            place(cache, [len(tokens[s]) for s in some], [(s,) for s in some])
            for s in some:
                tokens[s].append(7)
            head = cache.search_start
            assert cache.cells.tail[some].tolist() == list(range(head, head + len(some)))
        assert all(holds(cache, s, tokens[s]) for s in range(n))


def test_quirk_the_search_start_goes_back_by_sequences_not_tokens():
    cache = make(8)
    place(cache, [0], [(0,)])
    cache.cells.search_start = 6
    step = place(cache, [0, 0, 0], [(1,), (2,), (3,)])  # 6 <= 1 + 2 * 3: cells 6, 7, 1
    assert (step.head, step.n_kv) == (1, 7)
    cache = make(8)
    place(cache, [0], [(0,)])
    cache.cells.search_start = 6
    feed(cache, [1, 2, 3, 4, 5, 6], 1)  # 6 > 1 + 2, though not beyond 1 + 2 * 6 tokens
    assert cache.cells.tail[1] == 1
    old = make(8, rules="seed")
    feed(old, [1], 0)
    old.cells.search_start = 6
    feed(old, [1, 2, 3, 4, 5, 6], 1)
    assert old.cells.tail[1] == 6


def test_quirk_a_placement_without_room_changes_nothing():
    """There, cells had been freed and moved by then."""
    cache = make(4)
    feed(cache, [1, 2], 0)
    cache.seq_cp(0, 1)
    cache.rows.pinned[0] = np.uint64(0xFFFF)  # all 16 rows
    before = everything(cache)
    for ids in (0, 1, [[0, 1]], [3]):
        with pytest.raises(NoSlotError, match="wait for a session commit") as error:
            cache.prepare(Batch([5], seq_ids=ids))
        assert error.value.n_waiting == cache.config.n_rows - 1
        assert cache.try_prepare(Batch([5], seq_ids=ids)).error is not None
    assert everything(cache) == before


def test_quirk_prepare_tries_every_ubatch_and_places_none():
    cache = make(4)
    feed(cache, [1], 0)
    before = everything(cache)
    # Two free rows: the first part would fit, and the next two; not with the batch's own rollback.
    cache.rows.pinned[:] = ~np.uint64(0b1011)
    before[0][2] = cache.rows.pinned.tobytes()
    with pytest.raises(NoSlotError):
        cache.prepare(Batch([2, 3, 4], seq_ids=[0, 1, 2]), n_ubatch=1)
    assert everything(cache) == before
    feed(cache, [2, 3], [0, 0], n_ubatch=1)
    assert holds(cache, 0, [1, 2, 3])


def test_quirk_sources_are_told_however_often_they_are_asked_for():
    cache = make(4)
    place(cache, [0, 0], [(0,), (1,)])
    steps = cache.prepare(Batch([1, 1], seq_ids=[1, 2]))
    (step,) = steps
    for _ in range(2):
        assert (step.head, step.n_kv, step.zero_cell) == (1, 2, 2)
        assert step.copy_sources.tolist() == [1, 2]
    step.apply()
    assert (step.head, step.n_kv, step.zero_cell) == (1, 2, 2)
    assert step.copy_sources.tolist() == [1, 2]


class Graph:
    """A graph that keeps the states in the cells themselves, and does what it is told to."""

    def __init__(self, n_cells):
        self.cells = np.full((n_cells, WIDTH_S), np.nan, np.float32)

    def run(self, step):
        tokens = step.batch.tokens
        if step.zero_cell >= 0:
            self.cells[step.zero_cell] = 0
        states = self.cells[step.copy_sources].copy()
        for q in range(step.n_seqs):
            states[q] = advance(states[q], tokens[q])
        self.cells[step.head : step.head + step.n_kv] = states


@pytest.mark.parametrize("seed", range(30))
def test_who_keeps_states_in_cells_computes_the_same_from_the_sources(seed):
    rng = np.random.default_rng(100 + seed)
    n = int(rng.integers(2, 8))
    cache, graph = make(n, n_cells=n + int(rng.integers(0, 3))), None
    graph = Graph(cache.cells.n_cells)
    for _ in range(40):
        a, b = rng.integers(0, n, 2).tolist()
        action = rng.random()
        if action < 0.15:
            cache.seq_rm(a)
        elif action < 0.35:
            cache.seq_cp(a, b)
        elif action < 0.4:
            cache.seq_keep(a)
        else:
            some = rng.permutation(n)[: rng.integers(1, n + 1)].tolist()
            batch, ubatches = one_ubatch(
                rng.integers(0, 90, len(some)),
                [cache.seq_pos_max(s) + 1 for s in some],
                [(s,) for s in some],
            )
            (step,) = cache.prepare_ubatches(batch, ubatches)
            with step:
                graph.run(step)
                compute(cache, step)
        for s in range(n):
            if cache.seq_pos_max(s) >= 0:
                np.testing.assert_array_equal(
                    graph.cells[cache.cells.tail[s]], cache.state(0, s)[1]
                )


# -- cells that are shared ----------------------------------------------------------------------


def test_a_copy_shares_the_cell_until_one_of_the_two_goes_on():
    cache = make(n_rewind=1)
    feed(cache, [1, 2, 3])
    cache.seq_cp(0, 2)
    assert cache.used == 1
    assert cache.n_tokens == 2
    assert cache.view().seq_ids[0].tolist() == [0, 2, -1, -1]
    feed(cache, [4], 2)
    assert cache.used == 2
    assert holds(cache, 0, [1, 2, 3])
    assert holds(cache, 2, [1, 2, 3, 4])
    assert cache.cells.tail.tolist() == [0, -1, 1, -1]


def test_tokens_of_several_sequences_make_them_share():
    cache = make(4)
    feed(cache, [1, 2], [[0, 1, 3], [0, 1, 3]])
    assert cache.used == 1
    feed(cache, [3], 3)
    assert holds(cache, 3, [1, 2, 3])
    assert holds(cache, 1, [1, 2])
    # As in the reference: what follows the first id drops what it had.
    feed(cache, [4], [[1, 3]], pos=[2])
    assert holds(cache, 3, [1, 2, 4])
    assert holds(cache, 0, [1, 2])
    assert cache.used == 2


def test_a_copy_is_whole_or_refused():
    cache = make()
    feed(cache, [1, 2, 3])
    feed(cache, [9], 1)
    before = everything(cache)
    for p0, p1 in ((1, -1), (0, 2), (5, 9)):
        with pytest.raises(PositionError, match="only be copied whole"):
            cache.seq_cp(0, 1, p0, p1)
    cache.seq_cp(0, 1, 2, 2)
    cache.seq_cp(0, 0)
    assert everything(cache) == before
    cache.seq_cp(0, 1, 0, 3)
    assert holds(cache, 1, [1, 2, 3])
    cache.seq_cp(2, 1)
    assert cache.seq_pos_max(1) == -1
    assert holds(cache, 0, [1, 2, 3])


def test_keep_drops_the_others_and_leaves_no_field_behind():
    cache = make(n_rewind=1)
    for s in (0, 1, 2):
        feed(cache, [s, 5], s)
    cache.seq_cp(1, 3)
    cache.seq_keep(1)
    assert cache.used == 1
    assert cache.cells.tail.tolist() == [-1, 1, -1, -1]
    assert holds(cache, 1, [1, 5])
    cache.check()  # every field of the freed cells is as in the beginning
    cache.seq_keep(3)
    assert cache.used == 0


# -- positions ----------------------------------------------------------------------------------


def test_positions_move_for_all_that_share_a_state():
    cache = make(n_rewind=2)
    feed(cache, range(6))
    cache.seq_cp(0, 1)
    cache.seq_add(0, 0, -1, 10)
    assert [cache.seq_pos_max(s) for s in (0, 1)] == [15, 15]
    assert cache.seq_pos_min(1) == 13
    cache.seq_div(1, 0, -1, 3)
    assert cache.seq_pos_max(0) == 5
    assert cache.cells.row_pos[0].tolist() == [5, 4, -1]  # 15, 14, 13: the last two became one
    assert cache.seq_rm(0, 5, -1)
    assert holds(cache, 0, range(5))
    assert cache.seq_rm(1, 4, -1) is False  # 12 is at 4 as well
    assert cache.seq_pos_min(1) == 4


def test_a_sequence_that_goes_below_0_is_removed():
    cache = make(n_rewind=1)
    feed(cache, [1, 2, 3])
    cache.seq_cp(0, 1)
    cache.seq_add(0, 0, -1, -2)
    assert cache.seq_pos_max(0) == 0
    assert cache.cells.n_kept[0] == 1  # the state at -1 cannot be meant any more
    cache.seq_add(0, 0, -1, -1)
    assert cache.used == 0
    cache.check()
    old = make(rules="seed")
    feed(old, [1, 2, 3])
    old.seq_add(0, 0, -1, -4)
    assert old.seq_pos_max(0) == -2
    assert old.used == 1
    old.check()


def test_numbers_beyond_the_last_position_are_refused():
    cache = make(n_rewind=1)
    feed(cache, [1, 2], pos=[MAX_POS - 6, MAX_POS - 5])
    before = everything(cache)
    for delta in (6, MAX_POS):
        with pytest.raises(PositionError):
            cache.seq_add(0, 0, -1, delta)
    assert everything(cache) == before
    cache.seq_add(0, 0, -1, 5)
    assert cache.seq_pos_max(0) == MAX_POS
    with pytest.raises(PositionError):
        cache.prepare(Batch([3]))


def test_a_gap_in_the_positions_is_taken_with_a_warning(caplog):
    cache = make(n_rewind=3)
    with caplog.at_level(logging.WARNING):
        feed(cache, [1, 2], pos=[0, 1])
        assert not caplog.records
        feed(cache, [3, 4], pos=[10, 11])
    assert "position 10" in caplog.text
    assert cache.seq_rm(0, 5, -1)
    assert holds(cache, 0, [1, 2])


def test_a_state_that_holds_later_positions_too_is_not_restored():
    cache = make(n_rewind=8)
    feed(cache, range(8))
    feed(cache, [90, 91], pos=[3, 4])  # back behind 7
    assert cache.seq_pos_max(0) == 4
    for p0 in (4, 5, 6, 7):  # 5 to 7 are in each of these states
        assert cache.seq_rm(0, p0, -1) is False
    assert "went back behind position 7" in cache.refusal(0, 5)
    assert cache.seq_pos_min(0) == 4
    feed(cache, [92], pos=[9])
    assert cache.seq_pos_min(0) == 9  # the state at 4 is kept, but it cannot be cut back to 4
    assert cache.seq_rm(0, 9, -1)
    assert holds(cache, 0, [*range(8), 90, 91])
    assert cache.seq_rm(0, 0, 7) is False
    assert cache.seq_rm(0, 0, 8)
    assert cache.used == 0


class Told:
    """A sequence as a list of (token, position), and what removing a range must leave of it."""

    def __init__(self, pairs=()):
        self.pairs = list(pairs)

    def left(self, p0, p1):
        kept = [(t, p) for t, p in self.pairs if not p0 <= p < p1]
        return kept if kept == self.pairs[: len(kept)] else None

    def moved(self, p0, p1, delta, d):
        self.pairs = [(t, (p + delta) // d if p0 <= p < p1 else p) for t, p in self.pairs]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_no_wrong_state_is_restored(seed, caplog):
    """Random positions, moved at random: a removal that is granted leaves just the other tokens."""
    rng = np.random.default_rng(1000 + seed)
    n_rewind = int(rng.integers(0, 6))
    cache, told, granted = make(3, n_rewind, n_layer=1), [Told() for _ in range(3)], 0
    caplog.set_level(logging.ERROR)
    for _ in range(120):
        s, action = int(rng.integers(3)), rng.random()
        p0, p1 = sorted(rng.integers(0, 16, 2).tolist())
        if action < 0.4:
            n = int(rng.integers(1, 5))
            start = cache.seq_pos_max(s) + 1 if rng.random() < 0.7 else int(rng.integers(0, 14))
            pos = (start + np.arange(n)).tolist()
            if rng.random() < 0.1:
                pos = rng.integers(0, 14, n).tolist()
            tokens = rng.integers(0, 90, n).tolist()
            feed(cache, tokens, s, pos, n_ubatch=int(rng.integers(1, 5)))
            told[s].pairs += zip(tokens, pos, strict=True)
        elif action < 0.5:
            other = int(rng.integers(3))
            cache.seq_cp(s, other)
            told[other] = Told(told[s].pairs)
        elif action < 0.6:
            delta, d = (int(rng.integers(-4, 5)), 1) if rng.random() < 0.7 else (0, 2)
            sharers = cache.cells.ids_of(cache.cells.tail[s]) if told[s].pairs else []
            (cache.seq_add if d == 1 else cache.seq_div)(s, p0, p1, delta if d == 1 else d)
            for of in sharers:
                told[of].moved(p0, p1, delta, d)
                if told[of].pairs[-1][1] < 0:
                    told[of] = Told()
        else:
            p1 = -1 if rng.random() < 0.7 else p1
            top = p1 if p1 >= 0 else 1 << 40
            left = told[s].left(p0, top)
            if cache.seq_rm(s, p0, p1):
                # Positions below 0 are shaped by the tokens, but nobody can name them any more.
                whole = all(p < 0 or p0 <= p < top for _, p in told[s].pairs)
                told[s] = Told() if whole else Told(left)
                granted += 1
        cache.check()
        for of in range(3):
            assert holds(cache, of, [t for t, _ in told[of].pairs])
            assert cache.seq_pos_max(of) == (told[of].pairs[-1][1] if told[of].pairs else -1)
    assert granted > 5


@pytest.mark.parametrize("seed", range(20))
def test_while_positions_follow_on_just_the_kept_states_are_granted(seed):
    rng = np.random.default_rng(2000 + seed)
    n_rewind = int(rng.integers(0, 5))
    cache, tokens, kept = make(2, n_rewind), [], 0
    for _ in range(80):
        if rng.random() < 0.6:
            new = rng.integers(0, 90, rng.integers(1, 5)).tolist()
            feed(cache, new, 1, n_ubatch=int(rng.integers(1, 5)))
            tokens, kept = tokens + new, min(len(tokens) + len(new), kept + len(new), n_rewind + 1)
        elif tokens:
            p = int(rng.integers(0, len(tokens) + 1))
            n_back = len(tokens) - p
            assert cache.seq_rm(1, p, -1) is (p == 0 or n_back < kept)
            if p == 0:
                tokens, kept = [], 0
            elif n_back < kept:
                tokens, kept = tokens[:p], kept - n_back
        assert holds(cache, 1, tokens)
        assert cache.seq_pos_min(1) == (len(tokens) - kept if tokens else -1)


# -- steps --------------------------------------------------------------------------------------


def test_a_step_is_undone_as_if_it_had_never_been():
    cache = make(n_rewind=2)
    feed(cache, [1, 2, 3])
    cache.seq_cp(0, 1)
    before = everything(cache)
    steps = cache.prepare(Batch([4, 5, 6, 7], seq_ids=[0, 0, 1, 1]))
    (step,) = steps
    step.apply()
    cache.check()
    assert cache.n_pending == 4
    step.rollback()
    assert everything(cache) == before
    assert cache.n_pending == 0
    with pytest.raises(StepError, match="rolled back"):
        step.apply()


@pytest.mark.parametrize("n_rewind", [0, 2])
@pytest.mark.parametrize("n_done", [1, 3, 5])
def test_a_whole_batch_is_undone_committed_steps_too(n_rewind, n_done):
    cache = make(n_rewind=n_rewind)
    feed(cache, [1, 2, 3])
    cache.seq_cp(0, 1)
    meta = [a.copy() for a in cache.cells.state]
    steps = cache.prepare(Batch(range(10, 20), seq_ids=0), n_ubatch=2)
    for step in steps[:n_done]:
        with step:
            compute(cache, step)
    assert cache.seq_pos_max(0) == 2 + 2 * n_done
    steps.rollback()
    assert all((a == b).all() for a, b in zip(meta, cache.cells.state, strict=True))
    assert holds(cache, 0, [1, 2, 3])
    if n_rewind:
        assert cache.seq_rm(0, 1, -1)
        assert holds(cache, 0, [1])
    assert holds(cache, 1, [1, 2, 3])
    feed(cache, [7])


def test_steps_may_be_applied_ahead_and_undone_one_by_one():
    cache = make(n_rewind=1)
    feed(cache, [1])
    steps = cache.prepare(Batch([2, 3, 4]), n_ubatch=1)
    for step in steps:
        compute(cache, step.apply())
    for n in (2, 1, 0):
        assert holds(cache, 0, [1, 2, 3, 4][: n + 2])
        with pytest.raises(StepError):
            (steps[n - 1] if n else steps[2]).rollback()
        steps[n].rollback()
    assert holds(cache, 0, [1])
    steps = cache.prepare(Batch([5, 6]), n_ubatch=1)
    for step in steps:
        compute(cache, step.apply())
    cache.rollback()
    assert holds(cache, 0, [1])


def test_steps_ahead_write_no_row_of_a_step_that_is_pending():
    cache = make(1, n_rewind=2)
    steps = cache.prepare(Batch([1, 2, 3, 4], [5, 1, 6, 7]), n_ubatch=2)
    first = steps[0].apply()
    assert cache.cells.n_kept.tolist() == [1]  # the state at 5 will not be kept, but written
    second = steps[1].apply()
    assert not set(first.target_rows.ravel()) & set(second.target_rows.ravel())
    steps.rollback()


def test_a_step_that_fails_is_undone_and_the_ones_before_stay():
    cache = make()
    steps = cache.prepare(Batch([1, 2, 3, 4]), n_ubatch=2)
    with steps[0] as step:
        compute(cache, step)
    with pytest.raises(ZeroDivisionError), steps[1]:
        _ = 1 // 0
    assert holds(cache, 0, [1, 2])
    steps.rollback()
    assert cache.used == 0
    cache.check()


def test_rows_that_may_be_wanted_are_never_given_out():
    cache = make(2, n_rewind=2)
    feed(cache, [1, 2, 3], 0)
    wanted = cache.cells.row[0].tolist()
    cache.rows.pinned[:] = 0
    steps = cache.prepare(Batch(np.arange(12), seq_ids=0), n_ubatch=3)
    for step in steps:
        with step:
            assert not set(step.target_rows.ravel().tolist()) & set(wanted)
            assert not set(step.target_rows.ravel().tolist()) & set(step.source_rows.tolist())
            compute(cache, step)
    steps.rollback()
    assert holds(cache, 0, [1, 2, 3])
    cache.rows.pinned[0] = np.uint64(0b1111)
    feed(cache, [4, 5], 1)
    assert cache.cells.row[cache.cells.tail[1], :2].min() >= 4


def test_there_are_rows_for_the_greatest_batch():
    """Full rings, as many new states in each ubatch, and the rings before the batch."""
    n, n_rewind = 3, 2
    cache = make(n, n_rewind)
    tokens = np.arange(30 * n)
    ids = np.tile(np.arange(n), 30)
    feed(cache, tokens, ids)
    steps = cache.prepare(Batch(tokens, seq_ids=ids), n_ubatch=n * (n_rewind + 1))
    assert len(steps) >= 10
    for step in steps:
        with step:
            compute(cache, step)
    assert holds(cache, 1, 2 * tokens[1::n].tolist())
    steps.rollback()
    assert all(holds(cache, s, tokens[s::n]) for s in range(n))


def test_too_many_steps_ahead_are_refused_when_rows_run_out():
    cache = make(1)
    feed(cache, [1])
    steps = cache.prepare(Batch(range(8)), n_ubatch=1)
    for step in steps[:3]:
        step.apply()
    before = everything(cache)
    with pytest.raises(NoSlotError, match="commit or roll back earlier steps"):
        steps[3].apply()
    assert everything(cache) == before
    for step in steps[:3]:
        step.commit()
    steps[3].apply()
    steps.rollback()
    assert holds(cache, 0, [1])


CHANGES = {
    "seq_rm": lambda c: c.seq_rm(1),
    "seq_cp": lambda c: c.seq_cp(0, 2),
    "seq_keep": lambda c: c.seq_keep(0),
    "seq_add": lambda c: c.seq_add(0, 0, -1, 1),
    "seq_div": lambda c: c.seq_div(0, 0, -1, 2),
    "clear": lambda c: c.clear(),
    "another batch": lambda c: feed(c, [9], 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_steps_are_stale_after_any_change(name):
    cache = make()
    feed(cache, [1, 2], 0)
    feed(cache, [3], 1)
    old = feed(cache, [4], 0)
    steps = cache.prepare(Batch([5, 6]))
    CHANGES[name](cache)
    for call in (steps[0].apply, old.rollback):
        before = everything(cache)
        with pytest.raises(StepError, match="changed"):
            call()
        assert everything(cache) == before


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "clear"])
def test_nothing_changes_while_a_step_is_pending(name):
    cache = make()
    feed(cache, [1, 2], 0)
    (step,) = cache.prepare(Batch([5, 6]))
    step.apply()
    before = everything(cache)
    with pytest.raises(StepError, match="pending"):
        CHANGES[name](cache)
    assert everything(cache) == before
    step.rollback()


def test_clear_drops_pending_steps():
    cache = make()
    (step,) = cache.prepare(Batch([5, 6]))
    step.apply()
    cache.clear()
    for call in (step.commit, step.rollback, lambda: step.read(0)):
        with pytest.raises(StepError):
            call()
    assert (cache.used, cache.n_pending, cache.search_start) == (0, 0, 0)


def test_steps_come_in_order():
    cache = make()
    steps = cache.prepare(Batch([1, 2, 3]), n_ubatch=1)
    with pytest.raises(StepError, match="in order"):
        steps[1].apply()
    for call in (steps[0].commit, steps[0].rollback, lambda: steps[0].read(0)):
        with pytest.raises(StepError):
            call()
    steps[0].apply()
    with pytest.raises(StepError, match="in order"):
        steps[2].apply()
    cache.commit()
    steps[1].apply()
    steps[1].rollback()
    with pytest.raises(StepError, match="in order"):
        steps[2].apply()
    assert cache.seq_pos_max(0) == 0


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.seq_rm(4), SequenceError),
        (lambda c: c.seq_rm(-2), SequenceError),
        (lambda c: c.seq_rm(True), SequenceError),
        (lambda c: c.seq_rm(0, 1.5), PositionError),
        (lambda c: c.refusal(9), SequenceError),
        (lambda c: c.seq_cp(0, 4), SequenceError),
        (lambda c: c.seq_cp(-1, 0), SequenceError),
        (lambda c: c.seq_cp(0, 1, "0", 1), PositionError),
        (lambda c: c.seq_keep(-1), SequenceError),
        (lambda c: c.seq_add(-1, 0, 1, 1), SequenceError),
        (lambda c: c.seq_add(0, 0, -1, 0.5), PositionError),
        (lambda c: c.seq_add(0, 0, -1, 1 << 31), PositionError),
        (lambda c: c.seq_div(0, 0, -1, 0), PositionError),
        (lambda c: c.seq_div(0, 0, -1, -2), PositionError),
        (lambda c: c.seq_pos_max(4), SequenceError),
        (lambda c: c.seq_pos_min(-1), SequenceError),
        (lambda c: c.state(1, 0), ConfigError),
        (lambda c: c.state(0, 7), SequenceError),
        (lambda c: c.view(-1), SequenceError),
        (lambda c: c.prepare(Batch([1], seq_ids=4)), SequenceError),
        (lambda c: c.prepare([1], n_ubatch=0), ConfigError),
        (lambda c: c.prepare(Batch(np.arange(9))), ShapeError),
        (lambda c: place(c, [3, 3], [(0,), (0,)]), SequenceError),
        (lambda c: place(c, [3, 3], [(0, 1), (2, 1)]), SequenceError),
        (lambda c: place(c, [3], [(4,)]), SequenceError),
    ],
)
def test_bad_arguments_change_nothing(call, error):
    cache = make(n_rewind=1, n_batch=8)
    feed(cache, [1, 2, 3])
    cache.seq_cp(0, 2)
    before, version = everything(cache), cache._version
    with pytest.raises(error):
        call(cache)
    assert everything(cache) == before
    assert cache._version == version


def test_ubatches_of_unequal_sequences_are_refused():
    cache = make()
    batch = Batch([1, 2], [0, 0], [0, 1])
    with pytest.raises(ShapeError, match="equally many"):
        cache.prepare_ubatches(batch, [Ubatch(batch, np.arange(2), 2, 1, False, ())])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"n_layer": 0}, "n_layer"),
        ({"n_embd_r": 0}, "n_embd_r"),
        ({"n_embd_r": [1]}, "n_embd_r"),
        ({"n_embd_s": -1}, "n_embd_s"),
        ({"n_embd_s": "5"}, "n_embd_s"),
        ({"n_seq_max": 0}, "n_seq_max"),
        ({"n_seq_max": 1 << 17}, "n_seq_max"),
        ({"n_cells": 3}, "n_cells"),
        ({"n_cells": True}, "n_cells"),
        ({"n_rewind": -1}, "n_rewind"),
        ({"n_rewind": 1 << 20}, "n_rewind"),
        ({"n_cells": 1 << 30, "n_rewind": 9}, "n_cells"),
        ({"type_s": "q8"}, "q8"),
        ({"n_ubatch": 0}, "n_ubatch"),
    ],
)
def test_impossible_configurations_are_named(changes, name):
    sizes = {"n_layer": 2, "n_embd_r": 4, "n_embd_s": 4, "n_seq_max": 4}
    with pytest.raises(ConfigError, match=name):
        RecurrentConfig(**sizes | changes)


def test_a_configuration_survives_json():
    config = RecurrentConfig(2, [3, 4], 5, 4, n_rewind=2, type_r="f16")
    assert RecurrentConfig.from_dict(config.to_dict()) == config
    assert config.n_rows == 4 * 3 * 4
    assert config.bytes_per_state == (3 + 4) * 2 + 2 * 5 * 4
    with pytest.raises(ConfigError, match="missing"):
        RecurrentConfig.from_dict({"n_layer": 1})
    with pytest.raises(ConfigError, match="n_head"):
        RecurrentConfig.from_dict({"n_head": 1})


def test_a_cache_needs_its_own_config_and_known_rules():
    with pytest.raises(ConfigError):
        RecurrentCache({"n_layer": 1})
    with pytest.raises(ConfigError, match="tomorrow"):
        make(rules="tomorrow")


# -- the old rules, checks, data ----------------------------------------------------------------


def test_old_rules_of_removal():
    cache = make(n_rewind=3, rules="seed")
    feed(cache, [1, 2, 3])
    assert cache.seq_rm(0, 0, 2) is False
    assert cache.seq_rm(0, 2, -1) is False
    assert cache.seq_rm(0, 3, -1) is True
    assert cache.seq_rm(-1, 0, 2) is False
    cache.seq_cp(0, 1, 5, 6)  # ranges are ignored
    assert cache.seq_pos_max(1) == 2
    assert cache.seq_rm(0, 0, 3) is True
    assert cache.seq_rm(-1) is True
    assert cache.used == 0


def test_old_rules_place_the_highest_id_first():
    cache = make(rules="seed")
    feed(cache, [1, 1, 1], [0, 1, 2])
    assert cache.cells.tail.tolist() == [2, 1, 0, -1]
    assert cache.search_start == 3
    today = make()
    feed(today, [1, 1, 1], [0, 1, 2])
    assert today.cells.tail.tolist() == [0, 1, 2, -1]
    assert today.search_start == 0


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (lambda c: c.tail.__setitem__(0, 9), "sequence 0"),
        (lambda c: c.src.__setitem__(0, 9), "copy source"),
        (lambda c: c.pos.__setitem__(3, 0), "empty cell"),
        (lambda c: c.row.__setitem__((3, 0), 0), "empty cell"),
        (lambda c: c.tail.__setitem__(1, 3), "below 0"),
        (lambda c: c.n_kept.__setitem__(0, 0), "keeps no state"),
        (lambda c: c.n_kept.__setitem__(0, 4), "more than it may"),
        (lambda c: c.row.__setitem__((0, 1), 999), "does not exist"),
        (lambda c: c.row.__setitem__((0, 1), c.row[0, 0]), "in one row"),
        (lambda c: c.row_pos.__setitem__((0, 1), 2), "do not descend"),
        (lambda c: c.row.__setitem__((0, 2), 5), "unused entry"),
        (lambda c: c.pos.__setitem__(0, 7), "newest state"),
        (lambda c: c.first_pos.__setitem__(0, 2), "least position"),
        (lambda c: setattr(c, "search_start", 4), "search"),
    ],
)
def test_check_finds_what_is_broken(harm, what):
    cache = make(n_rewind=2)
    feed(cache, [1, 2, 3])
    assert cache.seq_rm(0, 2, -1)
    cache.check()
    harm(cache.cells)
    with pytest.raises(DamagedError, match=what):
        cache.check()


def test_clear_gives_the_data_back():
    cache = make()
    feed(cache, [1, 2, 3])
    assert cache.rows.r[0].any()
    cache.clear()
    assert cache.rows.r[0].any()
    cache.clear(data=True)
    assert not cache.rows.r[0].any()
    feed(cache, [4])
    assert holds(cache, 0, [4])
    cache.close()
    with pytest.raises(SessionError):
        cache.prepare([5])


def test_a_view_tells_runs_of_empty_cells():
    cache = make(6)
    assert cache.view().max_contiguous == 6
    feed(cache, [1, 1, 1, 1], [0, 1, 2, 3])
    cache.seq_cp(2, 5)
    cache.seq_rm(1)
    view = cache.view(1)
    assert view.pos.tolist() == [0, -1, 0, 0, -1, -1]
    assert view.seq_ids.tolist() == [[0], [-1], [2], [3], [-1], [-1]]
    assert (view.used, view.n_tokens) == (3, 4)
    assert (view.max_contiguous, view.max_contiguous_idx) == (2, 4)
    assert (cache.used, cache.n_free) == (3, 3)
    assert "3/6 cells" in repr(cache)
    assert cache.update() is False
    assert cache.can_shift
