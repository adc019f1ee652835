"""Attention in place against float64 NumPy, and what it must not look at."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from reference import attention, is_hidden, narrow, widen

from kvnumba.kernels import attend
from kvnumba.kernels.attend import Scratch, attend_rows
from kvnumba.kernels.half import KINDS
from kvnumba.kernels.jit import JIT

SHAPES = [(9, 3, 64, 64), (8, 2, 20, 12), (4, 4, 5, 33), (6, 1, 16, 48), (32, 8, 128, 128)]
N_CELLS = (0, 1, 63, 64, 65, 1000) if JIT else (0, 1, 65)
N_QUERIES = (1, 2, 7, 8, 9, 64, 100) if JIT else (1, 2, 9)
TOLERANCE = 4e-6
"""Against the values as stored, so only float32 arithmetic differs, whatever the element type."""


class Case:
    """A cache whose listed cells lie scattered among rows of NaN."""

    def __init__(
        self, n, n_q, shape=(9, 3, 64, 64), kinds=("f16", "f16"), seed=0, order="ascending"
    ):
        self.n_head, self.n_head_kv, self.dk, self.dv = shape
        self.kinds = kinds
        rng = np.random.default_rng(seed)
        n_cells = n + n // 3 + 5
        self.cells = np.sort(rng.permutation(n_cells)[:n]).astype(np.int32)
        self.pos = np.arange(n, dtype=np.int32)
        if order == "shuffled":
            self.pos = rng.permutation(self.pos)
        self.q = rng.standard_normal((n_q, self.n_head, self.dk)).astype(np.float32)
        self.q_pos = (np.arange(n_q) + n - n_q).astype(np.int32)
        self.k, self.v = (
            self._storage(rng, kind, n_cells, d)
            for kind, d in zip(kinds, (self.dk, self.dv), strict=True)
        )

    def _storage(self, rng, kind, n_cells, d):
        values = np.full((n_cells, self.n_head_kv * d), np.nan, np.float32)
        values[self.cells] = rng.standard_normal((self.cells.size, values.shape[1]))
        return narrow(kind, values)

    def run(self, *, v_trans=False, **options):
        out = np.full((*self.q.shape[:2], self.dv), 7, np.float32)
        v = np.ascontiguousarray(self.v.T) if v_trans else self.v
        options.setdefault("scale", self.dk**-0.5)
        attend_rows(
            *self.kinds, self.q, self.k, v, self.n_head_kv, self.cells, self.pos, self.q_pos, out,
            v_trans=v_trans, **options,
        )  # fmt: skip
        return out

    def expected(self, **options):
        options.setdefault("scale", self.dk**-0.5)
        k, v = (widen(kind, a) for kind, a in zip(self.kinds, (self.k, self.v), strict=True))
        return attention(
            self.q, k, v, self.n_head_kv, self.cells, self.pos, self.q_pos, **options
        )  # fmt: skip

    def check(self, v_trans=False, atol=TOLERANCE, **options):
        got = self.run(v_trans=v_trans, **options)
        np.testing.assert_allclose(got, self.expected(**options), rtol=0, atol=atol)


@pytest.mark.parametrize("n", N_CELLS)
@pytest.mark.parametrize("n_q", N_QUERIES)
def test_counts_of_cells_and_queries(n, n_q):
    Case(n, n_q).check()


@pytest.mark.parametrize("shape", SHAPES if JIT else SHAPES[1:4])
@pytest.mark.parametrize("n_q", [1, 3, 20] if JIT else [1, 9])
def test_shapes_of_heads(shape, n_q):
    Case(150 if JIT else 20, n_q, shape).check()


@pytest.mark.parametrize("n_q", [1, 4, 30] if JIT else [1, 9])
@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("kind_v", KINDS)
@pytest.mark.parametrize("kind_k", KINDS)
def test_element_types(kind_k, kind_v, v_trans, n_q):
    Case(70 if JIT else 15, n_q, (6, 2, 20, 24), (kind_k, kind_v)).check(v_trans=v_trans)


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize("window", [0, 1, 10, 64, 5000])
@pytest.mark.parametrize("n_q", [1, 5, 40] if JIT else [1, 9])
def test_windows_and_unsorted_positions(order, window, n_q):
    Case(300 if JIT else 30, n_q, (4, 2, 16, 16), order=order).check(window=window)


RULES = [
    {"window": n, "window_kind": kind, "causal": causal}
    for kind in ("standard", "chunked", "symmetric")
    for causal in (True, False)
    for n in (0, 1, 2, 7, 64, 5000)
    if n or kind == "standard"
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: "-".join(map(str, r.values())))
@pytest.mark.parametrize("n_q", [1, 5, 40] if JIT else [1, 9])
def test_kinds_of_windows(n_q, rule):
    n = 300 if JIT else 30
    case = Case(n, n_q, (4, 2, 16, 16), order="shuffled")
    # queries amid the cells, so that there is a later side
    case.q_pos = np.random.default_rng(n_q).integers(0, n, n_q).astype(np.int32)
    case.check(**rule)


@pytest.mark.parametrize("n_q", [1, 9])
@pytest.mark.parametrize("window", [2**32, 2**40, 2**80])
@pytest.mark.parametrize("kind", ["standard", "chunked", "symmetric"])
def test_a_window_beyond_all_positions_is_none(kind, window, n_q):
    case = Case(20, n_q, (2, 1, 8, 8))
    last = 2**31 - 2
    case.pos, case.q_pos = case.pos * (last // 19), np.full(n_q, last, np.int32)
    case.pos = case.pos.astype(np.int32)
    for causal in (True, False):
        got = case.run(window=window, window_kind=kind, causal=causal)
        np.testing.assert_array_equal(got, case.run())


@pytest.mark.parametrize("n_q", [1, 9] if JIT else [2, 9])
@pytest.mark.parametrize("kind", ["chunked", "symmetric"])
def test_nan_that_a_window_hides_never_shows(kind, n_q):
    rule = {"window": 8, "window_kind": kind, "causal": False}
    case = Case(200 if JIT else 30, n_q, (4, 2, 16, 16))
    case.q_pos[:] = np.arange(n_q) % 4 + 17
    seen = [[not is_hidden(p, q, **rule) for p in case.pos.tolist()] for q in case.q_pos.tolist()]
    clean = case.run(**rule)
    hidden = case.cells[~np.any(seen, axis=0)]
    assert len(hidden)
    case.k[hidden] = case.v[hidden] = narrow("f16", np.full(1, np.nan, np.float32))
    np.testing.assert_allclose(case.run(**rule), clean, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("n_q", [1, 3, 9])
@pytest.mark.parametrize("window", range(9, 22))
def test_window_at_the_edge_of_the_cells(window, n_q):
    Case(20, n_q, (4, 2, 8, 8)).check(window=window)


@pytest.mark.parametrize("n_q", [1, 9])
def test_scores_that_grow_from_tile_to_tile(n_q):
    case = Case(300, n_q, (2, 1, 8, 8), kinds=("f32", "f32"))
    case.k[case.cells] = np.abs(case.k[case.cells]) * np.linspace(0.1, 3, 300)[:, None]
    case.q = np.abs(case.q)
    case.check(scale=1.0, atol=2e-5)


@pytest.mark.parametrize("n_q", [1, 3, 40] if JIT else [1, 9])
def test_soft_cap(n_q):
    case = Case(100 if JIT else 20, n_q, (4, 2, 16, 16))
    case.check(soft_cap=2.0, scale=1.0)
    assert np.abs(case.run(soft_cap=2.0, scale=1.0) - case.expected(scale=1.0)).max() > 0.05


@pytest.mark.parametrize("n_q", [1, 3, 40] if JIT else [1, 9])
def test_large_scores_do_not_overflow(n_q):
    Case(100 if JIT else 20, n_q, (4, 2, 16, 16)).check(scale=40.0, atol=1e-3)  # scores near 500


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("n_q", [1, 2, 8, 9, 40] if JIT else [2, 9])
def test_nan_in_masked_cells_never_shows(n_q, v_trans):
    case = Case(200 if JIT else 20, n_q, (4, 2, 16, 16))
    clean = case.run(v_trans=v_trans)
    # each query's own cell is NaN: only that query and those after it may notice
    future = case.cells[case.pos > case.q_pos[0]]
    case.k[future] = case.v[future] = narrow("f16", np.full(1, np.nan, np.float32))
    got = case.run(v_trans=v_trans)
    np.testing.assert_allclose(got[0], clean[0], rtol=0, atol=TOLERANCE)
    assert n_q == 1 or np.isnan(got[1:]).all()


@pytest.mark.parametrize("n_q", [1, 2, 9] if JIT else [2, 9])
def test_nan_outside_the_window_never_shows(n_q):
    case = Case(200 if JIT else 20, n_q, (4, 2, 16, 16))
    clean = case.run(window=5)
    old = case.cells[case.pos <= case.q_pos[0] - 5]
    case.k[old] = case.v[old] = narrow("f16", np.full(1, np.nan, np.float32))
    np.testing.assert_allclose(case.run(window=5), clean, rtol=0, atol=TOLERANCE)
    assert np.isnan(case.run(window=0)).all()


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("n_q", [1, 3, 40] if JIT else [1, 9])
def test_nan_in_a_visible_cell_shows(which, n_q):
    case = Case(100 if JIT else 20, n_q, (4, 2, 16, 16))
    getattr(case, which)[case.cells[0]] = narrow("f16", np.full(1, np.nan, np.float32))
    case.q_pos[:] = 1000
    assert np.isnan(case.run()).all()


@pytest.mark.parametrize("n_q", [3, 40] if JIT else [2, 9])
def test_a_query_that_sees_nothing_gets_zeros(n_q):
    case = Case(50 if JIT else 20, n_q, (4, 2, 16, 16))
    case.q_pos[0] = -1
    got = case.run()
    assert (got[0] == 0).all()
    np.testing.assert_allclose(got, case.expected(), rtol=0, atol=TOLERANCE)
    case.q_pos[:] = -1
    assert (case.run() == 0).all()


def test_decode_and_prefill_agree(monkeypatch):
    case = Case(150 if JIT else 20, 6, (6, 2, 24, 40))
    decoded = case.run(window=30)
    monkeypatch.setattr(attend, "MAX_DECODE_QUERIES", 0)
    np.testing.assert_allclose(case.run(window=30), decoded, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("n_q", [1, 40] if JIT else [1, 9])
@pytest.mark.parametrize("v_trans", [False, True])
def test_working_memory_does_not_grow_with_cells(n_q, v_trans):
    sizes, peaks = [], []
    for n in (200, 200, 2000) if JIT else (20, 20, 200):
        case = Case(n, n_q, (6, 2, 16, 16))
        v = np.ascontiguousarray(case.v.T) if v_trans else case.v
        out = np.empty((n_q, 6, 16), np.float32)
        scratch = Scratch()
        tracemalloc.start()
        attend_rows(
            "f16", "f16", case.q, case.k, v, 2, case.cells, case.pos, case.q_pos, out, scale=0.25,
            v_trans=v_trans, scratch=scratch,
        )  # fmt: skip
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(scratch.n_bytes)
    assert sizes[1] == sizes[2]
    # the plain twins make NumPy temporaries of up to a tile
    assert peaks[2] < peaks[1] + 20_000 or not JIT


def test_scratch_is_kept_between_calls():
    case, scratch = Case(100 if JIT else 20, 1, (4, 2, 16, 16)), Scratch()
    first = case.run(scratch=scratch)
    held = scratch.n_bytes
    np.testing.assert_array_equal(case.run(scratch=scratch), first)
    assert scratch.n_bytes == held > 0


@pytest.mark.parametrize("n_q", [1, 9])
def test_read_only_storage(n_q):
    case = Case(70 if JIT else 15, n_q, (6, 2, 16, 16))
    for array in (case.k, case.v, case.cells, case.pos, case.q_pos, case.q):
        array.flags.writeable = False
    case.check()
