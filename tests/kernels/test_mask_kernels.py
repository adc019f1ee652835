"""Masks and row indices against the rules in plain Python, cell by cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import is_hidden

from kvnumba.kernels import masks
from kvnumba.kernels.row_index import column_index_kernel, row_index_kernel
from kvnumba.kernels.sight import WINDOW_IDS, sight_bounds

ITEMS = {
    "f32": np.array([0, -np.inf], np.float32),
    "f16": np.array([0, -np.inf], np.float16).view(np.uint16),
    "bool": np.array([1, 0], np.uint8),
}
N_SEQ = 3


@st.composite
def scenes(draw):
    """Cells with holes and shared cells, some tokens, and a rule."""
    n_cells = draw(st.sampled_from([1, 40, 63, 64, 65, 130, 200]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    owners = rng.random((N_SEQ, n_cells)) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    if draw(st.booleans()):
        owners[:, 64:128] = draw(st.sampled_from([False, True, owners[:, :1]]))
    if draw(st.booleans()):
        owners[:, 64:] = owners[:, np.arange(64, n_cells) % 64]  # the same word again
    last = draw(st.sampled_from([5, 60, 2**31 - 2]))
    pos = np.where(owners.any(axis=0), rng.integers(max(0, last - 60), last + 1, n_cells), -1)
    n_tokens = draw(st.integers(0, 6))
    return {
        "owners": owners,
        "pos": pos.astype(np.int32),
        "cell_xy": rng.integers(0, 4, (2, n_cells)).astype(np.int32),
        "first_ids": rng.integers(0, N_SEQ, n_tokens).astype(np.int32),
        "q_pos": rng.integers(max(0, last - 60), last + 1, n_tokens).astype(np.int32),
        "q_xy": rng.integers(0, 4, (n_tokens, 2)).astype(np.int32),
        "n_kv": draw(st.sampled_from([n_cells, n_cells, n_cells // 2])),
        "rule": {
            "window": draw(st.sampled_from([0, 1, 2, 7, 20, 64, 2**32])),
            "window_kind": draw(st.sampled_from(list(WINDOW_IDS))),
            "causal": draw(st.booleans()),
        },
        "has_xy": draw(st.booleans()),
        "is_alibi": draw(st.booleans()),
    }


def words(owners):
    """Pack booleans ``[n_seq, n_cells]`` to bitmaps of uint64 words."""
    out = np.zeros((len(owners), -(-owners.shape[1] // 64)), np.uint64)
    for s, i in zip(*np.nonzero(owners), strict=True):
        out[s, i // 64] |= np.uint64(1) << np.uint64(i % 64)
    return out


def expected(scene, t, i):
    """Return None where token `t` does not see cell `i`, else their distance."""
    p0, p1 = int(scene["pos"][i]), int(scene["q_pos"][t])
    if p0 < 0 or not scene["owners"][scene["first_ids"][t], i]:
        return None
    if is_hidden(p0, p1, **scene["rule"]):
        return None
    if scene["has_xy"] and p0 == p1:
        (x0, y0), (x1, y1) = scene["cell_xy"][:, i].tolist(), scene["q_xy"][t].tolist()
        if y0 > y1 or (y0 == y1 and x0 > x1):
            return None
    return abs(p0 - p1)


def item(kind, distance, is_alibi):
    if distance is None:
        return ITEMS[kind][1]
    if not is_alibi:
        return ITEMS[kind][0]
    if kind == "f32":
        return np.float32(-distance)
    return np.float16(-min(distance, 65504)).view(np.uint16)


def fill(kernel, scene, kind):
    low, high = np.empty((2, len(scene["q_pos"])), np.int32)
    rule = scene["rule"]
    kind_id = WINDOW_IDS[rule["window_kind"]]
    sight_bounds(scene["q_pos"], rule["window"], kind_id, rule["causal"], low, high)
    out = np.full((len(low), scene["n_kv"]), 7, ITEMS[kind].dtype)
    n_pad = -len(scene["pos"]) % 64
    kernel(
        words(scene["owners"]), np.pad(scene["pos"], (0, n_pad), constant_values=-1),
        scene["cell_xy"] if scene["has_xy"] else np.empty((2, 0), np.int32), scene["first_ids"],
        scene["q_pos"], scene["q_xy"], low, high, scene["is_alibi"], ITEMS[kind], out,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", ITEMS)
@given(scenes())
def test_masks_cell_by_cell(kind, scene):
    scene["is_alibi"] &= kind != "bool"
    got = fill(masks.fill_mask_kernel, scene, kind)
    for t in range(got.shape[0]):
        for i in range(got.shape[1]):
            wanted = item(kind, expected(scene, t, i), scene["is_alibi"])
            assert got[t, i] == wanted, (t, i)


@pytest.mark.parametrize("kind", ITEMS)
@given(scenes())
def test_dealt_out_to_threads_it_is_the_same(kind, scene):
    scene["is_alibi"] &= kind != "bool"
    one = fill(masks.fill_mask_kernel, scene, kind)
    np.testing.assert_array_equal(fill(masks.fill_mask_parallel_kernel, scene, kind), one)


@given(
    st.lists(st.integers(-1, 300) | st.integers(0, 2**31 - 2), max_size=20),
    st.lists(st.integers(0, 300) | st.integers(0, 2**31 - 2), max_size=4),
    st.integers(1, 150),
)
def test_position_buckets(cell_pos, q_pos, n_table):
    table = np.arange(1000, 1000 + n_table, dtype=np.int32)
    out = np.full((len(q_pos), len(cell_pos)), -7, np.int32)
    pos = np.array(cell_pos, np.int32)
    masks.position_buckets_kernel(pos, np.array(q_pos, np.int32), table, out)
    for t, q in enumerate(q_pos):
        distances = [min(max(0, q - p), n_table - 1) for p in cell_pos]
        assert out[t].tolist() == [1000 + d for d in distances]


@given(st.lists(st.tuples(st.integers(0, 49), st.integers(0, 3)), max_size=9), st.integers(1, 5))
def test_indices_are_where_a_tensor_has_them(places, n):
    size, n_stream = 50, 4
    cells, streams = (np.array([p[j] for p in places], np.int32) for j in (0, 1))
    rows = np.full(len(places), -7, np.int64)
    row_index_kernel(cells, streams, size, rows)
    columns = np.full((len(places), n), -7, np.int64)
    column_index_kernel(cells, streams, size, columns)
    numbers = np.arange(n_stream * n * size).reshape(n_stream, n, size)
    for t, (cell, stream) in enumerate(places):
        assert rows[t] == np.ravel_multi_index((stream, cell), (n_stream, size))
        assert columns[t].tolist() == numbers[stream, :, cell].tolist()


def test_indices_beyond_32_bits():
    cells, streams = np.array([5], np.int32), np.array([3], np.int32)
    out = np.empty((1, 4), np.int64)
    column_index_kernel(cells, streams, 2**31 - 1, out)
    assert out[0].tolist() == [3 * (2**31 - 1) * 4 + j * (2**31 - 1) + 5 for j in range(4)]
