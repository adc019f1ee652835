"""`Ubatch`, and the order of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.errors import ConfigError, ShapeError


@dataclass(frozen=True, eq=False, slots=True)
class Ubatch:
    """Tokens of a batch that are placed and computed together.

    Attributes
    ----------
    batch : Batch
        The tokens.
    index : ndarray, shape (n_tokens,), int64
        Their numbers in the whole batch.
    n_seqs, n_seq_tokens : int
        The tokens are `n_seqs` sequences of `n_seq_tokens` each, one after the other.
    is_equal : bool
        Whether each of those sequences has the same ids all along, and no two share one. If not
        (`split_simple`), each token counts as a sequence.
    seq_sets : tuple of tuple of int
        If `is_equal`: the ids of each of the `n_seqs` sequences, ascending; else empty.
    """

    batch: Batch
    index: np.ndarray
    n_seqs: int
    n_seq_tokens: int
    is_equal: bool
    seq_sets: tuple[tuple[int, ...], ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.index)


def stretch(batch: Batch, start: int, stop: int, ids: tuple[int, ...] | None) -> Ubatch:
    """Return the tokens ``[start, stop)``: one sequence with `ids`, or each token for itself."""
    n = stop - start
    index = np.arange(start, stop)
    if ids is None:
        return Ubatch(batch.part(start, stop), index, n, 1, False, ())
    return Ubatch(batch.part(start, stop), index, 1, n, True, (ids,))


def output_index(ubatches: Sequence[Ubatch]) -> np.ndarray:
    """Return the batch's output tokens in the order in which the ubatches give results, int64."""
    chosen = [u.index[u.batch.outputs] for u in ubatches]
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)


def in_batch_order(rows: Any, ubatches: Sequence[Ubatch]) -> np.ndarray:
    """Sort results back into the order of the batch.

    Parameters
    ----------
    rows : array_like, shape (n_outputs, ...)
        Results of the output tokens as the ubatches gave them, one after the other.
    ubatches : sequence of Ubatch

    Raises
    ------
    ShapeError
        If there are not as many rows as output tokens.
    """
    rows, index = np.asarray(rows), output_index(ubatches)
    if rows.ndim == 0 or len(rows) != len(index):
        n = "no" if rows.ndim == 0 else len(rows)
        raise ShapeError(f"{n} rows for {len(index)} outputs; give one row for each, in order")
    ordered: np.ndarray = rows[np.argsort(index)]
    return ordered


def check_sizes(n_ubatch: Any, keep_tail: Any) -> None:
    for name, value, least in (("n_ubatch", n_ubatch, 1), ("keep_tail", keep_tail, 0)):
        is_int = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
        if not is_int or value < least:
            raise ConfigError(f"{name} {value!r} must be a whole number of at least {least}")
    if keep_tail >= n_ubatch:
        raise ConfigError(
            f"keep_tail {keep_tail} must be less than n_ubatch {n_ubatch}; raise n_ubatch or keep "
            "fewer states"
        )
