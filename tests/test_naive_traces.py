"""The oracle itself is right: it replays what a real llama.cpp did, and the position cases."""

from __future__ import annotations

import gzip
import json

import pytest
from naive import NaiveCells, NoSlotError, SharedCellsError

GOLDEN_TRACES = 40


def decode(cells, op):
    """One `decode` of a trace, as its caller drove the cache; returns 0, or 1 for no slot."""
    cells.update()
    try:
        slot = cells.find_slot(len(op["tokens"]))
    except NoSlotError:
        return 1
    cells.place(slot, op["pos"], op["seq_ids"], op["tokens"])
    cells.commit()
    return 0


def run(cells, op):
    """Run one operation; returns what the reference's call returned, or None."""
    kind, s, p = op["op"], op.get("seq_id"), (op.get("p0"), op.get("p1"))
    if kind == "decode":
        return decode(cells, op)
    if kind == "seq_rm":
        return cells.seq_rm(s, *p)
    if kind == "seq_cp":
        cells.seq_cp(op["seq_id_src"], op["seq_id_dst"], *p)
    elif kind == "seq_keep":
        cells.seq_keep(s)
    elif kind == "seq_add":
        cells.seq_add(s, *p, op["delta"])
    elif kind == "seq_div":
        cells.seq_div(s, *p, op["d"])
    elif kind == "clear":
        cells.clear()
    elif kind == "defrag":
        cells.defrag()
        cells.update()
    else:
        raise AssertionError(kind)
    return None


def seen(cells, with_pending=False):
    """What the recorder looked at; positions only of cells in use when a shift is pending."""
    pos, ids = cells.view(cells.n_seq_max)
    if with_pending:
        pos = [c.pos + c.shift if c.seqs else None for c in cells.cells]
    length, start = cells.longest_hole()
    return {
        "pos": pos,
        "seq_mask": [sum(1 << s for s in row if s >= 0) for row in ids],
        "used": cells.used,
        "n_tokens": cells.n_tokens,
        "max_contiguous": length,
        "max_contiguous_idx": start,
    }


def recorded(cells, with_pending=False):
    """The record, less the positions that the reference leaves in freed cells."""
    out = dict(cells)
    if with_pending:
        both = zip(cells["pos"], cells["seq_mask"], strict=True)
        out["pos"] = [p if mask else None for p, mask in both]
    return out


def test_the_oracle_replays_all_unified_traces(golden):
    n_traces = n_ops = 0
    for path in sorted((golden / "traces").glob("unified_*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for line in lines:
                n_ops += replay(json.loads(line))
                n_traces += 1
    assert n_traces == GOLDEN_TRACES
    assert n_ops > 3000


def replay(trace):
    """Replay one trace and compare after each operation; returns their number."""
    cells = NaiveCells(trace["n_cells"], trace["n_seq_max"], placement="ring")
    for number, op in enumerate(trace["ops"]):
        where = f"seed {trace['seed']}, op {number}: {op['op']}"
        result = run(cells, op)
        assert result == op.get("result"), where
        if "cells_before_update" in op:
            assert seen(cells, True) == recorded(op["cells_before_update"], True), where
            cells.update()
        assert seen(cells) == recorded(op["cells"]), where
        pos_max = [max(0, cells.seq_pos_max(s)) for s in range(trace["n_seq_max"])]
        assert pos_max == op["seq_pos_max"], where
    return len(trace["ops"])


def position_cases(golden):
    return json.loads((golden / "position_cases.json").read_text())


def run_position_op(cells, op):
    """Run one operation of a position case, in the notation of that file."""
    kind, *args = op
    if kind == "f":
        s, p0, p1 = args
        slot = cells.find_slot(p1 - p0)
        cells.place(slot, list(range(p0, p1)), [[s]] * (p1 - p0), list(range(p0, p1)))
        cells.commit()
    elif kind == "r":
        cells.seq_rm(*args)
    elif kind == "c":
        cells.seq_cp(*args)
    elif kind == "k":
        cells.seq_keep(*args)
    elif kind == "a":
        cells.seq_add(*args)
    elif kind == "d":
        cells.seq_div(*args)


def held(cells, seq_id):
    """``[pos, original pos, delta]`` of a sequence by original position (kept as the token)."""
    of = [cells.cells[i] for i in cells.members(seq_id)]
    return sorted(([c.pos, c.token, c.shift] for c in of), key=lambda row: row[1])


def check_case(cells, case):
    """Compare with all that the case says about the end."""
    if "used" in case:
        assert cells.used == case["used"]
    for name in ("want", "must_hold"):
        for s, rows in case.get(name, {}).items():
            assert held(cells, int(s)) == rows
    for s, rows in case.get("forbidden", {}).items():
        assert held(cells, int(s)) != rows
    for n, mode, expected in case.get("slot", []):
        try:
            got = cells.find_slot(n, contiguous=mode == "contig")
        except NoSlotError:
            got = None
        assert got == expected
    if "defrag" in case:
        ids, _ = cells.defrag_plan()
        moves = {i: t for i, t in enumerate(ids) if t not in (i, len(ids))}
        assert len(moves) == case["defrag"]["moves"]
        assert sorted(moves) == case["defrag"]["sources"]
        assert sorted(moves.values()) == case["defrag"]["holes"]


def test_the_oracle_meets_the_position_cases(golden):
    cases = position_cases(golden)
    assert len(cases) == 11
    for case in cases:
        cells = NaiveCells(case["n"], 3, placement="scatter", shared="copy")
        for op in case["ops"]:
            run_position_op(cells, op)
        check_case(cells, case)


def test_sharers_can_be_refused(golden):
    case = next(c for c in position_cases(golden) if c["id"] == "T10")
    cells = NaiveCells(case["n"], 3, placement="scatter", shared="refuse")
    for op in case["ops"][:-1]:
        run_position_op(cells, op)
    before = held(cells, 0), held(cells, 1)
    with pytest.raises(SharedCellsError):
        run_position_op(cells, case["ops"][-1])
    assert (held(cells, 0), held(cells, 1)) == before
