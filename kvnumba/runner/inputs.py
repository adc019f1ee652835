"""What every forward pass asks of the tokens it is given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvnumba.errors import ConfigError, ShapeError


def checked_rows(
    tokens: np.ndarray,
    pos: np.ndarray,
    rows: Sequence[int] | np.ndarray | None,
    n_vocab: int,
) -> np.ndarray:
    """Return the tokens whose logits are wanted, by index; by default the last.

    Parameters
    ----------
    tokens, pos : ndarray, shape (n,), int32
    rows : sequence of int, optional
    n_vocab : int

    Returns
    -------
    ndarray, shape (len(rows),), int64

    Raises
    ------
    ConfigError, ShapeError
        If a token or row is impossible, or a shape or type is another one.
    """
    n = len(tokens)
    if n == 0 or tokens.shape != (n,) or pos.shape != (n,):
        raise ShapeError(f"tokens are {tokens.shape}, pos {pos.shape}; (n,) of each wanted")
    if tokens.dtype.kind not in "iu" or pos.dtype.kind not in "iu":
        raise ShapeError(f"tokens are {tokens.dtype}, pos {pos.dtype}; int32 wanted")
    if not 0 <= tokens.min() <= tokens.max() < n_vocab:
        raise ConfigError(
            f"tokens {tokens.min()} to {tokens.max()} are not all in the vocabulary, [0, {n_vocab})"
        )
    wanted = np.array([n - 1]) if rows is None else np.asarray(rows, np.int64).reshape(-1)
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < n:
        raise ConfigError(f"rows {wanted.min()} to {wanted.max()} are not all in [0, {n})")
    return wanted
