"""The recorded position-level cases on the real cache: free placement, copies of shared cells."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import GOLDEN

from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import CacheFullError, NoSlotError, SequenceError, SharedCellError
from kvnumba.unified import UnifiedCache

CASES = {case["id"]: case for case in json.loads((GOLDEN / "position_cases.json").read_text())}
WIDTH = 4


def make(n_cells, shared="copy"):
    config = CacheConfig(
        n_layer=2,
        n_ctx=n_cells,
        n_head_kv=1,
        head_dim=WIDTH,
        n_seq_max=3,
        type_k="f32",
        type_v="f32",
        rope=RopeConfig(WIDTH),
        placement="scatter",
        shared=shared,
    )
    return UnifiedCache(config)


def row(seq_id, pos):
    """The row of the token that a sequence got at a position: its tag."""
    return np.full(WIDTH, 100 * (seq_id + 1) + pos, np.float32)


def run(cache, op):
    """Run one operation of a case; the original position is kept as the token id."""
    kind, *args = op
    if kind == "f":
        s, p0, p1 = args
        pos = list(range(p0, p1))
        cells = cache.find_slot(len(pos))
        cache.place(cells, pos, [s] * len(pos), pos)
        rows = np.array([row(s, p) for p in pos])
        for il in range(2):
            cache.layers.write(il, cells, rows, -rows)
        cache.commit()
    else:
        verb = {"r": "seq_rm", "c": "seq_cp", "k": "seq_keep", "a": "seq_add", "d": "seq_div"}
        getattr(cache, verb[kind])(*args)
    cache.check()


def played(name, shared="copy", n_ops=None):
    cache = make(CASES[name]["n"], shared)
    for op in CASES[name]["ops"][:n_ops]:
        run(cache, op)
    return cache


def held(cache, seq_id):
    """``[pos, original pos, pending shift]`` of a sequence, by original position."""
    c, cells = cache.cells, cache.cells.members(seq_id)
    rows = zip(c.pos[cells], c.token[cells], c.shift[cells], strict=True)
    return sorted(([int(v) for v in row] for row in rows), key=lambda r: r[1])


def snapshot(cache):
    """Everything that a refused call must leave as it is."""
    arrays = [*cache.cells.state, *cache.layers.k, *cache.layers.v]
    return [a.tobytes() for a in arrays]


def contents(cache):
    """Per used cell: position, shift, token, owners, K and V; in no order."""
    c = cache.cells
    members = [set(cache.cells.members(s).tolist()) for s in range(3)]
    out = []
    for i in np.flatnonzero(c.pos >= 0).tolist():
        owners = tuple(s for s in range(3) if i in members[s])
        rows = tuple(a[i].tobytes() for a in (*cache.layers.k, *cache.layers.v))
        out.append((int(c.pos[i]), int(c.shift[i]), int(c.token[i]), owners, rows))
    return sorted(out)


@pytest.mark.parametrize("name", CASES)
def test_the_end_is_as_recorded(name):
    case, cache = CASES[name], played(name)
    if "used" in case:
        assert cache.used == case["used"]
    for s, rows in {**case.get("want", {}), **case.get("must_hold", {})}.items():
        assert held(cache, int(s)) == rows
    for s, rows in case.get("forbidden", {}).items():
        assert held(cache, int(s)) != rows
    for n, mode, expected in case.get("slot", []):
        if expected is None:
            with pytest.raises(NoSlotError):
                cache.find_slot(n, contiguous=mode == "contig")
        else:
            assert cache.find_slot(n, contiguous=mode == "contig").tolist() == expected


def test_all_cases_are_there():
    assert len(CASES) == 11


def test_full_now_is_not_full_for_ever():
    cache = make(8)
    run(cache, ["f", 0, 0, 8])
    with pytest.raises(NoSlotError) as error:
        cache.find_slot(1)
    assert not isinstance(error.value, CacheFullError)
    with pytest.raises(CacheFullError):
        make(8).find_slot(9)


def test_two_shifts_are_one_rotation():
    cache = played("T04")
    assert cache.update()
    (k, v), cells = (cache.layers.k[1], cache.layers.v[1]), cache.cells.members(0)
    for i in cells:
        original = int(cache.cells.token[i])
        by = 2.0 if original >= 4 else 0.0
        theta = by * np.array([1.0, 10000 ** (-2 / WIDTH)])
        x = row(0, original).astype(np.float64)
        turned = np.empty(WIDTH)
        turned[0::2] = x[0::2] * np.cos(theta) - x[1::2] * np.sin(theta)
        turned[1::2] = x[0::2] * np.sin(theta) + x[1::2] * np.cos(theta)
        np.testing.assert_allclose(k[i], turned, rtol=1e-6)
        assert (v[i] == -row(0, original)).all()
    assert not cache.cells.shift.any()
    before = snapshot(cache)
    assert not cache.update()
    assert snapshot(cache) == before


def test_clear_after_a_shift_below_zero():
    cache = played("T07")
    freed = np.flatnonzero(cache.cells.pos[:6] < 0)
    assert len(freed) == 2
    assert not cache.cells.shift[freed].any()
    cache.clear()
    assert (cache.used, cache.pos_max(), cache.has_shift) == (0, -1, False)
    assert cache.find_slot(8).tolist() == list(range(8))


def test_all_sequences_and_bad_ids():
    cache = played("T08")
    before = snapshot(cache)
    for call in (
        lambda: cache.seq_rm(3, 0, 1),
        lambda: cache.seq_cp(0, 3, 0, 1),
        lambda: cache.seq_cp(-1, 0, 0, 1),
        lambda: cache.seq_keep(-1),
        lambda: cache.seq_add(3, 0, 1, 1),
        lambda: cache.seq_div(-1, 0, 1, 2),
    ):
        with pytest.raises(SequenceError):
            call()
    assert snapshot(cache) == before
    cache.seq_rm(-1, -1, -1)
    assert cache.used == 0


def test_a_fork_costs_no_cell():
    cache, counts = make(CASES["T09"]["n"]), []
    for op in CASES["T09"]["ops"]:
        run(cache, op)
        counts.append(cache.used)
    assert counts == [4, 4, 5, 6, 5, 6, 5]


def test_a_sharer_is_left_alone_by_a_copy():
    cache = played("T10")
    cache.update()
    assert held(cache, 1) == CASES["T10"]["must_hold"]["1"]
    assert held(cache, 0) == [[0, 2, 0], [1, 3, 0], [2, 4, 0], [3, 5, 0]]
    for i in cache.cells.members(1):
        assert (cache.layers.k[0][i] == row(0, int(cache.cells.token[i]))).all()
    for i in cache.cells.members(0):
        assert (cache.layers.v[1][i] == -row(0, int(cache.cells.token[i]))).all()


def test_a_sharer_is_left_alone_by_a_refusal():
    cache = played("T10", "refuse", n_ops=-1)
    before = snapshot(cache)
    with pytest.raises(SharedCellError):
        run(cache, CASES["T10"]["ops"][-1])
    assert snapshot(cache) == before


def test_a_copy_needs_room():
    cache = make(4)
    run(cache, ["f", 0, 0, 4])
    run(cache, ["c", 0, 1, -1, -1])
    before = snapshot(cache)
    with pytest.raises(NoSlotError):
        cache.seq_add(0, 0, -1, 5)
    assert snapshot(cache) == before


def test_defrag_moves_8_cells_in_5_runs():
    want = CASES["T14"]["defrag"]
    cache = played("T14")
    cache.seq_add(2, 3, -1, 4)
    src, dst, n_runs = cache.defrag_plan()
    assert (len(src), n_runs) == (want["moves"], 5)
    assert (sorted(src), sorted(dst)) == (want["sources"], want["holes"])
    before, a_cells = contents(cache), cache.cells.members(0).tolist()
    src_rows = {i: cache.layers.v[0][i].copy() for i in src.tolist()}
    cache.update()
    turned = contents(cache)
    places = [sorted(c[:1] + c[2:4] for c in cells) for cells in (before, turned)]
    assert places[0] == places[1]
    cache.defrag()
    assert cache.update()
    assert contents(cache) == turned
    assert np.flatnonzero(cache.cells.pos >= 0).tolist() == list(range(12))
    assert cache.cells.members(0).tolist() == a_cells
    for i, target in zip(src.tolist(), dst.tolist(), strict=True):
        assert (cache.layers.v[0][target] == src_rows[i]).all()
    cache.defrag()
    assert not cache.update()


def test_defrag_in_parts_ends_in_the_same_layout():
    whole, parts = played("T14"), played("T14")
    whole.defrag()
    whole.update()
    before, n_runs = contents(parts), []
    for _ in range(3):
        n_runs.append(parts.defrag_plan(3)[2])
        parts.defrag(3)
        parts.update()
        parts.check()
        assert contents(parts) == before
    assert n_runs == [3, 2, 0]
    assert (parts.cells.pos == whole.cells.pos).all()
    assert (parts.cells.seq == whole.cells.seq).all()


def test_padding_is_not_a_hole():
    cache = make(64)
    run(cache, ["f", 0, 0, 33])
    assert cache.fragmentation() == 0
    assert len(cache.defrag_plan()[0]) == 0
    run(cache, ["f", 0, 33, 64])
    run(cache, ["r", 0, 4, 60])
    assert cache.defrag_plan()[0].tolist() == [60, 61, 62, 63]
