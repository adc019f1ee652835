"""A `UnifiedCache` and the oracle side by side: the same calls, then everything compared.

Rows are small float32 vectors made from the oracle's tags, so a row that went astray, was not
copied, or was rotated by the wrong amount shows.
"""

from __future__ import annotations

from functools import cache

import naive
import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import (
    CacheFullError,
    ConfigError,
    NoSlotError,
    PositionError,
    SequenceError,
    ShapeError,
    SharedCellError,
    StepError,
)
from kvnumba.unified import UnifiedCache

ROPES = (RopeConfig(4), RopeConfig(4, "neox", freq_base=500.0), None)
N_HEAD_KV = (1, 2, 1)
HEAD_DIM = (4, 6, 2)
EXPECTED = {
    naive.NeverFitsError: CacheFullError,
    naive.NoSlotError: NoSlotError,
    naive.SharedCellsError: SharedCellError,
    naive.PendingError: StepError,
    naive.BadArgumentError: (SequenceError, PositionError, ShapeError, ConfigError),
}


@cache
def row_of(tag, il, kind, width):
    """The row that a tag stands for, in one layer; `kind` is 0 for K and 1 for V."""
    return np.random.default_rng([tag, il, kind]).standard_normal(width).astype(np.float32)


def rotated(rows, by, il, rope):
    """Rotate K rows of a layer by positions `by`, pair by pair, in float64."""
    out = rows.astype(np.float64)
    if rope is None:
        return out
    for h in range(N_HEAD_KV[il]):
        for j in range(rope.n_rot // 2):
            neox = rope.pairing == "neox"
            a, b = (j, j + rope.n_rot // 2) if neox else (2 * j, 2 * j + 1)
            a, b = a + h * HEAD_DIM[il], b + h * HEAD_DIM[il]
            angle = np.asarray(by, np.float64) * rope.freq_base ** (-2.0 * j / rope.n_rot)
            x, y = out[:, a].copy(), out[:, b].copy()
            out[:, a] = x * np.cos(angle) - y * np.sin(angle)
            out[:, b] = x * np.sin(angle) + y * np.cos(angle)
    return out


def set_bits(words):
    """Return the set bits of uint64 words as booleans, one per bit, lowest first."""
    n_words = words.shape[-1]
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:-1], 8 * n_words)
    return np.unpackbits(octets, axis=-1, bitorder="little").astype(bool)


