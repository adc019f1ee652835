"""Small sessions whose every row follows from its token, and pictures of them to compare."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.store.fingerprint import Fingerprint
from kvnumba.store.session import Session

N_LAYER, N_HEAD_KV, HEAD_DIM = 2, 2, 8
WIDTH = N_HEAD_KV * HEAD_DIM


def make_config(n_ctx=48, **changes):
    """A configuration of two small layers, the second without rope."""
    values = {
        "n_layer": N_LAYER,
        "n_head_kv": N_HEAD_KV,
        "head_dim": HEAD_DIM,
        "n_seq_max": 6,
        "type_k": "f32",
        "type_v": "f16",
        "rope": (RopeConfig(HEAD_DIM), None),
        "n_ubatch": 8,
    }
    return CacheConfig(n_ctx=n_ctx, **{**values, **changes})


def make_fingerprint(config=None, **changes):
    """A fingerprint of a model that exists only here."""
    values = {"architecture": "llama", "weights": "w" * 32, "tokenizer": "t" * 32}
    return Fingerprint.of_config(config or make_config(), **{**values, **changes})


def make_session(path, durability="process", **changes):
    """A new, empty session."""
    config = make_config(**changes)
    return Session.create(path, config, make_fingerprint(config), durability)


def rows_of(tokens, il):
    """K and V of some tokens in a layer, float32."""
    out = [
        np.random.default_rng([int(t), il]).standard_normal((2, WIDTH), np.float32) for t in tokens
    ]
    rows = np.array(out, np.float32).reshape(-1, 2, WIDTH)
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


def add(session, tokens, seq_ids=0):
    """Place tokens at the end of a sequence and write their rows."""
    for step in session.cache.prepare(Batch(np.array(tokens, np.int32), None, seq_ids)):
        with step:
            for il in range(N_LAYER):
                step.write(il, *rows_of(step.batch.tokens, il))


def picture(session):
    """All that a session promises to keep: tokens, positions and rows by sequence; user data."""
    cache, out = session.cache, {"user": dict(session.user)}
    for s in range(session.config.n_seq_max):
        cells = cache.cells.members(s)
        cells = cells[np.argsort(cache.cells.pos[cells], kind="stable")]
        # A shift that is still pending is part of the state; applied, it is in the rows.
        out[s] = (
            cache.cells.token[cells].tolist(),
            cache.cells.pos[cells].tolist(),
            cache.cells.shift[cells].tolist(),
            [cache.layers.read_k(il, cells).tobytes() for il in range(N_LAYER)],
            [cache.layers.read_v(il, cells).tobytes() for il in range(N_LAYER)],
        )
    return out


def copy_session(source: Path, target: Path):
    """Copy a session's folder; packs keep their holes by being linked."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".kv":
            (target / file.name).hardlink_to(file)
        else:
            shutil.copy(file, target / file.name)
    return target


# -- one life of a session, used by the tests of crashes and damage -------------------------------


def prefill(s):
    """Three ubatches of a prompt, committed one by one."""
    for start in range(0, 24, 8):
        add(s, range(100 + start, 108 + start))
        s.user["cost"] = b"%d" % start
        s.commit()


def decode(s):
    """Single tokens."""
    for t in range(200, 204):
        add(s, [t])
        s.user["tail"] = bytes([t % 256])
        s.commit()


def remove_and_refill(s):
    """Drop the end, put other tokens there; twice, so that freed cells are used again."""
    for base in (300, 400):
        s.cache.seq_rm(0, 10, -1)
        add(s, range(base, base + 12))
        s.commit()


def share(s):
    """Sequences that share cells."""
    s.cache.seq_cp(0, 3, 0, 8)
    add(s, [500, 501], 3)
    s.cache.seq_cp(0, 5)
    s.commit()
    s.cache.seq_rm(5)
    s.commit()


def shift(s):
    """Remove a span and close the gap: committed rows are turned."""
    s.cache.seq_rm(0, 9, 12)
    s.cache.seq_add(0, 12, -1, -3)
    s.commit()
    s.cache.seq_div(3, 0, 8, 2)
    s.commit()


def defrag(s):
    """Close holes by moving cells."""
    s.cache.seq_rm(0, 2, 6)
    s.cache.defrag()
    s.commit()


def checkpoint(s):
    """As happens when the journal is long."""
    s._writer.try_checkpoint()


def empty_and_restart(s):
    """Remove everything, then go on."""
    del s.user["tail"]
    s.cache.clear(data=True)
    s.commit()
    add(s, range(600, 609))
    s.commit()


LIFE = (
    prefill,
    decode,
    remove_and_refill,
    checkpoint,
    share,
    shift,
    checkpoint,
    defrag,
    decode,
    empty_and_restart,
    prefill,
)


def live(session, on_commit=lambda: None, life=LIFE):
    """Lead the life; call `on_commit` after each commit."""
    real = session.commit

    def commit():
        real()
        on_commit()

    session.commit = commit
    try:
        for part in life:
            part(session)
    finally:
        del session.commit


def history(path, life=LIFE, **changes):
    """Lead the life without trouble; return the picture after every commit, the empty one first."""
    with make_session(path, **changes) as session:
        pictures = [picture(session)]
        live(session, lambda: pictures.append(picture(session)), life)
    return pictures
