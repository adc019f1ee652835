"""Slot search against the plain rule, cell by cell."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.kernels import slots
from kvnumba.kernels.bits import n_words


def _bitmap(mask):
    out = np.zeros(n_words(len(mask)), np.uint64)
    for i in np.flatnonzero(mask):
        out[i // 64] |= np.uint64(1) << np.uint64(i % 64)
    return out


def _ring(taken, n_used, n_tokens, start):
    """The reference's search, one cell at a time."""
    size = len(taken)
    if start > n_used + 2 * n_tokens:
        start = 0
    tested = 0
    while True:
        if start + n_tokens > size:
            tested += size - start
            start = 0
            continue
        hit = next((i for i in range(n_tokens) if taken[start + i]), None)
        if hit is None:
            return True, start
        start += hit + 1
        tested += hit + 1
        if tested >= size:
            return False, start


@pytest.mark.parametrize("n_cells", [5, 63, 64, 65, 130])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_ring_is_the_reference_search(n_cells, density):
    rng = np.random.default_rng([n_cells, int(10 * density)])
    none = np.zeros(n_words(n_cells), np.uint64)
    for _ in range(30):
        taken = rng.random(n_cells) < density
        used = _bitmap(taken)
        n_used = int(taken.sum())
        for n_tokens in {1, 2, 5, min(60, n_cells), n_cells}:
            start = int(rng.integers(0, n_cells))
            got = slots.find_ring_kernel(used, none, n_cells, n_used, n_tokens, start)
            assert tuple(map(int, got)) == _ring(taken, n_used, n_tokens, start)


@pytest.mark.parametrize("n_cells", [1, 64, 65, 200])
def test_free_cells_runs_and_holes(n_cells):
    rng = np.random.default_rng(n_cells)
    for density in (0.0, 0.3, 0.8, 1.0):
        used = rng.random(n_cells) < density
        pinned = rng.random(n_cells) < density / 3
        free = np.flatnonzero(~(used | pinned))
        bits = _bitmap(used), _bitmap(pinned)
        for n in {0, 1, 5, len(free), len(free) + 1}:
            out = np.empty(n, np.int32)
            found = slots.find_free_kernel(*bits, n_cells, out)
            assert out[:found].tolist() == free[:n].tolist()
        starts = [i for i in range(n_cells - 2) if not (used | pinned)[i : i + 3].any()]
        got = slots.find_run_kernel(*bits, n_cells, 3)
        assert got == (starts[0] if starts else -1)
        run, start = slots.longest_free_run_kernel(bits[0], n_cells)
        holes = "".join("u" if u else "." for u in used).split("u")
        longest = max(map(len, holes))
        assert run == longest
        text = "".join("u" if u else "." for u in used)
        assert start == (text.find("." * longest) if longest else -1)
