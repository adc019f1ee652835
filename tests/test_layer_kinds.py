"""Layers that store K alone, or rows of other widths than their neighbours."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.composite_config import HybridConfig, WindowConfig
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import ConfigError, ShapeError
from kvnumba.hybrid import HybridCache
from kvnumba.layers import KVLayers
from kvnumba.mapping import IS_LINUX
from kvnumba.pack import KIND_K, planes_of
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.store.fingerprint import Fingerprint
from kvnumba.store.session import Session
from kvnumba.streams import StreamsCache
from kvnumba.unified import UnifiedCache
from kvnumba.window import WindowCache

linux = pytest.mark.skipif(not IS_LINUX, reason="pack files need Linux")
WHERE = ["memory", pytest.param("files", marks=linux)]
DIMS_V = (0, 4, 0)


def config(**changes):
    values = {
        "n_layer": 3,
        "n_ctx": 40,
        "n_head_kv": (2, 1, 1),
        "head_dim": (8, 4, 6),
        "head_dim_v": DIMS_V,
        "rope": (RopeConfig(4), None, None),
        "type_k": "f32",
        "type_v": "f32",
    }
    return CacheConfig(**{**values, **changes})


@pytest.fixture(params=WHERE)
def path(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "rows"


def int32(*values):
    return np.array(values, np.int32)


def random_rows(c, n, seed=0):
    """K and V rows for every layer; V is None where the layer has none."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.standard_normal((n, c.n_embd_k(il)), np.float32),
            rng.standard_normal((n, c.n_embd_v(il)), np.float32) if c.has_v(il) else None,
        )
        for il in range(c.n_layer)
    ]


def write_all(layers, cells, rows):
    layers.reserve(int(cells.max()) + 1)
    for il, (k, v) in enumerate(rows):
        layers.write(il, cells, k, v)


def test_widths_of_layers_without_v():
    c = config()
    assert [c.has_v(il) for il in range(3)] == [False, True, False]
    assert [c.n_embd_v(il) for il in range(3)] == [0, 4, 0]
    assert c.bytes_per_cell_v == 4 * 4
    assert config(head_dim_v=0).bytes_per_cell_v == 0
    assert CacheConfig.from_dict(c.to_dict()) == c


@pytest.mark.parametrize("head_dim_v", [-1, (0, -1, 0), (0, 0), False])
def test_other_values_are_refused(head_dim_v):
    with pytest.raises(ConfigError, match="head_dim_v"):
        config(head_dim_v=head_dim_v)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("head_dim_v", [DIMS_V, 0])
def test_rows_without_v_are_written_copied_turned_and_cleared(path, v_trans, head_dim_v):
    if v_trans and path:
        return
    layers = KVLayers(config(v_trans=v_trans, head_dim_v=head_dim_v), path)
    c, cells = layers.config, int32(0, 39, 7)
    rows = random_rows(c, 3)
    write_all(layers, cells, rows)
    layers.copy_cells(cells, cells - int32(0, 1, 1))
    layers.shift_cells(cells, int32(1, 2, 3), int32(0, 5, 0))
    for il, (k, v) in enumerate(rows):
        for there in (cells, int32(0, 38, 6)):
            assert np.array_equal(layers.read_k(il, there), k)
            assert np.array_equal(layers.read_v(il, there), np.empty((3, 0)) if v is None else v)
        assert np.array_equal(layers.read_k(il, int32(1, 3)), k[[0, 2]])
        assert np.array_equal(layers.read_k(il, int32(2)), k[[1]]) == (il != 0)
        n = c.n_embd_v(il)
        assert layers.v[il].shape == ((n, 40) if v_trans else (40, n))
    assert layers.residency()[1] >= layers.size_bytes
    layers.clear()
    assert not any(k.any() for k in layers.k)
    layers.close()


