"""Random lives: at any moment a copy of the folder opens at the last commit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from session_makers import add, copy_session, make_fingerprint, make_session, picture

from kvnumba import mapping
from kvnumba.errors import NoSlotError
from kvnumba.store.session import Session

pytestmark = pytest.mark.skipif(not mapping.IS_LINUX, reason="sessions need Linux")
N_OPS = 120


def random_range(rng, cache, s):
    end = cache.seq_pos_max(s) + 2
    p0 = int(rng.integers(0, end + 1))
    return p0, int(rng.integers(p0, end + 1)) if rng.random() < 0.7 else -1


def do_something(rng, session):
    """One random operation; refusals for want of room are fine."""
    cache, (s, other) = session.cache, (int(i) for i in rng.choice(6, 2, replace=False))
    p0, p1 = random_range(rng, cache, s)
    kind = rng.integers(10)
    try:
        if kind < 4:
            add(session, rng.integers(0, 1000, int(rng.integers(1, 12))), s)
        elif kind == 4:
            cache.seq_rm(s, p0, p1)
        elif kind == 5:
            cache.seq_cp(s, other, p0, p1)
        elif kind == 6:
            cache.seq_add(s, p0, p1, int(rng.integers(-3, 4)))
        elif kind == 7:
            cache.defrag()
        elif kind == 8:
            cache.update()
        elif rng.random() < 0.3:
            cache.seq_keep(s)
        else:
            session.user[f"u{rng.integers(3)}"] = rng.bytes(5)
    except NoSlotError:
        cache.seq_rm(s)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shared", ["move", "copy"])
@pytest.mark.parametrize("n_spare", [0, 6])
def test_a_copy_at_any_moment_opens_at_the_last_commit(
    tmp_path, monkeypatch, seed, shared, n_spare
):
    monkeypatch.setattr("kvnumba.store.log.MIN_JOURNAL", 1500)  # checkpoints now and then
    rng = np.random.default_rng([seed, n_spare])
    session = make_session(tmp_path / "s", n_ctx=70, shared=shared, n_spare=n_spare)
    want = picture(session)
    for n in range(N_OPS):
        do_something(rng, session)
        if rng.random() < 0.3:
            session.commit()
            want = picture(session)
            session.cache.check()
        if n % 4 == 0:
            path = copy_session(tmp_path / "s", tmp_path / "copy")
            with Session.open(path, make_fingerprint()) as copy:
                assert picture(copy) == want
            shutil.rmtree(path)
        if rng.random() < 0.1:
            session.close()
            session = Session.open(tmp_path / "s")
            assert picture(session) == want
    assert session.n_commits > 10
    session.close()
