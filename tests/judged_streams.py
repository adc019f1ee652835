"""A `StreamsCache` and its oracle side by side: the same calls, then everything compared."""

from __future__ import annotations

import copy

import naive
import numpy as np
import pytest
from judged import row_of
from judged_window import HEAD_DIM, N_HEAD_KV, ROPES, assert_refused, attended, part_of, rotated
from naive_streams import NaiveStreams

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig
from kvnumba.errors import KVCacheError, NoSlotError
from kvnumba.streams import StreamsCache

N_LAYER = 2


class JudgedStreams:
    """Drives both; `compare` finds any difference."""

    def __init__(self, n_cells=12, stream_of=(0, 1, 2), shared="move", v_trans=False):
        config = CacheConfig(
            n_layer=N_LAYER,
            n_ctx=n_cells,
            n_head_kv=N_HEAD_KV[:N_LAYER],
            head_dim=HEAD_DIM[:N_LAYER],
            n_seq_max=len(stream_of),
            type_k="f32",
            type_v="f32",
            rope=ROPES[:N_LAYER],
            shared=shared,
            v_trans=v_trans,
        )
        self.cache = StreamsCache(config, list(stream_of))
        self.oracle = NaiveStreams(n_cells, stream_of, shared)
        self.next_token = 0
        self.written = {}
        self.rng = np.random.default_rng(3)

    # -- calls --------------------------------------------------------------------------------

    def frozen(self):
        """Return all bytes of all streams."""
        out = []
        for part in self.cache.streams:
            out += [a.tobytes() for a in (*part.cells.state, *part.layers.k, *part.layers.v)]
        return out

    def call(self, name, *args):
        """Call a method of both; the results must agree, or both must refuse, and change nothing.

        Returns the oracle's result, or None when it refused.
        """
        before = self.frozen()
        try:
            want = getattr(self.oracle, name)(*args)
        except naive.RefusedError as refusal:
            assert_refused(refusal, getattr(self.cache, name), *args)
            assert self.frozen() == before
            return None
        assert getattr(self.cache, name)(*args) == want, name
        return want

    def prepare(self, seq_ids, n_ubatch):
        """Prepare a batch in both; returns (steps, pos, tokens), or None when it is refused."""
        tokens = list(range(self.next_token, self.next_token + len(seq_ids)))
        self.next_token += len(tokens)
        batch = Batch(tokens, None, seq_ids)
        has_shift = any(part.has_shift for part in self.cache.streams)
        before = self.frozen()
        try:
            pos = self.oracle.prepare(seq_ids)
        except naive.RefusedError as refusal:
            has_no_slot = isinstance(refusal, naive.NoSlotError)
            with pytest.raises(NoSlotError if has_no_slot else KVCacheError):
                self.cache.prepare(batch, n_ubatch)
            assert has_shift or self.frozen() == before
            return None
        steps = self.cache.prepare(batch, n_ubatch)
        self.oracle.update()
        assert has_shift or self.frozen() == before
        tokens_of_steps = [t for step in steps for t in step.ubatch.index.tolist()]
        assert sorted(tokens_of_steps) == list(range(len(tokens)))
        assert all(step.n_tokens <= n_ubatch for step in steps)
        return steps, pos, tokens

    def apply(self, step, seq_ids, pos, tokens):
        """Apply one step in both, write its rows, and compare what its tokens see."""
        mine = step.ubatch.index.tolist()
        step.apply()
        pos, ids, tokens = ([of[t] for t in mine] for of in (pos, seq_ids, tokens))
        where = self.oracle.apply(pos, ids, tokens)
        n_cells = self.cache.config.n_cells
        assert step.row_index.tolist() == [stream * n_cells + i for stream, i in where]
        assert step.pos.tolist() == pos
        self.written.update(zip(tokens, pos, strict=True))
        for il in range(N_LAYER):
            step.write(il, *(self.rows(tokens, il, kind) for kind in (0, 1)))
        for il in range(N_LAYER):
            self.compare_attention(step, il, list(zip(pos, ids, strict=True)))

    def run(self, seq_ids, n_ubatch=8, ending="commit", n_done=99):
        """Decode a batch; `ending` befalls step `n_done`. Returns whether it fitted."""
        prepared = self.prepare(seq_ids, n_ubatch)
        if prepared is None:
            return False
        steps, pos, tokens = prepared
        before = copy.deepcopy(self.oracle)
        n_done = len(steps) if ending == "commit" else min(n_done, len(steps))
        for k in range(n_done):
            at_step = copy.deepcopy(self.oracle)
            self.apply(steps[k], seq_ids, pos, tokens)
            if ending == "rollback" and k == n_done - 1:
                steps[k].rollback()
                self.oracle = at_step
            else:
                steps[k].commit()
                self.oracle.commit()
        if ending == "all back":
            steps.rollback()
            self.oracle = before
        self.compare()
        return True

    def feed(self, n, seq_id=0):
        """Decode `n` further tokens of a sequence; they must fit."""
        assert self.run([[seq_id]] * n, 4)

    # -- judgement ----------------------------------------------------------------------------

    def rows(self, tokens, il, kind):
        """Return the rows that tokens stand for; `kind` is 0 for K and 1 for V."""
        width = N_HEAD_KV[il] * HEAD_DIM[il]
        rows = [row_of(token, il, kind, width) for token in tokens]
        return np.array(rows, np.float32).reshape(len(tokens), width)

    def k_rows(self, tokens, pos, il):
        """Return K of tokens as it must be for these positions."""
        by = np.array(pos) - np.array([self.written[token] for token in tokens])
        return rotated(self.rows(tokens, il, 0), by.astype(np.float64), il)

    def compare_attention(self, step, il, queries):
        """What tokens at (position, ids) get from a layer, and what their sequence holds."""
        shape = len(queries), 2 * N_HEAD_KV[il], HEAD_DIM[il]
        q = self.rng.standard_normal(shape).astype(np.float32)
        got = step.attend(il, q)
        for t, (p, ids) in enumerate(queries):
            part = self.oracle.stream(ids[0])
            seen = [c for c in (part.cells[i] for i in part.members(ids[0])) if c.pos <= p]
            tokens = [c.token for c in seen]
            k = self.k_rows(tokens, [c.pos for c in seen], il)
            want = attended(q[t], k, self.rows(tokens, il, 1), N_HEAD_KV[il])
            np.testing.assert_allclose(got[t], want, rtol=0, atol=2e-5)

    def compare(self):
        """Compare all cells, counts, positions and rows; then spoil the rows that nobody uses."""
        self.cache.check()
        assert self.cache.used == self.oracle.used
        for s in range(self.oracle.n_seq_max):
            assert self.cache.seq_pos_min(s) == self.oracle.seq_pos_min(s)
            assert self.cache.seq_pos_max(s) == self.oracle.seq_pos_max(s)
        for real, want in zip(self.cache.streams, self.oracle.streams, strict=True):
            held = [c for c in want.cells if not c.is_free]
            assert part_of(real.cells) == sorted((c.token, c.pos, sorted(c.seqs)) for c in held)
            n = real.cells.n_cells
            assert real.cells.pos[:n].tolist() == [c.pos for c in want.cells]
            assert real.cells.shift[:n].tolist() == [c.shift for c in want.cells]
            for il in range(N_LAYER):
                self.compare_rows(real, il)

    def compare_rows(self, part, il):
        """Each cell in use has its token's rows; those of free cells become NaN."""
        k, v = part.layers.k[il], part.layers.v[il]
        v = v.T if part.config.v_trans else v
        pos = part.cells.pos[: part.cells.n_cells]
        used, free = np.flatnonzero(pos >= 0), np.flatnonzero(pos < 0)
        tokens = part.cells.token[used].tolist()
        want = self.k_rows(tokens, pos[used] - part.cells.shift[used], il)
        np.testing.assert_allclose(k[used], want, rtol=0, atol=1e-5)
        assert (v[used] == self.rows(tokens, il, 1)).all()
        k[free] = np.nan
        v[free] = np.nan
