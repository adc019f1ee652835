"""The list of visible cells against a plain filter, across word boundaries."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba.kernels.visible import visible_cells_kernel

INT32 = np.iinfo(np.int32)


def words(members: np.ndarray) -> np.ndarray:
    """Pack booleans to uint64 words, bit ``i % 64`` of word ``i // 64``."""
    padded = np.zeros(-(-members.size // 64) * 64, bool)
    padded[: members.size] = members
    return np.packbits(padded, bitorder="little").view(np.uint64)


@pytest.mark.parametrize("n_cells", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("p_range", [(0, INT32.max), (10, 40), (50, 50), (60, 20), (-5, 0)])
def test_against_a_filter(n_cells, share, p_range):
    rng = np.random.default_rng(n_cells)
    members = rng.random(n_cells) < share
    pos = rng.permutation(n_cells).astype(np.int32)
    pos[~members] = -1
    cells, positions = np.full((2, n_cells), -7, np.int32)
    p_min, p_max = p_range
    n = visible_cells_kernel(words(members), pos, p_min, p_max, cells, positions)
    expected = np.flatnonzero(members & (pos >= p_min) & (pos <= p_max))
    np.testing.assert_array_equal(cells[:n], expected)
    np.testing.assert_array_equal(positions[:n], pos[expected])
    assert (cells[n:] == -7).all()


@pytest.mark.parametrize("bounds", [(0, 63), (1, 63), (0, 62), (64, 127), (60, 70), (5, 5)])
def test_full_words_with_ascending_positions(bounds):
    pos = np.arange(192, dtype=np.int32)
    cells, positions = np.full((2, 192), -7, np.int32)
    n = visible_cells_kernel(words(np.ones(192, bool)), pos, *bounds, cells, positions)
    np.testing.assert_array_equal(cells[:n], np.arange(bounds[0], bounds[1] + 1))
    np.testing.assert_array_equal(positions[:n], cells[:n])


def test_positions_of_other_cells_are_not_looked_at():
    members = np.zeros(130, bool)
    members[[0, 64, 129]] = True
    pos = np.full(130, 5, np.int32)
    cells, positions = np.empty((2, 3), np.int32)
    assert visible_cells_kernel(words(members), pos, 0, 9, cells, positions) == 3
    np.testing.assert_array_equal(cells, [0, 64, 129])
