"""The command line as a user drives it: output, exit codes, one line for every error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kvnumba.cli.main import COMMANDS, build_parser, run_command
from kvnumba.cli.map_cells import owner_marks, picture

TRACES = "traces/unified_llama_cpp_python_0.3.8.jsonl.gz"


def run(capsys, *argv):
    """Run a command in this process; return its exit code, stdout and stderr."""
    code = run_command([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys, *argv):
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys, *argv):
    """Run a command that cannot do its work; return its one line."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.fixture
def tiny(golden):
    return golden / "models" / "tiny-llama32.gguf"


# -- the parser ---------------------------------------------------------------------------------


def test_every_command_is_there_and_helps(capsys):
    for command in COMMANDS:
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert command in out
    assert run(capsys, "--version")[1].startswith("kvnumba ")
    assert set(COMMANDS) <= set(str(build_parser().format_help()).replace("\n", " ").split())


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["run", "--n-predict", "x"], ["plan"], ["replay"], ["map"]]
)
def test_bad_usage_is_one_line(capsys, argv):
    refused(capsys, *argv)


def test_module_entry_point():
    done = subprocess.run(
        [sys.executable, "-m", "kvnumba", "replay", "/absent.jsonl"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


# -- replay -------------------------------------------------------------------------------------


def test_replay_traces(capsys, golden):
    out = run_json(capsys, "replay", golden / TRACES)
    assert (out["traces"], out["ops"], out["n_mismatches"]) == (40, 3040, 0)
    code, text, _ = run(capsys, "replay", golden / TRACES)
    assert code == 0
    assert f"{out['values']} values compared, 0 mismatches" in text


def test_replay_names_a_changed_value(capsys, golden, tmp_path):
    import gzip

    lines = gzip.decompress((golden / TRACES).read_bytes()).splitlines()
    trace = json.loads(lines[0])
    trace["ops"][7]["cells"]["used"] += 1
    path = tmp_path / "changed.jsonl"
    path.write_text(json.dumps(trace) + "\n")
    code, out, _ = run(capsys, "replay", path)
    assert code == 1
    assert "trace 0, op 7, cells.used: got" in out
    code, out, _ = run(capsys, "replay", path, "--json")
    assert code == 1
    (mismatch,) = json.loads(out)["mismatches"]
    assert (mismatch["op"], mismatch["field"]) == (7, "cells.used")


def test_replay_refusals(capsys, tmp_path, golden):
    assert "absent" in refused(capsys, "replay", tmp_path / "absent.jsonl")
    trace = tmp_path / "streams.jsonl"
    trace.write_text('{"kind": "streams", "n_cells": 1, "n_seq_max": 1, "ops": [{}]}')
    assert "streams" in refused(capsys, "replay", trace)
    assert "chain" in refused(capsys, "replay", golden / TRACES, "--type-k", "f32")
    assert "chain" in refused(capsys, "replay", golden / "position_cases.json")


@pytest.mark.parametrize("name", ["llama-f32", "llama-f16", "llama-f16-vtrans"])
def test_replay_chain_writes_logits_that_match(capsys, golden, tmp_path, name):
    out = run_json(capsys, "replay", golden / f"logits/{name}.json", "--logits", tmp_path / "o.npz")
    tolerance = 1e-9 if name == "llama-f32" else 1e-5
    with np.load(tmp_path / "o.npz") as got, np.load(golden / f"logits/{name}.npz") as want:
        assert set(got.files) == set(want.files) == set(out["nmse"])
        for label in want.files:
            g, w = (a[label].astype(np.float64).reshape(-1) for a in (got, want))
            assert ((g - w) ** 2).sum() / (w**2).sum() <= tolerance


def test_replay_chain_finds_other_logits(capsys, golden, tmp_path):
    for suffix in (".json", ".npz"):
        shutil.copy(golden / f"logits/llama-f32{suffix}", tmp_path / f"c{suffix}")
    with np.load(tmp_path / "c.npz") as data:
        logits = dict(data)
    logits["after_shift"] = logits["after_shift"] * 1.001
    np.savez(tmp_path / "c.npz", **logits)
    model = golden / "models/tiny-llama32.gguf"
    code, out, _ = run(capsys, "replay", tmp_path / "c.json", "--model", model, "--json")
    assert code == 1
    (mismatch,) = json.loads(out)["mismatches"]
    assert mismatch["field"] == "nmse of after_shift"
    assert "--model" in refused(capsys, "replay", tmp_path / "c.json")


# -- plan ---------------------------------------------------------------------------------------


def test_plan_of_a_model(capsys, tiny):
    out = run_json(capsys, "plan", "--model", tiny, "--n-ctx", 1000, "--type-k", "f32")
    per_token = 2 * 2 * 32 * (4 + 2)
    assert out["per_token_bytes"] == per_token
    assert out["k_bytes"] + out["v_bytes"] == out["total_bytes"] == per_token * 1000
    assert out["read_per_decoded_token_bytes"] == out["total_bytes"]
    code, text, _ = run(capsys, "plan", "--model", tiny, "--n-ctx", 1000)
    assert code == 0
    assert "per token" in text


def test_plan_of_json(capsys, tmp_path):
    ours, theirs = tmp_path / "ours.json", tmp_path / "config.json"
    ours.write_text(json.dumps({"n_layer": 2, "n_ctx": 8, "n_head_kv": 2, "head_dim": 16}))
    theirs.write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 64,
                "max_position_embeddings": 8,
            }
        )
    )
    assert run_json(capsys, "plan", "--config", ours) == run_json(
        capsys, "plan", "--config", theirs
    )
    ours.write_text(json.dumps({"n_layer": 2, "n_ctxx": 8}))
    assert "n_ctxx" in refused(capsys, "plan", "--config", ours)
    ours.write_text("[")
    refused(capsys, "plan", "--config", ours)
    refused(capsys, "plan", "--config", theirs, "--n-ctx", -5)


