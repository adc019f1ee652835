"""Small memories of every kind, fed with tokens whose rows and states say which tokens they were.

K of a token is a vector rotated by its position, V names the token, and a state is a number that
depends on all tokens before it. So what a memory holds can be told from its bytes alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvnumba import (
    CacheConfig,
    HybridCache,
    HybridConfig,
    RecurrentCache,
    RecurrentConfig,
    RopeConfig,
    StreamsCache,
    UnifiedCache,
    WindowCache,
    WindowConfig,
)
from kvnumba.batch import Batch
from kvnumba.cells import Cells

N_CTX = 64
WINDOW = 8
ATTENTION = CacheConfig(
    n_layer=2,
    n_ctx=N_CTX,
    n_head_kv=1,
    head_dim=2,
    n_seq_max=5,
    n_batch=64,
    n_ubatch=4,
    type_k="f32",
    type_v="f32",
    rope=RopeConfig(2),
)
COPIES = replace(ATTENTION, shared="copy")
STATES = RecurrentConfig(1, 1, 1, n_seq_max=5, n_batch=64, n_ubatch=4)
REWINDS = replace(STATES, n_rewind=3)
WINDOWS = WindowConfig(ATTENTION, WINDOW, (False, True), n_window_cells=28)
WIDE = replace(WINDOWS, full_size=True, n_window_cells=None)
LAYERS = (False, True, False)

MAKERS = {
    "unified": lambda: UnifiedCache(ATTENTION),
    "copies": lambda: UnifiedCache(COPIES),
    "fixed": lambda: UnifiedCache(replace(ATTENTION, can_shift=False)),
    "window": lambda: WindowCache(WINDOWS),
    "wide": lambda: WindowCache(WIDE),
    "recurrent": lambda: RecurrentCache(STATES),
    "rewinds": lambda: RecurrentCache(REWINDS),
    "hybrid": lambda: HybridCache(HybridConfig(ATTENTION, STATES, LAYERS)),
    "hybrid-rewinds": lambda: HybridCache(HybridConfig(COPIES, REWINDS, LAYERS)),
    "hybrid-window": lambda: HybridCache(HybridConfig(WINDOWS, STATES, LAYERS)),
    "streams": lambda: StreamsCache(ATTENTION, (0, 0, 0, 1, 1)),
}
CUTS_ANYWHERE = ("unified", "copies", "fixed", "wide", "streams")
SHIFTS = ("unified", "copies", "wide", "streams")


def parts_of(memory):
    """Return the plain caches of a memory."""
    if not hasattr(memory, "parts"):
        return [memory]
    return [p for part in memory.parts for p in parts_of(part)]


def rotated(tokens, pos):
    """Return K: a vector per token, rotated by its position."""
    z = (1.0 + np.asarray(tokens)) * np.exp(1j * np.asarray(pos))
    return np.stack([z.real, z.imag], -1).astype(np.float32)


def named(tokens):
    """Return V: the token, and its square."""
    tokens = np.asarray(tokens, np.float32)
    return np.stack([tokens, tokens**2], -1)


def folded(state, token):
    """Return a state after one more token; whole numbers that float32 holds exactly."""
    return (state * 31 + token + 1) % 65521


def _layers(memory):
    """Return which layers of a memory keep a state."""
    if isinstance(memory, RecurrentCache):
        return (True,)
    return getattr(memory.config, "is_recurrent", (False, False))


def _states(step, il):
    """Return r and s after each token that they are to be kept for."""
    tokens = step.batch.tokens.reshape(step.n_seqs, step.n_seq_tokens)
    states = [step.read(il)[1][:, 0]]
    for column in tokens.T:
        states.append(folded(states[-1], column))
    parts = getattr(step, "parts", (step,))
    n = parts[-1].n_states
    pairs = tokens[:, -n:], np.stack(states[1:], 1)[:, -n:]
    return tuple(a[:, :, None].astype(np.float32) for a in pairs)


def _compute(memory, step):
    k, v = rotated(step.batch.tokens, step.pos), named(step.batch.tokens)
    for il, is_recurrent in enumerate(_layers(memory)):
        step.write(il, *(_states(step, il) if is_recurrent else (k, v)))


def feed(memory, tokens, seq_id=0, n_ubatch=4):
    """Compute tokens at the end of a sequence."""
    for step in memory.prepare(Batch(np.asarray(tokens, np.int32), seq_ids=seq_id), n_ubatch):
        with step:
            _compute(memory, step)
    memory.check()


def check_holds(memory, tokens, seq_id=0):
    """Check that a sequence holds just these tokens, as if nothing else had ever happened.

    A window part may have forgotten those that the next token does not see.
    """
    memory.update()
    memory.check()
    assert memory.seq_pos_max(seq_id) == len(tokens) - 1
    for part in parts_of(memory):
        if not isinstance(part.cells, Cells):
            _check_state(part, tokens, seq_id)
        elif not isinstance(memory, StreamsCache) or memory.stream(seq_id) is part:
            _check_cells(part, tokens, seq_id)


def _check_cells(part, tokens, seq_id):
    cells = part.cells.members(seq_id)
    cells = cells[np.argsort(part.cells.pos[cells], kind="stable")]
    tokens = np.asarray(tokens, np.int32)
    n_forgotten = len(tokens) - len(cells)
    n_hidden = max(0, len(tokens) - part.config.window + 1) if part.config.window else 0
    assert 0 <= n_forgotten <= n_hidden
    pos = np.arange(n_forgotten, len(tokens))
    assert part.cells.pos[cells].tolist() == pos.tolist()
    assert part.cells.token[cells].tolist() == tokens[n_forgotten:].tolist()
    for il in range(part.config.n_layer):
        k = rotated(tokens[n_forgotten:], pos)
        np.testing.assert_allclose(part.layers.k[il][cells], k, rtol=1e-5, atol=1e-4)
        assert (part.layers.v[il][cells] == named(tokens[n_forgotten:])).all()


def _check_state(part, tokens, seq_id):
    want = 0
    for token in tokens:
        want = folded(want, int(token))
    r, s = part.state(0, seq_id)
    assert s.tolist() == [want]
    assert r.tolist() == [tokens[-1] if len(tokens) else 0]


def frozen(memory):
    """Return all metadata of a memory, to tell whether anything changed."""
    out = []
    for part in parts_of(memory):
        out += [a.tobytes() for a in part.cells.state]
        if hasattr(part, "sliding"):
            out.append(part.sliding.lost.tobytes())
    return out
