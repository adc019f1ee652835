"""Operation traces (``.jsonl`` or ``.jsonl.gz``): every operation is done and compared."""

from __future__ import annotations

import gzip
import json
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


def read_traces(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the traces of a file, one JSON object a line.

    Raises
    ------
    StateFormatError
        If the file cannot be read or a line is no trace.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for n, line in enumerate(lines, 1):
                trace = json.loads(line)
                if not isinstance(trace, dict) or not {"n_cells", "n_seq_max", "ops"} <= set(trace):
                    raise StateFormatError(
                        f"{path}, line {n}: no trace; n_cells, n_seq_max and ops are wanted"
                    )
                yield trace
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StateFormatError(f"{path} cannot be read as traces: {error}") from None


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
            raise StateFormatError(f"{path}: traces of a {kind} cache cannot be replayed yet")
        try:
            _replay_trace(trace, report)
        except (KVCacheError, KeyError, TypeError, AttributeError) as error:
            raise StateFormatError(
                f"{path}: trace {report.n_traces}, op {report.n_ops_here} is malformed: {error!r}"
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
    with UnifiedCache(config) as cache:
        for n, op in enumerate(trace["ops"]):
            report.n_ops_here = n
            result = _do(cache, op)
            if "result" in op:
                report.compare("result", result, op["result"])
            if "cells_before_update" in op:
                _compare_cells(cache, op["cells_before_update"], report, "cells_before_update")
                cache.update()
            _compare_cells(cache, op["cells"], report, "cells")
            # An empty sequence has the greatest position 0 in the recordings, -1 here.
            pos_max = [max(0, cache.seq_pos_max(s)) for s in range(config.n_seq_max)]
            report.compare("seq_pos_max", pos_max, op["seq_pos_max"])
            cache.check()
        report.n_ops += len(trace["ops"])


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


def _compare_cells(cache: UnifiedCache, want: dict[str, Any], report: Report, name: str) -> None:
    view, cells = cache.view(), cache.cells
    n = view.n_cells
    # Before the update, the recorded positions contain the pending shift a second time, and a
    # freed cell shows the shift that it carried: positions of empty cells say nothing there.
    pending = name != "cells"
    pos = (view.pos + cells.shift[:n]).tolist()
    masks = _seq_masks(view.seq_ids)
    report.compare(f"{name}.seq_mask", masks, want["seq_mask"])
    for i in range(n):
        if masks[i] or not pending:
            report.compare(f"{name}.pos[{i}]", pos[i], want["pos"][i])
    report.compare(f"{name}.used", int(view.used), want["used"])
    report.compare(f"{name}.n_tokens", int(view.n_tokens), want["n_tokens"])
    report.compare(f"{name}.max_contiguous", int(view.max_contiguous), want["max_contiguous"])
    report.compare(
        f"{name}.max_contiguous_idx", int(view.max_contiguous_idx), want["max_contiguous_idx"]
    )


def _seq_masks(seq_ids: np.ndarray) -> list[int]:
    return [sum(1 << s for s in owners if s >= 0) for owners in seq_ids.tolist()]
