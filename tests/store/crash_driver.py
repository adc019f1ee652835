"""Run by test_session_crash.py in a process of its own: it forks, and its children are killed.

``python crash_driver.py SCENARIO FOLDER``. Prints one line of JSON: what was counted. A fork costs
milliseconds, so every single operation can be the last one. Nothing here may start numba's
threads, which do not survive a fork.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from session_makers import LIFE, add, history, live, make_fingerprint, make_session, picture

from kvnumba import files, layers
from kvnumba.errors import DiskFullError, KVCacheError, SessionNotFoundError
from kvnumba.store.session import Session

PASSED = 99


class Steps:
    """Counts file operations and kernels that store rows; kills the process at one of them."""

    def __init__(self, kill_at=None):
        self.n, self.kill_at, self.names = 0, kill_at, []

    def __call__(self, name):
        self.n += 1
        self.names.append(name)
        if self.n == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self):
        """Count from now on."""
        files.hook = self
        for module, name in (
            (layers.rows, "write_rows"),
            (layers.rows, "copy_rows"),
            (layers, "shift_rows"),
        ):
            setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name, real):
        def call(*args):
            self(name)
            real(*args)

        return call


def in_child(work):
    """Run `work` in a forked child; return its wait status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        work()
        os._exit(PASSED)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def killed_at_each(path, work, judge, prepare=lambda: None):
    """Kill `work` at its first operation, at its second, and so on; judge what is left each time.

    Returns how many kills there were.
    """
    n = 0
    while True:
        n += 1
        prepare()
        status = in_child(lambda n=n: (Steps(n).watch(), work()))
        if os.waitstatus_to_exitcode(status) == PASSED:
            return n - 1
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, n
        judge(n)


class Acks:
    """How many commits have returned, told by a child that dies."""

    def __init__(self, path):
        self.path = path
        path.write_bytes(b"")

    def add(self):
        with open(self.path, "ab", buffering=0) as file:
            file.write(b".")

    @property
    def n(self):
        return self.path.stat().st_size


def open_and_judge(path, pictures, n_acked, goes_on=True):
    """The session opens at the last commit that returned, or at the one in work."""
    with Session.open(path, make_fingerprint()) as session:
        session.cache.check()
        got = picture(session)
        allowed = pictures[n_acked : n_acked + 2]
        assert got in allowed, f"after {n_acked} commits: {got['user']}, {got[0][:3]}"
    if goes_on:
        with Session.open(path) as session:
            add(session, [999])
            session.commit()
            want = picture(session)
        with Session.open(path) as session:
            assert picture(session) == want
    names = [p.name for p in path.iterdir()]
    assert not [n for n in names if n.endswith(".tmp")], names
    assert len([n for n in names if n.startswith("base.")]) <= 2, names
    return got == allowed[-1]


def scenario_life(folder, durability="process"):
    """Kill at every operation of a whole life."""
    path, pictures = folder / "s", history(folder / "plain", n_ctx=40)
    acks = Acks(folder / "acks")

    def prepare():
        shutil.rmtree(path, ignore_errors=True)
        acks.path.write_bytes(b"")

    def work():
        session = make_session(path, durability, n_ctx=40)
        acks.add()  # the empty state counts as picture 0
        live(session, acks.add)
        session.close()

    n_not_yet = [0]

    def judge(n):
        if acks.n == 0:
            try:
                open_and_judge(path, pictures, 0)
            except SessionNotFoundError:
                n_not_yet[0] += 1
                make_session(path, n_ctx=40).close()
                open_and_judge(path, pictures, 0)
        else:
            open_and_judge(path, pictures, acks.n - 1, goes_on=n % 3 == 0)

    n = killed_at_each(path, work, judge, prepare)
    return {"n_kills": n, "n_not_yet": n_not_yet[0], "n_commits": len(pictures) - 1}


def scenario_power(folder):
    """The same at level power."""
    return scenario_life(folder, "power")


def scenario_open(folder):
    """Kill while a session that needs mending is opened, at every operation of that."""
    pictures = history(folder / "plain", n_ctx=40)
    source, path = folder / "plain", folder / "s"
    newest = max(source.glob("base.*"), key=lambda p: int(p.suffix[1:]))
    counts = {}

    def damage(kind):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for p in source.iterdir():
            if p.suffix == ".kv":
                os.link(p, path / p.name)
            else:
                shutil.copy(p, path / p.name)
        if kind == "base":
            os.truncate(path / newest.name, 100)
        elif kind == "tail":
            with open(path / f"journal{newest.suffix}", "r+b") as file:
                file.write(b"KVJ1" + bytes(40) + b"x")
        elif kind == "leftovers":
            (path / "base.77.tmp").write_bytes(b"KVB1half")
            (path / ("0" * 32 + ".kv")).write_bytes(b"")

    for kind in ("base", "tail", "leftovers", "grow"):
        n_ctx = 64 if kind == "grow" else None

        def work(n_ctx=n_ctx):
            Session.open(path, make_fingerprint(), n_ctx=n_ctx).close()

        def judge(n):
            open_and_judge(path, pictures[-1:], 0)

        counts[kind] = killed_at_each(path, work, judge, lambda kind=kind: damage(kind))
    return counts


