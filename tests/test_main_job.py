"""The main job as a whole: resumed sessions are in use, equal to unbroken runs, and survive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvnumba.runner.generate import Generator
from kvnumba.runner.loading import Model
from kvnumba.runner.sampling import Sampler
from kvnumba.store.session import Session
from kvnumba.unified import UnifiedCache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions need Linux")
PROMPT = np.arange(3, 93, dtype=np.int32)


@pytest.fixture(scope="module")
def tiny_path():
    return Path(__file__).parent / "golden" / "models" / "tiny-llama32.gguf"


@pytest.fixture(scope="module")
def tiny(tiny_path):
    return Model(tiny_path)


def config_of(model, **changes):
    values = {"n_ctx": 200, "type_k": "f32", "type_v": "f32", "n_ubatch": 32}
    return model.net.config(**{**values, **changes})


def create(model, path, **changes):
    config = config_of(model, **changes)
    return Session.create(path, config, model.fingerprint(config))


def generate(model, session, prompt, n_predict, **options):
    sampler = options.pop("sampler", None) or Sampler()
    return Generator(model.net, session.cache, session).run(
        np.asarray(prompt, np.int32), n_predict, sampler, frozenset(), **options
    )


def unbroken(model, prompt, n_predict, sampler=None):
    cache = UnifiedCache(config_of(model))
    return Generator(model.net, cache).run(prompt, n_predict, sampler or Sampler(), frozenset())


# -- a restore is in use ------------------------------------------------------------------------


def test_only_the_rest_of_the_prompt_enters_the_first_product(tiny, tmp_path):
    with create(tiny, tmp_path / "s") as session:
        before = tiny.net.n_rows_computed
        generate(tiny, session, PROMPT, 1)
        assert tiny.net.n_rows_computed - before == 90
    with Session.open(tmp_path / "s") as session:
        for prompt, n_rows in ((PROMPT, 1), ([*PROMPT, 5, 6, 7], 3), ([*PROMPT[:40], 9], 1)):
            before = tiny.net.n_rows_computed
            generate(tiny, session, prompt, 1)
            assert tiny.net.n_rows_computed - before == n_rows


@pytest.mark.parametrize("which", ["k", "v"])
def test_poisoned_rows_of_a_session_poison_what_follows(tiny, tmp_path, which):
    with create(tiny, tmp_path / "s") as session:
        generate(tiny, session, PROMPT, 1)
        cells = session.cache.cells.members(0)
        getattr(session.cache.layers, which)[0][cells[7]] = np.nan
        session.commit()
    with Session.open(tmp_path / "s") as session:
        generator = Generator(tiny.net, session.cache, session)
        logits = generator._forward(np.array([5], np.int32), len(PROMPT))
        assert np.isnan(logits).all()


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_stopping_after_any_token_changes_nothing(tiny, tmp_path, temperature):
    want = unbroken(tiny, PROMPT, 12, Sampler(temperature, seed=3)).tokens
    create(tiny, tmp_path / "s").close()
    got: list[int] = []
    for n in (3, 1, 1, 7):
        with Session.open(tmp_path / "s") as session:
            sampler = Sampler(temperature, seed=3)
            got += generate(tiny, session, [*PROMPT, *got], n, sampler=sampler).tokens
    assert got == want


def test_the_last_token_without_a_cell_is_kept(tiny, tmp_path):
    with create(tiny, tmp_path / "s") as session:
        tokens = generate(tiny, session, PROMPT, 4).tokens
    with Session.open(tmp_path / "s") as session:
        held = Generator(tiny.net, session.cache, session).held_tokens()
        assert held.tolist() == [*PROMPT.tolist(), *tokens]
        assert session.tokens(0).tolist() == held[:-1].tolist()


@pytest.mark.parametrize("type_kv", ["f32", "f16", "bf16"])
def test_range_removal_and_shift_in_a_session(tiny, tmp_path, type_kv):
    """A context shift, committed and reopened, decodes as the same one in plain memory."""
    cache = UnifiedCache(config_of(tiny, type_k=type_kv, type_v=type_kv))
    with create(tiny, tmp_path / "s", type_k=type_kv, type_v=type_kv) as session:
        for generator in (
            Generator(tiny.net, cache),
            Generator(tiny.net, session.cache, session),
        ):
            generator.run(PROMPT, 1, Sampler(), frozenset())
            generator.cache.seq_rm(0, 10, 40)
            generator.cache.seq_add(0, 40, -1, -30)
        session.commit()
    with Session.open(tmp_path / "s") as session:
        assert session.cache.seq_pos_max(0) == cache.seq_pos_max(0) == 59
        token = np.array([11], np.int32)
        logits = [Generator(tiny.net, c)._forward(token, 60) for c in (cache, session.cache)]
        np.testing.assert_array_equal(*logits)


# -- interruptions ------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_ubatches_that_are_done(tiny, tmp_path):
    def interrupt(n_done, n_total):
        if n_done == 64:
            raise KeyboardInterrupt

    with create(tiny, tmp_path / "s") as session:
        result = generate(tiny, session, PROMPT, 4, on_prefill=interrupt)
        assert result.stop == "interrupted"
        assert session.cache.n_pending == 0
    with Session.open(tmp_path / "s") as session:
        assert session.tokens(0).tolist() == PROMPT[:64].tolist()
        assert generate(tiny, session, PROMPT, 3).tokens == unbroken(tiny, PROMPT, 3).tokens


@pytest.mark.parametrize("n_lines", range(1, 400, 7))
def test_ctrl_c_at_any_line_keeps_every_token_once(tiny, tmp_path, n_lines):
    """KeyboardInterrupt at the n-th line of the generator's own code while decoding."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(("generate.py", "steps.py", "unified.py")):
            return None
        if event == "line":
            seen += 1
            if seen == n_lines:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    with create(tiny, tmp_path / "s") as session:
        generator = Generator(tiny.net, session.cache, session)
        before = sys.gettrace()

        def start(token):
            if sys.gettrace() is before:
                sys.settrace(trace)

        try:
            result = generator.run(PROMPT, 6, Sampler(), frozenset(), on_token=start)
        except KeyboardInterrupt:  # outside of the part that answers it
            pytest.skip("the line is not one of the run's")
        finally:
            sys.settrace(before)
        held = generator.held_tokens().tolist()
        stream = [*PROMPT.tolist(), *unbroken(tiny, PROMPT, 6).tokens]
        assert held == stream[: len(held)]
        assert held == [*PROMPT.tolist(), *result.tokens]
        assert session.cache.n_pending == 0


