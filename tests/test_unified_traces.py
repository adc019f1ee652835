"""The recorded traces of a real llama.cpp, op by op; and a changed value is found and named."""

from __future__ import annotations

import gzip
import json

import pytest

from kvnumba.errors import StateFormatError
from kvnumba.replay.traces import read_traces, replay_traces

TRACES = "traces/unified_llama_cpp_python_0.3.8.jsonl.gz"


def test_all_recorded_traces_agree(golden):
    report = replay_traces(golden / TRACES)
    assert (report.n_traces, report.n_ops) == (40, 3040)
    assert report.n_values > 400_000
    assert report.mismatches == []


def _first(golden, n=3):
    traces = read_traces(golden / TRACES)
    return [next(traces) for _ in range(n)]


def _write(path, traces):
    path.write_text("".join(json.dumps(t) + "\n" for t in traces))
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda o: o["cells"]["pos"].__setitem__(5, 77), "cells.pos[5]"),
        (lambda o: o["cells"]["seq_mask"].__setitem__(0, 9), "cells.seq_mask[0]"),
        (lambda o: o["cells"].__setitem__("used", 31), "cells.used"),
        (lambda o: o["cells"].__setitem__("n_tokens", 99), "cells.n_tokens"),
        (lambda o: o["cells"].__setitem__("max_contiguous", 1), "cells.max_contiguous"),
        (lambda o: o["cells"].__setitem__("max_contiguous_idx", 9), "cells.max_contiguous_idx"),
        (lambda o: o["seq_pos_max"].__setitem__(2, 30), "seq_pos_max[2]"),
    ],
)
def test_a_changed_value_is_named(golden, tmp_path, change, named):
    traces = _first(golden)
    change(traces[1]["ops"][20])
    report = replay_traces(_write(tmp_path / "t.jsonl", traces))
    assert [(m.trace, m.op, m.field) for m in report.mismatches] == [(1, 20, named)]


def test_a_changed_result_is_named(golden, tmp_path):
    traces = _first(golden)
    n, op = next((n, o) for n, o in enumerate(traces[0]["ops"]) if o["op"] == "decode")
    op["result"] = 1 - op["result"]
    report = replay_traces(_write(tmp_path / "t.jsonl", traces))
    assert [(m.trace, m.op, m.field) for m in report.mismatches] == [(0, n, "result")]


def test_cells_before_the_update_are_compared(golden, tmp_path):
    traces = _first(golden, 1)
    n, op = next(
        (n, o)
        for n, o in enumerate(traces[0]["ops"])
        if "cells_before_update" in o and any(o["cells_before_update"]["seq_mask"])
    )
    before = op["cells_before_update"]
    i = next(i for i, mask in enumerate(before["seq_mask"]) if mask)
    before["pos"][i] += 1
    report = replay_traces(_write(tmp_path / "t.jsonl", traces))
    assert [(m.op, m.field) for m in report.mismatches] == [(n, f"cells_before_update.pos[{i}]")]


@pytest.mark.parametrize("op", ["seq_rm", "seq_cp", "seq_keep", "seq_add", "defrag", "clear"])
def test_a_left_out_operation_is_found(golden, tmp_path, op):
    traces = list(read_traces(golden / TRACES))
    for trace in traces:
        trace["ops"] = [o for o in trace["ops"] if o["op"] != op]
    assert replay_traces(_write(tmp_path / "t.jsonl", traces)).mismatches


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json\n",
        b"[1]\n",
        b'{"n_cells": 4, "n_seq_max": 1}\n',
        b'{"n_cells": 4, "n_seq_max": 1, "ops": [{"op": "fly", "cells": {}}]}\n',
        b'{"n_cells": 4, "n_seq_max": 1, "ops": [{"op": "clear"}]}\n',
        b'{"n_cells": 4, "n_seq_max": 1, "ops": [3]}\n',
        b'{"n_cells": 0, "n_seq_max": 1, "ops": []}\n',
        b'{"n_cells": 4, "n_seq_max": 1, "kind": "recurrent", "ops": []}\n',
        b"\xff\xfe",
    ],
)
def test_files_that_are_no_traces(tmp_path, content):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(StateFormatError):
        replay_traces(path)


def test_damaged_gzip(golden, tmp_path):
    data = bytearray((golden / TRACES).read_bytes())
    for damaged in (bytes(data[:5000]), gzip.compress(b"{")[:-3], b"\x1f\x8b" + b"\0" * 30):
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(damaged)
        with pytest.raises(StateFormatError):
            replay_traces(path)
    with pytest.raises(StateFormatError):
        replay_traces(tmp_path / "absent.jsonl")