def scenario_random(folder):
    """Kill at random times, in the middle of stores too."""
    path, rng = folder / "s", random.Random(5)
    pictures = history(folder / "plain", n_ctx=40)
    acks = Acks(folder / "acks")
    n_killed = 0
    longest = None
    for n in range(60):
        shutil.rmtree(path, ignore_errors=True)
        acks.path.write_bytes(b"")
        session = make_session(path, n_ctx=40)
        session.close()
        start = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            live(Session.open(path), acks.add)
            os._exit(PASSED)
        if n and longest:
            time.sleep(rng.random() * longest / 2)
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        longest = longest or time.perf_counter() - start
        n_killed += os.WIFSIGNALED(status)
        open_and_judge(path, pictures, acks.n)
    return {"n_killed": n_killed}


def scenario_file_limit(folder):
    """A limit on the size of files stands in for a full disk: the same error, without root."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    session = make_session(folder / "s", n_ctx=100)
    live(session)
    want, n_refused = picture(session), 0
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (session._writer.journal.end + 50, hard))
    session.cache.seq_rm(0, 3, 5)
    add(session, range(20))
    for _ in range(3):
        try:
            session.commit()
        except DiskFullError:
            n_refused += 1
    try:
        make_session(folder / "other")
    except DiskFullError:
        n_refused += 1
    assert not (folder / "other").exists()
    session._writer.try_checkpoint()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    check_last(session, want, folder)
    session.commit()
    want = picture(session)
    add(session, range(20))
    session.close()
    with Session.open(folder / "s", make_fingerprint()) as session:
        assert picture(session) == want
    return {"n_refused": n_refused, "n_tokens": len(want[0][0])}


def check_last(session, want, folder):
    """What is on disk while `session` still runs is `want`."""
    shutil.rmtree(folder / "copy", ignore_errors=True)
    (folder / "copy").mkdir()
    for p in session.path.iterdir():
        if p.suffix == ".kv":
            subprocess.run(["cp", "--sparse=always", p, folder / "copy"], check=True)
        else:
            shutil.copy(p, folder / "copy" / p.name)
    with Session.open(folder / "copy", make_fingerprint()) as copy:
        assert picture(copy) == want


def fill(path):
    """Take a little of the disk's room; return whether there was any."""
    try:
        with open(path, "ab", buffering=0) as file:
            return file.write(bytes(512)) == 512
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False


def scenario_full_disk(folder):
    """A file system of 4 MB that fills up: at growth, at commits, at checkpoints."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
    session = make_session(disk / "s", n_ctx=20_000)
    add(session, range(40))
    session.user["x"] = b"1"
    session.commit()
    want, counts = picture(session), {"growth": 0, "commit": 0}
    n_tokens = 40
    try:
        while True:
            add(session, range(n_tokens, n_tokens + 8))
            n_tokens += 8
    except DiskFullError:
        counts["growth"] = n_tokens
    assert n_tokens > 256
    while fill(disk / "filler"):
        pass
    session.user["x"] = os.urandom(200_000)
    for _ in range(3):
        try:
            session.commit()
        except DiskFullError:
            counts["commit"] += 1
    session._writer.try_checkpoint()
    check_last(session, want, folder)
    session.user["x"] = b"2"
    session.commit()  # small enough for the space kept ahead
    want = picture(session)
    assert len(want[0][0]) == n_tokens
    session._writer.try_checkpoint()
    check_last(session, want, folder)
    os.unlink(disk / "filler")
    session.user["x"] = bytes(1000)
    session.commit()
    want = picture(session)
    session.close()
    with Session.open(disk / "s", make_fingerprint()) as session:
        assert picture(session) == want
    try:
        make_session(disk / "other", n_ctx=10)
    except KVCacheError:
        assert not (disk / "other").exists()
    return counts


def scenario_readers(folder):
    """Look into a session again and again while it is written: never back in time, never torn."""
    session = make_session(folder / "s")
    session.close()
    pid = os.fork()
    if pid == 0:
        with Session.open(folder / "s") as session:
            stop = time.monotonic() + 3
            while time.monotonic() < stop:
                session.cache.clear()
                add(session, range(int(session.n_commits % 20) + 1))
                session.user["n"] = b"%d" % (session.n_commits + 1)
                session.commit()
                if session.n_commits % 5 == 0:
                    session._writer.try_checkpoint()
        os._exit(PASSED)
    last = n_looks = n_changes = 0
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        info = Session.inspect(folder / "s")
        assert info.n_commits >= last, (info.n_commits, last)
        if info.n_commits:
            assert info.user["n"] == b"%d" % info.n_commits
            n_tokens = (info.n_commits - 1) % 20 + 1
            assert info.cells.tokens_of(0).tolist() == list(range(n_tokens))
        n_changes += info.n_commits != last
        last, n_looks = info.n_commits, n_looks + 1
    return {"n_commits": last, "n_looks": n_looks, "n_changes": n_changes}


def scenario_broken(folder):
    """The judge itself is judged: with committed cells given out again, a crash must be noticed."""
    import numpy as np

    from kvnumba.store import log

    def commit_without_pins(self, cells, user, search_start):
        real(self, cells, user, search_start)
        cells.pinned[:] = np.uint64(0)

    real, log.SessionLog.commit = log.SessionLog.commit, commit_without_pins
    try:
        scenario_life(folder)
    except AssertionError as error:
        return {"noticed": str(error)[:60]}
    return {"noticed": ""}


if __name__ == "__main__":
    assert len(LIFE) > 3
    print(json.dumps(globals()[f"scenario_{sys.argv[1]}"](Path(sys.argv[2]))))
