"""Products with weight matrices that stay as the file's bytes; exact float32 arithmetic.

Few tokens: the bytes are read once and decoded in registers. Many tokens: a block of rows is
decoded into the cache for all of them (see `kvnumba.runner.kernels.panels`).
"""

from __future__ import annotations

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
_NO_OUT = np.empty((1, 0), np.float32)


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


_NONE = Linear(Rows(0, (0, 0), 0, np.empty(0, np.uint8)))


class Group:
    """One to three matrices with a common input, and their parts as kernels take them.

    Attributes
    ----------
    linears : tuple of Linear
    n_in : int
    n_outs : tuple of int
    """

    def __init__(self, *linears: Linear):
        if not 1 <= len(linears) <= _SHARED or len({m.n_in for m in linears}) > 1:
            shapes = [m.rows.shape for m in linears]
            raise ShapeError(f"matrices {shapes}; 1 to {_SHARED} with rows of one length wanted")
        self.linears = linears
        self.n_in = linears[0].n_in
        self.n_outs = tuple(m.n_out for m in linears)
        self.n_weights = self.n_in * sum(self.n_outs)
        rows = [m.rows for m in (*linears, *[_NONE] * (_SHARED - len(linears)))]
        self.weights = tuple([r.data for r in rows])
        self.kinds = tuple([r.kind for r in rows])
        self.sizes = tuple([r.row_bytes for r in rows])
        self.no_outs = (_NO_OUT,) * (_SHARED - len(linears))


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

    def __call__(self, x: np.ndarray, group: Group, outs: tuple[np.ndarray, ...]) -> None:
        """Multiply `x` with the matrices of a group.

        Parameters
        ----------
        x : ndarray of float32, shape (n, n_in), C order
        group : Group
        outs : tuple of ndarray of float32, shapes (n, n_out), C order
            Results.

        Raises
        ------
        ShapeError
            If a shape is another one. Types and order are the caller's promise: this is called a
            hundred times per token.
        """
        n, n_in = x.shape
        if n_in != group.n_in or [out.shape for out in outs] != [(n, m) for m in group.n_outs]:
            raise ShapeError(
                f"x is {x.shape}, out {[out.shape for out in outs]}; {(n, group.n_in)} and "
                f"{[(n, m) for m in group.n_outs]} wanted"
            )
        if n <= MAX_NARROW:
            n_parts = max(1, min(self.n_threads, n * group.n_weights // MIN_WORK))
            outs = (*outs, *group.no_outs)
            project_kernel(outs, x, group.weights, group.kinds, group.sizes, n_parts)
            return
        self._pack(x)
        for linear, out in zip(group.linears, outs, strict=True):
            self._wide(linear.rows, out)

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
