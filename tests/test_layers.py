"""K and V rows of all layers, in memory and in files: the same behaviour in both."""

from __future__ import annotations

import logging
import os
import stat

import numpy as np
import pytest

from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import ConfigError, InUseError, SessionError, ShapeError
from kvnumba.layers import KVLayers
from kvnumba.mapping import IS_LINUX
from kvnumba.unified import UnifiedCache

HEADS, DIMS, DIMS_V = (2, 1, 3), (8, 4, 6), (4, 4, 10)
ROPES = (RopeConfig(8), None, RopeConfig(4, "neox", freq_base=100.0))
WHERE = ["memory", pytest.param("files", marks=pytest.mark.skipif(not IS_LINUX, reason="Linux"))]


def config(**changes):
    values = {
        "n_layer": 3,
        "n_ctx": 40,
        "n_head_kv": HEADS,
        "head_dim": DIMS,
        "head_dim_v": DIMS_V,
        "rope": ROPES,
        "type_k": "f32",
        "type_v": "f32",
    }
    return CacheConfig(**{**values, **changes})


@pytest.fixture(params=WHERE)
def path(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "rows"


def int32(*values):
    return np.array(values, np.int32)


def random_rows(layers, n, seed=0):
    """K and V rows for every layer."""
    rng, c = np.random.default_rng(seed), layers.config
    return [
        (
            rng.standard_normal((n, c.n_embd_k(il)), np.float32),
            rng.standard_normal((n, c.n_embd_v(il)), np.float32),
        )
        for il in range(c.n_layer)
    ]


def write_all(layers, cells, rows):
    layers.reserve(int(cells.max()) + 1)
    for il, (k, v) in enumerate(rows):
        layers.write(il, cells, k, v)


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 0), ("f16", 1e-3), ("bf16", 8e-3)])
@pytest.mark.parametrize("v_trans", [False, True])
def test_rows_come_back(path, kind, tolerance, v_trans):
    c = config(type_k=kind, type_v="f32" if kind == "f16" else kind, v_trans=v_trans)
    if v_trans and path:
        with pytest.raises(ConfigError, match="v_trans"):
            KVLayers(c, path)
        return
    layers = KVLayers(c, path)
    cells = int32(0, 39, 7)
    rows = random_rows(layers, 3)
    write_all(layers, cells, rows)
    for il, (k, v) in enumerate(rows):
        np.testing.assert_allclose(layers.read_k(il, cells), k, rtol=tolerance)
        np.testing.assert_allclose(layers.read_v(il, cells), v, rtol=tolerance)
        assert layers.k[il].shape == (40, c.n_embd_k(il))
        assert layers.v[il].shape == ((c.n_embd_v(il), 40) if v_trans else (40, c.n_embd_v(il)))
        assert type(layers.k[il]) is type(layers.v[il]) is np.ndarray
        assert layers.k[il].flags.c_contiguous
    untouched = int32(*(i for i in range(39) if i not in cells))
    assert not layers.read_k(0, untouched).any()
    layers.close()


def test_layers_do_not_overlap(path):
    layers = KVLayers(config(), path)
    layers.reserve(40)
    for n, array in enumerate((*layers.k, *layers.v)):
        array[:] = n + 1
    for n, array in enumerate((*layers.k, *layers.v)):
        assert (array == n + 1).all()
    layers.close()


def test_strided_rows_are_written_too(path):
    layers = KVLayers(config(n_layer=1, n_head_kv=1, head_dim=4, head_dim_v=4, rope=None), path)
    layers.reserve(2)
    k = np.arange(16, dtype=np.float32).reshape(2, 8)[:, ::2]
    layers.write(0, int32(0, 1), k, k)
    assert np.array_equal(layers.read_k(0, int32(0, 1)), k)
    layers.close()


def bad_writes():
    k, v = np.zeros((2, 16), np.float32), np.zeros((2, 8), np.float32)
    cells = int32(0, 1)
    yield "layer", ConfigError, (3, cells, k, v)
    yield "negative layer", ConfigError, (-1, cells, k, v)
    yield "k dtype", ShapeError, (0, cells, k.astype(np.float64), v)
    yield "v dtype", ShapeError, (0, cells, k, v.astype(np.float16))
    yield "k width", ShapeError, (0, cells, k[:, :15], v)
    yield "v width", ShapeError, (0, cells, k, k)
    yield "k rows", ShapeError, (0, cells, k[:1], v)
    yield "v rows", ShapeError, (0, int32(0), k[:1], v)
    yield "k dimensions", ShapeError, (0, cells, k.reshape(2, 2, 8), v)
    yield "no array", ShapeError, (0, cells, k.tolist(), v)
    yield "cells dtype", ShapeError, (0, cells.astype(np.int64), k, v)
    yield "cells list", ShapeError, (0, [0, 1], k, v)
    yield "cell beyond", ShapeError, (0, int32(0, 40), k, v)
    yield "cell far beyond", ShapeError, (0, int32(0, 2**31 - 1), k, v)
    yield "cell below", ShapeError, (0, int32(0, -1), k, v)


