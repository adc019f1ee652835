"""Operation traces (``.jsonl`` or ``.jsonl.gz``): every operation is done and compared."""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import KVCacheError, NoSlotError, StateFormatError
from kvnumba.replay.report import Report
from kvnumba.unified import UnifiedCache

# A trace holds the state of every cell after every operation: no recording comes near this.
MAX_CELLS = 1 << 20
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


def read_traces(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the traces of a file, one JSON object a line; blank lines at the end are allowed.

    Raises
    ------
    StateFormatError
        If the file cannot be read or a line is no trace.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    blank = 0
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for n, line in enumerate(lines, 1):
                if not line.strip():
                    blank = blank or n
                    continue
                if blank:
                    raise StateFormatError(f"{path}, line {blank} is blank; a trace is wanted")
                yield _parse_trace(line, f"{path}, line {n}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise StateFormatError(f"{path} cannot be read as traces: {error}") from None


def _parse_trace(line: str, where: str) -> dict[str, Any]:
    try:
        trace = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StateFormatError(f"{where} cannot be read as JSON: {error}") from None
    if not isinstance(trace, dict) or not {"n_cells", "n_seq_max", "ops"} <= set(trace):
        raise StateFormatError(f"{where}: no trace; n_cells, n_seq_max and ops are wanted")
    if not isinstance(trace["ops"], list) or not trace["ops"]:
        raise StateFormatError(f"{where}: ops must be a list of at least one operation")
    return trace


def replay_traces(path: str | Path) -> Report:
    """Replay every trace of a file with ring placement, and compare after each operation.

    Raises
    ------
    StateFormatError
        If the file is no trace file, or of a kind of cache that does not exist here.
    """
    report = Report()
    for trace in read_traces(path):
        kind = trace.get("kind", "unified")
        if kind != "unified":
            raise StateFormatError(
                f"{path}: traces of a {reprlib.repr(kind)} cache cannot be replayed yet"
            )
        report.n_ops_here = 0
        try:
            _replay_trace(trace, report)
        except _MALFORMED as error:
            what = str(error) if isinstance(error, KVCacheError) else repr(error)
            raise StateFormatError(
                f"{path}: trace {report.n_traces}, op {report.n_ops_here} is malformed: {what}"
            ) from error
        report.n_traces += 1
    if not report.n_traces:
        raise StateFormatError(f"{path} holds no traces")
    return report


def _replay_trace(trace: dict[str, Any], report: Report) -> None:
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
    if config.n_ctx > MAX_CELLS:
        raise StateFormatError(f"n_cells {config.n_ctx} is beyond {MAX_CELLS}")
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
    if name in ("decode", "seq_rm") or "result" in op:
        report.compare("result", result, _recorded(op, "result"))
    if name in ("seq_add", "seq_div") or "cells_before_update" in op:
        before = _recorded(op, "cells_before_update")
        _compare_cells(cache, before, report, "cells_before_update", _pending(cache, op, owned))
        cache.update()
    _compare_cells(cache, _recorded(op, "cells"), report, "cells", 0)
    # An empty sequence has the greatest position 0 in the recordings, -1 here.
    pos_max = [max(0, cache.seq_pos_max(s)) for s in range(cache.config.n_seq_max)]
    report.compare("seq_pos_max", pos_max, _list(op, "seq_pos_max"))
    cache.check()


def _recorded(op: dict[str, Any], key: str) -> Any:
    if key not in op:
        raise StateFormatError(f"{op.get('op')!r} lacks the key {key!r}")
    return op[key]


def _list(values: dict[str, Any], key: str) -> list[Any]:
    found = _recorded(values, key)
    if not isinstance(found, list):
        raise StateFormatError(f"{key} is {reprlib.repr(found)}; a list is wanted")
    return found


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
    name = op["op"]
    if name == "decode":
        return _decode(cache, op)
    if name == "seq_rm":
        return cache.seq_rm(op["seq_id"], op["p0"], op["p1"])
    if name == "seq_cp":
        cache.seq_cp(op["seq_id_src"], op["seq_id_dst"], op["p0"], op["p1"])
    elif name == "seq_keep":
        cache.seq_keep(op["seq_id"])
    elif name == "seq_add":
        cache.seq_add(op["seq_id"], op["p0"], op["p1"], op["delta"])
    elif name == "seq_div":
        cache.seq_div(op["seq_id"], op["p0"], op["p1"], op["d"])
    elif name == "defrag":
        cache.defrag()
        cache.update()
    elif name == "clear":
        cache.clear()
    else:
        raise StateFormatError(f"operation {name!r} is not known")
    return None


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


def _compare_cells(
    cache: UnifiedCache, want: dict[str, Any], report: Report, name: str, pending: Any
) -> None:
    view = cache.view()
    report.compare(f"{name}.seq_mask", _seq_masks(view.seq_ids), _list(want, "seq_mask"))
    report.compare(f"{name}.pos", (view.pos + pending).tolist(), _list(want, "pos"))
    for key in ("used", "n_tokens", "max_contiguous", "max_contiguous_idx"):
        report.compare(f"{name}.{key}", int(getattr(view, key)), _recorded(want, key))


def _seq_masks(seq_ids: np.ndarray) -> list[int]:
    return [sum(1 << s for s in owners if s >= 0) for owners in seq_ids.tolist()]
