"""Products with weight matrices that stay as the file's bytes; exact float32 arithmetic.

Few tokens: the bytes are read once and decoded in registers. Many tokens: a block of rows is
decoded into the cache for all of them (see `kvnumba.runner.kernels.panels`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvnumba.errors import ShapeError
from kvnumba.runner.kernels.panels import (
    PANEL,
    ROWS,
    block_size,
    multiply_panels_kernel,
    pack_panels_kernel,
)
from kvnumba.runner.kernels.project import project_kernel
from kvnumba.runner.quants import Rows

MAX_NARROW = 10
"""Tokens up to which a panel, mostly empty, would cost more than their dot products."""
MIN_WORK = 1 << 17
"""Products of a weight and a value that are worth another thread."""
BLOCK_BYTES = 192 * 1024
"""Decoded weights of a block: they share a second-level cache of 512 KiB with the panels."""
_SHARED = 3
_NONE = Rows(0, (0, 0), 0, np.frombuffer(b"", np.uint8))


class Linear:
    """A matrix of weights; ``out = x @ weights.T``.

    Attributes
    ----------
    rows : Rows
    n_in, n_out : int
    """

    def __init__(self, rows: Rows):
        data = rows.data.view()
        data.flags.writeable = False  # one type for all weights, so that one kernel serves them
        self.rows = rows._replace(data=data)
        self.n_out, self.n_in = rows.shape


class Multiplier:
    """Multiplies; holds the working memory and knows how many threads there are.

    Not to be used by two Python threads at once.

    Attributes
    ----------
    n_threads : int
    """

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self._panels = self._work = np.empty(0, np.float32)

    def __call__(
        self, x: np.ndarray, linears: Sequence[Linear], outs: Sequence[np.ndarray]
    ) -> None:
        """Multiply `x` with up to three matrices.

        Parameters
        ----------
        x : ndarray of float32, shape (n, n_in), C order
        linears : sequence of Linear
        outs : sequence of ndarray of float32, shapes (n, n_out), C order
            Results.
        """
        _check(x, linears, outs)
        if x.shape[0] <= MAX_NARROW:
            self._narrow(x, linears, outs)
        else:
            self._pack(x)
            for linear, out in zip(linears, outs, strict=True):
                self._wide(linear.rows, out)

    def _narrow(self, x: np.ndarray, linears: Sequence[Linear], outs: Sequence[np.ndarray]) -> None:
        unused = _SHARED - len(linears)
        n_out = sum(linear.n_out for linear in linears)
        n_parts = max(1, min(self.n_threads, x.size * n_out // MIN_WORK))
        rows = [linear.rows for linear in linears] + [_NONE] * unused
        project_kernel(
            (*outs, *[np.empty((len(x), 0), np.float32)] * unused),
            x,
            tuple([r.data for r in rows]),
            tuple([r.kind for r in rows]),
            tuple([r.row_bytes for r in rows]),
            n_parts,
        )

    def _pack(self, x: np.ndarray) -> None:
        n, n_in = x.shape
        size = -(-n // PANEL) * PANEL * n_in
        if self._panels.size < size:
            self._panels = np.empty(size, np.float32)
        pack_panels_kernel(self._panels, x, self.n_threads)

    def _wide(self, rows: Rows, out: np.ndarray) -> None:
        n_rows, n_in = rows.shape
        n_parts = max(1, min(self.n_threads, n_rows // ROWS))
        n_block = max(1, min(BLOCK_BYTES // (4 * n_in), -(-n_rows // n_parts)) // ROWS) * ROWS
        size = block_size(n_block, n_in)
        if self._work.size < n_parts * size:
            self._work = np.empty(n_parts * size, np.float32)
        work = self._work[: n_parts * size].reshape(n_parts, size)
        multiply_panels_kernel(
            out, work, self._panels, rows.data, rows.kind, rows.row_bytes, n_in, n_block, n_parts
        )


def _check(x: np.ndarray, linears: Sequence[Linear], outs: Sequence[np.ndarray]) -> None:
    if not 1 <= len(linears) <= _SHARED or len(linears) != len(outs):
        raise ShapeError(f"{len(linears)} matrices and {len(outs)} results; 1 to {_SHARED} wanted")
    for linear, out in zip(linears, outs, strict=True):
        if x.ndim != 2 or out.shape != (x.shape[0], linear.n_out) or x.shape[1] != linear.n_in:
            raise ShapeError(
                f"x is {x.shape}, the weights are {linear.rows.shape}, out is {out.shape}; "
                "(n, n_in), (n_out, n_in) and (n, n_out) wanted"
            )
        for array in (x, out):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ShapeError("x and out must be float32 in C order")