# -- run ----------------------------------------------------------------------------------------


def tokens_of(*ids):
    return ",".join(map(str, ids))


def test_run_tokens_without_a_session(capsys, tiny):
    out = run_json(capsys, "run", "--model", tiny, "--tokens", "5,6,7", "--n-predict", 4)
    assert out["prompt_tokens"] == [5, 6, 7]
    assert len(out["tokens"]) == 4
    assert (out["n_reused"], out["n_prefilled"], out["text"]) == (0, 3, None)
    assert (out["restore_ms"], out["session"], out["stop"]) == (None, None, "length")
    code, text, _ = run(capsys, "run", "--model", tiny, "--tokens", "5,6,7", "--n-predict", 4)
    assert code == 0
    assert text.split() == [str(t) for t in out["tokens"]]


def test_run_resumes_and_continues_as_if_never_stopped(capsys, tiny, tmp_path):
    prompt = list(range(3, 43))
    base = ["run", "--model", tiny, "--type-k", "f32", "--type-v", "f32"]
    whole = run_json(capsys, *base, "--tokens", tokens_of(*prompt), "--n-predict", 12)
    session = tmp_path / "s"
    first = run_json(
        capsys, *base, "--tokens", tokens_of(*prompt), "--n-predict", 5, "--session", session
    )
    longer = prompt + first["tokens"]
    second = run_json(
        capsys, *base, "--tokens", tokens_of(*longer), "--n-predict", 7, "--session", session
    )
    assert first["tokens"] + second["tokens"] == whole["tokens"]
    assert (second["n_reused"], second["n_prefilled"]) == (44, 1)
    assert second["restore_ms"] > 0


def test_run_reuse_of_same_longer_and_diverging_prompts(capsys, tiny, tmp_path):
    base = ["run", "--model", tiny, "--session", tmp_path / "s", "--n-predict", 2]
    prompt = list(range(3, 23))

    def go(tokens):
        out = run_json(capsys, *base, "--tokens", tokens_of(*tokens))
        return out["n_reused"], out["n_prefilled"], out["n_dropped"] > 0

    assert go(prompt) == (0, 20, False)
    assert go(prompt) == (19, 1, True)  # the stored answer is left out
    assert go([*prompt, 50, 51, 52]) == (20, 3, True)
    assert go([*prompt[:10], 60, 61]) == (10, 2, True)
    code, _, err = run(capsys, *base, "--tokens", tokens_of(*prompt[:5], 70))
    assert code == 0
    assert "diverges from the session after 5 tokens" in err


