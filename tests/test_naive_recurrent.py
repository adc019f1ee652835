"""The oracle of recurrent caches is right: it replays what a real llama.cpp did, and by hand."""

from __future__ import annotations

import gzip
import json

from naive_recurrent import SeedCells

GOLDEN_TRACES, GOLDEN_OPS = 37, 1850


def run(cells, op):
    """Run one operation of a trace; returns what the reference's call returned, or None."""
    kind, s, p = op["op"], op.get("seq_id"), (op.get("p0"), op.get("p1"))
    if kind == "decode":
        cells.decode([(pos, *ids) for pos, ids in zip(op["pos"], op["seq_ids"], strict=True)])
        return 0
    if kind == "seq_rm":
        return cells.seq_rm(s, *p)
    if kind == "seq_cp":
        cells.seq_cp(op["seq_id_src"], op["seq_id_dst"])
    elif kind == "seq_keep":
        cells.seq_keep(s)
    elif kind == "seq_add":
        cells.move(s, *p, lambda pos: pos + op["delta"])
    elif kind == "seq_div":
        cells.move(s, *p, lambda pos: pos // op["d"])
    elif kind == "clear":
        cells.clear()
    else:
        assert kind == "defrag"  # means nothing here
    return None


def seen(cells):
    """What the recorder looked at; positions only of cells in use."""
    length, start = cells.longest_hole()
    both = zip(cells.cells, cells.slip, strict=True)
    return {
        "pos": [c.pos + slip if c.seqs else None for c, slip in both],
        "seq_mask": [sum(1 << s for s in c.seqs) for c in cells.cells],
        "used": cells.used,
        "n_tokens": cells.n_tokens,
        "max_contiguous": length,
        "max_contiguous_idx": start,
    }


def recorded(cells):
    """The record, less the positions of cells that are not in use."""
    both = zip(cells["pos"], cells["seq_mask"], strict=True)
    return {**cells, "pos": [p if mask else None for p, mask in both]}


def replay(trace):
    """Replay one trace and compare after each operation; returns their number."""
    cells = SeedCells(trace["n_cells"])
    for number, op in enumerate(trace["ops"]):
        where = f"seed {trace['seed']}, op {number}: {op['op']}"
        assert run(cells, op) == op.get("result"), where
        assert seen(cells) == recorded(op["cells"]), where
        if "cells_before_update" in op:
            assert seen(cells) == recorded(op["cells_before_update"]), where
        # The reference looks for the maximum from 0 on: neither empty nor below 0 shows.
        pos_max = [max(0, cells.seq_pos_max(s)) for s in range(trace["n_seq_max"])]
        assert pos_max == op["seq_pos_max"], where
    return len(trace["ops"])


def test_the_oracle_replays_all_recurrent_traces(golden):
    n_traces = n_ops = 0
    for path in sorted((golden / "traces").glob("recurrent_*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for line in lines:
                n_ops += replay(json.loads(line))
                n_traces += 1
    assert (n_traces, n_ops) == (GOLDEN_TRACES, GOLDEN_OPS)