_KILLED = """
import os, signal, sys
import numpy as np
from kvnumba.runner.generate import Generator
from kvnumba.runner.loading import Model
from kvnumba.runner.sampling import Sampler
from kvnumba.store.session import Session

model, path, when = Model(sys.argv[1]), sys.argv[2], sys.argv[3]
config = model.net.config(n_ctx=200, type_k="f32", type_v="f32", n_ubatch=32)
session = Session.create(path, config, model.fingerprint(config))
generator = Generator(model.net, session.cache, session)
prompt = np.arange(3, 93, dtype=np.int32)


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


if when == "prefill":  # in the middle of the third ubatch
    attend, n = session.cache.reader.attend, 0

    def count(*args, **options):
        global n
        n += 1
        if n == 6:
            kill()
        return attend(*args, **options)

    session.cache.reader.attend = count
    generator.run(prompt, 1, Sampler(), frozenset())
generator.run(prompt, 1, Sampler(), frozenset())
if when == "decode":
    tokens = []

    def stop(token):
        tokens.append(token)
        if len(tokens) == 5:
            kill()

    generator.run(prompt, 9, Sampler(), frozenset(), on_token=stop)
session.cache.seq_rm(0, 50, -1)
if when == "refill":
    generator._forward(np.full(30, 7, np.int32), 50)
    kill()
session.cache.seq_add(0, 20, -1, 3)
turn, n_layers = session.cache.layers._turn, 0
def shift(*args):
    global n_layers
    n_layers += 1
    if n_layers == 2:
        kill()
    turn(*args)
session.cache.layers._turn = shift
session.commit()
"""


@pytest.mark.parametrize(
    ("when", "n_held"), [("prefill", 64), ("decode", 94), ("refill", 90), ("shift", 90)]
)
def test_kill_9_leaves_the_last_commit(tiny, tiny_path, tmp_path, when, n_held):
    path = tmp_path / "s"
    done = subprocess.run([sys.executable, "-c", _KILLED, tiny_path, path, when], check=False)
    assert done.returncode == -signal.SIGKILL
    want = unbroken(tiny, PROMPT, 8)
    stream = [*PROMPT.tolist(), *want.tokens]
    with Session.open(path) as session:
        assert session.tokens(0).tolist() == stream[:n_held]
        session.cache.check()
        result = generate(tiny, session, PROMPT, 8)
        assert result.n_reused == min(n_held, 89)
        assert result.tokens == want.tokens


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_loses_nothing(tiny_path, small_disk):
    command = [sys.executable, "-m", "kvnumba", "run", "--model", tiny_path, "--json"]
    command += ["--session", small_disk / "s", "--n-ctx", "20000", "--n-predict", "1"]
    few, many = ",".join(["3"] * 10), ",".join(["3"] * 1500)

    def run(tokens):
        return subprocess.run([*command, "--tokens", tokens], capture_output=True, text=True)

    assert run(few).returncode == 0
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    full = run(many)
    assert (full.returncode, full.stdout) == (2, ""), full.stderr
    assert full.stderr.count("\n") == 1
    assert "room" in full.stderr or "space" in full.stderr or "full" in full.stderr
    assert Session.inspect(small_disk / "s").cells.tokens_of(0).tolist() == [3] * 10
    filler.unlink()
    again = run(many)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["n_reused"] == 10


@pytest.mark.model
def test_sigint_while_reading(smollm2_path, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("The sea was calm and the light was lit. " * 500)
    command = [sys.executable, "-m", "kvnumba", "run", "--session", tmp_path / "s"]
    command += ["--file", text, "--n-predict", "1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (tmp_path / "s").exists():
            try:
                if Session.inspect(tmp_path / "s").cells.n_used >= 512:
                    break
            except OSError:
                continue
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["stop"] == "interrupted"
    n_used = Session.inspect(tmp_path / "s").cells.n_used
    assert n_used >= 512
    assert n_used % 512 == 0


# -- against transformers -----------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("case", [0, 1, 2])
def test_smollm2_greedy_is_token_for_token_the_float32_reference(golden, smollm2_path, case):
    recorded = json.loads((golden / "smollm2_greedy.json").read_text())["cases"][case]
    want = recorded["hf_f32"]["greedy"]
    model = Model(smollm2_path)
    cache = UnifiedCache(model.net.config(n_ctx=512, type_k="f32", type_v="f32"))
    prompt = np.array(recorded["prompt_tokens"], np.int32)
    result = Generator(model.net, cache).run(prompt, len(want), Sampler(), model.end_ids)
    assert result.tokens == want


# -- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "None"),
    ],
)
def test_idle_workers_stop_spinning_unless_the_user_says_otherwise(given, want):
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, kvnumba.kernels.jit; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, **given}, capture_output=True, text=True
    )
    assert done.stdout.strip() == want
