"""Operation traces on the recurrent cache, under the rules of their time (``rules="seed"``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvnumba.batch import Batch, int32_array
from kvnumba.errors import NoSlotError
from kvnumba.recurrent import RecurrentCache
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.replay.operations import (
    compare_cells,
    compare_ends,
    compare_result,
    do_verb,
    has_second_look,
)
from kvnumba.replay.recordings import MAX_CELLS, check_n_cells, recorded
from kvnumba.replay.report import Report


def replay_recurrent(trace: dict[str, Any], report: Report) -> None:
    """Replay one trace, and compare after each operation.

    Parameters
    ----------
    trace : dict
    report : Report
        Modified in place.

    Raises
    ------
    KVCacheError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError
        If the trace is malformed.
    """
    check_n_cells(trace["n_cells"])
    config = RecurrentConfig(
        n_layer=1,
        n_embd_r=1,
        n_embd_s=1,
        n_seq_max=trace["n_seq_max"],
        n_cells=trace["n_cells"],
        n_batch=MAX_CELLS,
    )
    with RecurrentCache(config, rules="seed") as cache:
        slip = np.zeros(trace["n_cells"], np.int32)
        for n, op in enumerate(trace["ops"]):
            report.n_ops_here = n
            _replay_op(cache, op, slip, report)
        report.n_ops += len(trace["ops"])


def _replay_op(cache: RecurrentCache, op: dict[str, Any], slip: np.ndarray, report: Report) -> None:
    """Do one operation; compare its result, the cells before and after the update, the ends.

    ``slip[n_cells]`` (modified in place) is what the recorder added to each cell's position: -1
    for good once a copy took the last sequence out of the cell, for there the reference left a
    shift of -1 behind.
    """
    used = _used(cache)
    result = _do(cache, op)
    if op["op"] == "seq_cp":
        slip[used & ~_used(cache)] = -1
    compare_result(op, result, report)
    names = ["cells_before_update", "cells"] if has_second_look(op) else ["cells"]
    for name in names:
        view = cache.view()
        want = recorded(op, name)
        compare_cells(view, view.pos + slip, want, report, name, _used(cache))
        cache.update()
    compare_ends(cache, op, report)
    cache.check()


def _used(cache: RecurrentCache) -> np.ndarray:
    """Return which cells have a sequence, shape ``(n_cells,)``, bool."""
    used: np.ndarray = cache.view(1).seq_ids[:, 0] >= 0
    return used


def _do(cache: RecurrentCache, op: dict[str, Any]) -> bool | int | None:
    if op["op"] == "decode":
        return _decode(cache, op)
    if op["op"] == "defrag":  # there is nothing to be gathered
        cache.update()
        return None
    return do_verb(cache, op)


def _decode(cache: RecurrentCache, op: dict[str, Any]) -> int:
    batch = _batch_of(op)
    try:
        steps = cache.prepare(batch, n_ubatch=max(1, batch.n_tokens))
    except NoSlotError:
        return 1
    for step in steps:
        with step:
            states = np.zeros((step.n_seqs, step.n_states, 1), np.float32)
            step.write(0, states, states)
    return 0


def _batch_of(op: dict[str, Any]) -> Batch:
    """Return the batch of a decode. Recorded positions may be below 0, which `Batch` refuses."""
    pos = int32_array(op["pos"], "pos")
    batch = Batch(op["tokens"], np.maximum(pos, 0), op["seq_ids"])
    batch.pos = pos
    return batch
