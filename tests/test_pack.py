"""The pack file: header, sparse planes, space that is reserved on all planes or on none."""

from __future__ import annotations

import errno
import os
import stat

import numpy as np
import pytest

from kvnumba import files
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, DamagedError, DiskFullError, StateFormatError
from kvnumba.mapping import IS_LINUX
from kvnumba.pack import HEADER_BYTES, SLOTS, Pack, pack_header, planes_of
from kvnumba.packs import MAX_STEP_BYTES, MIN_STEP, MappedRows

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="pack files need Linux")
OWNER = bytes(range(16))


def config(n_ctx=1000, **changes):
    values = {"n_layer": 2, "n_head_kv": 2, "head_dim": (8, 4), "type_k": "f32"}
    return CacheConfig(n_ctx=n_ctx, **{**values, **changes})


@pytest.fixture
def planes():
    return planes_of(config())


@pytest.fixture
def pack(tmp_path, planes):
    pack = Pack.create(tmp_path, OWNER, planes)
    yield pack
    pack.close()


def used_bytes(pack):
    return os.stat(pack.file.path).st_blocks * 512


def test_planes_follow_each_other_at_multiples_of_64_kib(planes):
    assert [(p.kind, p.layer, p.ggml_id, p.row_bytes) for p in planes] == [
        (0, 0, 0, 64),
        (1, 0, 1, 32),
        (0, 1, 0, 32),
        (1, 1, 1, 16),
    ]
    end = HEADER_BYTES
    for plane in planes:
        assert (plane.offset, plane.offset % 65536) == (end, 0)
        end += plane.row_bytes * SLOTS
    with pytest.raises(ConfigError, match="too many"):
        planes_of(config(n_layer=1025, head_dim=1))


def test_a_pack_is_sparse_private_and_opens_again(pack, tmp_path, planes):
    path = pack.file.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == HEADER_BYTES + SLOTS * sum(p.row_bytes for p in planes)
    assert used_bytes(pack) <= 2 * HEADER_BYTES
    again = Pack.open(tmp_path, pack.pack_id, planes)
    again.close()


def test_every_byte_of_the_header_counts(pack, tmp_path, planes):
    n = len(pack_header(pack.pack_id, OWNER, planes))
    good = pack.file.read(n)
    for i in range(n):
        bad = bytearray(good)
        bad[i] ^= 1 << i % 8
        pack.file.write(bad, 0)
        with pytest.raises(DamagedError):
            Pack.open(tmp_path, pack.pack_id, planes)
    pack.file.write(good, 0)
    Pack.open(tmp_path, pack.pack_id, planes).close()


def test_a_newer_version_is_named(pack, tmp_path, planes, monkeypatch):
    monkeypatch.setattr("kvnumba.pack.VERSION", 2)
    pack.file.write(pack_header(pack.pack_id, OWNER, planes), 0)
    monkeypatch.undo()
    with pytest.raises(StateFormatError, match="version 2"):
        Pack.open(tmp_path, pack.pack_id, planes)


def test_wrong_packs_are_refused(pack, tmp_path, planes):
    other = planes_of(config(head_dim=(8, 8)))
    with pytest.raises(DamagedError, match="another session or layout"):
        Pack.open(tmp_path, pack.pack_id, other)
    with pytest.raises(DamagedError, match="is missing"):
        Pack.open(tmp_path, OWNER, planes)
    pack.file.truncate(pack.file.size - 1)
    with pytest.raises(DamagedError, match="was cut"):
        Pack.open(tmp_path, pack.pack_id, planes)
    for n in (0, 7, 40, 80):
        pack.file.truncate(n)
        with pytest.raises(DamagedError):
            Pack.open(tmp_path, pack.pack_id, planes)