@pytest.mark.parametrize("case", list(bad_writes()), ids=lambda case: case[0])
def test_refused_writes_change_nothing(path, case):
    layers = KVLayers(config(), path)
    write_all(layers, np.arange(40, dtype=np.int32), random_rows(layers, 40))
    before = [a.copy() for a in (*layers.k, *layers.v)]
    with pytest.raises(case[1]):
        layers.write(*case[2])
    for a, b in zip(before, (*layers.k, *layers.v), strict=True):
        assert np.array_equal(a, b)
    layers.close()


@pytest.mark.skipif(not IS_LINUX, reason="Linux")
def test_unreserved_cells_are_refused(tmp_path):
    layers = KVLayers(config(n_ctx=5000), tmp_path / "rows")
    k, v = random_rows(layers, 1)[0]
    with pytest.raises(ShapeError, match="reserve"):
        layers.write(0, int32(0), k, v)
    layers.reserve(1)
    layers.write(0, int32(0), k, v)
    with pytest.raises(ShapeError, match="reserve"):
        layers.copy_cells(int32(0), int32(4999))
    with pytest.raises(ShapeError):
        layers.reserve(5001)
    layers.close()


def test_copy_cells(path):
    layers = KVLayers(config(), path)
    rows = random_rows(layers, 3)
    write_all(layers, int32(1, 2, 3), rows)
    layers.reserve(40)
    layers.copy_cells(int32(1, 3), int32(30, 31))
    for il, (k, v) in enumerate(rows):
        assert np.array_equal(layers.read_k(il, int32(30, 31, 1)), k[[0, 2, 0]])
        assert np.array_equal(layers.read_v(il, int32(30, 31, 1)), v[[0, 2, 0]])
    with pytest.raises(ShapeError):
        layers.copy_cells(int32(1, 2), int32(3))
    layers.close()


