"""A `RecurrentCache` and the oracle side by side: the same calls, then everything compared.

The model is a fake one: its states are the oracle's 64-bit numbers, written into rows of small
whole numbers that every element type holds exactly. It goes on from what the cache hands out, so
a state that was lost, swapped, overwritten or wrongly restored shows in all that follows.
"""

from __future__ import annotations

import contextlib

import naive_recurrent as naive
import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.errors import PositionError, SequenceError, SharedCellError, StepError
from kvnumba.recurrent import RecurrentCache
from kvnumba.recurrent_config import RecurrentConfig

WIDTHS = ((8, 9), (10, 8), (8, 0))
"""Values of r and s in each layer; the last layer has no s."""

EXPECTED = {
    naive.PendingError: StepError,
    naive.BadArgumentError: (SequenceError, PositionError),
    naive.SharedStateError: SharedCellError,
}


def row_of(state, width):
    """Return the row of a state: its bytes, then as many of them again as there is room for."""
    octets = np.frombuffer(np.uint64(state).tobytes(), np.uint8)
    return np.resize(octets, width).astype(np.float32)


def state_in(row):
    """Return the state that is in a row."""
    state = int(row[:8].astype(np.uint8).view(np.uint64)[0])
    assert row.tobytes() == row_of(state, len(row)).tobytes()
    return state