def test_run_keeps_the_session_s_types_and_grows_it(capsys, tiny, tmp_path):
    base = ["run", "--model", tiny, "--session", tmp_path / "s", "--n-predict", 1]
    run_json(capsys, *base, "--tokens", "1,2,3", "--type-k", "f32", "--n-ctx", 8)
    out = run_json(capsys, *base, "--tokens", "1,2,3,4")
    assert out["n_reused"] == 3
    long = tokens_of(*range(1, 13))
    assert "--n-ctx" in refused(capsys, *base, "--tokens", long)
    assert run_json(capsys, *base, "--tokens", long, "--n-ctx", 16)["n_reused"] == 4


def test_run_stops_when_the_context_is_full(capsys, tiny):
    out = run_json(
        capsys, "run", "--model", tiny, "--tokens", "1,2,3", "--n-ctx", 5, "--n-predict", 9
    )
    assert (len(out["tokens"]), out["stop"]) == (3, "context")


def test_run_refuses_a_session_of_another_model_or_type(capsys, golden, tiny, tmp_path):
    base = ["--session", tmp_path / "s", "--tokens", "1,2,3", "--n-predict", 1]
    run_json(capsys, "run", "--model", tiny, *base)
    before = {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir() if p.stat().st_size < 1e6}
    assert "type_k" in refused(capsys, "run", "--model", tiny, *base, "--type-k", "f32")
    other = golden / "models/tiny-llama.gguf"
    assert "session does not fit" in refused(capsys, "run", "--model", other, *base)
    for name, content in before.items():
        assert (tmp_path / "s" / name).read_bytes() == content


def test_run_refusals(capsys, golden, tiny, tmp_path):
    model = ["run", "--model", tiny]
    not_a_model = tmp_path / "x.gguf"
    not_a_model.write_bytes(b"hello")
    mamba = ["run", "--model", golden / "models/tiny-mamba.gguf", "--tokens", "1"]
    for argv, named in [
        ([*model], "prompt"),
        ([*model, "--prompt", "hi"], "tokenizer"),
        ([*model, "--chat", "--prompt", "hi"], "tokenizer"),
        ([*model, "--tokens", "1,a"], "1,a"),
        ([*model, "--tokens", "1,96"], "96"),
        ([*model, "--tokens", "-1"], "-1"),
        ([*model, "--tokens", ""], "tokens"),
        ([*model, "--tokens", "1", "--prompt", "x"], "--tokens"),
        ([*model, "--tokens", "1", "--n-predict", "-1"], "--n-predict"),
        ([*model, "--tokens", "1", "--temp", "-1"], "temp"),
        ([*model, "--tokens", "1", "--top-p", "2"], "top"),
        ([*model, "--tokens", "1", "--type-k", "q3"], "q3"),
        ([*model, "--tokens", "1", "--n-ctx", "0"], "n_ctx"),
        ([*model, "--file", tmp_path / "absent.txt"], "absent.txt"),
        (["run", "--model", tmp_path / "absent.gguf", "--tokens", "1"], "absent.gguf"),
        (["run", "--model", not_a_model, "--tokens", "1"], "x.gguf"),
        ([*mamba, "--session", tmp_path / "s"], "--session"),
        ([*mamba, "--type-k", "f16"], "--type-k"),
        ([*mamba, "--n-ctx", "0"], "--n-ctx"),
        ([*model, "--tokens", "1", "--session", not_a_model], "x.gguf"),
    ]:
        assert named in refused(capsys, *argv), argv


def test_plan_of_a_recurrent_model(capsys, golden):
    model = golden / "models/tiny-mamba.gguf"
    out = run_json(capsys, "plan", "--model", model, "--n-seq-max", 3)
    # r is 64 x 3 and s 64 x 16 floats, in each of two layers.
    assert out["per_sequence_bytes"] == 2 * 4 * 64 * (3 + 16)
    assert out["total_bytes"] == 3 * out["per_sequence_bytes"]
    assert "--n-ctx" in refused(capsys, "plan", "--model", model, "--n-ctx", 8)


