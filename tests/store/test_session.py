"""Sessions without crashes: what is kept, what is refused, what is read."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from session_makers import (
    LIFE,
    add,
    copy_session,
    history,
    live,
    make_config,
    make_fingerprint,
    make_session,
    picture,
)

from kvnumba import files, mapping
from kvnumba.batch import Batch
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import (
    ConfigError,
    DamagedError,
    DiskFullError,
    FingerprintError,
    InUseError,
    NoSlotError,
    SessionError,
    SessionLockedError,
    SessionNotFoundError,
    StepError,
)
from kvnumba.store.committed import Committed
from kvnumba.store.journal import Journal
from kvnumba.store.session import Session

pytestmark = pytest.mark.skipif(not mapping.IS_LINUX, reason="sessions need Linux")
ROOT = Path(__file__).parents[2]


def names(path):
    return sorted(p.name for p in path.iterdir())


def contents(path):
    """Every file with its bytes, packs without."""
    return {p.name: p.read_bytes() for p in path.iterdir() if p.suffix != ".kv"}


# -- keeping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "power"])
def test_it_opens_at_its_last_commit(tmp_path, durability):
    with make_session(tmp_path / "s", durability) as session:
        live(session)
        want = picture(session)
        add(session, [1, 2])
        session.user["late"] = b"x"
    with Session.open(tmp_path / "s", make_fingerprint(), durability=durability) as session:
        assert picture(session) == want
        session.cache.check()
        assert np.array_equal(session.tokens(0), want[0][0])
        add(session, [3])
        session.commit()
        want = picture(session)
    with Session.open(tmp_path / "s") as session:
        assert picture(session) == want


@pytest.mark.parametrize("close", [True, False])
def test_every_commit_can_be_the_last(tmp_path, close):
    pictures = history(tmp_path / "all")
    with make_session(tmp_path / "s") as session:
        pass
    seen = [pictures[0]]
    for part in LIFE:
        session = Session.open(tmp_path / "s", make_fingerprint())
        assert picture(session) == seen[-1]
        live(session, lambda s=session: seen.append(picture(s)), [part])
        if close:
            session.close()
        del session  # an object that is simply dropped lets go of the lock too
    assert seen == pictures


def test_a_resumed_session_goes_on_like_an_uninterrupted_one(tmp_path):
    with make_session(tmp_path / "a") as a, make_session(tmp_path / "b") as b:
        for session in (a, b):
            live(session, life=LIFE[:7])
        b.close()
        with Session.open(tmp_path / "b") as b:
            for session in (a, b):
                live(session, life=LIFE[7:])
            assert picture(a) == picture(b)
            assert np.array_equal(a.cache.cells.pos, b.cache.cells.pos)
            assert np.array_equal(a.cache.pinned, b.cache.pinned)


def test_ring_placement_goes_on_where_it_was(tmp_path):
    with make_session(tmp_path / "s", placement="ring", n_spare=5) as session:
        add(session, range(10))
        session.cache.seq_rm(0, 2, 4)
        add(session, [50])
        session.commit()
        start = session.cache.search_start
        assert start > 0
    with Session.open(tmp_path / "s") as session:
        assert session.cache.search_start == start


def test_a_pending_shift_that_has_no_room_is_kept(tmp_path):
    with make_session(tmp_path / "s", n_ctx=16, n_spare=2) as session:
        add(session, range(16))
        session.commit()
        want = session.cache.layers.read_k(0, np.arange(16, dtype=np.int32))
        session.cache.seq_rm(0, 0, 4)
        session.cache.seq_add(0, 4, -1, -4)
        session.commit()
        assert session.cache.has_shift
        assert np.array_equal(session.cache.layers.read_k(0, np.arange(16, dtype=np.int32)), want)
    with Session.open(tmp_path / "s") as session:
        assert session.cache.has_shift
        session.cache.check()
        assert session.tokens(0).tolist() == list(range(4, 16))
        with pytest.raises(NoSlotError):
            session.cache.update()


def test_committed_rows_stay_until_the_next_commit(tmp_path):
    with make_session(tmp_path / "s", n_ctx=16) as session:
        add(session, range(16))
        session.commit()
        k = [a.copy() for a in session.cache.layers.k]
        session.cache.seq_rm(0, 4, 8)
        session.cache.seq_add(0, 8, -1, -4)
        session.cache.update()
        add(session, range(50, 54))
        assert session.cache.cells.n_waiting
        for old, new in zip(k, session.cache.layers.k, strict=True):
            assert np.array_equal(old[:16], new[:16])
        session.commit()
        assert session.cache.cells.n_waiting == 0
        assert np.array_equal(session.cache.pinned, session.cache.cells.used)


def test_user_data_travels_with_the_commit(tmp_path):
    with make_session(tmp_path / "s") as session:
        session.user.update({"a": b"1", "empty": b"", "ünï": bytes(1000)})
        session.commit()
        session.user["a"] = b"2"
        del session.user["empty"]
        session.commit()
        session.user["a"] = b"3"
    with Session.open(tmp_path / "s") as session:
        assert session.user == {"a": b"2", "ünï": bytes(1000)}
        session.user["a"] = "text"
        before = contents(tmp_path / "s")
        with pytest.raises(ConfigError, match="bytes"):
            session.commit()
        assert contents(tmp_path / "s") == before


def test_a_commit_without_changes_writes_nothing(tmp_path):
    with make_session(tmp_path / "s") as session:
        add(session, [1])
        session.commit()
        before, n = contents(tmp_path / "s"), session.n_commits
        session.commit()
        assert (contents(tmp_path / "s"), session.n_commits) == (before, n)


def test_a_long_journal_becomes_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("kvnumba.store.log.MIN_JOURNAL", 4000)
    with make_session(tmp_path / "s") as session:
        generations = set()
        for n in range(60):
            session.user["n"] = b"%d" % n + bytes(300)
            session.commit()
            generations.add(session._writer.journal.generation)
            assert len([p for p in names(tmp_path / "s") if p.startswith("base")]) <= 2
        assert len(generations) > 3
    with Session.open(tmp_path / "s") as session:
        assert session.user["n"].startswith(b"59")


def test_many_records_become_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("kvnumba.store.log.MAX_RECORDS", 5)
    with make_session(tmp_path / "s") as session:
        for n in range(7):
            session.user["n"] = b"%d" % n
            session.commit()
        assert session._writer.journal.generation == 1


def test_two_generations_are_kept(tmp_path):
    with make_session(tmp_path / "s") as session:
        for n in range(4):
            session.user["n"] = b"%d" % n
            session.commit()
            session._writer.try_checkpoint()
    kept = [p for p in names(tmp_path / "s") if not p.endswith(".kv")]
    assert kept == ["base.3", "base.4", "journal.3", "journal.4", "lock", "reused"]


def test_an_interrupt_right_after_the_renaming_loses_nothing(tmp_path, monkeypatch):
    with make_session(tmp_path / "s") as session:
        add(session, [1])
        session.commit()
        real = os.rename

        def interrupted(*args):
            real(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as m:
            m.setattr(os, "rename", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session._writer.try_checkpoint()
        add(session, [2])
        session.commit()
        path = copy_session(tmp_path / "s", tmp_path / "killed")
    with Session.open(path) as session:
        assert session.tokens(0).tolist() == [1, 2]


def test_an_interrupted_commit_ends_the_commits(tmp_path, monkeypatch):
    """At any moment between the record and our copy of the state: no later commit is lost."""
    places = [
        (Journal, "append", False),
        (Journal, "append", True),
        (Committed, "apply", False),
        (Committed, "apply", True),
    ]
    for n, (owner, name, is_after) in enumerate(places):
        session = make_session(tmp_path / str(n))
        add(session, [1])
        session.commit()
        allowed = [picture(session)]
        add(session, [2])
        allowed.append(picture(session))
        real = getattr(owner, name)

        def interrupted(*args, real=real, is_after=is_after):
            if is_after:
                real(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as m:
            m.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.commit()
        session.cache.seq_rm(0)
        with pytest.raises(SessionError, match="interrupted; open the session again"):
            session.commit()
        session.close()
        with Session.open(tmp_path / str(n)) as session:
            assert picture(session) in allowed
            add(session, [3])
            session.commit()
            want = picture(session)
        with Session.open(tmp_path / str(n)) as session:
            assert picture(session) == want


def test_a_refused_commit_changes_nothing_and_may_be_repeated(tmp_path, monkeypatch):
    with make_session(tmp_path / "s") as session:
        add(session, range(10))
        session.commit()
        session.cache.seq_rm(0, 5, -1)
        add(session, range(20, 30))
        before, pinned = contents(tmp_path / "s"), session.cache.pinned.copy()
        want, n_free = picture(session), session.cache.n_free

        def full(*args):
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as m:
            m.setattr(os, "pwrite", full)
            with pytest.raises(DiskFullError):
                session.commit()
        after = contents(tmp_path / "s")
        assert {k: v.rstrip(b"\0") for k, v in after.items()} == {
            k: v.rstrip(b"\0") for k, v in before.items()
        }
        assert np.array_equal(session.cache.pinned, pinned)
        assert (picture(session), session.cache.n_free) == (want, n_free)
        session.commit()
    with Session.open(tmp_path / "s") as session:
        assert picture(session) == want


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_failed_sync_ends_the_commits(tmp_path, monkeypatch, durability):
    with make_session(tmp_path / "s", durability) as session:
        add(session, [1])
        session.commit()
        add(session, [2])

        def failing(fd):
            raise OSError(errno.EIO, "I/O error")

        with monkeypatch.context() as m:
            m.setattr(os, "fdatasync", failing)
            if durability == "process":
                session.commit()  # nothing is synced, so nothing fails
                return
            with pytest.raises(SessionError, match="I/O error"):
                session.commit()
        with pytest.raises(SessionError, match="open the session again"):
            session.commit()
        with pytest.raises(SessionError, match="open the session again"):
            session.commit()
    with Session.open(tmp_path / "s", durability=durability) as session:
        assert session.tokens(0).tolist() in ([1], [1, 2])
        add(session, [3])
        session.commit()


def test_freed_cells_wait_when_the_mark_cannot_be_written(tmp_path, monkeypatch):
    with make_session(tmp_path / "s", n_ctx=16) as session:
        add(session, range(16))
        session.commit()
        session.cache.seq_rm(0, 4, -1)
        real = session._writer._mark.write

        def failing(*args):
            raise SessionError("I/O error")

        with monkeypatch.context() as m:
            m.setattr(session._writer._mark, "write", failing)
            session.commit()
        assert session.cache.cells.n_waiting == 12
        assert session._writer._mark.write == real
        session.user["next"] = b""
        session.commit()
        assert session.cache.cells.n_waiting == 0


def test_n_ctx_may_grow(tmp_path):
    with make_session(tmp_path / "s", n_ctx=16) as session:
        add(session, range(16))
        session.commit()
        want = picture(session)
        with pytest.raises(NoSlotError):
            session.cache.prepare(Batch([99]))
    with pytest.raises(ConfigError, match="may grow"):
        Session.open(tmp_path / "s", n_ctx=15)
    for _ in range(2):
        with Session.open(tmp_path / "s", make_fingerprint(), n_ctx=40) as session:
            assert (session.config.n_ctx, session.config.n_spare) == (40, 40)
            assert picture(session) == want
    with Session.open(tmp_path / "s") as session:
        assert session.config.n_ctx == 40
        add(session, range(16, 40))
        session.commit()
        assert session.tokens(0).tolist() == list(range(40))


def test_several_packs(tmp_path):
    n = 65536 + 100
    config = CacheConfig(
        n_layer=1, n_ctx=n, n_head_kv=1, head_dim=4, n_batch=n, n_ubatch=n, type_k="f32"
    )
    rows = np.arange(4 * n, dtype=np.float32).reshape(n, 4) % 2048
    with Session.create(tmp_path / "s", config, make_fingerprint(config)) as session:
        for part in (slice(0, 65000), slice(65000, n)):
            for step in session.cache.prepare(Batch(np.arange(n, dtype=np.int32)[part])):
                with step:
                    step.write(0, rows[part], rows[part])
            session.commit()
        assert len([p for p in names(tmp_path / "s") if p.endswith(".kv")]) == 2
    with Session.open(tmp_path / "s") as session:
        cells = session.cache.cells.members(0)
        assert len(cells) == n
        assert np.array_equal(session.cache.layers.read_k(0, cells), rows)
        assert np.array_equal(session.cache.layers.read_v(0, cells), rows)


def test_only_sequences_that_hold_something_cost_anything(tmp_path):
    with make_session(tmp_path / "s", n_seq_max=60_000) as session:
        add(session, [1], 59_999)
        session.commit()
    size = sum(p.stat().st_size for p in (tmp_path / "s").glob("base.*"))
    assert size < 10_000
    with Session.open(tmp_path / "s") as session:
        assert session.tokens(59_999).tolist() == [1]


# -- files -----------------------------------------------------------------------------------------


def test_files_are_private(tmp_path):
    with make_session(tmp_path / "s") as session:
        live(session)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    for file in (tmp_path / "s").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_copied_folder_is_a_session(tmp_path):
    with make_session(tmp_path / "s") as session:
        live(session)
        want = picture(session)
        # also beside its writer: between commits the files are whole
        copy_session(tmp_path / "s", tmp_path / "live")
    copy_session(tmp_path / "s", tmp_path / "after")
    (tmp_path / "after/lock").unlink()
    for name in ("live", "after"):
        with Session.open(tmp_path / name, make_fingerprint()) as session:
            assert picture(session) == want


def test_create_takes_new_or_empty_folders_only(tmp_path):
    (tmp_path / "empty").mkdir()
    make_session(tmp_path / "empty").close()
    make_session(tmp_path / "deep/er/new").close()
    for path in ("empty", "deep/er/new"):
        before = contents(tmp_path / path)
        with pytest.raises(SessionError, match="holds a session already"):
            make_session(tmp_path / path)
        assert contents(tmp_path / path) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full").chmod(0o755)
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(SessionError, match="notes"):
        make_session(tmp_path / "full")
    assert names(tmp_path / "full") == ["notes.txt"]
    assert stat.S_IMODE((tmp_path / "full").stat().st_mode) == 0o755
    (tmp_path / "file").write_text("x")
    with pytest.raises(SessionError):
        make_session(tmp_path / "file")


@pytest.mark.parametrize("call", ["posix_fallocate", "ftruncate", "pwrite", "rename"])
def test_a_failed_creation_leaves_nothing(tmp_path, monkeypatch, call):
    def failing(*args, **kwargs):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as m:
        m.setattr(os, call, failing)
        with pytest.raises(DiskFullError):
            make_session(tmp_path / "s")
        assert names(tmp_path) == []
        (tmp_path / "s").mkdir()
        with pytest.raises(DiskFullError):
            make_session(tmp_path / "s")
    assert names(tmp_path / "s") == []
    with pytest.raises(SessionNotFoundError):
        Session.open(tmp_path / "s")
    assert names(tmp_path / "s") == []
    make_session(tmp_path / "s").close()


def test_leftovers_are_removed(tmp_path):
    with make_session(tmp_path / "s") as session:
        add(session, [1])
        session.commit()
        want = picture(session)
    good = names(tmp_path / "s")
    for name in ("base.2.tmp", "f" * 32 + ".kv", "journal.2"):
        (tmp_path / "s" / name).write_bytes(b"")
    foreign = ["mine.txt", "my.kv", "e" * 32 + ".kv", "base.3.tmp", "draft.tmp", "journal.07"]
    for name in foreign:
        (tmp_path / "s" / name).write_text("not ours")
    with Session.open(tmp_path / "s") as session:
        assert picture(session) == want
        assert names(tmp_path / "s") == sorted([*good, *foreign])


@pytest.mark.parametrize(
    "foreign",
    [
        {"mydata.kv": "", "draft.tmp": "", "myjournal.0": ""},
        {"draft.tmp": ""},
        {"journal.00": ""},
        {"F" * 32 + ".kv": ""},
        {"f" * 32 + ".kv": "somebody's notes"},
        {"base.0.tmp": "somebody's notes"},
        {"reused": "somebody's notes"},
        {"lock": "somebody's notes"},
    ],
)
def test_somebody_elses_files_stay(tmp_path, foreign):
    path = tmp_path / "s"
    path.mkdir()
    path.chmod(0o755)
    for name, text in {"lock": "", "journal.0": "", **foreign}.items():
        (path / name).write_text(text)
    before = contents(path), names(path)
    with pytest.raises(SessionError, match="name a new folder"):
        make_session(path)
    assert (contents(path), names(path)) == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


# -- refusals --------------------------------------------------------------------------------------


def test_a_missing_session(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("absent", "empty", "file"):
        for call in (Session.open, Session.inspect, Session.read_config):
            with pytest.raises(SessionNotFoundError) as caught:
                call(tmp_path / name)
            assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["empty", "file"]
    assert names(tmp_path / "empty") == []


@pytest.mark.parametrize(
    ("changes", "fields", "field"),
    [
        ({}, {"architecture": "mamba"}, "architecture"),
        ({}, {"weights": "other"}, "weights"),
        ({}, {"weights_kind": "whole"}, "weights_kind"),
        ({}, {"tokenizer": "other"}, "tokenizer"),
        ({}, {"adapters": ("lora",)}, "adapters"),
        ({"n_layer": 3, "rope": None}, {}, "n_layer"),
        ({"type_k": "bf16"}, {}, "type_k"),
        ({"type_v": "f32"}, {}, "type_v"),
        ({"n_head_kv": 4}, {}, "n_head_kv"),
        ({"head_dim": 16}, {}, "head_dim"),
        ({"head_dim_v": 4}, {}, "head_dim_v"),
        ({"v_trans": True}, {}, "v_trans"),
        ({"rope": None}, {}, "rope[0]"),
    ],
)
def test_another_fingerprint_is_refused_by_its_field(tmp_path, changes, fields, field):
    with make_session(tmp_path / "s") as session:
        add(session, [1, 2])
        session.commit()
        want = picture(session)
    before = contents(tmp_path / "s")
    with pytest.raises(FingerprintError, match="does not fit") as caught:
        Session.open(tmp_path / "s", make_fingerprint(make_config(**changes), **fields))
    assert caught.value.field == field
    assert contents(tmp_path / "s") == before
    with Session.open(tmp_path / "s", make_fingerprint()) as session:
        assert picture(session) == want


def test_options_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="durability"):
        make_session(tmp_path / "s", "forever")
    with pytest.raises(ConfigError, match="v_trans"):
        make_session(tmp_path / "s", v_trans=True)
    assert not (tmp_path / "s").exists()
    make_session(tmp_path / "s").close()
    with pytest.raises(ConfigError, match="durability"):
        Session.open(tmp_path / "s", durability="")


NO_PATHS = (None, "", b"s", 3, "a\0b", "\ud800")


@pytest.mark.parametrize("path", NO_PATHS)
def test_paths_that_are_none(path):
    for call in (make_session, Session.open, Session.inspect, Session.read_config):
        with pytest.raises(ConfigError, match="names no folder"):
            call(path)


def test_arguments_of_another_kind(tmp_path):
    config = make_config()
    for fingerprint in ("x", None, make_fingerprint(weights=b"x"), make_fingerprint(weights={1})):
        with pytest.raises(ConfigError, match="fingerprint"):
            Session.create(tmp_path / "s", config, fingerprint)
    bad = replace(make_fingerprint(), n_layer="2", rope=(None,))
    with pytest.raises(ConfigError, match="fingerprint"):
        Session.create(tmp_path / "s", config, bad)
    with pytest.raises(ConfigError, match="CacheConfig"):
        Session.create(tmp_path / "s", config.to_dict(), make_fingerprint())
    assert names(tmp_path) == []
    make_session(tmp_path / "s").close()
    before = contents(tmp_path / "s")
    for n_ctx in ("9", 99.0, True, [99]):
        with pytest.raises(ConfigError, match="n_ctx"):
            Session.open(tmp_path / "s", n_ctx=n_ctx)
    with pytest.raises(ConfigError, match="fingerprint"):
        Session.open(tmp_path / "s", "x")
    assert contents(tmp_path / "s") == before
    Session.open(tmp_path / "s", n_ctx=np.int64(50)).close()
    assert Session.read_config(tmp_path / "s").n_ctx == 50


def test_numpy_numbers_are_numbers(tmp_path):
    rope = RopeConfig(np.int64(8), freq_base=np.float32(500000), n_ctx_orig=np.int32(7))
    config = make_config(rope=(rope, None), n_seq_max=np.int64(6), v_trans=np.bool_(False))
    Session.create(tmp_path / "s", config, make_fingerprint(config)).close()
    plain = make_config(rope=(RopeConfig(8, freq_base=500000.0, n_ctx_orig=7), None))
    for same in (config, plain):
        with Session.open(tmp_path / "s", make_fingerprint(same)) as session:
            assert session.config == replace(plain, n_spare=plain.n_ctx, rope=session.config.rope)
            assert session.config.rope_of(0) == rope


@pytest.mark.parametrize(
    "user", [None, [], [("a", b"x")], {"a": "x"}, {1: b"x"}, {"\udc80": b"x"}, {b"a": b"x"}]
)
def test_user_data_of_another_kind(tmp_path, user):
    with make_session(tmp_path / "s") as session:
        session.user["kept"] = b"1"
        session.commit()
        before = contents(tmp_path / "s")
        session.user = user
        with pytest.raises(ConfigError, match=r"session\.user"):
            session.commit()
        assert contents(tmp_path / "s") == before
        session.user = {"kept": b"2"}
        session.commit()
    assert Session.inspect(tmp_path / "s").user == {"kept": b"2"}


def test_elsewhere_sessions_say_so_in_one_line(tmp_path, monkeypatch):
    make_session(tmp_path / "s").close()
    monkeypatch.setattr(sys, "platform", "darwin")
    for call in (lambda: make_session(tmp_path / "t"), lambda: Session.open(tmp_path / "s")):
        with pytest.raises(SessionError, match="need Linux") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["s"]


def test_pending_tokens_are_refused(tmp_path):
    with make_session(tmp_path / "s") as session:
        add(session, [1])
        session.commit()
        before = contents(tmp_path / "s")
        (step,) = session.cache.prepare(Batch([2]))
        step.apply()
        with pytest.raises(StepError, match="pending"):
            session.commit()
        assert contents(tmp_path / "s") == before
        step.rollback()
        session.commit()
        assert session.tokens(0).tolist() == [1]


def test_after_close_nothing_goes(tmp_path):
    session = make_session(tmp_path / "s")
    add(session, [1])
    session.commit()
    k = session.cache.layers.k[0]
    assert k[0].any()
    session.close()
    session.close()
    assert not session.is_open
    assert not k.any()
    with pytest.raises(SessionError, match="closed"):
        session.commit()
    assert "closed" in repr(session)
    rows = np.ones((1, 16), np.float32)
    for call in (
        lambda: session.cache.prepare(Batch([2])),
        lambda: session.cache.layers.write(0, np.zeros(1, np.int32), rows, rows),
        lambda: session.cache.layers.reserve(1),
        session.cache.layers.clear,
    ):
        with pytest.raises(SessionError, match="closed"):
            call()


# -- one writer ------------------------------------------------------------------------------------


def test_a_second_object_or_process_is_refused(tmp_path):
    path = tmp_path / "s"
    code = (
        "import sys\n"
        "from kvnumba.errors import SessionLockedError\n"
        "from kvnumba.store.session import Session\n"
        "try:\n    Session.open(sys.argv[1])\n"
        "except SessionLockedError as error:\n    print(error)\n"
    )

    def other():
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        args = [sys.executable, "-c", code, str(path)]
        return subprocess.run(args, env=env, check=True, capture_output=True, text=True).stdout

    with make_session(path) as session:
        add(session, [1])
        session.commit()
        want = picture(session)
        before = contents(path)
        with pytest.raises(SessionLockedError, match="close it there first"):
            Session.open(path)
        with pytest.raises(SessionLockedError):
            make_session(path)
        assert "being written" in other()
        assert contents(path) == before
        # reading is possible meanwhile
        info = Session.inspect(path)
        assert info.cells.tokens_of(0).tolist() == [1]
        assert (info.n_commits, info.config) == (1, session.config)
        assert Session.read_config(path) == session.config
        assert info.fingerprint == make_fingerprint()
        assert picture(session) == want
    assert other() == ""


def test_another_thread_is_refused(tmp_path):
    with make_session(tmp_path / "s") as session:
        add(session, [1])
        errors = []

        def commit():
            try:
                session.commit()
            except InUseError as error:
                errors.append(error)

        with session.cache.guard:
            thread = threading.Thread(target=commit)
            thread.start()
            thread.join()
        assert len(errors) == 1
        assert session.n_commits == 0
        session.commit()
        assert session.n_commits == 1


FORK = """
import os, sys
import numpy as np
from kvnumba.batch import Batch
from kvnumba.errors import InUseError
from kvnumba.store.session import Session

