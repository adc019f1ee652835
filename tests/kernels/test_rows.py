"""Rows and columns go where they should, rounded once, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from reference import narrow, widen

from kvnumba.kernels import half, rows

DTYPE = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}
WIDTHS = (1, 20, 192)


def storage(kind: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return narrow(kind, rng.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("kind", half.KINDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("trans", [False, True])
def test_write_then_read(kind, width, trans):
    rng = np.random.default_rng(1)
    src = rng.standard_normal((7, width)).astype(np.float32)
    cells = np.array([9, 0, 3, 4, 5, 15, 2], np.int32)
    dst = storage(kind, (16, width))
    if trans:
        dst = np.ascontiguousarray(dst.T)
    expected = dst.copy()
    (expected.T if trans else expected)[cells] = narrow(kind, src)
    (rows.write_cols if trans else rows.write_rows)(kind, dst, cells, src)
    assert dst.dtype == DTYPE[kind]
    np.testing.assert_array_equal(dst, expected)

    out = np.empty_like(src)
    (rows.read_cols if trans else rows.read_rows)(half.KINDS[kind], dst, cells, out)
    np.testing.assert_array_equal(out, widen(kind, narrow(kind, src)))


@pytest.mark.parametrize("kind", half.KINDS)
@pytest.mark.parametrize("trans", [False, True])
def test_copy_follows_the_order_of_the_list(kind, trans):
    dst = storage(kind, (12, 24))
    # a chain that reads what it wrote, an overlapping run moved down, a move onto itself, one up
    to = np.array([0, 5, 6, 7, 8, 0, 11, 10], np.int32)
    source = np.array([3, 6, 7, 8, 9, 5, 11, 2], np.int32)
    expected = dst.copy()
    for a, b in zip(to, source, strict=True):
        expected[a] = expected[b]
    if trans:
        dst = np.ascontiguousarray(dst.T)
    (rows.copy_cols if trans else rows.copy_rows)(dst, to, source)
    np.testing.assert_array_equal(dst.T if trans else dst, expected)


@pytest.mark.parametrize("kind", half.KINDS)
def test_empty_lists_change_nothing(kind):
    none = np.empty(0, np.int32)
    dst = storage(kind, (4, 8))
    expected = dst.copy()
    rows.write_rows(kind, dst, none, np.empty((0, 8), np.float32))
    rows.copy_rows(dst, none, none)
    rows.read_rows(kind, dst, none, np.empty((0, 8), np.float32))
    np.testing.assert_array_equal(dst, expected)
