"""Bitmaps against Python sets."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.kernels import bits


def _bitmap(cells, n_cells):
    out = np.zeros(bits.n_words(n_cells), np.uint64)
    for i in cells:
        out[i // 64] |= np.uint64(1) << np.uint64(i % 64)
    return out


@pytest.mark.parametrize("n_cells", [1, 63, 64, 65, 200])
def test_against_sets(n_cells):
    rng = np.random.default_rng(n_cells)
    for density in (0.0, 0.1, 0.9, 1.0):
        a = set(np.flatnonzero(rng.random(n_cells) < density).tolist())
        b = set(np.flatnonzero(rng.random(n_cells) < density / 2).tolist())
        bits_a, bits_b = _bitmap(a, n_cells), _bitmap(b, n_cells)
        assert bits.count_kernel(bits_a) == len(a)
        out = np.empty(len(a), np.int32)
        assert bits.list_kernel(bits_a, out) == len(a)
        assert out.tolist() == sorted(a)
        assert bits._last_set(bits_a) == max(a, default=-1)
        for start in range(0, n_cells + 1, 7):
            for stop in (start, n_cells // 2, n_cells):
                inside = range(start, stop)
                first_set = min((i for i in inside if i in a | b), default=stop)
                first_clear = min((i for i in inside if i not in a | b), default=stop)
                assert bits._next_set(bits_a, bits_b, start, stop) == first_set
                assert bits._next_clear(bits_a, bits_b, start, stop) == first_clear


@pytest.mark.parametrize("word", [0, 1, 1 << 63, (1 << 64) - 1, 0x0F0F_0000_0000_0000])
def test_words(word):
    w = np.uint64(word)

    assert _popcount(w) == word.bit_count()
    assert _trailing(w) == (64 if not word else (word & -word).bit_length() - 1)
    assert _leading(w) == 64 - word.bit_length()


@bits.njit()
def _popcount(w):
    return bits.popcount(w)


@bits.njit()
def _trailing(w):
    return bits.trailing_zeros(w)


@bits.njit()
def _leading(w):
    return bits.leading_zeros(w)