def test_v_is_asked_for_where_there_is_one_and_refused_where_there_is_none(path):
    layers = KVLayers(config(), path)
    rows = random_rows(layers.config, 1)
    write_all(layers, int32(0), rows)
    layers.write(0, int32(0), rows[0][0], np.empty((1, 0), np.float32))
    with pytest.raises(ShapeError, match="layer 1 has V"):
        layers.write(1, int32(0), np.ones((1, 4), np.float32))
    with pytest.raises(ShapeError, match="v has shape"):
        layers.write(0, int32(0), np.ones((1, 16), np.float32), np.ones((1, 16), np.float32))
    for il, (k, _) in enumerate(rows):
        assert np.array_equal(layers.read_k(il, int32(0)), k)
    layers.close()


def test_a_layer_without_v_has_no_plane():
    assert [(p.kind, p.layer) for p in planes_of(config())] == [(0, 0), (0, 1), (1, 1), (0, 2)]
    assert all(p.kind == KIND_K for p in planes_of(config(head_dim_v=0)))
    many = planes_of(config(n_layer=2000, n_head_kv=1, head_dim=1, head_dim_v=0, rope=None))
    assert len(many) == 2000
    with pytest.raises(ConfigError, match="2400 planes"):
        planes_of(config(n_layer=1200, n_head_kv=1, head_dim=1, head_dim_v=1, rope=None))


def fill(cache, tokens, rows):
    for step in cache.prepare(tokens):
        step.apply()
        for il, (k, v) in enumerate(rows):
            step.write(il, k, v)
        step.commit()


@linux
def test_a_session_of_layers_without_v(tmp_path):
    c = config(head_dim_v=DIMS_V)
    fingerprint = Fingerprint.of_config(c)
    rows = random_rows(c, 3)
    with Session.create(tmp_path / "s", c, fingerprint) as session:
        fill(session.cache, [5, 6, 7], rows)
        session.commit()
        session.cache.seq_add(0, 1, -1, 2)
        session.commit()
        turned = session.cache.layers.read_k(0, session.cache.cells.members(0))
    with Session.open(tmp_path / "s", fingerprint) as session:
        cells = session.cache.cells.members(0)
        cells = cells[np.argsort(session.cache.cells.pos[cells])]
        assert session.cache.cells.pos[cells].tolist() == [0, 3, 4]
        for il, (k, v) in enumerate(rows):
            found = session.cache.layers.read_k(il, cells)
            assert np.array_equal(found, k) == (il != 0)
            if v is not None:
                assert np.array_equal(session.cache.layers.read_v(il, cells), v)
        assert np.array_equal(
            session.cache.layers.read_k(0, session.cache.cells.members(0)), turned
        )


def test_a_layer_without_v_has_nothing_to_attend_to():
    cache = UnifiedCache(config())
    fill(cache, [1], random_rows(cache.config, 1))
    with pytest.raises(ConfigError, match=r"layer 0 stores K alone.*v_in_k"):
        cache.attend(0, np.ones((1, 2, 8), np.float32), [0])
    assert cache.attend(1, np.ones((1, 1, 4), np.float32), [0]).shape == (1, 1, 4)
    cache.close()


# -- attention over latent rows (MLA): V is the first part of K, the rotated part its end ---------


