"""Masks, biases and indices over a cache, and that they say the same as attention in place."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.cells import Cells
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, PositionError, SequenceError, ShapeError
from kvnumba.masks import alibi_slopes, column_index, kq_mask, position_buckets, row_index
from kvnumba.unified import UnifiedCache

N_HEAD, N_HEAD_KV, DIM = 4, 2, 16
KINDS = ("standard", "chunked", "symmetric")
RULES = [{}, {"causal": False}] + [
    {"window": window, "window_kind": kind, "causal": causal}
    for window in (1, 5, 8)
    for kind in KINDS
    for causal in (True, False)
]


def make_cache(seed=0, **options):
    """A cache with holes, cells of two owners, and values in every row that is held."""
    options = {"type_k": "f32", "type_v": "f32"} | options
    cache = UnifiedCache(CacheConfig(1, 160, N_HEAD_KV, DIM, n_seq_max=4, **options))
    rng = np.random.default_rng(seed)
    for s, n in ((0, 40), (1, 30), (2, 25), (0, 20)):
        for step in cache.prepare(Batch(np.arange(n), seq_ids=s)):
            with step:
                write(step, rng)
    cache.seq_rm(0, 10, 17)
    cache.seq_cp(0, 3, 0, 30)
    cache.seq_rm(1, 20, -1)
    return cache, rng


def write(step, rng):
    n = step.batch.n_tokens
    step.write(0, *rng.standard_normal((2, n, N_HEAD_KV * DIM)).astype(np.float32))


def softmax_attention(cache, q, mask):
    """Attend over all rows ``[0, n_kv)`` in float64, `mask` added to the scores."""
    cells = np.arange(mask.shape[1], dtype=np.int32)
    shape = (len(cells), N_HEAD_KV, DIM)
    k = cache.layers.read_k(0, cells).reshape(shape).astype(np.float64)
    v = cache.layers.read_v(0, cells).reshape(shape).astype(np.float64)
    out = np.zeros((len(q), N_HEAD, DIM))
    for head in range(N_HEAD):
        h = head // (N_HEAD // N_HEAD_KV)
        scores = q[:, head].astype(np.float64) @ k[:, h].T / math.sqrt(DIM) + mask
        for t in np.flatnonzero(np.isfinite(mask).any(axis=1)):
            p = np.exp(scores[t] - scores[t].max())
            out[t, head] = p @ v[:, h] / p.sum()
    return out


@pytest.mark.parametrize("rule", RULES, ids=lambda r: "-".join(map(str, r.values())))
@pytest.mark.parametrize("n_tokens", [1, 5, 24])
def test_attention_with_a_mask_equals_attention_in_place(n_tokens, rule):
    cache, rng = make_cache(n_tokens)
    batch = Batch(np.arange(n_tokens), seq_ids=[t % 4 for t in range(n_tokens)])
    (step,) = cache.prepare(batch)
    with step:
        write(step, rng)
        n_kv = cache.cells.cell_max
        q = rng.standard_normal((n_tokens, N_HEAD, DIM)).astype(np.float32)
        mask = kq_mask(cache.cells, step.batch, n_kv, **rule)
        wanted = softmax_attention(cache, q, mask)
        np.testing.assert_allclose(step.attend(0, q, **rule), wanted, rtol=0, atol=4e-6)
    # from positions amid the sequence, where there is a later side
    pos, seq_ids = rng.integers(5, 25, n_tokens), rng.integers(0, 4, n_tokens)
    wanted = softmax_attention(cache, q, kq_mask(cache.cells, (pos, seq_ids), n_kv, **rule))
    got = cache.attend(0, q, pos, seq_ids, **rule)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-6)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("n_tokens", [2, 24])
def test_element_types_with_a_mask(n_tokens, kind, v_trans):
    cache, rng = make_cache(type_k=kind, type_v=kind, v_trans=v_trans)
    pos, seq_ids = rng.integers(0, 60, n_tokens), rng.integers(0, 4, n_tokens)
    q = rng.standard_normal((n_tokens, N_HEAD, DIM)).astype(np.float32)
    for rule in RULES:
        mask = kq_mask(cache.cells, (pos, seq_ids), cache.cells.cell_max, **rule)
        got = cache.attend(0, q, pos, seq_ids, **rule)
        np.testing.assert_allclose(got, softmax_attention(cache, q, mask), rtol=0, atol=4e-6)


def test_a_cache_with_a_window_attends_by_its_own_kind():
    for kind in KINDS:
        cache, rng = make_cache(window=12, window_kind=kind, placement="scatter")
        q = rng.standard_normal((3, N_HEAD, DIM)).astype(np.float32)
        pos = [44, 55, 59]
        rule = {"window": 12, "window_kind": kind}
        mask = kq_mask(cache.cells, (pos, 0), cache.cells.cell_max, **rule)
        got = cache.attend(0, q, pos, 0)
        np.testing.assert_allclose(got, softmax_attention(cache, q, mask), rtol=0, atol=4e-6)
        np.testing.assert_array_equal(got, cache.attend(0, q, pos, 0, **rule))


def test_the_three_dtypes_agree():
    cache, _ = make_cache()
    tokens, n_kv = ([3, 20, 59], [0, 1, 0]), cache.cells.n_cells
    seen = kq_mask(cache.cells, tokens, n_kv, dtype="bool")
    assert seen.dtype == np.bool_
    assert seen.any()
    assert not seen.all()
    for dtype, kind in (("f32", np.float32), ("f16", np.float16)):
        mask = kq_mask(cache.cells, tokens, n_kv, dtype=dtype)
        assert mask.dtype == kind
        np.testing.assert_array_equal(mask, np.where(seen, 0, -np.inf))
    members = set(cache.cells.members(0).tolist())
    assert set(np.flatnonzero(seen[2]).tolist()) == members


def test_only_the_first_sequence_counts():
    cache, _ = make_cache()
    both = kq_mask(cache.cells, Batch([1], [25], [[3, 1]]), 160, dtype="bool")
    np.testing.assert_array_equal(both, kq_mask(cache.cells, ([25], [3]), 160, dtype="bool"))
    assert (both != kq_mask(cache.cells, ([25], [1]), 160, dtype="bool")).any()


def test_large_masks_are_dealt_out_and_the_same():
    cells = Cells(4096, 2)
    cells.pos[:] = np.random.default_rng(0).permutation(4096)
    cells.seq[0, ::2] = cells.seq[1, 1::3] = ~np.uint64(0)
    cells.rebuild()
    pos, seq_ids = np.arange(100) * 40, np.arange(100) % 2
    whole = kq_mask(cells, (pos, seq_ids), 4096)
    for t in range(100):
        alone = kq_mask(cells, (pos[t : t + 1], seq_ids[t : t + 1]), 4096)
        np.testing.assert_array_equal(whole[t : t + 1], alone)
    seen = kq_mask(cells, (pos, 0), 4096, window=1000, dtype="bool")
    distance = pos[:, None] - cells.pos
    members = np.isin(np.arange(4096), cells.members(0))
    np.testing.assert_array_equal(seen, members & (distance >= 0) & (distance < 1000))


def test_out_is_filled_and_returned():
    cache, _ = make_cache()
    wanted = kq_mask(cache.cells, ([9], 0), 70)
    for dtype in (np.float32, np.float16):
        out = np.full((1, 70), 7, dtype)
        assert kq_mask(cache.cells, ([9], 0), 70, out=out) is out
        np.testing.assert_array_equal(out, wanted)
    bits = np.full((1, 70), 7, np.uint16)
    assert kq_mask(cache.cells, ([9], 0), 70, out=bits) is bits
    np.testing.assert_array_equal(bits.view(np.float16), wanted)


def image_cells():
    """A text token, an image of two rows and three columns at one position, a text token."""
    cells = Cells(64, 1)
    cells.pos[:8] = [0, 1, 1, 1, 1, 1, 1, 4]
    xy = np.zeros((2, 64), np.int32)
    xy[:, :8] = [0, 1, 2, 3, 1, 2, 3, 4], [0, 1, 1, 1, 2, 2, 2, 4]
    cells.seq[0, 0] = 0xFF
    cells.rebuild()
    return cells, xy


def test_an_image_is_seen_row_by_row():
    cells, xy = image_cells()
    sections = np.stack([cells.pos[:8], xy[1, :8], xy[0, :8]])
    seen = kq_mask(cells, (sections, 0), 8, cell_xy=xy, dtype="bool")
    np.testing.assert_array_equal(seen, np.tri(8, dtype=bool))
    batch = Batch(embeddings=np.zeros((8, 4), np.float32), pos=sections)
    again = kq_mask(cells, batch, 8, cell_xy=xy, dtype="bool")
    np.testing.assert_array_equal(again, seen)
    # one position a token: the whole image, and in either order
    flat = kq_mask(cells, (sections[0], 0), 8, dtype="bool")
    assert flat[1:7, 1:7].all()
    free = kq_mask(cells, (sections, 0), 8, cell_xy=xy, dtype="bool", causal=False)
    assert free.all()


def test_text_has_its_position_in_both_directions():
    cells, xy = image_cells()
    for p in range(5):
        text = kq_mask(cells, ([p], 0), 8, cell_xy=xy)
        same = kq_mask(cells, ([[p], [p], [p]], 0), 8, cell_xy=xy)
        np.testing.assert_array_equal(text, same)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_batch_is_seen_beyond_the_window(kind):
    cells = Cells(64, 2)
    cells.pos[:60] = np.tile(np.arange(30), 2)
    cells.seq[0, 0] = (1 << 30) - 1
    cells.seq[1, 0] = ((1 << 30) - 1) << 30
    cells.rebuild()
    pos, seq_ids = [20, 18, 29, 5, 10], [0, 0, 0, 1, 1]
    rule = {"causal": False, "window": 4, "window_kind": kind}
    plain = kq_mask(cells, (pos, seq_ids), 60, dtype="bool", **rule)
    whole = kq_mask(cells, (pos, seq_ids), 60, dtype="bool", whole_batch=True, **rule)
    for t, s in enumerate(seq_ids):
        least = 18 if s == 0 else 5
        for i in range(60):
            beyond = cells.pos[i] >= least and i // 30 == s
            assert whole[t, i] == (plain[t, i] or beyond)
    assert (whole != plain).any()


def test_distances():
    cache, _ = make_cache()
    tokens = ([12, 30], [0, 3])
    seen = kq_mask(cache.cells, tokens, 160, causal=False, dtype="bool")
    distances = kq_mask(cache.cells, tokens, 160, causal=False, alibi=True)
    far = -np.abs(np.array([[12], [30]]) - cache.cells.pos[:160])
    np.testing.assert_array_equal(distances, np.where(seen, far, -np.inf))
    assert (distances[seen] < -10).any()


def test_a_far_cell_is_not_hidden_by_a_short_float():
    cells = Cells(64, 1)
    cells.pos[:3], cells.seq[0, 0] = [0, 100_000, 200_000], 7
    cells.rebuild()
    mask = kq_mask(cells, ([200_000], 0), 4, alibi=True, dtype="f16")
    assert mask.tolist() == [[-65504, -65504, 0, -math.inf]]
    assert kq_mask(cells, ([200_000], 0), 2, alibi=True).tolist() == [[-200_000, -100_000]]


def test_slopes():
    np.testing.assert_array_equal(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    # 12 heads: those of 8, then every other one of 16
    sixteen = [2 ** (-8 * h / 16) for h in range(1, 17)]
    wanted = [2.0**-h for h in range(1, 9)] + sixteen[0::2][:4]
    np.testing.assert_allclose(alibi_slopes(12), wanted, rtol=1e-7)
    assert alibi_slopes(1).tolist() == [2**-8]
    assert alibi_slopes(3, 0).tolist() == [1, 1, 1]
    assert alibi_slopes(5, 16.0).dtype == np.float32


@pytest.mark.parametrize("n_buckets", [2, 3, 4, 16, 31, 32, 64, 100, 128, 255])
def test_buckets_by_whole_numbers(n_buckets):
    """Bucket e + k begins where ``(d / e) ** m >= (128 / e) ** k``, m the buckets beyond e."""
    cells = Cells(320, 1)
    cells.pos[:300] = np.arange(300)
    e = n_buckets // 2
    m = n_buckets - e
    got = position_buckets(cells, ([299], 0), 301, n_buckets)[0]
    for i in range(300):
        d = 299 - i
        k = sum(d**m * e**k >= 128**k * e**m for k in range(1, m)) if d >= e else 0
        assert got[i] == min(n_buckets - 1, e + k if d >= e else d), d
    assert got[300] == n_buckets - 1  # empty: at -1


def test_buckets_of_cells_ahead_and_empty():
    cells = Cells(64, 1)
    cells.pos[:3] = [0, 5, 9]
    out = np.full((2, 4), 7, np.int32)
    assert position_buckets(cells, ([5, 0], 0), 4, out=out) is out
    assert out.tolist() == [[5, 0, 0, 6], [0, 0, 0, 1]]


def test_indices():
    assert row_index([3, 0, 7], 8, [0, 2, 1]).tolist() == [3, 16, 15]
    assert row_index(np.array([3, 0], np.int32), 8).dtype == np.int64
    assert column_index([3], 8, 4, 2).tolist() == [[67, 75, 83, 91]]
    assert row_index([], 8).shape == (0,)
    assert column_index([], 8, 4).shape == (0, 4)
    cache, rng = make_cache(v_trans=True)
    (step,) = cache.prepare(Batch([1, 2, 3], seq_ids=0))
    with step:
        k, v = rng.standard_normal((2, 3, N_HEAD_KV * DIM)).astype(np.float32)
        step.write(0, k, v)
        rows = row_index(step.cells, cache.cells.n_cells)
        np.testing.assert_array_equal(cache.layers.k[0][rows], k)
        columns = column_index(step.cells, cache.cells.n_cells, v.shape[1])
        np.testing.assert_array_equal(cache.layers.v[0].reshape(-1)[columns], v)


BAD = {
    "cells": (ConfigError, "cells", {"cells": 5}),
    "batch": (ShapeError, "batch", {"batch": [1, 2]}),
    "no positions": (PositionError, "positions", {"batch": Batch([1])}),
    "ragged": (ShapeError, "pos", {"batch": ([[1], [1, 2], [1]], 0)}),
    "two rows": (ShapeError, "pos", {"batch": ([[1], [1]], 0)}),
    "scalar": (ShapeError, "pos", {"batch": (3, 0)}),
    "negative": (PositionError, "pos", {"batch": ([1, -1], 0)}),
    "ids": (ShapeError, "seq_ids", {"batch": ([1, 2], [0])}),
    "id": (SequenceError, "token 1", {"batch": ([1, 2], [0, 4])}),
    "n_kv": (ShapeError, "n_kv", {"n_kv": 161}),
    "n_kv < 0": (ShapeError, "n_kv", {"n_kv": -1}),
    "n_kv is True": (ShapeError, "n_kv", {"n_kv": True}),
    "window": (ConfigError, "window", {"window": -1}),
    "window is True": (ConfigError, "window", {"window": True}),
    "window 1.5": (ConfigError, "window", {"window": 1.5}),
    "kind": (ConfigError, "window_kind", {"window": 4, "window_kind": "round"}),
    "kind []": (ConfigError, "window_kind", {"window": 4, "window_kind": []}),
    "causal": (ConfigError, "causal", {"causal": 1}),
    "whole": (ConfigError, "whole_batch", {"whole_batch": True}),
    "whole 1": (ConfigError, "whole_batch", {"whole_batch": 1, "causal": False}),
    "alibi": (ConfigError, "alibi", {"alibi": 8.0}),
    "alibi bool": (ConfigError, "alibi", {"alibi": True, "dtype": "bool"}),
    "dtype": (ConfigError, "dtype", {"dtype": "f64"}),
    "dtype []": (ConfigError, "dtype", {"dtype": []}),
    "out": (ShapeError, "out", {"out": np.zeros((2, 9), np.float32)}),
    "out f64": (ConfigError, "out", {"out": np.zeros((2, 160))}),
    "out list": (ConfigError, "out", {"out": [1]}),
    "out dtype": (ShapeError, "out", {"out": np.zeros((2, 160), np.float32), "dtype": "f16"}),
    "out order": (ShapeError, "out", {"out": np.zeros((160, 2), np.float32).T}),
    "xy": (ShapeError, "cell_xy", {"cell_xy": np.zeros((2, 159), np.int32)}),
    "xy dtype": (ShapeError, "cell_xy", {"cell_xy": np.zeros((2, 160))}),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_refusals(case):
    error, words, changed = case
    cache, _ = make_cache()
    out = changed.get("out")
    before = np.array(out)
    given = {"cells": cache.cells, "batch": ([3, 4], 0), "n_kv": 160} | changed
    with pytest.raises(error, match=words):
        kq_mask(given.pop("cells"), given.pop("batch"), given.pop("n_kv"), **given)
    np.testing.assert_array_equal(np.array(out), before)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: alibi_slopes(0), ConfigError, "n_head"),
        (lambda c: alibi_slopes(8, -1), ConfigError, "max_bias"),
        (lambda c: alibi_slopes(8, math.nan), ConfigError, "max_bias"),
        (lambda c: position_buckets(c, ([1], 0), 8, 1), ConfigError, "n_buckets"),
        (lambda c: position_buckets(c, ([1], 0), 8, 256), ConfigError, "n_buckets"),
        (lambda c: position_buckets(c, ([1], 0), 8, max_distance=1), ConfigError, "max_distance"),
        (lambda c: position_buckets(c, ([1], 0), 65), ShapeError, "n_kv"),
        (lambda c: position_buckets(c, ([1], 0), 8, out=np.zeros(8, np.int32)), ShapeError, "out"),
        (lambda c: row_index([8], 8), ShapeError, "cell 8 of token 0"),
        (lambda c: row_index([0, -1], 8), ShapeError, "cell -1 of token 1"),
        (lambda c: row_index([0], 0), ShapeError, "size"),
        (lambda c: row_index([0], 8, -1), ShapeError, "stream -1"),
        (lambda c: row_index([0], 8, 2**40), ShapeError, "stream"),
        (lambda c: row_index([0], 8, [0, 0]), ShapeError, "stream"),
        (lambda c: row_index([[0]], 8), ShapeError, "cells"),
        (lambda c: column_index([0], 8, 0), ShapeError, "n_embd_v"),
    ],
)
def test_refusals_of_the_others(call, error, words):
    with pytest.raises(error, match=words):
        call(Cells(64, 1))


def test_attention_refuses_the_same_rules():
    cache, rng = make_cache()
    q = rng.standard_normal((1, N_HEAD, DIM)).astype(np.float32)
    for options in ({"window_kind": "round"}, {"causal": None}, {"window": -1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            cache.attend(0, q, [5], 0, **options)
