"""Streams: who lives where, copies across, isolation, and what the reference gets wrong."""

from __future__ import annotations

import numpy as np
import pytest
from judged_streams import N_LAYER, JudgedStreams

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, NoSlotError, PositionError, SequenceError, StepError
from kvnumba.streams import StreamsCache

SIZES = {"n_layer": 1, "n_ctx": 8, "n_head_kv": 1, "head_dim": 32}


@pytest.fixture
def fed():
    """Sequences 0 and 2 in stream 0, 1 and 3 in stream 1; 0 has 5 tokens and 1 has 3."""
    judged = JudgedStreams(stream_of=(0, 1, 0, 1))
    judged.feed(5, 0)
    judged.feed(3, 1)
    return judged


def positions(judged, seq_id):
    part = judged.oracle.stream(seq_id)
    return sorted(part.cells[i].pos for i in part.members(seq_id))


# -- who lives where ---------------------------------------------------------------------------


def test_a_stream_for_each_sequence_or_for_several():
    config = CacheConfig(**SIZES, n_seq_max=4)
    for given, meant in (
        (4, (0, 1, 2, 3)),
        (2, (0, 1, 0, 1)),
        (1, (0, 0, 0, 0)),
        ([1, 0, 1, 2], (1, 0, 1, 2)),
    ):
        cache = StreamsCache(config, given)
        assert cache.stream_of == meant
        assert len(cache.streams) == max(meant) + 1
        assert cache.stream(3) is cache.streams[meant[3]]


@pytest.mark.parametrize(
    "stream_of",
    [0, 5, -1, True, "01", None, 2.0, [0, 1], [0, 1, 3, 0], [1, 1, 1, 1], [0, -1, 0, 0]],
)
def test_impossible_maps_are_refused(stream_of):
    with pytest.raises(ConfigError):
        StreamsCache(CacheConfig(**SIZES, n_seq_max=4), stream_of)


def test_streams_have_room_of_their_own(fed):
    fed.feed(7, 0)
    assert fed.run([[0]]) is False
    assert fed.run([[2]]) is False
    fed.feed(9, 3)
    assert fed.run([[1]]) is False


@pytest.mark.parametrize("seq_ids", [[[0]] * 8, [[1], [0]] * 8, [[1]] * 3 + [[2]] * 8])
def test_a_batch_for_which_one_stream_has_no_room_is_placed_in_none(fed, seq_ids):
    before = fed.frozen()
    for n_ubatch in (1, 3, 99):
        with pytest.raises(NoSlotError):
            fed.cache.prepare(Batch(range(len(seq_ids)), seq_ids=seq_ids), n_ubatch)
        assert fed.frozen() == before


def test_a_token_of_sequences_in_several_streams_is_refused(fed):
    before = fed.frozen()
    with pytest.raises(SequenceError, match="token 1"):
        fed.cache.prepare(Batch([1, 2], seq_ids=[[0, 2], [0, 1]]))
    assert fed.frozen() == before
    assert fed.run([[0, 2], [1, 3], [2, 0]], 2)


def test_one_batch_for_all_streams():
    judged = JudgedStreams(stream_of=(0, 1, 2))
    assert judged.run([[0], [1], [2], [2], [1], [0], [2]], 3)
    assert [judged.cache.seq_pos_max(s) for s in range(3)] == [1, 1, 2]
    assert [part.used for part in judged.cache.streams] == [2, 2, 3]


def test_sequence_ids_at_the_edges_of_words():
    stream_of = [s % 3 for s in range(130)]
    judged = JudgedStreams(n_cells=20, stream_of=stream_of)
    for s in (0, 63, 64, 129):
        judged.feed(3, s)
    judged.call("seq_cp", 129, 64, -1, -1)
    judged.call("seq_cp", 64, 63, -1, -1)
    judged.compare()
    judged.call("seq_keep", 64)
    judged.compare()


# -- isolation ---------------------------------------------------------------------------------


def test_streams_do_not_see_each_other():
    """The other stream's rows are spoilt: nothing of them reaches an output, and 0 * nan is nan."""
    judged = JudgedStreams(stream_of=(0, 1))
    judged.feed(6, 0)
    judged.feed(6, 1)
    for il in range(N_LAYER):
        judged.cache.streams[1].layers.k[il][:] = np.nan
        judged.cache.streams[1].layers.v[il][:] = np.nan
    (step,) = judged.cache.prepare(Batch([90], seq_ids=0))
    judged.oracle.prepare([[0]])
    judged.apply(step, [[0]], [6], [90])