def test_run_of_a_recurrent_model(capsys, golden):
    model = golden / "models/tiny-mamba.gguf"
    base = ["run", "--model", model, "--n-predict", 4]
    out = run_json(capsys, *base, "--tokens", "1,2,3")
    assert len(out["tokens"]) == 4
    assert (out["n_reused"], out["n_prefilled"]) == (0, 3)
    # Greedy decoding goes on as if what was generated had been the prompt.
    more = run_json(capsys, *base, "--tokens", tokens_of(1, 2, 3, *out["tokens"][:2]))
    assert more["tokens"][:2] == out["tokens"][2:]


def test_a_refused_run_makes_and_grows_no_session(capsys, tiny, tmp_path):
    session = tmp_path / "s"
    base = ["run", "--model", tiny, "--session", session]
    refused(capsys, *base, "--chat", "--prompt", "hi")
    refused(capsys, *base, "--tokens", "1,2,3,4", "--n-ctx", 3)
    assert not session.exists()
    run_json(capsys, *base, "--tokens", "1,2,3", "--n-ctx", 8, "--n-predict", 1)
    before = sorted((p.name, p.stat().st_size) for p in session.iterdir())
    refused(capsys, *base, "--tokens", tokens_of(*range(1, 40)), "--n-ctx", 16)
    assert sorted((p.name, p.stat().st_size) for p in session.iterdir()) == before


def test_nobody_reads_the_output(tiny):
    command = (
        f"{sys.executable} -m kvnumba run --model {tiny} --tokens 1 --n-predict 40 | head -c 1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_run_refuses_a_foreign_folder(capsys, tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(capsys, "run", "--model", tiny, "--tokens", "1", "--session", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.model
def test_run_chat_with_a_document(capsys, smollm2_path, tmp_path):
    document = tmp_path / "d.txt"
    document.write_text("The goat of the keeper was called Duchess. She ate the almanac.")
    base = ["run", "--model", smollm2_path, "--session", tmp_path / "s", "--chat"]
    first = run_json(
        capsys, *base, "--file", document, "--prompt", "What was the goat called?",
        "--n-predict", 24,
    )  # fmt: skip
    assert "Duchess" in first["text"]
    second = run_json(capsys, *base, "--prompt", "What did she eat?", "--n-predict", 16)
    held = first["prompt_tokens"] + first["tokens"]
    assert second["prompt_tokens"][: len(held)] == held
    assert second["n_reused"] == len(held) - 1
    assert second["n_dropped"] == 0


# -- map and warmup -----------------------------------------------------------------------------


def test_map_of_a_session(capsys, tiny, tmp_path):
    session = tmp_path / "s"
    base = ["run", "--model", tiny, "--session", session, "--n-ctx", 100, "--n-predict", 1]
    run_json(capsys, *base, "--tokens", "1,2,3")
    out = run_json(capsys, "map", session)
    assert (out["used"], out["n_ctx"]) == (3, 100)
    assert out["cells"].startswith("000.")
    assert out["sequences"] == [{"seq_id": 0, "n_cells": 3, "pos_min": 0, "pos_max": 2}]
    code, text, _ = run(capsys, "map", session)
    assert code == 0
    assert "0 000......" in text
    assert "3 of 100 cells used" in text
    assert "absent" in refused(capsys, "map", tmp_path / "absent")


def test_picture_marks_owners_and_folds_equal_lines():
    seq = np.zeros((11, 2), np.uint64)
    seq[0, 0], seq[10, 0] = 0b0111, 0b0100
    marks = owner_marks(seq, 70)
    assert "".join(marks[:5]) == "00+.."
    assert owner_marks(seq[10:], 4) == [".", ".", "0", "."]
    lines = picture(marks, 8)
    assert lines[0].split() == ["0", "00+....."]
    assert "(the same" in lines[2]
    assert lines[-1].split() == ["64", "......"]


def test_warmup_compiles_every_kernel_of_the_cache(tiny):
    """In a fresh process: which kernels were called is a property of the process."""
    done = subprocess.run(
        [sys.executable, "-m", "kvnumba", "warmup", "--model", str(tiny), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    out = json.loads(done.stdout)
    idle = [name for name in out["not_compiled"] if name.startswith("kernels.")]
    assert idle == []
    assert out["n_kernels"] > 20
