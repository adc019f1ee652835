"""The mamba runner: recorded logits, states, several sequences, and going back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import gguf_bytes
from tiny_mamba import N_LAYER, N_VOCAB, FakeStates, keys, open_tiny, weights

from kvnumba.batch import Batch
from kvnumba.errors import ConfigError, ModelFileError, ShapeError
from kvnumba.recurrent import RecurrentCache
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.kernels.conv import convolve_kernel
from kvnumba.runner.kernels.scan import BLOCK, scan_kernel
from kvnumba.runner.mamba import MambaModel

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def golden_net():
    return MambaModel(GGUFFile(GOLDEN / "models/tiny-mamba.gguf"))


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return MambaModel(open_tiny(tmp_path_factory.mktemp("tiny")))


def decode(net, cache, tokens, seq_ids=0):
    """One ubatch; return the logits of all its tokens."""
    (step,) = cache.prepare(Batch(tokens, seq_ids=seq_ids), len(tokens))
    with step:
        return net.forward(step.batch.tokens, step.pos, step, np.arange(len(tokens)))


def nmse(got, want):
    want = want.astype(np.float64).reshape(got.shape)
    return ((got - want) ** 2).sum() / (want**2).sum()


@pytest.mark.parametrize("n_rewind", [0, 3])
def test_logits_are_those_of_a_real_llama_cpp(golden_net, n_rewind):
    chain = json.loads((GOLDEN / "logits/mamba.json").read_text())
    cache = RecurrentCache(golden_net.recurrent_config(n_seq_max=2, n_rewind=n_rewind))
    labels = set()
    with np.load(GOLDEN / "logits/mamba.npz") as want:
        for step in chain["steps"]:
            if step["op"] == "seq_cp":
                cache.seq_cp(step["seq_id_src"], step["seq_id_dst"])
                continue
            logits = decode(golden_net, cache, step["tokens"], step["seq_ids"])
            assert nmse(logits, want[step["logits"]]) <= 1e-9
            labels.add(step["logits"])
        assert labels == set(want.files)


def test_states_are_those_of_a_real_llama_cpp(golden_net):
    chain = json.loads((GOLDEN / "logits/mamba.json").read_text())
    cache = RecurrentCache(golden_net.recurrent_config(n_seq_max=2))
    for step in chain["steps"][:-1]:
        if step["op"] == "seq_cp":
            cache.seq_cp(0, 1)
        else:
            decode(golden_net, cache, step["tokens"], step["seq_ids"])
    data = (GOLDEN / "logits/mamba.seq0").read_bytes()
    r_size, s_size = 64 * 3 * 4, 64 * 16 * 4
    for il in range(2):
        at_r, at_s = 40 + il * (r_size + 12), 1600 + il * (s_size + 12)
        r, s = cache.state(il, 0)
        np.testing.assert_allclose(r, np.frombuffer(data[at_r : at_r + r_size], "<f4"), atol=3e-5)
        np.testing.assert_allclose(s, np.frombuffer(data[at_s : at_s + s_size], "<f4"), atol=3e-5)


def test_sequences_side_by_side_are_as_one_by_one(net):
    tokens = np.arange(12, dtype=np.int32) % N_VOCAB
    together = RecurrentCache(net.recurrent_config(n_seq_max=3))
    logits = decode(net, together, tokens, [s for s in range(3) for _ in range(4)])
    for s in range(3):
        alone = RecurrentCache(net.recurrent_config())
        mine = decode(net, alone, tokens[4 * s : 4 * s + 4])
        np.testing.assert_allclose(logits[4 * s : 4 * s + 4], mine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ahead", [[1, 1, 1], [3], [2, 1]])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_rewind_then_decode_is_never_having_gone_ahead(net, ahead, back):
    """Bit for bit, against a run with the same batch shapes."""
    prompt, after = [1, 2, 3, 4, 5, 6, 7, 8], [9, 10]
    went = RecurrentCache(net.recurrent_config(n_rewind=3))
    stayed = RecurrentCache(net.recurrent_config(n_rewind=3))
    decode(net, went, prompt)
    decode(net, stayed, prompt)
    extra = [11, 12, 13]
    n_kept = 3 - back
    done = 0
    for n in ahead:
        decode(net, went, extra[done : done + n])
        # What stays is the same; what goes may be anything.
        same = extra[done : min(done + n, n_kept)] + [20] * n
        decode(net, stayed, same[:n])
        done += n
    for cache in (went, stayed):
        assert cache.seq_rm(0, len(prompt) + n_kept, -1)
    for il in range(N_LAYER):
        for a, b in zip(went.state(il, 0), stayed.state(il, 0), strict=True):
            assert np.array_equal(a, b)
    assert np.array_equal(decode(net, went, after), decode(net, stayed, after))


def test_going_back_over_single_steps_is_a_run_without_them(net):
    went = RecurrentCache(net.recurrent_config(n_rewind=3))
    never = RecurrentCache(net.recurrent_config(n_rewind=3))
    for cache in (went, never):
        decode(net, cache, [1, 2, 3, 4, 5])
        decode(net, cache, [6])
    for token in (7, 8, 9):
        decode(net, went, [token])
    assert went.seq_rm(0, 6, -1)
    for token in (10, 11):
        assert np.array_equal(decode(net, went, [token]), decode(net, never, [token]))


def test_states_on_the_way_are_those_of_shorter_runs(net):
    states = FakeStates(net.params, n_rewind=3)
    step = states.step([0], 6)
    tokens = np.arange(6, dtype=np.int32)
    net.forward(tokens, tokens, step)
    for k in range(4):
        shorter = FakeStates(net.params)
        n = 3 + k
        net.forward(tokens[:n], tokens[:n], shorter.step([0], n))
        for il in range(N_LAYER):
            np.testing.assert_allclose(step.kept[il][0][0, k], shorter.r[il, 0], atol=1e-5)
            np.testing.assert_allclose(step.kept[il][1][0, k], shorter.s[il, 0], atol=1e-5)


def test_bad_tokens_are_refused_before_anything_is_written(net):
    states = FakeStates(net.params)
    step = states.step([0], 2)
    two = np.zeros(2, np.int32)
    with pytest.raises(ConfigError, match="vocabulary"):
        net.forward(two + N_VOCAB, two, step)
    with pytest.raises(ConfigError, match="rows"):
        net.forward(two, two, step, [2])
    with pytest.raises(ShapeError, match="1 sequences of 2"):
        net.forward(np.zeros(3, np.int32), np.zeros(3, np.int32), step)
    assert not states.r


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general__architecture": "rwkv"}, "rwkv"),
        ({"ssm__conv_kernel": None}, "conv_kernel"),
        ({"ssm__conv_kernel": 1}, "at least 2"),
        ({"ssm__state_size": 0}, "state_size"),
        ({"ssm__dt_b_c_rms": True}, "dt_b_c_rms"),
    ],
)
def test_keys_that_are_missing_or_not_done_are_named(tmp_path, change, named):
    with pytest.raises(ModelFileError, match=named):
        MambaModel(open_tiny(tmp_path, keys(**change)))


def test_tensors_that_are_missing_or_unknown_are_named(tmp_path):
    tensors = weights()
    del tensors["blk.1.ssm_d"]
    with pytest.raises(ModelFileError, match=r"blk\.1\.ssm_d"):
        MambaModel(open_tiny(tmp_path, tensors=tensors))
    tensors = weights() | {"blk.0.ssm_norm.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelFileError, match="ssm_norm"):
        MambaModel(open_tiny(tmp_path, tensors=tensors))
    assert gguf_bytes


def scan_by_hand(s, dt, x, z, b, c, a, skip, bias):
    """The recurrence in float64, one sequence."""
    out, states = [], []
    s = s.reshape(a.shape).astype(np.float64)
    for t in range(len(x)):
        step = np.logaddexp(0, dt[t].astype(np.float64) + bias)
        s = s * np.exp(step[:, None] * a) + (step * x[t])[:, None] * b[t]
        gate = z[t].astype(np.float64)
        out.append((s @ c[t] + skip * x[t]) * gate / (1 + np.exp(-gate)))
        states.append(s.reshape(-1))
    return np.array(out), np.array(states)


@pytest.mark.parametrize("d_state", [1, 3, 8, 16, 19])
@pytest.mark.parametrize("d_inner", [5, BLOCK, BLOCK + 9])
def test_scan_is_the_recurrence(d_state, d_inner):
    rng = np.random.default_rng(d_state * d_inner)

    def some(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    n_seqs, n, n_states, n_parts = 2, 7, 3, 2
    s, dt, x, z = some(n_seqs, d_inner * d_state), *(some(n_seqs * n, d_inner) for _ in range(3))
    b, c = some(n_seqs * n, d_state), some(n_seqs * n, d_state)
    dt[0, 0], dt[1, 1] = 40, -100  # where softplus is its argument, and nothing
    a, skip, bias = -np.exp(some(d_inner, d_state)), some(d_inner), some(d_inner)
    out = np.empty_like(x)
    states = np.empty((n_seqs, n_states, d_inner * d_state), np.float32)
    work = np.empty((n_parts, 2, BLOCK), np.float32)
    scan_kernel(out, states, work, s, dt, x, z, b, c, a, skip, bias, n_parts)
    for q in range(n_seqs):
        t = slice(q * n, q * n + n)
        want, after = scan_by_hand(s[q], dt[t], x[t], z[t], b[t], c[t], a, skip, bias)
        np.testing.assert_allclose(out[t], want, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(states[q], after[-n_states:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_convolution_goes_over_what_came_before(n):
    rng = np.random.default_rng(n)
    n_seqs, d_inner, d_conv, n_states = 2, 70, 4, min(n, 3)
    r = rng.standard_normal((n_seqs, d_inner, d_conv - 1)).astype(np.float32)
    x = rng.standard_normal((n_seqs * n, d_inner)).astype(np.float32)
    weights_, bias = rng.standard_normal((d_conv, d_inner)), rng.standard_normal(d_inner)
    out = np.empty_like(x)
    states = np.empty((n_seqs, n_states, d_inner * (d_conv - 1)), np.float32)
    history = np.empty((n_seqs, d_conv - 1, d_inner), np.float32)
    convolve_kernel(
        out, states, history, r.reshape(n_seqs, -1), x, weights_.astype(np.float32),
        bias.astype(np.float32), 2,
    )  # fmt: skip
    for q in range(n_seqs):
        line = np.concatenate([r[q], x[q * n : q * n + n].T], 1).astype(np.float64)
        for t in range(n):
            total = (line[:, t : t + d_conv] * weights_.T).sum(1) + bias
            want = total / (1 + np.exp(-total))
            np.testing.assert_allclose(out[q * n + t], want, rtol=1e-4, atol=1e-5)
        for k in range(n_states):
            end = line.shape[1] - (n_states - 1 - k)
            np.testing.assert_allclose(
                states[q, k].reshape(d_inner, -1), line[:, end - d_conv + 1 : end], rtol=1e-6
            )