def rotated(rows, by, il):
    """Turn K rows by some positions each, pair by pair, in float64."""
    rope, out = ROPES[il], rows.astype(np.float64)
    if rope is None:
        return out
    for h in range(HEADS[il]):
        for j, angle in enumerate(rope.theta()):
            pair = (2 * j, 2 * j + 1) if rope.pairing == "normal" else (j, j + rope.n_rot // 2)
            a, b = (h * DIMS[il] + d for d in pair)
            x, y = out[:, a].copy(), out[:, b].copy()
            out[:, a] = x * np.cos(angle * by) - y * np.sin(angle * by)
            out[:, b] = x * np.sin(angle * by) + y * np.cos(angle * by)
    return out


@pytest.mark.parametrize("moving", [False, True])
def test_shift_cells_turns_k_and_carries_v(path, moving):
    layers = KVLayers(config(), path)
    src, delta = int32(5, 6, 9), int32(3, 0, -7)
    dst = int32(25, 6, 26) if moving else src
    rows = random_rows(layers, 3)
    write_all(layers, src, rows)
    layers.reserve(40)
    layers.shift_cells(src, dst, delta)
    for il, (k, v) in enumerate(rows):
        np.testing.assert_allclose(layers.read_k(il, dst), rotated(k, delta, il), atol=1e-6)
        assert np.array_equal(layers.read_v(il, dst), v)
        if moving:
            assert np.array_equal(layers.read_k(il, src), k), "the old rows stay"
            assert np.array_equal(layers.read_v(il, src), v)
    for bad in (int32(1, 2), delta.astype(np.int64)):
        with pytest.raises(ShapeError):
            layers.shift_cells(src, dst, bad)
    layers.close()


def test_clear_and_residency(path):
    layers = KVLayers(config(n_ctx=4000), path)
    cells = np.arange(4000, dtype=np.int32)
    write_all(layers, cells, random_rows(layers, 4000))
    resident, total = layers.residency()
    assert 0.9 * total <= resident <= total
    assert total >= layers.size_bytes
    layers.clear()
    assert layers.residency()[0] == 0
    assert not any(a.any() for a in (*layers.k, *layers.v))
    write_all(layers, int32(3999), random_rows(layers, 1))
    layers.close()


def test_close_leaves_zeros(path):
    layers = KVLayers(config(), path)
    write_all(layers, int32(0), random_rows(layers, 1))
    k = layers.k[0]
    assert k[0].any()
    layers.close()
    assert not k.any()
    layers.close()


def test_sizes_and_the_log_line(path, caplog):
    caplog.set_level(logging.INFO, "kvnumba.layers")
    c = CacheConfig(n_layer=2, n_ctx=512, n_spare=512, n_head_kv=4, head_dim=64, type_v="f32")
    layers = KVLayers(c, path)
    assert layers.size_bytes == 1024 * 2 * 4 * 64 * (2 + 4)
    (record,) = caplog.records
    text = record.getMessage()
    assert "K (f16) 1.0 MiB, V (f32) 2.0 MiB, total 3.0 MiB" in text
    assert ("memory" if path is None else "files") in text
    layers.close()


@pytest.mark.skipif(not IS_LINUX, reason="Linux")
def test_the_folder_must_be_new_or_empty_and_is_private(tmp_path):
    (tmp_path / "empty").mkdir(0o755)
    for name in ("new", "empty"):
        layers = KVLayers(config(), tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
        (file,) = (tmp_path / name).iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        layers.close()
        with pytest.raises(SessionError, match="not empty"):
            KVLayers(config(), tmp_path / name)
        (tmp_path / name).chmod(0o755)
        with pytest.raises(SessionError, match="not empty"):
            UnifiedCache(config(), tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o755
    (tmp_path / "file").write_text("x")
    with pytest.raises(SessionError):
        KVLayers(config(), tmp_path / "file")
    for path in ("", "a\0b", "\ud800", b"rows", 7):
        with pytest.raises(ConfigError, match="names no folder"):
            KVLayers(config(), path)
    with pytest.raises(ConfigError, match="v_trans"):
        KVLayers(config(v_trans=True), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_elsewhere_files_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SessionError, match="need Linux") as caught:
        KVLayers(config(), tmp_path / "rows")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "rows").exists()


def changing_calls(layers):
    """Everything that would change rows, cell 0 and 1."""
    k, v = random_rows(layers, 1)[0]
    return [
        lambda: layers.write(0, int32(0), k, v),
        lambda: layers.copy_cells(int32(0), int32(1)),
        lambda: layers.shift_cells(int32(0), int32(0), int32(1)),
        lambda: layers.reserve(1),
        lambda: layers.reserve(4000),
        layers.clear,
    ]


def test_another_process_may_not_change_rows(path, monkeypatch):
    layers = KVLayers(config(n_ctx=5000), path)
    write_all(layers, int32(0), random_rows(layers, 1))
    with monkeypatch.context() as m:
        pid = os.getpid()
        m.setattr(os, "getpid", lambda: pid + 1)
        for call in changing_calls(layers):
            with pytest.raises(InUseError, match="forked child"):
                call()
        assert layers.read_k(0, int32(0)).any()
    layers.close()


@pytest.mark.skipif(not IS_LINUX, reason="Linux")
def test_a_forked_child_is_refused_and_not_killed(path):
    cache = UnifiedCache(config(), path)
    (step,) = cache.prepare([1])
    step.apply()
    k, v = random_rows(cache.layers, 1)[0]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            step.write(0, k, v)
        except InUseError:
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    step.write(0, k, v)
    assert np.array_equal(cache.layers.read_k(0, step.cells), k)
    cache.close()


def test_after_close_nothing_is_written(path):
    layers = KVLayers(config(n_ctx=5000), path)
    write_all(layers, int32(0, 1), random_rows(layers, 2))
    layers.close()
    for call in changing_calls(layers):
        with pytest.raises(SessionError, match="closed"):
            call()
    assert not layers.k[0].any()


def test_a_closed_cache_says_so(path):
    def applied():
        cache = UnifiedCache(config(n_seq_max=2), path and path / str(len(made)))
        made.append(cache)
        (step,) = cache.prepare([1])
        return cache, step.apply()

    made = []
    cache, step = applied()
    k, v = random_rows(cache.layers, 1)[0]
    cache.close()
    with pytest.raises(SessionError, match="closed"):
        step.write(0, k, v)
    step.rollback()
    with pytest.raises(SessionError, match="closed"):
        cache.prepare([1])

    cache, step = applied()
    for il, rows in enumerate(random_rows(cache.layers, 1)):
        step.write(il, *rows)
    step.commit()
    cache.close()
    cache.seq_add(0, 0, -1, 1)
    with pytest.raises(SessionError, match="closed"):
        cache.update()
    assert cache.cells.pos[0] == 1


def test_offsets_are_64_bit():
    layers = KVLayers(CacheConfig(n_layer=1, n_ctx=1 << 21, n_head_kv=8, head_dim=128))
    assert layers.k[0].nbytes == 1 << 32
    last = int32((1 << 21) - 1)
    k = np.full((1, 1024), 2, np.float32)
    layers.write(0, last, k, k)
    assert (layers.read_v(0, last) == 2).all()
    assert layers.residency()[0] < 1 << 20
    layers.close()
