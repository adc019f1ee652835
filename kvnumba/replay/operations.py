"""What the operations of all traces have in common, whatever cache they are about."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvnumba.errors import StateFormatError
from kvnumba.replay.recordings import recorded, recorded_list
from kvnumba.replay.report import Report
from kvnumba.view import CacheView


def do_verb(cache: Any, op: dict[str, Any]) -> bool | None:
    """Do an operation that has the same name and arguments in every cache.

    Returns
    -------
    bool or None
        What the call returned.

    Raises
    ------
    StateFormatError
        If there is no such operation.
    """
    name = op["op"]
    if name == "seq_rm":
        removed: bool = cache.seq_rm(op["seq_id"], op["p0"], op["p1"])
        return removed
    if name == "seq_cp":
        cache.seq_cp(op["seq_id_src"], op["seq_id_dst"], op["p0"], op["p1"])
    elif name == "seq_keep":
        cache.seq_keep(op["seq_id"])
    elif name == "seq_add":
        cache.seq_add(op["seq_id"], op["p0"], op["p1"], op["delta"])
    elif name == "seq_div":
        cache.seq_div(op["seq_id"], op["p0"], op["p1"], op["d"])
    elif name == "clear":
        cache.clear()
    else:
        raise StateFormatError(f"operation {name!r} is not known")
    return None


def compare_result(op: dict[str, Any], result: Any, report: Report) -> None:
    """Compare what an operation returned, where that is of interest."""
    if op["op"] in ("decode", "seq_rm") or "result" in op:
        report.compare("result", result, recorded(op, "result"))


def has_second_look(op: dict[str, Any]) -> bool:
    """Whether the cells were also recorded before the update that follows an operation."""
    return op["op"] in ("seq_add", "seq_div") or "cells_before_update" in op


def compare_cells(
    view: CacheView,
    pos: np.ndarray,
    want: dict[str, Any],
    report: Report,
    name: str,
    with_pos: np.ndarray | None = None,
) -> None:
    """Compare the cells with recorded ones.

    Parameters
    ----------
    view : CacheView
    pos : ndarray, shape (n_cells,), int32
        The positions as the recorder saw them.
    want : dict
        The record.
    report : Report
    name : str
        Of the record, for the report.
    with_pos : ndarray, shape (n_cells,), bool, optional
        The cells whose position is of interest. Default: all.
    """
    report.compare(f"{name}.seq_mask", _seq_masks(view.seq_ids), recorded_list(want, "seq_mask"))
    want_pos = recorded_list(want, "pos")
    if with_pos is None or len(want_pos) != len(pos):
        report.compare(f"{name}.pos", pos.tolist(), want_pos)
    else:
        for i in np.flatnonzero(with_pos).tolist():
            report.compare(f"{name}.pos[{i}]", int(pos[i]), want_pos[i])
    for key in ("used", "n_tokens", "max_contiguous", "max_contiguous_idx"):
        report.compare(f"{name}.{key}", int(getattr(view, key)), recorded(want, key))


def compare_ends(cache: Any, op: dict[str, Any], report: Report) -> None:
    """Compare the greatest position of each sequence.

    The reference looks for it from 0 on: neither an empty sequence nor one below 0 shows.
    """
    pos_max = [max(0, cache.seq_pos_max(s)) for s in range(cache.config.n_seq_max)]
    report.compare("seq_pos_max", pos_max, recorded_list(op, "seq_pos_max"))


def _seq_masks(seq_ids: np.ndarray) -> list[int]:
    return [sum(1 << s for s in owners if s >= 0) for owners in seq_ids.tolist()]
