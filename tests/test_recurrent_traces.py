"""The recorded traces of the recurrent cache; a changed value is named, a broken one refused."""

from __future__ import annotations

import copy
import json

import pytest

from kvnumba.cli.main import run_command
from kvnumba.errors import StateFormatError
from kvnumba.replay.traces import read_traces, replay_traces

TRACES = "traces/recurrent_llama_cpp_python_0.3.8.jsonl.gz"


def test_all_recorded_traces_agree(golden):
    report = replay_traces(golden / TRACES)
    assert (report.n_traces, report.n_ops) == (37, 1850)
    assert report.n_values > 36_000
    assert report.mismatches == []


def test_the_command_replays_them(capsys, golden):
    assert run_command(["replay", str(golden / TRACES)]) == 0
    out, err = capsys.readouterr()
    assert "37 traces, 1850 operations" in out
    assert "0 mismatches" in out
    assert err == ""


@pytest.fixture(scope="module")
def recorded(golden):
    """Three recorded traces; the tests change copies."""
    traces = read_traces(golden / TRACES)
    return [next(traces) for _ in range(3)]


@pytest.fixture
def traces(recorded):
    return copy.deepcopy(recorded)


def write(path, traces):
    path.write_text("".join(json.dumps(t) + "\n" for t in traces))
    return path


def mismatches(tmp_path, traces):
    report = replay_traces(write(tmp_path / "t.jsonl", traces))
    return [(m.trace, m.op, m.field) for m in report.mismatches]


def first(trace, *names):
    return next((n, o) for n, o in enumerate(trace["ops"]) if o["op"] in names)


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", ["cells", "cells_before_update"])
@pytest.mark.parametrize("key", ["seq_mask", "used", "n_tokens", "max_contiguous"])
def test_a_changed_value_is_named(traces, tmp_path, record, key):
    n, op = first(traces[1], "seq_add")
    if key == "seq_mask":
        op[record][key][2] += 1
    else:
        op[record][key] += 1
    name = f"{record}.{key}" + "[2]" * (key == "seq_mask")
    assert mismatches(tmp_path, traces) == [(1, n, name)]


def test_other_changed_values_are_named(traces, tmp_path):
    n_rm, rm = first(traces[0], "seq_rm")
    rm["result"] = not rm["result"]
    n_decode, decode = first(traces[2], "decode")
    decode["result"] = 1
    decode["seq_pos_max"][0] += 1
    named = [(0, n_rm, "result"), (2, n_decode, "result"), (2, n_decode, "seq_pos_max[0]")]
    assert mismatches(tmp_path, traces) == named


def test_each_position_of_a_cell_in_use_counts_and_no_other(traces, tmp_path):
    """A slip of the recorder is known, so that such cells count, too."""
    ops = traces[2]["ops"]
    n_slips = 0
    for n in range(0, len(ops), 5):
        pos = ops[n]["cells"]["pos"]
        for i, mask in enumerate(ops[n]["cells"]["seq_mask"]):
            ends = [p for s, p in enumerate(ops[n]["seq_pos_max"]) if mask >> s & 1]
            n_slips += pos[i] + 1 in ends
            pos[i] += 1
            wanted = [(0, n, f"cells.pos[{i}]")] if mask else []
            assert mismatches(tmp_path, [{**traces[2], "ops": ops[: n + 1]}]) == wanted
            pos[i] -= 1
    assert n_slips


@pytest.mark.parametrize("key", ["pos", "seq_mask"])
@pytest.mark.parametrize("longer", [False, True])
def test_a_list_of_another_length_is_named(traces, tmp_path, key, longer):
    values = traces[0]["ops"][7]["cells"][key]
    if longer:
        values.append(0)
    else:
        values.pop()
    assert (0, 7, f"cells.{key} length") in mismatches(tmp_path, traces)


# -- shape ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("decode", "result"),
        ("seq_rm", "result"),
        ("seq_add", "cells_before_update"),
        ("seq_div", "cells_before_update"),
        ("seq_cp", "cells"),
        ("seq_keep", "seq_pos_max"),
        ("defrag", "cells"),
    ],
)
def test_a_missing_key_is_named(golden, tmp_path, name, key):
    traces = read_traces(golden / TRACES)
    trace = next(t for t in traces if any(o["op"] == name for o in t["ops"]))
    n, op = first(trace, name)
    del op[key]
    with pytest.raises(StateFormatError, match=f"trace 0, op {n} .*{name}.*{key}"):
        replay_traces(write(tmp_path / "t.jsonl", [trace]))


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o["cells"].__setitem__("pos", "x"),
        lambda o: o["cells"].__delitem__("used"),
        lambda o: o.__setitem__("cells", []),
        lambda o: o.__setitem__("seq_pos_max", 3),
        lambda o: o.__setitem__("seq_ids", [["a"]] * len(o["tokens"])),
        lambda o: o.__setitem__("seq_ids", [[99]] * len(o["tokens"])),
        lambda o: o.__setitem__("seq_ids", [[]] * len(o["tokens"])),
        lambda o: o.__setitem__("tokens", [None] * len(o["tokens"])),
        lambda o: o.__setitem__("pos", [2**31 - 1] * len(o["tokens"])),
        lambda o: o.__setitem__("pos", o["pos"][1:]),
        lambda o: o.pop("pos"),
        lambda o: o.__setitem__("op", ["decode"]),
        lambda o: o.__setitem__("op", "seq_shift"),
        lambda o: o.update(op="seq_rm", seq_id=float("inf"), p0=0, p1=1),
        lambda o: o.update(op="seq_add", seq_id=0, p0=0, p1=9, delta="x"),
        lambda o: o.update(op="seq_div", seq_id=0, p0=0, p1=9, d=0),
    ],
)
def test_malformed_operations_are_refused(traces, tmp_path, change):
    n, op = first(traces[0], "decode")
    change(op)
    with pytest.raises(StateFormatError, match=f"trace 0, op {n} is malformed"):
        replay_traces(write(tmp_path / "t.jsonl", traces))


@pytest.mark.parametrize(
    "sizes",
    [{"n_cells": 2**30}, {"n_cells": "a"}, {"n_seq_max": None}, {"n_cells": 10**40}]
    + [{"n_cells": 2}, {"n_cells": 0}, {"n_cells": 4.0}],
)
def test_impossible_sizes_are_refused(traces, tmp_path, sizes):
    with pytest.raises(StateFormatError, match="trace 0, op 0"):
        replay_traces(write(tmp_path / "t.jsonl", [{**traces[0], **sizes}]))


def test_only_known_kinds_are_replayed(traces, tmp_path):
    traces[1]["kind"] = "window"
    with pytest.raises(StateFormatError, match="'window' cache cannot be replayed"):
        replay_traces(write(tmp_path / "t.jsonl", traces))


def test_both_kinds_may_be_in_one_file(golden, traces, tmp_path):
    unified = next(read_traces(golden / TRACES.replace("recurrent", "unified")))
    report = replay_traces(write(tmp_path / "t.jsonl", [*traces, unified]))
    assert (report.n_traces, report.mismatches) == (4, [])