def test_a_verb_on_a_sequence_leaves_other_streams_alone(fed):
    before = [a.tobytes() for a in fed.cache.streams[1].cells.state]
    fed.call("seq_rm", 0, 2, 4)
    fed.call("seq_add", 0, 0, -1, 3)
    fed.call("seq_div", 0, 0, -1, 2)
    fed.call("seq_cp", 0, 2, -1, -1)
    assert [a.tobytes() for a in fed.cache.streams[1].cells.state] == before
    fed.call("update")
    fed.compare()


# -- copies across streams ---------------------------------------------------------------------


@pytest.mark.parametrize("v_trans", [False, True])
def test_a_copy_has_its_bytes_at_once(v_trans):
    """The reference shows the copied cells first, and moves their rows at the next update."""
    judged = JudgedStreams(stream_of=(0, 1), v_trans=v_trans)
    judged.feed(5, 0)
    judged.feed(2, 1)
    judged.call("seq_cp", 0, 1, -1, -1)
    judged.compare()
    here, there = judged.cache.streams
    a, b = here.cells.members(0), there.cells.members(1)
    for il in range(N_LAYER):
        assert here.layers.k[il][a].tobytes() == there.layers.k[il][b].tobytes()
        v = [part.layers.v[il].T if v_trans else part.layers.v[il] for part in (here, there)]
        assert v[0][a].tobytes() == v[1][b].tobytes()
    judged.feed(3, 1)
    judged.feed(1, 0)


def test_a_copy_is_independent_of_its_source(fed):
    fed.call("seq_cp", 0, 1, -1, -1)
    assert positions(fed, 1) == list(range(5))  # what it held is gone
    fed.call("seq_rm", 0, -1, -1)
    fed.compare()
    fed.feed(4, 2)
    fed.call("seq_add", 1, 2, -1, 1)
    fed.call("update")
    fed.compare()
    fed.feed(2, 1)


def test_a_copy_with_a_shift_pending(fed):
    fed.call("seq_rm", 0, 0, 2)
    fed.call("seq_add", 0, 2, -1, -2)
    fed.call("seq_cp", 0, 3, -1, -1)
    fed.compare()
    assert fed.cache.streams[1].has_shift
    fed.call("update")
    fed.compare()
    fed.feed(2, 3)


@pytest.mark.parametrize("type_k", ["f16", "bf16"])
def test_a_copy_of_packed_rows(type_k):
    cache = StreamsCache(CacheConfig(**SIZES, n_seq_max=2, type_k=type_k, type_v=type_k), 2)
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 4, 32)).astype(np.float32)
    with cache.prepare(Batch(range(4)))[0] as step:
        step.write(0, k, v)
    cache.seq_cp(0, 1)
    a, b = cache.streams
    assert (a.layers.k[0][:4] == b.layers.k[0][:4]).all()
    assert (a.layers.v[0][:4] == b.layers.v[0][:4]).all()
    q, out = rng.standard_normal((1, 2, 32)).astype(np.float32), []
    for s in (0, 1):
        with cache.prepare(Batch([9], seq_ids=s))[0] as step:
            step.write(0, k[:1], v[:1])
            out.append(step.attend(0, q))
    assert np.array_equal(*out)


def test_a_part_of_a_sequence_is_not_copied_across(fed):
    before = fed.frozen()
    for p0, p1 in ((0, 3), (1, -1), (2, 4), (3, 3)):
        with pytest.raises(PositionError):
            fed.cache.seq_cp(0, 1, p0, p1)
        assert fed.frozen() == before
    for p0, p1 in ((0, 5), (-1, 5), (0, 2**31 - 1)):
        fed.call("seq_cp", 0, 1, p0, p1)
        fed.compare()
    fed.call("seq_cp", 0, 2, 1, 3)  # within the stream a part is fine
    assert positions(fed, 2) == [1, 2]


def test_a_copy_of_nothing_empties(fed):
    fed.call("seq_cp", 2, 1, -1, -1)
    assert fed.cache.seq_pos_max(1) == -1
    fed.compare()


def test_a_copy_without_room_changes_nothing(fed):
    fed.feed(5, 0)
    fed.feed(5, 3)
    before = fed.frozen()
    with pytest.raises(NoSlotError):
        fed.cache.seq_cp(0, 1)  # 10 tokens; 4 free and 3 of its own
    assert fed.frozen() == before
    fed.call("seq_rm", 0, 7, -1)
    fed.call("seq_cp", 0, 1, -1, -1)
    fed.compare()
    assert fed.cache.streams[1].used == 12


