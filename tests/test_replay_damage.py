"""Altered and broken recordings: a changed value is named, a broken file is refused."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest

from kvnumba.cli.main import run_command
from kvnumba.errors import ConfigError, ShapeError, StateFormatError
from kvnumba.replay.chains import replay_chain
from kvnumba.replay.traces import read_traces, replay_traces

TRACES = "traces/unified_llama_cpp_python_0.3.8.jsonl.gz"


@pytest.fixture(scope="module")
def recorded(golden):
    """Two recorded traces; the tests change copies."""
    traces = read_traces(golden / TRACES)
    return [next(traces) for _ in range(2)]


@pytest.fixture
def traces(recorded):
    return copy.deepcopy(recorded)


def write(path, traces, end=""):
    path.write_text("".join(json.dumps(t) + "\n" for t in traces) + end)
    return path


def first(trace, *names):
    return next((n, o) for n, o in enumerate(trace["ops"]) if o["op"] in names)


# -- traces: values ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cells", "cells_before_update"])
@pytest.mark.parametrize("key", ["pos", "seq_mask"])
@pytest.mark.parametrize("longer", [False, True])
def test_a_list_of_another_length_is_named(traces, tmp_path, where, key, longer):
    n, op = first(traces[0], "seq_add")
    values = op[where][key]
    n_cells = len(values)
    if longer:
        values.append(-1 if key == "pos" else 0)
    else:
        values.pop()
    report = replay_traces(write(tmp_path / "t.jsonl", traces))
    assert [(m.trace, m.op, m.field, m.got, m.want) for m in report.mismatches] == [
        (0, n, f"{where}.{key} length", n_cells, len(values))
    ]


def test_every_position_before_the_update_counts(golden, tmp_path):
    """Also those of empty cells: free before the operation, or freed by it."""
    seen = set()
    for trace in read_traces(golden / TRACES):
        owned = [0] * trace["n_cells"]
        for n, op in enumerate(trace["ops"]):
            before = op.get("cells_before_update")
            for i in range(trace["n_cells"]) if before else ():
                sort = (op["op"], bool(owned[i]), bool(before["seq_mask"][i]))
                if sort in seen:
                    continue
                seen.add(sort)
                changed = {**trace, "ops": copy.deepcopy(trace["ops"][: n + 1])}
                changed["ops"][n]["cells_before_update"]["pos"][i] += 1
                report = replay_traces(write(tmp_path / "t.jsonl", [changed]))
                assert [(m.op, m.field) for m in report.mismatches] == [
                    (n, f"cells_before_update.pos[{i}]")
                ]
            owned = op["cells"]["seq_mask"]
    assert seen == {
        ("seq_add", False, False),
        ("seq_add", True, False),
        ("seq_add", True, True),
        ("seq_div", False, False),
        ("seq_div", True, True),
    }


# -- traces: shape -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("decode", "result"),
        ("seq_rm", "result"),
        ("seq_add", "cells_before_update"),
        ("seq_div", "cells_before_update"),
        ("seq_cp", "cells"),
        ("seq_keep", "seq_pos_max"),
    ],
)
def test_a_missing_key_is_named(golden, tmp_path, name, key):
    traces = list(read_traces(golden / TRACES))
    trace = next(t for t in traces if any(o["op"] == name for o in t["ops"]))
    n, op = first(trace, name)
    del op[key]
    path = write(tmp_path / "t.jsonl", [trace])
    with pytest.raises(StateFormatError, match=f"trace 0, op {n} .*{name}.*{key}"):
        replay_traces(path)


@pytest.mark.parametrize("key", ["pos", "seq_mask", "used", "n_tokens", "max_contiguous_idx"])
def test_a_missing_figure_of_the_cells_is_refused(traces, tmp_path, key):
    del traces[1]["ops"][7]["cells"][key]
    with pytest.raises(StateFormatError, match=f"trace 1, op 7 .*{key}"):
        replay_traces(write(tmp_path / "t.jsonl", traces))


@pytest.mark.parametrize("ops", [{}, [], None, 3, "ops"])
def test_ops_must_be_a_list_with_something_in_it(traces, tmp_path, ops):
    traces[1]["ops"] = ops
    with pytest.raises(StateFormatError, match="line 2: ops"):
        replay_traces(write(tmp_path / "t.jsonl", traces))


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o["cells"].__setitem__("pos", "x"),
        lambda o: o["cells"].__setitem__("pos", 7),
        lambda o: o["cells"].__setitem__("seq_mask", {}),
        lambda o: o.__setitem__("cells", []),
        lambda o: o.__setitem__("seq_pos_max", 3),
        lambda o: o.__setitem__("seq_ids", [["a"]] * len(o["tokens"])),
        lambda o: o.__setitem__("seq_ids", [[10**30]] * len(o["tokens"])),
        lambda o: o.__setitem__("seq_ids", [[]] * len(o["tokens"])),
        lambda o: o.__setitem__("tokens", "x"),
        lambda o: o.__setitem__("tokens", [None] * len(o["tokens"])),
        lambda o: o.__setitem__("pos", [float("inf")] * len(o["tokens"])),
        lambda o: o.__setitem__("op", ["decode"]),
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
    [{"n_cells": 2**30}, {"n_cells": "a"}, {"n_seq_max": None}, {"n_cells": 10**40}],
)
def test_impossible_sizes_are_refused(traces, tmp_path, sizes):
    with pytest.raises(StateFormatError, match="trace 0, op 0"):
        replay_traces(write(tmp_path / "t.jsonl", [{**traces[0], **sizes}]))


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"n_cells": ' + "9" * 5000 + "}", "{", "\ufeff{}"]
)
def test_lines_that_json_cannot_read(traces, tmp_path, line):
    with pytest.raises(StateFormatError, match="line 3"):
        replay_traces(write(tmp_path / "t.jsonl", traces, line))


@pytest.mark.parametrize("depth", [200, 900, 940])
@pytest.mark.parametrize("key", ["kind", "op", "result", "cells", "seq_pos_max"])
def test_nested_values_do_not_break_the_report(capsys, traces, tmp_path, key, depth):
    """Deep enough, and they can be read but not printed."""
    target = traces[0] if key == "kind" else first(traces[0], "decode")[1]
    target[key] = "DEEP"
    path = write(tmp_path / "t.jsonl", traces)
    path.write_text(path.read_text().replace('"DEEP"', "[" * depth + "]" * depth))
    for more in ([], ["--json"]):
        assert run_command(["replay", str(path), *more]) in (1, 2)
    capsys.readouterr()


def test_blank_lines_only_at_the_end(traces, tmp_path):
    path = write(tmp_path / "t.jsonl", traces, "\n")
    assert replay_traces(path).n_traces == 2
    text = path.read_text()
    path.write_text("\n" + text)
    with pytest.raises(StateFormatError, match="line 1 is blank"):
        replay_traces(path)
    path.write_text("\n")
    with pytest.raises(StateFormatError, match="no traces"):
        replay_traces(path)


# -- chains --------------------------------------------------------------------------------------


@pytest.fixture
def chain(golden, tmp_path):
    """A recorded chain beside its logits and its model; the tests damage it."""
    for file in ("logits/llama-f32.json", "logits/llama-f32.npz", "models/tiny-llama32.gguf"):
        shutil.copy(golden / file, tmp_path)
    return tmp_path / "llama-f32.json"


def change(chain, do):
    values = json.loads(chain.read_text())
    do(values["steps"])
    chain.write_text(json.dumps(values))
    return chain


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"steps": ' + "9" * 5000 + "}",
        '{"steps": []}',
        '{"steps": [3]}',
        '{"steps": [{}]}',
        '{"kv": 3, "model": "tiny-llama32.gguf", "steps": [{"op": "seq_keep", "seq_id": 0}]}',
    ],
)
def test_texts_that_are_no_chain(chain, text):
    chain.write_text(text)
    with pytest.raises(StateFormatError):
        replay_chain(chain)


@pytest.mark.parametrize(
    "do",
    [
        lambda s: s[0].__setitem__("seq_ids", [["a"]] * 40),
        lambda s: s[0].__setitem__("seq_ids", 3),
        lambda s: s[0].__setitem__("pos", "x"),
        lambda s: s[0].__setitem__("tokens", 3),
        lambda s: s[0].__setitem__("tokens", []),
        lambda s: s[1].__setitem__("op", ["decode"]),
        lambda s: s[1].pop("tokens"),
        lambda s: s[1].__setitem__("logits", 3),
        lambda s: s[1].__setitem__("logits", "prefill"),
        lambda s: s[1].__setitem__("logits", "a\0b"),
        lambda s: s[1].__setitem__("logits", "\ud800"),
        lambda s: s[1].__setitem__("logits", "x" * 70_000),
    ],
)
def test_malformed_steps_are_refused(chain, do):
    with pytest.raises((StateFormatError, ShapeError)):
        replay_chain(change(chain, do))


def test_damaged_recorded_logits(chain):
    path = chain.with_suffix(".npz")
    data = path.read_bytes()
    for cut in (0, 10, 500, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(StateFormatError, match="logits"):
            replay_chain(chain)
    for arrays in ({}, {"prefill": np.array(["x"])}, {"prefill": np.array([{}], object)}):
        np.savez(path, **arrays)
        with pytest.raises(StateFormatError, match="logits"):
            replay_chain(chain)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(StateFormatError, match="logits"):
        replay_chain(chain)


def test_logits_left_out_of_the_recording_are_named(chain):
    path = chain.with_suffix(".npz")
    with np.load(path) as data:
        logits = dict(data)
    del logits["fork1"]
    logits["decode0"] = np.zeros_like(logits["decode0"])
    np.savez(path, **logits)
    fields = [m.field for m in replay_chain(chain).mismatches]
    assert fields == ["nmse of decode0", "logits of fork1"]


def test_any_label_can_be_written(chain, tmp_path):
    change(chain, lambda s: [s[n].__setitem__("logits", x) for n, x in enumerate(["file", "a/b"])])
    replay_chain(chain, logits_out=tmp_path / "out")
    with np.load(tmp_path / "out.npz") as data:
        assert data["file"].shape == (40, 96)
        assert data["a/b"].shape == (1, 96)


def test_logits_that_cannot_be_written(chain, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        replay_chain(chain, logits_out=tmp_path / "absent" / "out.npz")
    recorded = chain.with_suffix(".npz")
    before = recorded.read_bytes()
    with pytest.raises(ConfigError, match="recorded"):
        replay_chain(chain, logits_out=recorded)
    assert recorded.read_bytes() == before