def attention(q, k, v, q_pos, k_pos):
    """Plain causal attention, float64: q [n, n_head, dk], k [n_kv, n_head_kv, dk], v likewise."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.empty((*q.shape[:2], v.shape[2]))
    for t, head in np.ndindex(out.shape[:2]):
        h = head * k.shape[1] // q.shape[1]
        seen = k_pos <= q_pos[t]
        scores = k[seen, h] @ q[t, head] / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max())
        out[t, head] = weights / weights.sum() @ v[seen, h]
    return out


def latent(**changes):
    values = {
        "n_layer": 1,
        "n_ctx": 64,
        "n_head_kv": 1,
        "head_dim": 40,
        "head_dim_v": 0,
        "v_in_k": 32,
        "type_k": "f32",
        "rope": RopeConfig(8, first=32),
    }
    return CacheConfig(**{**values, **changes})


@pytest.mark.parametrize("n", [3, 30])  # decode and prefill
@pytest.mark.parametrize("kind", ["f32", "f16"])
@pytest.mark.parametrize(
    "changes", [{}, {"v_trans": True}, {"n_head_kv": 2}, {"head_dim": 33, "rope": None}]
)
def test_attention_over_layers_without_v(n, kind, changes):
    c = latent(type_k=kind, **changes)
    cache = UnifiedCache(c)
    rng = np.random.default_rng(1)
    k = rng.standard_normal((n, c.n_embd_k(0)), np.float32)
    if kind == "f16":
        k = k.astype(np.float16).astype(np.float32)
    (step,) = cache.prepare(range(n))
    step.apply().write(0, k)
    q = rng.standard_normal((n, 4, c.k_head_dim(0)), np.float32)
    heads, pos = k.reshape(n, c.n_kv_heads(0), -1), np.arange(n)
    want = attention(q, heads, heads[:, :, :32], pos, pos)
    np.testing.assert_allclose(step.attend(0, q), want, atol=1e-5)
    out = np.empty((n, 4, 32), np.float32)
    assert step.attend(0, q, out) is out
    np.testing.assert_allclose(out, want, atol=1e-5)
    with pytest.raises(ShapeError, match="out is"):
        step.attend(0, q, np.empty(q.shape, np.float32))
    cache.close()


def test_attention_without_v_of_several_sequences():
    cache = UnifiedCache(latent(n_seq_max=2))
    ids = [0, 1, 0, 1, 1]
    k, q = random_arrays((5, 40), (5, 2, 40))
    (step,) = cache.prepare(Batch(range(5), seq_ids=ids))
    step.apply().write(0, k)
    out = step.attend(0, q)
    for s in (0, 1):
        rows = np.flatnonzero(np.array(ids) == s)
        heads, pos = k[rows][:, None], np.arange(len(rows))
        want = attention(q[rows], heads, heads[:, :, :32], pos, pos)
        np.testing.assert_allclose(out[rows], want, atol=1e-5)
    cache.close()


def random_arrays(*shapes, seed=2):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("pairing", ["normal", "neox"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_shift_turns_the_rotated_part_wherever_it_lies(kind, pairing):
    first, n_rot = 5, 4
    rope = RopeConfig(n_rot, pairing, freq_base=50.0, first=first)
    c = latent(n_head_kv=2, head_dim=12, rope=rope, type_k=kind, v_in_k=4)
    layers = KVLayers(c)
    layers.reserve(4)
    (k,) = random_arrays((2, 24))
    layers.write(0, int32(0, 1), k)
    stored = layers.read_k(0, int32(0, 1))
    layers.shift_cells(int32(0, 1), int32(0, 3), int32(3, -2))
    found = layers.read_k(0, int32(0, 3)).reshape(2, 2, 12)
    heads = stored.reshape(2, 2, 12).astype(np.float64)
    want = heads.copy()
    for j, angle in enumerate(rope.theta()):
        a, b = (2 * j, 2 * j + 1) if pairing == "normal" else (j, j + 2)
        turn = angle * np.array([3, -2])[:, None]
        x, y = heads[:, :, first + a], heads[:, :, first + b]
        want[:, :, first + a] = x * np.cos(turn) - y * np.sin(turn)
        want[:, :, first + b] = x * np.sin(turn) + y * np.cos(turn)
    atol = {"f32": 1e-6, "f16": 2e-3, "bf16": 2e-2}[kind]
    np.testing.assert_allclose(found, want, atol=atol)
    fixed = [*range(first), *range(first + n_rot, 12)]
    assert np.array_equal(found[:, :, fixed], heads[:, :, fixed])
    layers.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"v_in_k": 41}, "v_in_k 41 is more than head_dim 40 of layer 0"),
        ({"v_in_k": -1}, "v_in_k"),
        ({"v_in_k": 1.0}, "v_in_k"),
        ({"rope": RopeConfig(8, first=33)}, "8 values from 33 on"),
    ],
)
def test_impossible_parts_of_a_row_are_named(changes, named):
    with pytest.raises(ConfigError, match=named):
        latent(**changes)
    assert latent(head_dim_v=4, v_in_k=41).out_head_dim(0) == 4, "not used, not asked about"


# -- layers that read the K and V of others -------------------------------------------------------

SHARING = {"n_layer": 2, "n_head_kv": 1, "head_dim": 4, "rope": None, "head_dim_v": 4}


def sharing(**changes):
    return config(**{**SHARING, "layer_map": (0, 1, -1, 1, 0, None), **changes})


def test_layers_of_the_model_read_what_the_first_of_them_writes():
    c = sharing()
    assert c.layer_map == (0, 1, -1, 1, 0, -1)
    assert c.n_model_layer == 6
    assert [c.storage_of(il) for il in (0, 1, 3, 4)] == [0, 1, 1, 0]
    assert CacheConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    cache = UnifiedCache(c)
    assert len(cache.layers.k) == 2
    (step,) = cache.prepare([1, 2])
    step.apply()
    k, v, q = random_arrays((2, 4), (2, 4), (2, 3, 4))
    step.write(0, k, v)
    step.write(1, v, k)
    for il, keys, values in ((0, k, v), (4, k, v), (1, v, k), (3, v, k)):
        want = attention(q, keys[:, None], values[:, None], np.arange(2), np.arange(2))
        np.testing.assert_allclose(step.attend(il, q), want, atol=1e-6)
        np.testing.assert_allclose(cache.attend(il, q, [0, 1]), want, atol=1e-6)
    for il, first in ((3, 1), (4, 0)):
        with pytest.raises(ConfigError, match=f"layer {il} only reads .* of layer {first}"):
            step.write(il, k, v)
    for il, named in ((2, "layer 2 has no K and V"), (5, "layer 5 has"), (6, r"outside \[0, 6\)")):
        for call in (lambda il=il: step.write(il, k, v), lambda il=il: step.attend(il, q)):
            with pytest.raises(ConfigError, match=named):
                call()
    assert np.array_equal(cache.layers.read_k(0, step.cells), k)
    assert np.array_equal(cache.layers.read_k(1, step.cells), v)
    cache.close()


def test_without_a_map_each_layer_has_its_own():
    c = config()
    assert c.n_model_layer == 3
    for il in (*range(3), np.int64(2)):
        assert c.storage_of(il) == c.storage_to_write(il) == il
    for il in (-1, 3, 1.0, True, None):
        with pytest.raises(ConfigError, match="layer"):
            c.storage_of(il)


@pytest.mark.parametrize(
    ("layer_map", "named"),
    [
        ((0, 2), "that of layer 1 is 2"),
        ((0, -2), "layer 1 is -2"),
        ((0, True), "layer 1 is True"),
        ((0, 1.0), "layer 1 is 1.0"),
        ((0, 0), "names 1 of 2 layers, 1 not"),
        ((), "names 0 of 2 layers"),
        (1, "layer_map must be a list"),
        ("01", "layer_map must be a list"),
    ],
)
def test_impossible_maps_are_named(layer_map, named):
    with pytest.raises(ConfigError, match=named):
        sharing(layer_map=layer_map)


def test_layers_of_a_window_pair_share_within_their_kind():
    base = sharing(n_layer=3, layer_map=(0, 1, 2, 1, 2, 0))
    c = WindowConfig(base, 8, (False, True, False, True, False, False), full_size=True)
    assert (c.base_part.n_layer, c.base_part.layer_map) == (2, (0, 1, 1, 0))
    assert (c.window_part.n_layer, c.window_part.layer_map) == (1, (0, 0))
    cache = WindowCache(c)
    (step,) = cache.prepare([1, 2])
    step.apply()
    q, *rows = random_arrays((2, 1, 4), (2, 4), (2, 4), (2, 4))
    for il, k in enumerate(rows):
        step.write(il, k, k)
    for il, first in ((3, 1), (4, 2), (5, 0)):
        assert np.array_equal(step.attend(il, q), step.attend(first, q))
        with pytest.raises(ConfigError, match=f"layer {il} is layer . of its part"):
            step.write(il, rows[0], rows[0])
    with pytest.raises(ConfigError, match="layer 5 read what a layer of the other kind"):
        WindowConfig(base, 8, (False, True, False, True, False, True))
    with pytest.raises(ConfigError, match="3 entries for 6 layers"):
        WindowConfig(base, 8, (False, True, False))
    cache.close()


def test_layers_share_in_streams_and_beside_recurrent_ones():
    c = sharing(n_seq_max=2, layer_map=(0, 1, 1))
    k, q = random_arrays((2, 4), (2, 1, 4))
    cache = StreamsCache(c, 2)
    (step,) = cache.prepare(Batch([1, 2], seq_ids=[0, 1]))
    step.apply()
    for il in (0, 1):
        step.write(il, k + il, k)
    assert np.array_equal(step.attend(2, q), step.attend(1, q))
    with pytest.raises(ConfigError, match="layer 2 only reads"):
        step.write(2, k, k)
    step.commit()
    cache.close()

    recurrent = RecurrentConfig(1, 4, 4, n_seq_max=2)
    cache = HybridCache(HybridConfig(c, recurrent, (False, True, False, False)))
    (step,) = cache.prepare([1, 2])
    step.apply()
    step.write(0, k, k)
    step.write(2, k + 1, k)
    assert np.array_equal(step.attend(3, q), step.attend(2, q))
    with pytest.raises(ConfigError, match="layer 3 is layer 2 of its part: layer 2 only reads"):
        step.write(3, k, k)
    cache.close()


# -- layers of different width --------------------------------------------------------------------


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("type_v", ["f32", "f16", "bf16"])
def test_layers_of_different_width_share_cells_but_nothing_else(path, v_trans, type_v):
    if v_trans and path:
        return
    c = config(
        n_head_kv=(2, 1, 3),
        head_dim=(8, 4, 6),
        head_dim_v=(4, 6, 10),
        v_trans=v_trans,
        type_v=type_v,
        n_seq_max=2,
        shared="copy",
        rope=(RopeConfig(4), None, RopeConfig(6, "neox")),
    )
    cache = UnifiedCache(c, path)
    rng = np.random.default_rng(3)
    rows = [
        (
            rng.standard_normal((12, c.n_embd_k(il)), np.float32),
            rng.integers(-8, 8, (12, c.n_embd_v(il))).astype(np.float32),  # exact in each type
        )
        for il in range(3)
    ]
    fill(cache, range(12), rows)
    cache.seq_rm(0, 2, 5)
    cache.seq_cp(0, 1)
    cache.seq_add(1, 5, -1, -3)  # sequence 1 gets copies of its own, turned
    cache.defrag()
    cache.update()
    cache.check()
    kept = [0, 1, *range(5, 12)]
    for s, pos in ((0, kept), (1, list(range(9)))):
        cells = cache.cells.members(s)
        cells = cells[np.argsort(cache.cells.pos[cells])]
        assert cache.cells.pos[cells].tolist() == pos
        for il, (k, v) in enumerate(rows):
            is_same = s == 0 or c.rope_of(il) is None
            assert np.array_equal(cache.layers.read_k(il, cells), k[kept]) == is_same
            assert np.array_equal(cache.layers.read_v(il, cells), v[kept])
    for il, (k, v) in enumerate(rows):
        q = rng.standard_normal((1, 6, c.k_head_dim(il)), np.float32)
        heads = (x[kept].reshape(9, c.n_kv_heads(il), -1) for x in (k, v))
        want = attention(q, *heads, [11], np.array(kept))
        np.testing.assert_allclose(cache.attend(il, q, [11]), want, atol=1e-5)
    cache.close()