def test_a_failed_creation_leaves_nothing(tmp_path, planes, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", refuse_from(0))
    with pytest.raises(DiskFullError, match="no room"):
        Pack.create(tmp_path, OWNER, planes)
    assert list(tmp_path.iterdir()) == []


def refuse_from(n):
    """A posix_fallocate that gets its space and then fails, as ext4's does, from call `n` on."""
    real, calls = os.posix_fallocate, []

    def posix_fallocate(fd, offset, length):
        real(fd, offset, length)
        calls.append(offset)
        if len(calls) > n:
            raise OSError(errno.ENOSPC, "No space left on device")

    return posix_fallocate


@pytest.mark.parametrize("n_good", [0, 1, 3])
def test_space_comes_on_all_planes_or_on_none(pack, monkeypatch, n_good):
    pack.reserve(0, 250)
    pack.file.write(bytes(range(64)), pack.planes[0].offset + 249 * 64)
    before = used_bytes(pack)
    with monkeypatch.context() as m:
        m.setattr(os, "posix_fallocate", refuse_from(n_good))
        with pytest.raises(DiskFullError):
            pack.reserve(250, 20000)
    # The file system's own list of the file's pieces may have grown by a block.
    assert used_bytes(pack) <= before + HEADER_BYTES
    pack.reserve(250, 20000)
    assert used_bytes(pack) > before + 19000 * sum(p.row_bytes for p in pack.planes)
    assert pack.file.read(64, pack.planes[0].offset + 249 * 64) == bytes(range(64))


# -- several packs as one array -------------------------------------------------------------------


def test_growth_in_steps(tmp_path):
    rows = MappedRows(config(n_ctx=50_000), tmp_path, OWNER)
    rows.reserve(1)
    assert rows.n_reserved == MIN_STEP
    rows.reserve(MIN_STEP)
    assert rows.n_reserved == MIN_STEP
    rows.reserve(4000)
    rows.reserve(4001)
    assert rows.n_reserved == 5000
    rows.reserve(4, exactly=True)
    rows.reserve(49_999)
    rows.reserve(50_000)
    assert rows.n_reserved == 50_000
    rows.close()


def test_a_step_is_limited_in_bytes(tmp_path, monkeypatch):
    per_cell = 64 + 32 + 32 + 16
    assert MAX_STEP_BYTES == 64 << 20
    monkeypatch.setattr("kvnumba.packs.MAX_STEP_BYTES", 100 * per_cell + 1)
    rows = MappedRows(config(n_ctx=10_000), tmp_path, OWNER)
    for asked, got in ((10, 100), (101, 200), (5000, 5000), (5001, 5100)):
        rows.reserve(asked)
        assert rows.n_reserved == got
    rows.close()


def test_the_least_growth_is_tried_when_the_step_does_not_fit(tmp_path, monkeypatch):
    rows = MappedRows(config(n_ctx=1000), tmp_path, OWNER)
    real = Pack.reserve

    def small_only(self, first, last):
        if last - first > 10:
            raise DiskFullError("no room")
        real(self, first, last)

    monkeypatch.setattr(Pack, "reserve", small_only)
    rows.reserve(10)
    assert rows.n_reserved == 10
    with pytest.raises(DiskFullError):
        rows.reserve(100)
    assert rows.n_reserved == 10
    rows.close()


def test_two_packs_are_one_array(tmp_path):
    n = SLOTS + 500
    rows = MappedRows(config(n_ctx=n), tmp_path, OWNER)
    assert len(rows.packs) == 1
    rows.reserve(n)
    assert len(rows.packs) == 2
    for arrays in (rows.k, rows.v):
        for a in arrays:
            assert a.shape[0] == n
            a[SLOTS - 1], a[SLOTS] = 1, 2
    ids = [pack.pack_id for pack in rows.packs]
    rows.close()
    assert not rows.k[0][SLOTS].any()
    again = MappedRows(config(n_ctx=n), tmp_path, OWNER, ids)
    assert not again.k[1][SLOTS].any(), "what is not reserved is not mapped"
    again.reserve(n, exactly=True)
    for a in again.k + again.v:
        assert (a[SLOTS - 2 : SLOTS + 2, 0].astype(np.int64) != 0).tolist() == [0, 1, 1, 0]
        assert (a[SLOTS - 1] == 1).all()
        assert (a[SLOTS] == 2).all()
    again.close()


def test_one_mapping_a_plane_after_many_steps(tmp_path):
    rows = MappedRows(config(n_ctx=20_000), tmp_path, OWNER)
    for n in range(100, 20_000, 100):
        rows.reserve(n)
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if str(tmp_path) in line]
    assert len(lines) == 4
    rows.close()


def test_clear_gives_the_disk_space_back(tmp_path):
    rows = MappedRows(config(), tmp_path, OWNER)
    rows.reserve(1000)
    rows.k[0][:] = 3
    view = rows.k[0]
    resident, size = rows.residency()
    assert 0 < resident <= size == 1000 * (64 + 32 + 32 + 16)
    rows.clear()
    assert (rows.n_reserved, rows.residency()) == (0, (0, 0))
    assert not view.any()
    assert used_bytes(rows.packs[0]) <= 2 * HEADER_BYTES
    rows.reserve(10)
    assert not view[:10].any()
    view[5] = 4
    rows.close()


def test_operations_are_counted(tmp_path):
    seen = []
    files.hook = seen.append
    try:
        rows = MappedRows(config(), tmp_path, OWNER)
        rows.reserve(10)
        rows.sync()
        rows.close()
    finally:
        files.hook = None
    assert seen == ["create", "truncate", "allocate", "write", *["allocate"] * 4, "sync"]
