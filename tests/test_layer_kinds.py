"""Layers that store K alone, or rows of other widths than their neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import ConfigError, ShapeError
from kvnumba.layers import KVLayers
from kvnumba.mapping import IS_LINUX
from kvnumba.pack import KIND_K, planes_of
from kvnumba.store.fingerprint import Fingerprint
from kvnumba.store.session import Session
from kvnumba.unified import UnifiedCache

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
    with pytest.raises(ConfigError, match="layer 0 stores K alone"):
        cache.attend(0, np.ones((1, 2, 8), np.float32), [0])
    assert cache.attend(1, np.ones((1, 1, 4), np.float32), [0]).shape == (1, 1, 4)
    cache.close()
