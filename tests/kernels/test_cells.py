"""What the verbs' kernels return and carry that the cache above them does not show."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.kernels import cells as kernels

N_CELLS, N_SEQ, N_WORDS = 150, 5, 3
NO_END = 2**31 - 1
ONE = np.uint64(1)


def random_state(seed):
    """Cells of which a third is free; some belong to several sequences, some wait for a shift."""
    rng = np.random.default_rng(seed)
    members = rng.random((N_SEQ, N_WORDS * 64)) < 0.25
    members[:, N_CELLS:] = False
    n_owners = members.sum(axis=0)
    pos = np.where(n_owners > 0, rng.integers(0, 50, N_WORDS * 64), -1).astype(np.int32)
    shift = np.where(n_owners > 0, rng.integers(-9, 9, N_WORDS * 64), 0).astype(np.int32)
    token = np.where(n_owners > 0, rng.integers(0, 99, N_WORDS * 64), -1).astype(np.int32)
    bitmaps = [bitmap(m) for m in (*members, n_owners > 0, n_owners > 1)]
    return [pos, shift, token, np.array(bitmaps[:N_SEQ]), bitmaps[-2], bitmaps[-1]]


def bitmap(mask):
    octets = np.packbits(np.asarray(mask, bool), bitorder="little")
    return octets.view(np.uint64).copy()


def owners(state, i):
    return [s for s in range(N_SEQ) if state[3][s, i // 64] >> np.uint64(i % 64) & ONE]


def lists(state):
    """Position, shift, token and owners of each cell."""
    pos, shift, token = state[:3]
    return [(int(pos[i]), int(shift[i]), int(token[i]), owners(state, i)) for i in range(N_CELLS)]


def is_whole(state):
    return kernels.check_kernel(*state, N_CELLS)[0] == kernels.OK


def freed_between(before, after):
    """How many cells became free, and the lowest of them."""
    freed = [i for i in range(N_CELLS) if before[i][3] and not after[i][3]]
    assert all(after[i] == (-1, 0, -1, []) for i in freed)
    return len(freed), min(freed, default=N_WORDS * 64)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("p", [(0, NO_END), (10, 30), (20, 21), (7, 7), (60, 90)])
def test_removals_count_what_they_free(seed, p):
    for kernel, args in (
        (kernels.seq_rm_kernel, (2, *p)),
        (kernels.cells_rm_kernel, p),
        (kernels.seq_add_kernel, (2, *p, -15)),
    ):
        state = random_state(seed)
        before = lists(state)
        assert kernel(*state, *args) == freed_between(before, lists(state)), kernel
        assert is_whole(state)


@pytest.mark.parametrize("seed", range(5))
def test_keep_and_cp_count_cells(seed):
    state = random_state(seed)
    before = lists(state)
    n_cells = kernels.seq_cp_kernel(state[0], state[3], state[5], 0, 3, 10, 30)
    assert n_cells == sum(0 in ids and 10 <= pos < 30 for pos, _, _, ids in before)
    assert is_whole(state)
    before = lists(state)
    assert kernels.seq_keep_kernel(*state, 4) == freed_between(before, lists(state))[0]
    assert is_whole(state)


@pytest.mark.parametrize("seed", range(5))
def test_a_moved_cell_takes_all_its_fields_along(seed):
    state = random_state(seed)
    before = lists(state)
    src = [i for i in range(N_CELLS - 1, -1, -1) if before[i][3]][:9]
    dst = [i for i in range(N_CELLS) if not before[i][3]][:9]
    kernels.move_cells_kernel(*state, np.array(src, np.int32), np.array(dst, np.int32))
    after = lists(state)
    assert [after[i] for i in dst] == [before[i] for i in src]
    assert [after[i] for i in src] == [(-1, 0, -1, [])] * len(src)
    assert is_whole(state)


@pytest.mark.parametrize("seed", range(5))
def test_a_split_cell_gives_a_copy_to_one_owner(seed):
    state = random_state(seed)
    before = lists(state)
    src = np.empty(N_CELLS, np.int32)
    src = src[: kernels.shared_in_range_kernel(state[0], state[3], state[5], 1, 5, 45, src)]
    wanted = [
        i
        for i, (pos, _, _, ids) in enumerate(before)
        if 1 in ids and len(ids) > 1 and 5 <= pos < 45
    ]
    assert src.tolist() == wanted
    dst = np.array([i for i in range(N_CELLS) if not before[i][3]][: len(src)], np.int32)
    kernels.split_cells_kernel(*state, 1, src[: len(dst)], dst)
    after = lists(state)
    for i, target in zip(src.tolist(), dst.tolist(), strict=False):
        assert after[target] == (*before[i][:3], [1])
        assert after[i] == (*before[i][:3], [s for s in before[i][3] if s != 1])
    assert is_whole(state)


def test_rebuild_agrees_with_the_owners():
    state = random_state(1)
    used, shared = state[4].copy(), state[5].copy()
    state[4][:], state[5][:] = np.uint64(7), np.uint64(9)
    kernels.rebuild_kernel(state[3], state[4], state[5])
    assert (state[4] == used).all()
    assert (state[5] == shared).all()


def flip(array):
    return lambda state, i: state[array].__setitem__(i // 64, state[array][i // 64] ^ bit(i))


def put(array, value):
    return lambda state, i: state[array].__setitem__(i, value)


def bit(i):
    return ONE << np.uint64(i % 64)


POS, SHIFT, TOKEN, USED, SHARED = 0, 1, 2, 4, 5
BROKEN = [  # the code that names it, the damage, and how many owners the damaged cell has
    (kernels.BAD_USED, flip(USED), [1, 2]),
    (kernels.BAD_USED, flip(USED), [0]),
    (kernels.BAD_SHARED, flip(SHARED), [1]),
    (kernels.BAD_SHARED, flip(SHARED), [2, 3]),
    (kernels.BAD_POS_EMPTY, put(POS, 0), [0]),
    (kernels.BAD_POS_EMPTY, put(POS, -2), [0]),
    (kernels.BAD_POS_USED, put(POS, -1), [1, 2]),
    (kernels.BAD_SHIFT, put(SHIFT, -1), [0]),
    (kernels.BAD_TOKEN, put(TOKEN, 0), [0]),
]


@pytest.mark.parametrize(("code", "damage", "n_owners"), BROKEN)
@pytest.mark.parametrize("word", [0, 1, 2])
def test_check_finds_each_broken_invariant(code, damage, n_owners, word):
    state = random_state(2)
    assert kernels.check_kernel(*state, N_CELLS) == (kernels.OK, -1)
    cells = range(word * 64, min(word * 64 + 64, N_CELLS))
    cell = [i for i in cells if len(owners(state, i)) in n_owners][-1]
    damage(state, cell)
    assert kernels.check_kernel(*state, N_CELLS) == (code, cell)


def test_check_finds_cells_beyond_the_last():
    for i in (N_CELLS, N_WORDS * 64 - 1):
        state = random_state(3)
        state[3][0, i // 64] |= bit(i)
        state[4][i // 64] |= bit(i)
        state[0][i] = 5
        assert kernels.check_kernel(*state, N_CELLS) == (kernels.BAD_TAIL, i)
        assert kernels.check_kernel(*state, i + 1) == (kernels.OK, -1)


def test_range_masks_at_both_ends_of_the_positions():
    state = random_state(4)
    pos = state[0]
    held = [i for i in range(64) if pos[i] >= 0]
    pos[held[0]], pos[held[1]] = 0, 2**31 - 2
    low, high = kernels.pos_bounds_kernel(pos, state[4], 0, NO_END)
    assert (low, high) == (0, 2**31 - 2)
    assert kernels.pos_bounds_kernel(pos, state[4], 2**31 - 2, NO_END) == (2**31 - 2, 2**31 - 2)
    assert kernels.pos_bounds_kernel(pos, state[4], 0, 0) == (-1, -1)
    assert kernels.pos_bounds_kernel(pos, state[4], 51, 2**31 - 2) == (-1, -1)
