"""A `HybridCache` and its oracle side by side: the same calls, then everything compared.

A recurrent state is made of all the tokens that shaped it, in their order, so a state that knows a
token too many or too few shows at once.
"""

from __future__ import annotations

import copy
from functools import cache

import naive
import numpy as np
import pytest
from judged import row_of
from judged_window import assert_refused, part_of
from naive_hybrid import NaiveHybrid
from naive_window import NaiveWindow

from kvnumba.batch import Batch
from kvnumba.composite_config import HybridConfig, WindowConfig
from kvnumba.config import CacheConfig
from kvnumba.errors import KVCacheError, NoSlotError
from kvnumba.hybrid import HybridCache
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.window import WindowCache

IS_RECURRENT = (True, False, True, False)
WIDTH = 4
N_R, N_S = (3, 5), (4, 2)


@cache
def state_of(tokens, il):
    """Return r and s of recurrent layer `il` (of its part) after these tokens, zeros after none."""
    if not tokens:
        return np.zeros(N_R[il], np.float32), np.zeros(N_S[il], np.float32)
    rng = np.random.default_rng([il, *tokens])
    return tuple(rng.standard_normal(n[il]).astype(np.float32) for n in (N_R, N_S))


class JudgedHybrid:
    """Drives both; `compare` finds any difference. With `n_window` the attention has windows."""

    def __init__(self, n_ctx=32, n_seq_max=4, n_rewind=2, shared="copy", n_window=0, window=4):
        sizes = {"n_layer": 2, "n_ctx": n_ctx, "n_head_kv": 1, "head_dim": WIDTH}
        attention = CacheConfig(
            **sizes, n_seq_max=n_seq_max, type_k="f32", type_v="f32", shared=shared
        )
        cells = naive.NaiveCells(n_ctx, n_seq_max, shared=shared)
        if n_window:
            flags = (True, False)
            attention = WindowConfig(attention, window, flags, n_window_cells=n_window)
            cells = NaiveWindow(n_ctx, n_window, n_seq_max, window, shared=shared)
        recurrent = RecurrentConfig(2, N_R, N_S, n_seq_max, n_rewind=n_rewind)
        self.cache = HybridCache(HybridConfig(attention, recurrent, IS_RECURRENT))
        self.oracle = NaiveHybrid(cells, n_rewind + 1)
        self.shared = shared
        self.next_token = 0

    # -- calls --------------------------------------------------------------------------------

    @property
    def attention_parts(self):
        """The real caches of attention."""
        part = self.cache.attention
        return (part.base, part.window) if isinstance(part, WindowCache) else (part,)

    def frozen(self):
        """Return all bytes of both parts."""
        rec = self.cache.recurrent
        out = [a.tobytes() for a in (*rec.cells.state, *rec.rows.r, *rec.rows.s)]
        for part in self.attention_parts:
            out += [a.tobytes() for a in (*part.cells.state, *part.layers.k, *part.layers.v)]
            out.append(part.sliding.lost.tobytes())
        return out

    def call(self, name, *args):
        """Call a method of both; the results must agree, or both must refuse, and change nothing.

        Returns the oracle's result, or None when it refused.
        """
        before, oracle = self.frozen(), copy.deepcopy(self.oracle)
        try:
            want = getattr(self.oracle, name)(*args)
        except naive.RefusedError as refusal:
            assert_refused(refusal, getattr(self.cache, name), *args)
            assert self.frozen() == before
            return None
        may_refuse = any(o.has_hole(s) for o in (oracle, self.oracle) for s in range(o.n_seq_max))
        may_refuse = may_refuse or (self.shared == "move" and self.has_forks())
        try:
            got = getattr(self.cache, name)(*args)
        except KVCacheError:
            assert may_refuse
            got = False
        if got is False:
            assert self.frozen() == before
            if want is not False and may_refuse:
                self.oracle = oracle
                return None
        assert got == want, name
        return want

    def has_forks(self):
        """Whether sequences share cells, but have a state each: to move both is not easy."""
        tail = self.cache.recurrent.cells.tail
        owners = [c.seqs for c in self.oracle.cells.cells]
        return any(len({int(tail[s]) for s in ids}) > 1 for ids in owners)

    def seq_rm(self, seq_id, p0, p1):
        """Remove in both; `refusal` must announce what happens. Returns what `seq_rm` does."""
        n_ids = self.oracle.n_seq_max
        reason = self.cache.refusal(seq_id, p0, p1) if -1 <= seq_id < n_ids else "bad id"
        done = self.call("seq_rm", seq_id, p0, p1)
        assert (reason is None) == (done is True)
        return done

    def prepare(self, seq_ids, n_ubatch):
        """Prepare a batch in both; returns (steps, plan, tokens), or None when it does not fit."""
        tokens = list(range(self.next_token, self.next_token + len(seq_ids)))
        self.next_token += len(tokens)
        batch = Batch(tokens, None, seq_ids)
        counted = Batch(tokens, np.arange(len(tokens)), seq_ids)  # any positions: just to split
        split = self.cache.recurrent.split(counted, n_ubatch, sequential=False)
        way = [ubatch.index.tolist() for ubatch in split]
        before = self.frozen()
        try:
            pos, plan = self.oracle.prepare(seq_ids, n_ubatch, way)
        except naive.RefusedError as refusal:
            has_no_slot = isinstance(refusal, naive.NoSlotError)
            with pytest.raises(NoSlotError if has_no_slot else KVCacheError):
                self.cache.prepare(batch, n_ubatch)
            self.oracle.update()
            self.cache.update()
            return None
        steps = self.cache.prepare(batch, n_ubatch)
        assert [step.ubatch.index.tolist() for step in steps] == way
        self.oracle.update()
        if not any(part.has_shift for part in self.attention_parts):
            assert self.frozen()[:6] == before[:6]
        return steps, (pos, plan, seq_ids), tokens

    def apply(self, step, planned, mine, tokens):
        """Apply one prepared step in both; read the states it goes on from, and write new ones."""
        pos, _, seq_ids = planned
        sets = step.ubatch.seq_sets
        before = [self.oracle.life(ids[0]).tokens for ids in sets]
        step.apply()
        self.oracle.apply(mine, sets, pos, seq_ids, tokens)
        assert step.pos.tolist() == [pos[t] for t in mine[0]]
        n, n_states = step.n_seq_tokens, step.of_layer(0)[0].n_states
        new = [tuple(tokens[t] for t in mine[0][q * n : (q + 1) * n]) for q in range(len(sets))]
        for il, is_recurrent in enumerate(IS_RECURRENT):
            local = IS_RECURRENT[:il].count(is_recurrent)
            if is_recurrent:
                for kind, got in enumerate(step.read(il)):
                    want = [state_of(life, local)[kind] for life in before]
                    assert np.array_equal(got, want)
                lives = [
                    [life + more[:k] for k in range(n - n_states + 1, n + 1)]
                    for life, more in zip(before, new, strict=True)
                ]
                rows = ([[state_of(x, local)[k] for x in of] for of in lives] for k in (0, 1))
                step.write(il, *(np.array(r, np.float32) for r in rows))
            else:
                mine_tokens = [tokens[t] for t in mine[0]]
                step.write(il, *(rows_of(mine_tokens, local, kind) for kind in (0, 1)))

    def run(self, seq_ids, n_ubatch=8, ending="commit", n_done=99):
        """Decode a batch; `ending` befalls step `n_done`. Returns whether it fitted."""
        prepared = self.prepare(seq_ids, n_ubatch)
        if prepared is None:
            return False
        steps, planned, tokens = prepared
        before = copy.deepcopy(self.oracle)
        n_done = len(steps) if ending == "commit" else min(n_done, len(steps))
        for k in range(n_done):
            at_step = copy.deepcopy(self.oracle)
            self.apply(steps[k], planned, planned[1][k], tokens)
            if ending == "rollback" and k == n_done - 1:
                steps[k].rollback()
                self.oracle = at_step
            else:
                steps[k].commit()
        if ending == "all back":
            steps.rollback()
            self.oracle = before
        self.compare()
        return True

    def feed(self, n, seq_id=0, n_ubatch=64):
        """Decode `n` further tokens of a sequence; they must fit."""
        assert self.run([[seq_id]] * n, n_ubatch)

    # -- judgement ----------------------------------------------------------------------------

    def compare(self):
        """Compare cells, positions, states, and V of all cells."""
        self.cache.check()
        assert self.oracle.broken() is None
        for real, want in zip(self.attention_parts, self.oracle_parts(), strict=True):
            held = [c for c in want.cells if not c.is_free]
            assert part_of(real.cells) == sorted((c.token, c.pos, sorted(c.seqs)) for c in held)
        for s in range(self.oracle.n_seq_max):
            assert self.cache.seq_pos_max(s) == self.oracle.seq_pos_max(s)
            low = self.oracle.seq_pos_min(s)
            assert self.cache.seq_pos_min(s) >= low
            assert self.cache.seq_pos_min(s) == low or self.oracle.has_hole(s)
            for il in range(2):
                got = self.cache.recurrent.state(il, s)
                want = state_of(self.oracle.life(s).tokens, il)
                assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        self.compare_rows()

    def oracle_parts(self):
        """Return the oracle's cells of attention."""
        part = self.oracle.attention
        return (part.base, part.window) if isinstance(part, NaiveWindow) else (part,)

    def compare_rows(self):
        """Each cell has the V of its token."""
        locals_of = [(1,), (0,)] if len(self.attention_parts) == 2 else [(0, 1)]
        for part, layers in zip(self.attention_parts, locals_of, strict=True):
            used = np.flatnonzero(part.cells.pos[: part.cells.n_cells] >= 0)
            tokens = part.cells.token[used].tolist()
            for n, il in enumerate(layers):
                assert np.array_equal(part.layers.v[n][used], rows_of(tokens, il, 1))


def rows_of(tokens, il, kind):
    """Return the K (kind 0) or V rows that tokens stand for in attention layer `il`."""
    rows = [row_of(token, il, kind, WIDTH) for token in tokens]
    return np.array(rows, np.float32).reshape(len(tokens), WIDTH)
