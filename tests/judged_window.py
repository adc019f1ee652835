"""A `WindowCache` and its oracle side by side: the same calls, then everything compared.

Each token has an id of its own, which says whose row a cell must carry, in whatever cell it lies.
Attention is compared with plain NumPy over all that the full part remembers.
"""

from __future__ import annotations

import copy

import naive
import numpy as np
import pytest
from judged import row_of
from naive_window import NaiveWindow

from kvnumba.batch import Batch
from kvnumba.composite_config import WindowConfig
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import KVCacheError, NoSlotError, WindowLostError
from kvnumba.window import WindowCache

IS_WINDOW = (True, False, True, False)
N_HEAD_KV = (1, 2, 1, 1)
HEAD_DIM = (4, 6, 2, 4)
ROPES = (RopeConfig(4), RopeConfig(4, "neox", freq_base=500.0), None, RopeConfig(2))


def rotated(rows, by, il):
    """Rotate K rows of a layer by positions `by`, pair by pair, in float64."""
    out, rope = rows.astype(np.float64), ROPES[il]
    for h in range(N_HEAD_KV[il] if rope else 0):
        for j in range(rope.n_rot // 2):
            is_neox = rope.pairing == "neox"
            a, b = (j, j + rope.n_rot // 2) if is_neox else (2 * j, 2 * j + 1)
            a, b = a + h * HEAD_DIM[il], b + h * HEAD_DIM[il]
            angle = by * rope.freq_base ** (-2.0 * j / rope.n_rot)
            x, y = out[:, a].copy(), out[:, b].copy()
            out[:, a] = x * np.cos(angle) - y * np.sin(angle)
            out[:, b] = x * np.sin(angle) + y * np.cos(angle)
    return out


def attended(q, k, v, n_head_kv):
    """Attend from one token's queries ``[n_head, head_dim]`` to rows of K and V, in float64."""
    n_head, head_dim = q.shape
    k, v = k.reshape(len(k), n_head_kv, -1), v.reshape(len(v), n_head_kv, -1)
    out = []
    for h in range(n_head):
        g = h * n_head_kv // n_head
        score = k[:, g] @ q[h].astype(np.float64) / np.sqrt(head_dim)
        weight = np.exp(score - score.max())
        out.append(weight @ v[:, g] / weight.sum())
    return np.array(out)


def assert_refused(reason, call, *args):
    """Fail, with the oracle's reason, unless a call raises an error of ours."""
    try:
        call(*args)
    except KVCacheError:
        return
    pytest.fail(f"{call.__name__}{args} is accepted, but: {reason!r}")


def part_of(cells):
    """Return what the cells of a real part hold, as a sorted list."""
    n = cells.n_cells
    used = [i for i in range(n) if cells.pos[i] >= 0]
    ids = {i: [] for i in used}
    for s in range(cells.n_seq_max):
        for i in cells.members(s).tolist():
            ids[i].append(s)
    return sorted((int(cells.token[i]), int(cells.pos[i]), ids[i]) for i in used)


class JudgedWindow:
    """Drives both; `compare` finds any difference."""

    def __init__(
        self, n_base=64, n_window=12, n_seq_max=3, window=8, kind="standard", shared="move", **kv
    ):
        kv = {"type_k": "f32", "type_v": "f32"} | kv
        base = CacheConfig(
            n_layer=len(IS_WINDOW),
            n_ctx=n_base,
            n_head_kv=N_HEAD_KV,
            head_dim=HEAD_DIM,
            n_seq_max=n_seq_max,
            rope=ROPES,
            shared=shared,
            **kv,
        )
        config = WindowConfig(base, window, IS_WINDOW, kind, n_window_cells=n_window)
        self.cache = WindowCache(config)
        self.oracle = NaiveWindow(n_base, n_window, n_seq_max, window, kind, shared)
        self.written = {}  # position of each token when its rows were written
        self.next_token = 0
        self.rng = np.random.default_rng(7)

    @property
    def parts(self):
        """The parts of both, in pairs."""
        return (self.cache.base, self.oracle.base), (self.cache.window, self.oracle.window)

    # -- calls --------------------------------------------------------------------------------

    def frozen(self):
        """Return all bytes of both parts."""
        out = []
        for part in self.cache.parts:
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
        try:
            got = getattr(self.cache, name)(*args)
        except WindowLostError:
            assert may_refuse
            got = False
        if got is False:
            assert self.frozen() == before
            if want is not False and may_refuse:
                self.oracle = oracle
                return None
        assert got == want, name
        return want

    def seq_rm(self, seq_id, p0, p1):
        """Remove in both; `refusal` must announce what happens, and say why."""
        n_ids = self.oracle.n_seq_max
        reason = self.cache.refusal(seq_id, p0, p1) if -1 <= seq_id < n_ids else "window lost: no"
        done = self.call("seq_rm", seq_id, p0, p1)
        assert (reason is None) == (done is True)
        assert done or "window lost" in reason

    def prepare(self, seq_ids, n_ubatch, pos=None):
        """Prepare a batch in both; returns (steps, plan, tokens), or None when it does not fit."""
        tokens = list(range(self.next_token, self.next_token + len(seq_ids)))
        self.next_token += len(tokens)
        batch = Batch(tokens, pos, seq_ids)
        has_shift = any(part.has_shift for part in self.cache.parts)
        before = self.frozen()
        try:
            pos, plan = self.oracle.prepare(pos, seq_ids, n_ubatch)
        except naive.RefusedError as refusal:
            has_no_slot = isinstance(refusal, naive.NoSlotError)
            if not has_no_slot or all(len(ids) == 1 for ids in seq_ids):
                with pytest.raises(NoSlotError if has_no_slot else KVCacheError):
                    self.cache.prepare(batch, n_ubatch)
                assert has_shift or self.frozen() == before
                return None
            try:  # batches of shared tokens may be split in ways that the oracle does not know
                steps = self.cache.prepare(batch, n_ubatch)
            except NoSlotError:
                assert has_shift or self.frozen() == before
                return None
            ways = [[step.ubatch.index.tolist() for step in steps]]
            pos, plan = self.oracle.prepare(pos, seq_ids, n_ubatch, ways)
        else:
            steps = self.cache.prepare(batch, n_ubatch)
        assert [step.ubatch.index.tolist() for step in steps] == [mine for mine, *_ in plan]
        self.oracle.update()
        assert has_shift or self.frozen() == before
        return steps, (pos, plan, seq_ids), tokens

    def apply(self, step, planned, mine, tokens):
        """Apply one prepared step in both, write its rows, and compare what its tokens see."""
        pos, _, seq_ids = planned
        step.apply()
        self.oracle.apply(mine, pos, seq_ids, tokens)
        assert step.pos.tolist() == [pos[t] for t in mine[0]]
        for t in mine[0]:
            self.written[tokens[t]] = pos[t]
        for il in range(len(IS_WINDOW)):
            rows = [self.rows([tokens[t] for t in mine[0]], il, kind) for kind in (0, 1)]
            step.write(il, *rows)
        for il in range(len(IS_WINDOW)):
            self.compare_attention(step, il, [(pos[t], seq_ids[t][0]) for t in mine[0]])

    def feed(self, n, seq_id=0, n_ubatch=4):
        """Decode `n` further tokens of a sequence; they must fit."""
        steps, planned, tokens = self.prepare([[seq_id]] * n, n_ubatch)
        for step, mine in zip(steps, planned[1], strict=True):
            self.apply(step, planned, mine, tokens)
            step.commit()
        self.oracle.commit()
        self.compare()
        return steps

    # -- judgement ----------------------------------------------------------------------------

    def rows(self, tokens, il, kind):
        """Return the rows that tokens stand for; `kind` is 0 for K and 1 for V."""
        width = N_HEAD_KV[il] * HEAD_DIM[il]
        out = [row_of(token, il, kind, width) for token in tokens]
        return np.array(out, np.float32).reshape(len(tokens), width)

    def k_rows(self, tokens, pos, il):
        """Return K of tokens as it must be for these positions."""
        by = np.array(pos) - np.array([self.written[token] for token in tokens])
        return rotated(self.rows(tokens, il, 0), by.astype(np.float64), il)

    def compare_attention(self, step, il, queries):
        """What tokens at (position, sequence) get from a layer, and what the truth is."""
        shape = len(queries), 2 * N_HEAD_KV[il], HEAD_DIM[il]
        q = self.rng.standard_normal(shape).astype(np.float32)
        got = step.attend(il, q)
        for t, (p, s) in enumerate(queries):
            seen = [self.oracle.base.cells[i] for i in self.oracle.base.members(s)]
            seen = [c for c in seen if c.pos <= p]
            if IS_WINDOW[il]:
                seen = [c for c in seen if not self.oracle.window.masks(c.pos, p)]
            tokens = [c.token for c in seen]
            k = self.k_rows(tokens, [c.pos for c in seen], il)
            want = attended(q[t], k, self.rows(tokens, il, 1), N_HEAD_KV[il])
            np.testing.assert_allclose(got[t], want, rtol=0, atol=2e-5)

    def compare(self):
        """Compare all cells, counts, positions and rows; then spoil the rows that nobody uses."""
        self.cache.check()
        self.oracle.check()
        for real, want in self.parts:
            held = [c for c in want.cells if not c.is_free]
            assert part_of(real.cells) == sorted((c.token, c.pos, sorted(c.seqs)) for c in held)
            assert real.used == want.used
        assert self.cache.used == self.oracle.base.used
        for s in range(self.oracle.n_seq_max):
            assert self.cache.seq_pos_max(s) == self.oracle.seq_pos_max(s)
            low = self.oracle.seq_pos_min(s)
            assert self.cache.seq_pos_min(s) >= low
            assert self.cache.seq_pos_min(s) == low or self.oracle.has_hole(s)
        for il, is_window in enumerate(IS_WINDOW):
            self.compare_rows(il, self.cache.parts[is_window])

    def compare_rows(self, il, part):
        """Each cell in use has its token's rows; those of free cells become NaN."""
        local = IS_WINDOW[:il].count(IS_WINDOW[il])
        cells, k, v = part.cells, part.layers.k[local], part.layers.v[local]
        v = v.T if part.config.v_trans else v
        used = np.flatnonzero(cells.pos[: cells.n_cells] >= 0)
        tokens = cells.token[used].tolist()
        want = self.k_rows(tokens, cells.pos[used] - cells.shift[used], il)
        np.testing.assert_allclose(k[used], want, rtol=0, atol=1e-5)
        assert (v[used] == self.rows(tokens, il, 1)).all()
        free = np.flatnonzero(cells.pos[: cells.n_cells] < 0)
        k[free] = np.nan
        v[free] = np.nan