class Judged:
    """Drives both; `compare` finds any difference."""

    def __init__(
        self,
        n_cells,
        n_seq_max,
        placement,
        shared,
        n_spare=0,
        v_trans=False,
        ropes=ROPES,
    ):
        n_spare, self.ropes = min(n_spare, n_cells - 1), ropes
        config = CacheConfig(
            n_layer=len(ROPES),
            n_ctx=n_cells - n_spare,
            n_spare=n_spare,
            n_head_kv=N_HEAD_KV,
            head_dim=HEAD_DIM,
            n_seq_max=n_seq_max,
            type_k="f32",
            type_v="f32",
            v_trans=v_trans,
            rope=ropes,
            placement=placement,
            shared=shared,
        )
        self.cache = UnifiedCache(config)
        self.oracle = naive.NaiveCells(
            n_cells, n_seq_max, placement, shared, n_ctx=n_cells - n_spare
        )
        self.oracle.rotates = any(ropes)
        self.kept_rows = {}

    def call(self, name, *args):
        """Call a method of both; the results must agree, or both must refuse.

        Returns the oracle's result, or None when it refused.
        """
        try:
            want = getattr(self.oracle, name)(*args)
        except naive.RefusedError as refusal:
            with pytest.raises(EXPECTED[type(refusal)]):
                getattr(self.cache, name)(*args)
            return None
        got = getattr(self.cache, name)(*args)
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == want, name
        return want

    # -- tokens and their rows ----------------------------------------------------------------

    def rows(self, cells, il, kind):
        """Return the rows that the tags in some cells stand for."""
        width = N_HEAD_KV[il] * HEAD_DIM[il]
        tags = [self.oracle.cells[i].tag for i in cells]
        out = [row_of(tag, il, kind, width) for tag in tags]
        return np.array(out, np.float32).reshape(len(tags), width)

    def write(self, cells, write=None):
        """Write K and V of newly placed cells; `write` is a step's method, if there is one."""
        for il in range(len(ROPES)):
            k, v = self.rows(cells, il, 0), self.rows(cells, il, 1)
            if write is None:
                self.cache.layers.write(il, np.array(cells, np.int32), k, v)
            else:
                write(il, k, v)

    def place(self, where, pos, seq_ids, tokens):
        """Place tokens in given cells and write their rows; returns whether it was possible."""
        tag = self.oracle.next_tag
        self.call("place", where, pos, seq_ids, tokens)
        placed = self.oracle.next_tag > tag
        if placed:
            self.write(where)
        return placed

    def prepare(self, pos, seq_ids, n_ubatch, tokens):
        """Prepare a batch in both; returns the real steps and the oracle's plan, or two None."""
        batch = Batch(tokens, pos, seq_ids)
        try:
            want = self.oracle.prepare(pos, seq_ids, n_ubatch)
        except naive.RefusedError as refusal:
            with pytest.raises(EXPECTED[type(refusal)]):
                self.cache.prepare(batch, n_ubatch)
            return None, None
        steps = self.cache.prepare(batch, n_ubatch)
        assert [step.cells.tolist() for step in steps] == want[1]
        return steps, want

    def apply(self, step, where, pos, seq_ids, tokens):
        """Apply one prepared step in both, and write its rows through it."""
        step.apply()
        self.oracle.begin(where)
        self.oracle.place(where, pos, seq_ids, tokens)
        self.write(where, step.write)

    # -- rows that must not matter, and rows that must not change -----------------------------

    def v_rows(self, il):
        """Return V of a layer by cell, whatever its layout."""
        v = self.cache.layers.v[il]
        return v.T if self.cache.config.v_trans else v

    def plant_nan(self):
        """Spoil every row that no cell uses and nothing pins."""
        free = np.array(self.oracle.free_cells(), np.int64)
        for il in range(len(ROPES)):
            self.cache.layers.k[il][free] = np.nan
            self.v_rows(il)[free] = np.nan

    def pin(self, cells):
        """Pin exactly these cells, as a session's commit does; their rows must stay."""
        self.oracle.pinned = set(cells)
        words = np.zeros_like(self.cache.pinned)
        for i in cells:
            words[i // 64] |= np.uint64(1) << np.uint64(i % 64)
        self.cache.pinned[:] = words
        self.kept_rows = {
            il: (self.cache.layers.k[il][cells].copy(), self.v_rows(il)[cells].copy())
            for il in range(len(ROPES))
        }

    def contents(self):
        """Return what each cell holds, to tell whether anything changed."""
        return [(c.pos, c.token, sorted(c.seqs)) for c in self.oracle.cells]

    # -- judgement ----------------------------------------------------------------------------

    def compare(self):
        """Compare every field of every cell, all counts, and all rows in use."""
        self.cache.check()
        self.compare_cells()
        self.compare_counts()
        self.compare_rows()
        self.compare_kept_rows()

    def compare_cells(self):
        """Cells, bitmaps, and nothing beyond the last cell."""
        cells, n = self.cache.cells, self.oracle.n_cells
        want = self.oracle.cells
        assert cells.pos[:n].tolist() == [c.pos for c in want]
        assert cells.shift[:n].tolist() == [c.shift for c in want]
        assert cells.token[:n].tolist() == [c.token for c in want]
        members = set_bits(cells.seq)
        found = {(int(i), int(s)) for s, i in np.argwhere(members)}
        assert found == {(i, s) for i, c in enumerate(want) for s in c.seqs}
        n_owners = members.sum(axis=0)
        assert (set_bits(cells.used) == (n_owners > 0)).all()
        assert (set_bits(cells.shared) == (n_owners > 1)).all()
        assert (cells.pos[n:] == -1).all()
        assert (cells.shift[n:] == 0).all()
        assert (cells.token[n:] == -1).all()

    def compare_counts(self):
        """All that can be asked without an argument, and each sequence's positions."""
        cache, oracle = self.cache, self.oracle
        for name in ("used", "n_tokens", "n_free"):
            assert getattr(cache, name) == getattr(oracle, name), name
        for name in ("pos_max", "cell_max"):
            assert getattr(cache, name)() == getattr(oracle, name)(), name
        for s in {s for c in oracle.cells for s in c.seqs} | {0, oracle.n_seq_max - 1}:
            assert cache.seq_pos_min(s) == oracle.seq_pos_min(s)
            assert cache.seq_pos_max(s) == oracle.seq_pos_max(s)
        assert cache.has_shift or not oracle.has_shift
        assert cache.n_pending == sum(map(len, oracle.pending))
        if oracle.placement == "ring":
            assert cache.search_start == oracle.search_start

    def compare_rows(self):
        """K of each cell is its tag's row, rotated; V is its tag's row, byte for byte."""
        used = self.oracle.members(-1)
        by = [self.oracle.cells[i].rotation for i in used]
        for il in range(len(ROPES)):
            k = rotated(self.rows(used, il, 0), by, il, self.ropes[il])
            np.testing.assert_allclose(self.cache.layers.k[il][used], k, rtol=0, atol=1e-5)
            assert (self.v_rows(il)[used] == self.rows(used, il, 1)).all()

    def compare_kept_rows(self):
        """Rows of pinned cells are as they were, byte for byte."""
        cells = sorted(self.oracle.pinned)
        for il, (k, v) in self.kept_rows.items():
            assert self.cache.layers.k[il][cells].tobytes() == k.tobytes()
            assert np.ascontiguousarray(self.v_rows(il)[cells]).tobytes() == v.tobytes()
