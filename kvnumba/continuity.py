"""Whether the positions of a batch follow on what a cache holds; where not, a logged warning."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from kvnumba.batch import Batch

log = logging.getLogger(__name__)


def find_gap(batch: Batch, pos_max: Callable[[int], int]) -> tuple[int, int, int] | None:
    """Return (token, sequence, expected position) of the first token that does not follow on.

    Parameters
    ----------
    batch : Batch
        With positions.
    pos_max : callable
        The last position of a sequence in the cache, -1 when it is empty.
    """
    pos = batch.pos
    assert pos is not None
    of_token = np.repeat(np.arange(batch.n_tokens), np.diff(batch.id_start))
    first: tuple[int, int, int] | None = None
    for s in np.unique(batch.ids).tolist():
        tokens = of_token[batch.ids == s]
        expected = np.empty(len(tokens), np.int64)
        expected[0] = pos_max(s) + 1
        expected[1:] = pos[tokens[:-1]].astype(np.int64) + 1
        wrong = np.flatnonzero(pos[tokens] != expected)
        if len(wrong) and (first is None or tokens[wrong[0]] < first[0]):
            first = int(tokens[wrong[0]]), s, int(expected[wrong[0]])
    return first


def warn_of_gap(batch: Batch, pos_max: Callable[[int], int]) -> None:
    """Log a warning when a batch's positions do not follow on; they are taken as they are."""
    if not log.isEnabledFor(logging.WARNING):
        return
    gap = find_gap(batch, pos_max)
    if gap is not None:
        token, s, expected = gap
        assert batch.pos is not None
        log.warning(
            "token %d has position %d in sequence %d, %d would follow on; it is placed as given "
            "(Batch.validate refuses such batches)",
            token,
            batch.pos[token],
            s,
            expected,
        )
