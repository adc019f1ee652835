"""Calls by address do what a direct call does, errors included."""

from __future__ import annotations

import numpy as np
import pytest
from numba import types
from numba.core.errors import TypingError

from kvnumba.kernels.indirect import address_of, make_call
from kvnumba.kernels.jit import JIT, njit

TYPES = (types.float64[::1], types.UniTuple(types.int64, 2), types.int64)
call = make_call(TYPES)


@njit()
def _add(values, pair, n):
    if n < 0:
        raise ValueError("n is negative")
    values[n] += pair[0] * pair[1]


@njit()
def _run(function, values, pair, n):
    call(function, (values, pair, n))


@njit()
def _run_short(function, values):
    call(function, (values,))


def test_arguments_arrive():
    values = np.zeros(3)
    _run(address_of(_add, TYPES), values, (6, 7), 1)
    np.testing.assert_array_equal(values, [0, 42, 0])


def test_errors_pass_through():
    with pytest.raises(ValueError, match="n is negative"):
        _run(address_of(_add, TYPES), np.zeros(3), (6, 7), -1)


@pytest.mark.skipif(not JIT, reason="only compiled calls have types")
def test_other_arguments_do_not_compile():
    with pytest.raises(TypingError, match="compiled for"):
        _run_short(address_of(_add, TYPES), np.zeros(3))
    with pytest.raises(TypingError, match="compiled for"):
        _run(address_of(_add, TYPES), np.zeros(3, np.float32), (6, 7), 1)
