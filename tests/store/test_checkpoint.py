"""Checkpoints: there whole or not at all, and every byte that matters is checked."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from kvnumba.errors import DamagedError, DiskFullError, SessionNotFoundError, StateFormatError
from kvnumba.store import blocks, checkpoint
from kvnumba.store.checkpoint import (
    ALIGNMENT,
    Checkpoint,
    checkpoint_bytes,
    path_of,
    read_checkpoint,
    write_checkpoint,
)

META = {"config": {"n_ctx": 5}, "fingerprint": {"weights": "w"}, "session": "00ff"}
SECTIONS = [(blocks.CELLS, b"cells"), (blocks.USER, b""), (blocks.WORDS, bytes(100))]
POINT = Checkpoint(7, 41, META, SECTIONS)


def put(folder, data, generation=7):
    path_of(folder, generation).write_bytes(data)


def same(a, b):
    return (a.generation, a.seq, a.meta, a.sections) == (b.generation, b.seq, b.meta, b.sections)


def test_it_comes_back(tmp_path):
    n = write_checkpoint(tmp_path, POINT, sync=True)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_size) == ("base.7", n)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    got = read_checkpoint(tmp_path, 7)
    assert same(got, POINT)
    assert got.n_bytes == n


def test_sections_are_aligned():
    data = checkpoint_bytes(POINT)
    assert data.index(b"cells") % ALIGNMENT == 0


def test_every_flipped_bit_is_found_or_harmless(tmp_path):
    data = checkpoint_bytes(POINT)
    n_harmless = 0
    for i in range(len(data)):
        bad = bytearray(data)
        bad[i] ^= 1 << i % 8
        put(tmp_path, bad)
        try:
            assert same(read_checkpoint(tmp_path, 7), POINT), i
            n_harmless += 1
        except DamagedError:
            pass
    assert n_harmless < ALIGNMENT * len(SECTIONS), "only the padding"


def test_every_truncation_is_found(tmp_path):
    data = checkpoint_bytes(POINT)
    for n in range(len(data)):
        put(tmp_path, data[:n])
        with pytest.raises(DamagedError):
            read_checkpoint(tmp_path, 7)


def test_another_name_is_damage(tmp_path):
    put(tmp_path, checkpoint_bytes(POINT), generation=8)
    with pytest.raises(DamagedError, match="generation 7"):
        read_checkpoint(tmp_path, 8)


def test_a_missing_one_is_not_found(tmp_path):
    with pytest.raises(SessionNotFoundError):
        read_checkpoint(tmp_path, 7)


def test_a_newer_version_is_named_not_called_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    put(tmp_path, checkpoint_bytes(POINT))
    monkeypatch.undo()
    with pytest.raises(StateFormatError, match="version 2") as caught:
        read_checkpoint(tmp_path, 7)
    assert not isinstance(caught.value, DamagedError)


def test_unknown_sections_come_from_a_newer_release(tmp_path):
    put(tmp_path, checkpoint_bytes(Checkpoint(7, 41, META, [(50, b"x")])))
    with pytest.raises(StateFormatError, match="newer"):
        read_checkpoint(tmp_path, 7)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {**META, "config": 3},
        {**META, "fingerprint": []},
        {**META, "session": "xyz"},
        {**META, "session": 5},
        [1],
    ],
)
def test_a_description_that_says_nothing(tmp_path, meta):
    put(tmp_path, checkpoint_bytes(Checkpoint(7, 41, meta, SECTIONS)))
    with pytest.raises(DamagedError, match="cannot be read"):
        read_checkpoint(tmp_path, 7)


@pytest.mark.parametrize("call", ["pwrite", "rename", "open", "fdatasync"])
def test_a_failure_leaves_the_folder_as_it_was(tmp_path, monkeypatch, call):
    write_checkpoint(tmp_path, POINT, sync=False)

    def failing(*args, **kwargs):
        raise OSError(errno.ENOSPC, "full")

    newer = Checkpoint(8, 50, META, SECTIONS)
    with monkeypatch.context() as m:
        m.setattr(os, call, failing)
        with pytest.raises(DiskFullError):
            write_checkpoint(tmp_path, newer, sync=True)
    assert [p.name for p in tmp_path.iterdir()] == ["base.7"]
    write_checkpoint(tmp_path, newer, sync=True)
    assert same(read_checkpoint(tmp_path, 8), newer)


def test_a_leftover_of_a_killed_one_is_replaced(tmp_path):
    (tmp_path / "base.7.tmp").write_bytes(b"half")
    write_checkpoint(tmp_path, POINT, sync=False)
    assert [p.name for p in tmp_path.iterdir()] == ["base.7"]
