"""Changes as runs: finding them, writing them down, making them elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnumba.batch import MAX_POS
from kvnumba.cells import Cells
from kvnumba.errors import ConfigError, DamagedError, StateFormatError
from kvnumba.kernels.bits import n_words
from kvnumba.store import blocks
from kvnumba.store.committed import Committed

N_CELLS, N_SEQ = 200, 70


def random_cells(rng, n_cells=N_CELLS, dense=False):
    """Cells in a state that `check` accepts: mostly runs, some holes and oddities."""
    cells = Cells(n_cells, N_SEQ)
    at = 0
    while at < n_cells:
        n = int(rng.integers(1, 90))
        part = slice(at, min(at + n, n_cells))
        size = part.stop - part.start
        kind = rng.integers(4) if not dense else 1
        if kind:
            first = int(rng.integers(0, 1000)) if kind < 3 else MAX_POS - size
            cells.pos[part] = np.arange(first, first + size)
            cells.token[part] = rng.integers(-1, 50000, size)
            cells.shift[part] = int(rng.integers(-3, 4)) if kind == 2 else 0
            for s in rng.choice(N_SEQ, int(rng.integers(1, 4)), replace=False):
                for i in range(part.start, part.stop):
                    cells.seq[s, i // 64] |= np.uint64(1) << np.uint64(i % 64)
        at += n
    cells.rebuild()
    cells.check()
    return cells


def same(a, b):
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("pos", "shift", "token", "seq", "used", "shared")
    )


@given(st.integers(0, 2**32))
def test_changes_lead_from_one_state_to_the_next(seed):
    rng = np.random.default_rng(seed)
    there = Committed(N_CELLS, N_SEQ)
    user, start, packs = {}, 0, [b"p" * 16]
    for step in range(4):
        cells = random_cells(rng)
        user = {f"name{i}": rng.bytes(3) for i in rng.integers(0, 5, step)}
        start = int(rng.integers(0, N_CELLS))
        packs = packs + [bytes([step]) * 16]
        changes = there.changes(cells, user, start, packs)
        there.apply(changes)
        there.settle()
        assert same(there.cells, cells)
        assert (there.user, there.search_start, there.packs) == (user, start, packs)
        assert there.changes(cells, user, start, packs) == []
        fresh = Committed(N_CELLS, N_SEQ)
        fresh.apply(there.everything())
        fresh.settle()
        assert same(fresh.cells, cells)
        assert (fresh.user, fresh.search_start, fresh.packs) == (user, start, packs)


def test_more_changes_than_the_first_buffer_holds():
    n_cells = 20_000
    cells, there = Cells(n_cells, N_SEQ), Committed(n_cells, N_SEQ)
    rng = np.random.default_rng(1)
    cells.pos[:n_cells] = rng.permutation(n_cells)
    cells.token[:n_cells] = rng.integers(0, 9, n_cells)
    for s in range(N_SEQ):
        cells.seq[s, : n_cells // 64] = rng.integers(1, 2**63, n_cells // 64)
    cells.seq[0, : n_cells // 64] = 2**64 - 1
    cells.pos[n_cells // 64 * 64 :], cells.token[n_cells // 64 * 64 :] = -1, -1
    cells.rebuild()
    there.apply(there.changes(cells, {}, 0, []))
    there.settle()
    assert same(there.cells, cells)


def test_what_is_written_grows_with_what_changed():
    cells, there = Cells(100_000, 4), Committed(100_000, 4)
    n = 90_000
    cells.pos[:n], cells.token[:n] = np.arange(n), 7
    cells.seq[0, : n // 64] = 2**64 - 1
    cells.pos[n // 64 * 64 :], cells.token[n // 64 * 64 :] = -1, -1
    cells.rebuild()

    def size(changes):
        return sum(len(data) for _, data in changes)

    first = there.changes(cells, {}, 0, [])
    assert size(first) < 4 * n + n // 8 + 100
    there.apply(first)
    i = n
    cells.pos[i], cells.token[i] = n, 7
    cells.seq[0, i // 64] |= np.uint64(1) << np.uint64(i % 64)
    cells.rebuild()
    one = there.changes(cells, {}, 0, [])
    assert size(one) <= 60
    there.apply(one)
    cells.clear()
    gone = there.changes(cells, {}, 0, [])
    assert size(gone) < n // 8 + 100, "a removed span is one run"
    there.apply(gone)
    there.settle()
    assert same(there.cells, cells)


def test_positions_do_not_run_over_the_end():
    cells, there = Cells(64, 1), Committed(64, 1)
    cells.pos[:3] = [MAX_POS - 1, MAX_POS, 0]
    cells.token[:3] = 5
    cells.seq[0, 0] = 7
    cells.rebuild()
    there.apply(there.changes(cells, {}, 0, []))
    there.settle()
    assert there.cells.pos[:3].tolist() == [MAX_POS - 1, MAX_POS, 0]


def test_shifts_may_differ_inside_a_run_of_positions():
    cells, there = Cells(64, 1), Committed(64, 1)
    cells.pos[:4], cells.token[:4], cells.shift[:4] = range(4), 1, [0, 0, 5, -5]
    cells.seq[0, 0] = 15
    cells.rebuild()
    there.apply(there.changes(cells, {}, 0, []))
    there.settle()
    assert same(there.cells, cells)


def test_growing_keeps_the_state():
    cells, small = random_cells(np.random.default_rng(3)), Committed(N_CELLS, N_SEQ)
    small.apply(small.changes(cells, {"a": b"b"}, 7, [b"x" * 16]))
    assert small.grown(N_CELLS) is small
    large = small.grown(1000)
    target = Cells(1000, N_SEQ)
    large.fill(target)
    target.check()
    assert np.array_equal(target.pos[:N_CELLS], cells.pos[:N_CELLS])
    assert np.array_equal(target.seq[:, : n_words(N_CELLS)], cells.seq)
    assert np.array_equal(target.pinned, target.used)
    assert (large.user, large.search_start, large.packs) == ({"a": b"b"}, 7, [b"x" * 16])


def runs(*rows):
    return np.array(rows, np.int32)


def cell_block(rows, tokens):
    return blocks.CELLS, blocks.pack_runs(runs(*rows), np.array(tokens, np.int32))


def word_block(rows, values):
    return blocks.WORDS, blocks.pack_runs(runs(*rows), np.array(values, np.uint64))


BAD = [
    cell_block([(-1, 1, 0, 0)], [1]),
    cell_block([(0, 0, 0, 0)], []),
    cell_block([(0, -1, 0, 0)], []),
    cell_block([(N_CELLS, 1, 0, 0)], [1]),
    cell_block([(N_CELLS - 1, 2, 0, 0)], [1, 2]),
    cell_block([(2**31 - 1, 2**31 - 1, -1, 0)], []),
    cell_block([(0, 1, -2, 0)], []),
    cell_block([(0, 1, -1, 5)], []),
    cell_block([(0, 2, MAX_POS, 0)], [1, 2]),
    cell_block([(0, 2, 0, 0)], [1]),
    cell_block([(0, 1, 0, 0)], [1, 2]),
    cell_block([(0, 1, -1, 0)], [1]),
    word_block([(-1, 0, 1)], [1]),
    word_block([(N_SEQ, 0, 1)], [1]),
    word_block([(0, -1, 1)], [1]),
    word_block([(0, n_words(N_CELLS), 1)], [1]),
    word_block([(0, 0, 0)], []),
    word_block([(0, 0, 2)], [1]),
    word_block([(0, 1, 2**31 - 1)], [1]),
    (blocks.CELLS, b""),
    (blocks.CELLS, bytes(7)),
    (blocks.CELLS, b"\1\0\0\0\0\0\0\0"),
    (blocks.WORDS, b"\xff" * 8),
    (blocks.USER, b"\0"),
    (blocks.USER, b"\1\0\0\0" + b"\1" + bytes(7) + b"a"),
    (blocks.USER, b"\1\0\0\0" + b"\xfe" + b"\xff" * 7 + b"a"),
    (blocks.USER, b"\1\0\0\0" + bytes(8) + b"\xff"),
    (blocks.PLACE, bytes(7)),
    (blocks.PLACE, blocks.pack_place(-1)),
    (blocks.PLACE, blocks.pack_place(N_CELLS + 1)),
    (blocks.PACKS, b""),
    (blocks.PACKS, bytes(15)),
    (blocks.PACKS, bytes(32)),
]


@pytest.mark.parametrize("block", BAD, ids=str)
def test_blocks_that_contradict_themselves(block):
    there = Committed(N_CELLS, N_SEQ)
    with pytest.raises(DamagedError):
        there.apply([block])
    assert (there.cells.pos == -1).all()


def test_a_state_that_contradicts_itself():
    for block in (cell_block([(3, 1, 0, 0)], [1]), word_block([(0, 0, 1)], [2])):
        there = Committed(N_CELLS, N_SEQ)
        there.apply([block])
        with pytest.raises(DamagedError, match="cell"):
            there.settle()
    there = Committed(N_CELLS, N_SEQ)
    there.apply([cell_block([(70, 1, 0, 0)], [1]), word_block([(0, 1, 1)], [1 << 6])])
    there.settle()
    there.packs = [b"x" * 16]
    there.check_packs(71)
    with pytest.raises(DamagedError, match="packs"):
        there.check_packs(70)


def test_unknown_kinds_come_from_a_newer_release():
    with pytest.raises(StateFormatError, match="newer"):
        blocks.check_kind(99, "x")


@pytest.mark.parametrize("user", [{"a": "text"}, {"a": bytearray(b"x")}, {3: b"x"}, {"a": None}])
def test_user_data_is_bytes_under_names(user):
    with pytest.raises(ConfigError, match="bytes"):
        Committed(8, 1).changes(Cells(8, 1), user, 0, [])
