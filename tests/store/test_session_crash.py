"""Kills, full disks and damage: a session opens at a commit that was made, whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from session_makers import (
    LIFE,
    add,
    copy_session,
    history,
    live,
    make_fingerprint,
    make_session,
    picture,
)

from kvnumba import mapping
from kvnumba.errors import DamagedError, StateFormatError
from kvnumba.store import recovery
from kvnumba.store.journal import read_records
from kvnumba.store.session import Session

pytestmark = pytest.mark.skipif(not mapping.IS_LINUX, reason="sessions need Linux")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def drive(scenario, folder, *before):
    """Run a scenario of crash_driver.py; return what it counted."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = [*before, sys.executable, str(HERE / "crash_driver.py"), scenario, str(folder)]
    done = subprocess.run(args, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture
def fast_folder():
    """A folder in memory where there is one: hundreds of sessions are made in it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["life", "power"])
def test_killed_at_every_operation(fast_folder, scenario):
    counts = drive(scenario, fast_folder)
    assert counts["n_kills"] > 150
    assert counts["n_commits"] > 20
    assert counts["n_not_yet"] < 30


def test_killed_at_random_times(fast_folder):
    assert drive("random", fast_folder)["n_killed"] > 20


def test_killed_while_opening(fast_folder):
    assert min(drive("open", fast_folder).values()) > 10


def test_reusing_committed_cells_would_be_noticed(fast_folder):
    assert drive("broken", fast_folder)["noticed"]


def test_readers_beside_a_writer(fast_folder):
    counts = drive("readers", fast_folder)
    assert min(counts.values()) > 20


# -- full disks ------------------------------------------------------------------------------------


def test_a_limit_on_files_is_a_full_disk(tmp_path):
    assert drive("file_limit", tmp_path)["n_refused"] == 4


def test_a_full_disk_loses_nothing(tmp_path):
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    try:
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small tmpfs needs root and unshare")
    counts = drive("full_disk", tmp_path, "unshare", "-m")
    assert counts["growth"] > 256
    assert counts["commit"] == 3


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """A session that ends with records in its journal, and its pictures."""
    folder = tmp_path_factory.mktemp("lived")
    pictures = history(folder / "closed", n_ctx=40)
    session = make_session(folder / "s", n_ctx=40)
    live(session, life=LIFE[:7])  # ends with a checkpoint
    live(session, life=LIFE[7:])
    assert picture(session) == pictures[-1]
    copy_session(folder / "s", folder / "torn")
    session.close()
    return folder / "torn", pictures


def names_by_age(path):
    """Newest checkpoint, its journal, the ones before."""
    bases = sorted(path.glob("base.*"), key=lambda p: int(p.suffix[1:]), reverse=True)
    return [name for p in bases for name in (p.name, f"journal{p.suffix}")]


def state_of(cells):
    return tuple(getattr(cells, n).tobytes() for n in ("pos", "shift", "token", "seq"))


def loads_as(path):
    """The metadata a folder loads as; None if it refuses."""
    try:
        loaded = recovery.load(path)
    except (DamagedError, StateFormatError):
        return None
    return state_of(loaded.committed.cells), tuple(sorted(loaded.committed.user.items()))


def states_of(path):
    """The metadata of every commit that can be read from a folder."""
    newest = names_by_age(path)[1]
    whole = (path / newest).read_bytes()
    data = whole.rstrip(b"\0")
    point = recovery.load(path).point
    out = []
    for end in [0, *(r.end for r in read_records(whole, point.generation, point.seq))]:
        (path / newest).write_bytes(data[:end])
        mark = (path / recovery.MARK).read_bytes()
        (path / recovery.MARK).write_bytes(recovery.mark_bytes(0))
        out.append(loads_as(path))
        (path / recovery.MARK).write_bytes(mark)
    (path / newest).write_bytes(whole)
    assert None not in out
    return out


@pytest.mark.parametrize("which", [0, 1, 2, 3, "mark"])
def test_every_flipped_bit_and_every_cut(lived, tmp_path, which):
    """Metadata is as of some commit, or refused; nothing else ever comes out, and no crash."""
    path = copy_session(lived[0], tmp_path / "s")
    name = recovery.MARK if which == "mark" else names_by_age(path)[which]
    allowed = [*states_of(path), None]
    good = (path / name).read_bytes()
    n = min(len(good), len(good.rstrip(b"\0")) + 16)
    seen = set()
    for i in range(n):
        bad = bytearray(good)
        bad[i] ^= 1 << i % 8
        (path / name).write_bytes(bad)
        seen.add(allowed.index(loads_as(path)))
        if i % 7 == 0:
            (path / name).write_bytes(good[:i])
            seen.add(allowed.index(loads_as(path)))
    if which == 0:
        assert seen == {len(allowed) - 2}, "the checkpoint before and two journals say the same"
    elif which == 1:
        assert len(seen) > 2
    elif which == "mark":
        assert seen == {len(allowed) - 2, len(allowed) - 1}
    else:
        assert seen == {len(allowed) - 2}, "not needed while the newest is good"


def test_a_cut_journal_never_gives_rows_of_another_time(lived, tmp_path):
    """Whole rows too: where freed cells were used again, the older commit is refused."""
    source, pictures = lived
    name = names_by_age(source)[1]
    data = (source / name).read_bytes()
    n_opened = n_refused = 0
    for n, end in enumerate(range(0, len(data.rstrip(b"\0")) + 16, 23)):
        path = copy_session(source, tmp_path / str(n))
        (path / name).write_bytes(data[:end])
        try:
            with Session.open(path, make_fingerprint()) as session:
                assert picture(session) in pictures
                n_opened += 1
        except DamagedError:
            n_refused += 1
        shutil.rmtree(path)
    assert n_opened > 5
    assert n_refused > 0


def test_without_the_mark_old_rows_would_be_wrong(tmp_path):
    """Why there is a mark: the record that freed cells is lost after they were used again."""
    with make_session(tmp_path / "a", n_ctx=16) as session:
        add(session, range(16))
        session.commit()
        old = picture(session)
        session._writer.try_checkpoint()
        journal = session._writer.journal.file.path
        session.cache.seq_rm(0, 8, -1)
        session.commit()
        add(session, range(100, 108))  # not committed, but its rows are in the file
        path = copy_session(tmp_path / "a", tmp_path / "b")
    (path / journal.name).write_bytes(b"")
    with pytest.raises(DamagedError, match="may have been replaced"):
        Session.open(path)
    (path / recovery.MARK).write_bytes(recovery.mark_bytes(0))
    with Session.open(path) as session:
        assert picture(session) != old


def test_a_torn_record_is_dropped_and_written_over(lived, tmp_path):
    path = copy_session(lived[0], tmp_path / "s")
    name = names_by_age(path)[1]
    data = (path / name).read_bytes()
    end = len(data.rstrip(b"\0"))
    torn = b"KVJ1" + os.urandom(300)
    (path / name).write_bytes(data[: end + 8 - end % 8] + torn)
    with Session.open(path) as session:
        assert picture(session) == lived[1][-1]
        session.user["next"] = b"1"
        session.commit()
    with Session.open(path) as session:
        assert session.user["next"] == b"1"


@pytest.mark.parametrize("at", ["head", "seq", "payload", "sum"])
def test_damage_before_whole_commits_is_refused_and_nothing_cut(lived, tmp_path, at):
    path = copy_session(lived[0], tmp_path / "s")
    name = names_by_age(path)[1]
    data = bytearray((path / name).read_bytes())
    point = recovery.load(path).point
    records = list(read_records(bytes(data), point.generation, point.seq))
    assert len(records) > 2
    start, end = records[0].end, records[1].end
    data[{"head": start, "seq": start + 24, "payload": start + 50, "sum": end - 1}[at]] ^= 1
    (path / name).write_bytes(data)
    for call in (Session.open, Session.inspect):
        with pytest.raises(DamagedError, match=f"{name}: commit {records[1].seq} is damaged"):
            call(path)
    assert (path / name).read_bytes() == data

    # The last one damaged is a torn end, and dropped.
    data = bytearray((lived[0] / name).read_bytes())
    data[records[-1].end - 1] ^= 1
    (path / name).write_bytes(data)
    (path / recovery.MARK).write_bytes(recovery.mark_bytes(0))
    assert Session.inspect(path).n_commits == records[-2].seq


def test_a_lost_end_of_the_journal_before_is_damage(lived, tmp_path):
    """With the newest checkpoint damaged, commits of its journal need the whole one before."""
    path = copy_session(lived[0], tmp_path / "s")
    base, _, _, before = names_by_age(path)[:4]
    os.truncate(path / base, 100)
    assert loads_as(path) is not None
    os.truncate(path / before, len((path / before).read_bytes().rstrip(b"\0")) // 2)
    with pytest.raises(DamagedError, match="is damaged, but the whole commit"):
        Session.open(path)


def test_a_reader_that_passed_a_record_before_it_came_reads_again(lived, tmp_path, monkeypatch):
    path = copy_session(lived[0], tmp_path / "s")
    want, real, seen = loads_as(path), recovery._read_file, []
    name = names_by_age(path)[1]

    def overtaken(file):
        data = real(file)
        if file.name == name:
            seen.append(file)
            if len(seen) == 1:
                data = data[:8] + bytes(40) + data[48:]
        return data

    monkeypatch.setattr(recovery, "_read_file", overtaken)
    assert loads_as(path) == want
    assert len(seen) == 2


def test_a_session_that_was_never_finished_may_be_made_again(tmp_path):
    path = tmp_path / "s"
    path.mkdir()
    for name in ("lock", "reused", "journal.0", "base.0.tmp", "0" * 32 + ".kv"):
        (path / name).write_bytes(b"")
    make_session(path).close()
    assert not (path / ("0" * 32 + ".kv")).exists()
    with Session.open(path) as session:
        assert not np.any(session.cache.cells.used)
