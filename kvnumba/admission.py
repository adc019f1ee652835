"""What every cache asks of a batch before it is split: a size, and positions that follow on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.cells import is_whole
from kvnumba.errors import ConfigError, SequenceError, ShapeError
from kvnumba.extra_positions import check_sections

log = logging.getLogger(__name__)
MAX_N_POS = 4


def checked_batch(batch: Batch | Any, n_ubatch: Any, config: Any) -> tuple[Batch, int]:
    """Return a batch and the most tokens of a step, as a cache's `prepare` was given them.

    Parameters
    ----------
    batch : Batch or array_like of int
        Bare token ids continue sequence 0.
    n_ubatch : int or None
        None: ``config.n_ubatch``.
    config : object
        With ``n_batch``, ``n_ubatch`` and ``n_seq_max``, and ``n_pos`` where it keeps positions.

    Raises
    ------
    ConfigError, ShapeError, SequenceError, PositionError
        If `n_ubatch` is no count, or the batch is too large, names an impossible sequence, or has
        more positions per token than the cache keeps.
    """
    batch = batch if isinstance(batch, Batch) else Batch(batch)
    n_ubatch = config.n_ubatch if n_ubatch is None else n_ubatch
    if not is_whole(n_ubatch) or n_ubatch < 1:
        raise ConfigError(f"n_ubatch {n_ubatch!r} must be a whole number of at least 1")
    if batch.n_tokens > config.n_batch:
        raise ShapeError(
            f"a batch of {batch.n_tokens} tokens is larger than n_batch {config.n_batch}; "
            "split it or raise n_batch"
        )
    bad = np.flatnonzero(batch.ids >= config.n_seq_max)
    if len(bad):
        token = int(np.searchsorted(batch.id_start, bad[0], side="right")) - 1
        raise SequenceError(
            f"token {token}: seq_id {batch.ids[bad[0]]} is outside [0, {config.n_seq_max}); raise "
            "n_seq_max in the configuration"
        )
    check_sections(batch.sections, getattr(config, "n_pos", MAX_N_POS))
    return batch, int(n_ubatch)


def with_positions(batch: Batch, pos_max: Callable[[int], int], n_pos: int = 1) -> Batch:
    """Return the batch with positions: counting on, or as given, with a warning of a gap.

    With several positions per token gaps are usual: what follows an image begins beyond its width
    and height.
    """
    if batch.pos is None:
        return batch.filled(pos_max)
    if n_pos == 1:
        warn_of_gap(batch, pos_max)
    return batch


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