def refused(call):
    try:
        call()
    except InUseError:
        return True
    return False

session = Session.open(sys.argv[1])
cache, rows = session.cache, np.ones((1, 16), np.float32)
(step,) = cache.prepare(Batch([9]))
pid = os.fork()
if pid == 0:
    held = session.tokens(0).tolist()
    calls = [
        session.commit,
        lambda: cache.seq_rm(0),
        lambda: cache.prepare(Batch([5])),
        lambda: cache.layers.write(0, np.array([0], np.int32), rows, rows),
        step.apply,
        cache.clear,
    ]
    good = all([refused(call) for call in calls]) and held == [1, 2, 3]
    session.close()
    os._exit(7 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
with step:
    for il in range(2):
        step.write(il, rows, rows)
session.commit()

# A child that lives on does not hold the lock beyond its parent's close.
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(read, 1)
    os._exit(0)
session.close()
Session.open(sys.argv[1]).close()
os.write(write, b"x")
os.waitpid(pid, 0)
"""


def test_a_forked_child_may_not_write(tmp_path):
    with make_session(tmp_path / "s") as session:
        add(session, [1, 2, 3])
        session.commit()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path / "s")], env=env, check=True)
    with Session.open(tmp_path / "s") as session:
        assert session.tokens(0).tolist() == [1, 2, 3, 9]


# -- opening is cheap ------------------------------------------------------------------------------


def test_opening_a_large_session_reads_less_than_a_megabyte(tmp_path):
    n = 100_000
    config = CacheConfig(
        n_layer=4, n_ctx=n, n_head_kv=1, head_dim=64, n_batch=n, n_ubatch=n, type_k="f32"
    )
    rng = np.random.default_rng(0)
    with Session.create(tmp_path / "s", config, make_fingerprint(config)) as session:
        tokens = rng.integers(0, 100_000, n).astype(np.int32)
        rows = np.ones((n, 64), np.float32)
        for step in session.cache.prepare(Batch(tokens)):
            with step:
                for il in range(4):
                    step.write(il, rows, rows)
        session.commit()
        session.commit()
    packs = list((tmp_path / "s").glob("*.kv"))
    for pack in packs:
        with open(pack, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, io_before = files.n_bytes_read, bytes_read()
    with Session.open(tmp_path / "s", make_fingerprint(config)) as session:
        assert files.n_bytes_read - before < 1_000_000
        assert bytes_read() - io_before < 1_000_000
        resident, total = session.cache.layers.residency()
        assert total == n * 4 * 64 * 6
        assert resident < total / 10
        assert np.array_equal(session.tokens(0), tokens)
        assert (session.cache.layers.read_k(3, np.array([77_777], np.int32)) == 1).all()


def bytes_read():
    """Bytes this process has read by system calls."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_without_loss(tmp_path):
    with make_session(tmp_path / "s") as session:
        live(session)
        want = picture(session)
        newest = f"base.{session._writer.journal.generation}"
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    for cut in (0, 10, 300):
        with open(tmp_path / "t" / newest, "r+b") as file:
            file.truncate(cut)
        with Session.open(tmp_path / "t", make_fingerprint()) as session:
            assert picture(session) == want
            session.user["again"] = b"%d" % cut
            session.commit()
            want = picture(session)
            newest = f"base.{session._writer.journal.generation}"
    with Session.open(tmp_path / "t") as session:
        assert picture(session) == want


def test_lost_files_are_damage_not_absence(tmp_path):
    with make_session(tmp_path / "s") as session:
        live(session)
    losses = {"base": "*", "reused": "", ".kv": "*"}
    for n, (name, kind) in enumerate(losses.items()):
        path = copy_session(tmp_path / "s", tmp_path / str(n))
        for file in path.glob(f"*{name}*" if kind else name):
            file.unlink()
        left = names(path)
        with pytest.raises(DamagedError):
            Session.open(path)
        assert set(names(path)) - {"lock"} == set(left) - {"lock"}
        with pytest.raises((SessionError, DamagedError)):
            make_session(path)


def test_poisoned_rows_show(tmp_path):
    """The rows are really the file's: what is changed there is read."""
    with make_session(tmp_path / "s") as session:
        add(session, [1, 2, 3])
        session.commit()
    with Session.open(tmp_path / "s") as session:
        session.cache.layers.k[0][:3] = np.nan
    with Session.open(tmp_path / "s") as session:
        assert np.isnan(session.cache.layers.read_k(0, np.arange(3, dtype=np.int32))).all()
        q = np.ones((1, 2, 8), np.float32)
        assert np.isnan(session.cache.attend(0, q, [5])).all()