def test_a_copy_over_cells_that_its_target_shares(fed):
    fed.call("seq_cp", 1, 3, -1, -1)
    fed.call("seq_cp", 0, 1, -1, -1)
    fed.compare()
    assert positions(fed, 3) == [0, 1, 2]


# -- keeping, removing, clearing ---------------------------------------------------------------


def test_keeping_one_sequence_cleans_all_streams(fed):
    """The reference cleans the stream of that sequence only."""
    fed.call("seq_cp", 0, 2, -1, -1)
    fed.call("seq_keep", 0)
    fed.compare()
    assert [part.used for part in fed.cache.streams] == [5, 0]
    fed.call("seq_keep", 3)
    assert fed.cache.used == 0


def test_removing_from_all_streams(fed):
    fed.call("seq_rm", -1, 2, -1)
    fed.compare()
    assert [fed.cache.seq_pos_max(s) for s in (0, 1)] == [1, 1]
    fed.call("seq_rm", -1, -1, -1)
    assert fed.cache.used == 0


@pytest.mark.parametrize("bad", [-1, 4, 64, 2**40, "0", None, 1.5])
def test_unknown_ids_are_refused(fed, bad):
    c, before = fed.cache, fed.frozen()
    calls = [
        lambda: c.seq_keep(bad),
        lambda: c.seq_cp(0, bad),
        lambda: c.seq_cp(bad, 0),
        lambda: c.seq_add(bad, 0, -1, 1),
        lambda: c.seq_div(bad, 0, -1, 2),
        lambda: c.seq_pos_min(bad),
        lambda: c.seq_pos_max(bad),
        lambda: c.stream(bad),
    ]
    if bad != -1:
        calls += [lambda: c.seq_rm(bad), lambda: c.refusal(bad)]
    for call in calls:
        with pytest.raises(SequenceError):
            call()
    with pytest.raises((SequenceError, ValueError)):
        c.prepare(Batch([1], seq_ids=bad))
    assert fed.frozen() == before


def test_a_refused_shift_leaves_later_batches_prepared(fed):
    """What was refused has changed nothing, so a prepared batch is not stale."""
    steps = fed.cache.prepare(Batch([1], seq_ids=0))
    for call in (
        lambda c: c.seq_add(0, 0, -1, 2**31 - 2),
        lambda c: c.seq_div(0, 0, -1, 0),
        lambda c: c.seq_cp(0, 1, 0, 2),
    ):
        with pytest.raises(PositionError):
            call(fed.cache)
    with steps[0]:
        pass
    assert fed.cache.seq_pos_max(0) == 5


# -- steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_done", [1, 2, 3, 5])
def test_a_whole_batch_goes_back_in_all_streams(fed, n_done):
    assert fed.run([[0], [1], [3], [2], [1], [0]], 2, "all back", n_done)
    assert [fed.cache.seq_pos_max(s) for s in range(4)] == [4, 2, -1, -1]
    assert fed.run([[0], [1]], 2)


def test_a_step_whose_computation_fails_is_undone_in_all_streams(fed):
    with pytest.raises(ZeroDivisionError), fed.cache.prepare(Batch([1, 2], seq_ids=[0, 1]))[0]:
        _ = 1 // 0
    fed.compare()


def test_a_pending_step_in_one_stream_holds_up_the_verbs_of_all(fed):
    step = fed.cache.prepare(Batch([1], seq_ids=0))[0].apply()
    for call in (
        lambda c: c.seq_rm(1),
        lambda c: c.seq_cp(1, 3),
        lambda c: c.seq_keep(1),
        lambda c: c.seq_add(1, 0, -1, 1),
        lambda c: c.update(),
        lambda c: c.prepare(Batch([1], seq_ids=1)),
    ):
        with pytest.raises(StepError):
            call(fed.cache)
    step.rollback()
    fed.compare()


def test_mapped_files_of_each_stream(tmp_path):
    config = CacheConfig(**SIZES, n_seq_max=3)
    with StreamsCache(config, 3, tmp_path / "streams") as cache:
        with cache.prepare(Batch([1, 2], seq_ids=[0, 2]))[0] as step:
            step.write(0, *np.ones((2, 2, 32), np.float32))
        cache.check()
    folders = {p.parent.name for p in tmp_path.rglob("*") if p.is_file()}
    assert {"stream0", "stream2"} <= folders
