"""Products with stored weights against float64, for few and for many tokens."""

from __future__ import annotations

import numpy as np
import pytest
from test_quants import NATIVE, expected, rows_of

from kvnumba.errors import ShapeError
from kvnumba.kernels.jit import JIT
from kvnumba.runner import linear
from kvnumba.runner.kernels.blocks import decode_plain
from kvnumba.runner.linear import Group, Linear, Multiplier

FEW = [1, 2, 3, 4, 5, 9, linear.MAX_NARROW]
MANY = [linear.MAX_NARROW + 1, linear.PANEL, linear.PANEL + 1, 3 * linear.PANEL - 2]


def _product(n: int, linears: list[Linear], n_threads: int = 2) -> tuple[np.ndarray, list]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, linears[0].n_in)).astype(np.float32)
    outs = [np.full((n, m.n_out), np.nan, np.float32) for m in linears]
    Multiplier(n_threads)(x, Group(*linears), tuple(outs))
    return x, outs


def _check(x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    want = x.astype(np.float64) @ weights.astype(np.float64).T
    # rounding grows with the sum of absolute values, whatever cancels
    size = np.abs(x).astype(np.float64) @ np.abs(weights).astype(np.float64).T
    assert (np.abs(out - want) <= 1.5e-6 * size + 1e-30).all()


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("n", FEW + MANY)
def test_products_are_those_of_the_decoded_weights(kind, n):
    rows = rows_of(kind, 53, 96)
    x, (out,) = _product(n, [Linear(rows)])
    _check(x, expected(rows), out)


@pytest.mark.parametrize("kind", [0, 1, 30])
@pytest.mark.parametrize("n", [1, 5, 20])
def test_rows_of_plain_kinds_have_any_length(kind, n):
    for n_in in (1, 31, 67):
        rows = rows_of(kind, 10, n_in)
        x, (out,) = _product(n, [Linear(rows)])
        _check(x, expected(rows), out)


@pytest.mark.parametrize("n_rows", [1, 3, 4, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 4, 20])
def test_every_row_is_computed_by_some_thread(n_rows, n_threads, n, monkeypatch):
    monkeypatch.setattr(linear, "MIN_WORK", 1)
    rows = rows_of(3, n_rows, 64)
    x, (out,) = _product(n, [Linear(rows)], n_threads)
    _check(x, expected(rows), out)


@pytest.mark.parametrize("n", [1, 6, 40])
def test_matrices_of_different_kinds_share_an_input(n):
    linears = [Linear(rows_of(kind, m, 64)) for kind, m in ((3, 48), (8, 7), (0, 16))]
    x, outs = _product(n, linears)
    for m, out in zip(linears, outs, strict=True):
        _check(x, expected(m.rows), out)


def test_blocks_smaller_than_the_matrix_give_the_same(monkeypatch):
    m = Linear(rows_of(3, 53, 96))
    _, (whole,) = _product(40, [m])
    monkeypatch.setattr(linear, "BLOCK_BYTES", 1)
    _, (pieces,) = _product(40, [m])
    np.testing.assert_allclose(pieces, whole, rtol=1e-5, atol=1e-6 * np.abs(whole).max())


def test_working_memory_grows_and_is_used_again():
    multiply = Multiplier(2)
    m, rng = Linear(rows_of(8, 20, 64)), np.random.default_rng(0)
    for n in (40, 20, 100, 30):
        x = rng.standard_normal((n, 64)).astype(np.float32)
        out = np.empty((n, 20), np.float32)
        multiply(x, Group(m), (out,))
        _check(x, expected(m.rows), out)


@pytest.mark.skipif(not JIT, reason="compares compiled code with its plain twin")
@pytest.mark.parametrize("kind", NATIVE)
def test_vector_code_agrees_with_numpy(kind):
    rows = rows_of(kind, 6, 64)
    x, (out,) = _product(4, [Linear(rows)])
    plain = x @ decode_plain(kind, rows.data).reshape(rows.shape).T
    np.testing.assert_allclose(out, plain, rtol=1e-4, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("n", [2, 20])
def test_nan_and_infinity_stay_in_their_token(n):
    rows = rows_of(3, 20, 64)
    x = np.ones((n, 64), np.float32)
    x[0, 5], x[1, 7] = np.nan, np.inf
    out = np.empty((n, 20), np.float32)
    Multiplier(2)(x, Group(Linear(rows)), (out,))
    assert np.isnan(out[0]).all()
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(out[2:]).all()


def test_shapes_are_checked():
    m, multiply = Linear(rows_of(0, 8, 32)), Multiplier(1)
    x, out = np.zeros((2, 32), np.float32), np.zeros((2, 8), np.float32)
    for bad_x, bad_outs in (
        (x[:, :31], (out,)),
        (x, (out[:, :7],)),
        (x[:1], (out,)),
        (x, (out, out)),
        (x, ()),
    ):
        with pytest.raises(ShapeError, match="wanted"):
            multiply(bad_x, Group(m), bad_outs)
    for linears in ([m] * 4, [], [m, Linear(rows_of(0, 8, 33))]):
        with pytest.raises(ShapeError, match="1 to 3"):
            Group(*linears)
