"""Operation traces (``.jsonl`` or ``.jsonl.gz``): every operation is done and compared."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import KVCacheError, NoSlotError, StateFormatError
from kvnumba.replay.operations import (
    compare_cells,
    compare_ends,
    compare_result,
    do_verb,
    has_second_look,
)
from kvnumba.replay.recordings import check_n_cells, read_traces, recorded
from kvnumba.replay.recurrent_traces import replay_recurrent
from kvnumba.replay.report import Report
from kvnumba.unified import UnifiedCache

__all__ = ["read_traces", "replay_traces"]

_MALFORMED = (
    KVCacheError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


def replay_traces(path: str | Path) -> Report:
    """Replay every trace of a file, each on the kind of cache it is about.

    Raises
    ------
    StateFormatError
        If the file is no trace file, or about a kind of cache that does not exist here.
    """
    report = Report()
    for trace in read_traces(path):
        replay = _replayer(trace.get("kind", "unified"), path)
        report.n_ops_here = 0
        try:
            replay(trace, report)
        except _MALFORMED as error:
            what = str(error) if isinstance(error, KVCacheError) else repr(error)
            raise StateFormatError(
                f"{path}: trace {report.n_traces}, op {report.n_ops_here} is malformed: {what}"
            ) from error
        report.n_traces += 1
    if not report.n_traces:
        raise StateFormatError(f"{path} holds no traces")
    return report


def _replayer(kind: Any, path: str | Path) -> Callable[[dict[str, Any], Report], None]:
    if kind == "unified":
        return _replay_unified
    if kind == "recurrent":
        return replay_recurrent
    raise StateFormatError(
        f'{path}: traces of a {reprlib.repr(kind)} cache cannot be replayed; "unified" and '
        '"recurrent" can'
    )


def _replay_unified(trace: dict[str, Any], report: Report) -> None:
    config = CacheConfig(
        n_layer=1,
        n_ctx=trace["n_cells"],
        n_head_kv=1,
        head_dim=2,
        n_seq_max=trace["n_seq_max"],
        type_k="f32",
        type_v="f32",
        rope=RopeConfig(2),
        placement="ring",
    )
    check_n_cells(config.n_ctx)
    with UnifiedCache(config) as cache:
        for n, op in enumerate(trace["ops"]):
            report.n_ops_here = n
            _replay_op(cache, op, report)
        report.n_ops += len(trace["ops"])


def _replay_op(cache: UnifiedCache, op: dict[str, Any], report: Report) -> None:
    """Do one operation; compare its result, the cells before and after the update, the ends."""
    name = op["op"]
    owned = cache.view().seq_ids[:, 0] >= 0 if name == "seq_add" else None
    result = _do(cache, op)
    compare_result(op, result, report)
    if has_second_look(op):
        before = recorded(op, "cells_before_update")
        view = cache.view()
        pos = view.pos + _pending(cache, op, owned)
        compare_cells(view, pos, before, report, "cells_before_update")
        cache.update()
    view = cache.view()
    compare_cells(view, view.pos, recorded(op, "cells"), report, "cells")
    compare_ends(cache, op, report)
    cache.check()


def _pending(cache: UnifiedCache, op: dict[str, Any], owned: Any) -> np.ndarray:
    """Return what the recordings have added to each position before the update, int32.

    That is the shift still to come, once more. A cell that this operation freed carries `delta`
    of a shift that never comes; one that was empty before carries none.
    """
    n = cache.view().n_cells
    out: np.ndarray = cache.cells.shift[:n].copy()
    if owned is not None:
        out[owned & (cache.view().seq_ids[:, 0] < 0)] = op["delta"]
    return out


def _do(cache: UnifiedCache, op: dict[str, Any]) -> bool | int | None:
    if op["op"] == "decode":
        return _decode(cache, op)
    if op["op"] == "defrag":
        cache.defrag()
        cache.update()
        return None
    return do_verb(cache, op)


def _decode(cache: UnifiedCache, op: dict[str, Any]) -> int:
    batch = Batch(op["tokens"], op["pos"], op["seq_ids"])
    try:
        steps = cache.prepare(batch, n_ubatch=max(1, batch.n_tokens))
    except NoSlotError:
        return 1
    row = np.zeros((batch.n_tokens, 2), np.float32)
    for step in steps:
        with step:
            step.write(0, row, row)
    return 0