class JudgedStates:
    """Drives both; `compare` finds any difference."""

    def __init__(self, n_seq_max, n_rewind=0, shared="move", n_more_cells=0, types=("f32", "f32")):
        r, s = zip(*WIDTHS, strict=True)
        n_cells = n_seq_max + n_more_cells
        config = RecurrentConfig(
            len(WIDTHS), r, s, n_seq_max, n_cells, n_rewind, *types, shared=shared
        )
        self.cache = RecurrentCache(config)
        self.oracle = naive.NaiveStates(n_seq_max, n_rewind, shared)
        self.steps = []  # of the batch at work, as applied
        self.n_tokens = 0  # so far, for tokens that occur once
        self.kept_rows = {}

    # -- the same calls -----------------------------------------------------------------------

    def call(self, name, *args):
        """Call a method of both; the results must agree, or both must refuse.

        Returns the oracle's result, or None when it refused. A refusal changes nothing.
        """
        before = self.everything()
        try:
            want = getattr(self.oracle, name)(*args)
        except naive.RefusedError as refusal:
            with pytest.raises(EXPECTED[type(refusal)]):
                getattr(self.cache, name)(*args)
            assert self.everything() == before
            return None
        got = getattr(self.cache, name)(*args)
        assert got == want, name
        if want is False:
            assert self.everything() == before
        return want

    def seq_rm(self, s, p0, p1):
        """Remove in both; a cache that knows less than the oracle may refuse more."""
        before = self.everything()
        valid = s == -1 or 0 <= s < self.oracle.n_seq_max
        if valid and not self.oracle.is_known(s, p0, p1) and self.cache.refusal(s, p0, p1):
            with contextlib.suppress(StepError):
                assert self.cache.seq_rm(s, p0, p1) is False
            assert self.everything() == before
            return
        refused = valid and self.cache.refusal(s, p0, p1)
        if valid:
            assert self.everything() == before
            assert bool(refused) == self.oracle.refuses(s, p0, p1), refused
        self.call("seq_rm", s, p0, p1)

    def seq_cp(self, src, dst, p0, p1):
        """Copy in both; a cache that knows less than the oracle may refuse more."""
        life = self.oracle.lives.get(src)
        if life is not None and not life.is_known(p0, p1):
            before = self.everything()
            try:
                self.cache.seq_cp(src, dst, p0, p1)
            except (PositionError, SequenceError, StepError):
                assert self.everything() == before
                return
            self.oracle.seq_cp(src, dst, p0, p1)
            return
        self.call("seq_cp", src, dst, p0, p1)

    def move(self, name, s, p0, p1, by):
        """Move positions in both, where it is known whether the range touches the sequence."""
        life = self.oracle.lives.get(s)
        if life is None or life.is_exact or life.hit(p0, p1):
            self.call(name, s, p0, p1, by)

    # -- batches ------------------------------------------------------------------------------

    def fresh_tokens(self, n):
        """Return `n` tokens that did not occur before."""
        self.n_tokens += n
        return list(range(self.n_tokens - n, self.n_tokens))

    def prepare(self, pos, seq_ids, n_ubatch):
        """Prepare a batch; return its steps, or None when it was rightly refused."""
        batch = Batch(self.fresh_tokens(len(seq_ids)), pos, seq_ids)
        before = self.everything()
        try:
            want = self.oracle.counted_on(seq_ids)
            self.oracle.check_none_pending()
        except naive.RefusedError as refusal:
            if pos is None or isinstance(refusal, naive.PendingError):
                with pytest.raises((*EXPECTED[naive.BadArgumentError], StepError)):
                    self.cache.prepare(batch, n_ubatch)
                assert self.everything() == before
                return None
        steps = self.cache.prepare(batch, n_ubatch)
        assert self.everything() == before
        if pos is None and seq_ids:
            assert steps.batch.pos.tolist() == want
        self.check_split(steps, seq_ids, n_ubatch)
        return steps

    def check_split(self, steps, seq_ids, n_ubatch):
        """Every token is in one ubatch; each sequence keeps its order; nothing is too large."""
        order = [t for step in steps for t in step.ubatch.index.tolist()]
        assert sorted(order) == list(range(len(seq_ids)))
        for s in {s for ids in seq_ids for s in ids}:
            mine = [t for t in order if s in seq_ids[t]]
            assert mine == sorted(mine)
        for step in steps:
            assert 0 < step.n_tokens <= n_ubatch
            ids = [s for ids in step.ubatch.seq_sets for s in ids]
            assert len(ids) == len(set(ids))
            assert step.n_states == min(step.n_seq_tokens, self.oracle.depth)

    def apply(self, step, is_first):
        """Apply a step in both, and compute all its layers."""
        before = dict(self.oracle.lives)
        step.apply()
        if is_first:
            self.oracle.begin()
            self.steps = []
        shape = step.n_seqs, step.n_seq_tokens
        tokens = step.batch.tokens.reshape(shape).tolist()
        self.oracle.place(step.ubatch.seq_sets, tokens, step.pos.reshape(shape).tolist())
        self.steps.append(step)
        for il in range(len(WIDTHS)):
            self.compute(step, il, tokens, before)

    def compute(self, step, il, tokens, before):
        """Go on from the states of one layer, which must be those of the lives before."""
        written = []
        for kind, rows in enumerate(step.read(il)):
            out = np.empty((step.n_seqs, step.n_seq_tokens, rows.shape[1]), np.float32)
            for q, ids in enumerate(step.ubatch.seq_sets if rows.shape[1] else ()):
                state = state_in(rows[q])
                life = before.get(ids[0], naive.Life())
                assert state == naive.state_of(life.tokens, il, kind), f"read of {ids}"
                for t, token in enumerate(tokens[q]):
                    state = naive.advance(state, token, il, kind)
                    out[q, t] = row_of(state, rows.shape[1])
            written.append(out[:, step.n_seq_tokens - step.n_states :])
        if step.n_states == 1 and il == 1:
            written = [rows[:, 0] for rows in written]
        step.write(il, written[0], written[1] if WIDTHS[il][1] else None)

    def commit(self, step):
        """Accept a step in both."""
        step.commit()
        self.oracle.accept(self.steps.index(step))

    def rollback(self, step):
        """Undo the last applied step in both; any other one cannot be undone yet."""
        k = self.steps.index(step)
        if k + 1 < len(self.steps):
            before = self.everything()
            with pytest.raises(StepError):
                step.rollback()
            assert self.everything() == before
            return
        step.rollback()
        self.oracle.undo_from(k)
        self.steps.pop()

    def rollback_all(self, steps):
        """Undo the whole batch at work in both."""
        steps.rollback()
        self.oracle.undo_from(0)
        self.steps = []

    def feed(self, pos, seq_ids, n_ubatch=64):
        """Do a whole batch; return its steps, or None."""
        steps = self.prepare(pos, seq_ids, n_ubatch)
        for k, step in enumerate(steps or ()):
            self.apply(step, k == 0)
            self.commit(step)
        return steps

    # -- rows that must not matter ------------------------------------------------------------

    def free_rows(self):
        """Return the rows that the cache would give out."""
        named = self.cache.rows.pinned.copy()
        for holder in (self.cache.cells, *self.cache._applied):
            holder.name_rows(named)
        taken = np.unpackbits(named.view(np.uint8), bitorder="little")
        return np.flatnonzero(taken[: self.cache.config.n_rows] == 0)

    def pin(self):
        """Pin the rows of all kept states, as a session's commit does; they must stay."""
        pinned = self.cache.rows.pinned
        pinned[:] = 0
        self.cache.cells.name_rows(pinned)
        taken = np.unpackbits(pinned.view(np.uint8), bitorder="little")
        self.kept_rows = {int(i): self.bytes_in(i) for i in np.flatnonzero(taken)}

    def bytes_in(self, i):
        """Return a row of all layers as bytes."""
        return b"".join(rows[i].tobytes() for rows in (*self.cache.rows.r, *self.cache.rows.s))

    def spoil_rows(self):
        """Fill rows that the cache would give out next with what no state is."""
        free = self.free_rows()[:40]
        for storage in (*self.cache.rows.r, *self.cache.rows.s):
            if storage.shape[1]:
                storage[free] = 77

    # -- judgement ----------------------------------------------------------------------------

    def everything(self):
        """Return all of the cache as bytes, to tell whether anything changed."""
        cells, rows = self.cache.cells, self.cache.rows
        arrays = [*cells.state, rows.pinned, *rows.r, *rows.s]
        counts = cells.search_start, self.cache.n_pending, self.cache._version
        return [a.tobytes() for a in arrays], counts

    def compare(self):
        """Compare each sequence's states and positions, who shares them, and all counts."""
        self.cache.check()
        cache, oracle = self.cache, self.oracle
        for s in sorted({*oracle.lives, 0, oracle.n_seq_max - 1}):
            self.compare_states(s)
            self.compare_positions(s)
        groups = oracle.groups()
        view = cache.view()
        rows = [[s for s in row if s >= 0] for row in view.seq_ids.tolist()]
        assert sorted(row for row in rows if row) == sorted(groups)
        for row, p in zip(rows, view.pos.tolist(), strict=True):
            assert p == (oracle.lives[row[0]].last if row else -1)
        assert (cache.used, view.used) == (len(groups), len(groups))
        assert (cache.n_tokens, view.n_tokens) == (len(oracle.lives), len(oracle.lives))
        assert cache.n_free == cache.config.n_cells - len(groups)
        pending = [
            step.n_tokens
            for step, (_, is_pending) in zip(self.steps, oracle.applied, strict=False)
            if is_pending
        ]
        assert cache.n_pending == sum(pending)
        for i, octets in self.kept_rows.items():
            assert self.bytes_in(i) == octets

    def compare_states(self, s):
        """The states of a sequence are those of its life, byte for byte."""
        for il, widths in enumerate(WIDTHS):
            for kind, row in enumerate(self.cache.state(il, s)):
                state = self.oracle.state(s, il, kind)
                assert row.tobytes() == row_of(state, widths[kind]).tobytes(), (s, il, kind)

    def compare_positions(self, s):
        """Both ends, and what they promise: each held position in between can be cut back to."""
        low, high = self.cache.seq_pos_min(s), self.cache.seq_pos_max(s)
        assert high == self.oracle.seq_pos_max(s)
        life = self.oracle.lives.get(s)
        if life is None or life.is_exact:
            assert low == self.oracle.seq_pos_min(s)
        if life is not None:
            assert self.oracle.seq_pos_min(s) <= low <= high
        if life is not None and life.is_exact and high == max(life.pos):
            for p in life.pos:
                assert low > p or self.cache.refusal(s, p + 1, -1) is None
        assert self.cache.refusal(s, -1, -1) is None
