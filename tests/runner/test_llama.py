"""The forward pass: recorded logits, known continuations, and files that must be refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from fake_cache import FakeCache
from tiny_llama import (
    BF16,
    F16,
    F32,
    N_EMBD,
    N_FF,
    N_HEAD,
    N_LAYER,
    N_VOCAB,
    Q4_0,
    Q4_1,
    Q5_1,
    Q8_0,
    decoded,
    keys,
    open_tiny,
    weights,
)

from kvnumba.errors import ConfigError, ModelFileError, ShapeError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.linear import MAX_NARROW
from kvnumba.runner.llama import LlamaModel, cache_config_of


def run(model: LlamaModel, cache: FakeCache, tokens: Any, rows: Any = None) -> np.ndarray:
    """Compute tokens at the end of sequence 0."""
    tokens = np.asarray(tokens, np.int32)
    pos = np.arange(len(cache.pos), len(cache.pos) + len(tokens), dtype=np.int32)
    return model.forward(tokens, pos, cache.step(pos, [0] * len(tokens)), rows)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    want = want.astype(np.float64)
    return float(((got - want) ** 2).sum() / (want**2).sum())


def test_recorded_logits_through_fork_removal_and_shift(golden):
    chain = json.loads((golden / "logits/llama-f32.json").read_text())
    model = LlamaModel(GGUFFile(golden / "models" / chain["model"]))
    cache, n_compared = FakeCache(model.params), 0
    with np.load(golden / "logits/llama-f32.npz") as recorded:
        for step in chain["steps"]:
            args = {k: v for k, v in step.items() if k not in ("op", "logits")}
            if step["op"] != "decode":
                getattr(cache, step["op"])(*args.values())
                continue
            pos = np.array(step["pos"], np.int32)
            applied = cache.step(pos, [s[0] for s in step["seq_ids"]])
            logits = model.forward(np.array(step["tokens"]), pos, applied, range(len(pos)))
            assert nmse(logits, recorded[step["logits"]]) <= 1e-9, step["logits"]
            n_compared += 1
    assert n_compared == 9


@pytest.mark.model
def test_greedy_continuations_of_smollm2(golden, smollm2_path):
    model = LlamaModel(GGUFFile(smollm2_path))
    for case in json.loads((golden / "smollm2_greedy.json").read_text())["cases"]:
        cache, tokens = FakeCache(model.params), []
        logits = run(model, cache, case["prompt_tokens"])
        for _ in case["hf_f32"]["greedy"]:
            tokens.append(int(logits[-1].argmax()))
            logits = run(model, cache, tokens[-1:])
        assert tokens == case["hf_f32"]["greedy"]


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q5_1])
def test_stored_kinds_compute_what_their_decoded_weights_do(tmp_path, kind):
    tokens = np.arange(20) % N_VOCAB
    model = LlamaModel(open_tiny(tmp_path, kind=kind))
    (tmp_path / "f32").mkdir()
    plain = {n: w if w.ndim == 1 else decoded(w, kind) for n, w in weights().items()}
    twin = LlamaModel(open_tiny(tmp_path / "f32", tensors=plain))
    for part in (tokens, tokens[:1], tokens[:3]):
        got = run(model, FakeCache(model.params), part, range(len(part)))
        want = run(twin, FakeCache(twin.params), part, range(len(part)))
        assert nmse(got, want) < 1e-11


def _by_hand(tokens: np.ndarray) -> np.ndarray:
    """Logits of the tiny model in float64, written from the papers."""
    w = {n.removesuffix(".weight"): a.astype(np.float64) for n, a in weights().items()}
    n, d = len(tokens), N_EMBD // N_HEAD
    turn = np.exp(1j * np.arange(n)[:, None, None] * 10000.0 ** (-np.arange(0, d, 2) / d))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * w[name]

    def rotated(x):
        pairs = x.reshape(n, -1, d // 2, 2)
        pairs = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([pairs.real, pairs.imag], -1).reshape(n, -1, d)

    x = w["token_embd"][tokens]
    for il in range(N_LAYER):
        h, b = norm(x, f"blk.{il}.attn_norm"), f"blk.{il}."
        q, k = rotated(h @ w[b + "attn_q"].T), rotated(h @ w[b + "attn_k"].T).repeat(2, 1)
        v = (h @ w[b + "attn_v"].T).reshape(n, -1, d).repeat(2, 1)
        scores = np.einsum("thd,chd->htc", q, k) / np.sqrt(d)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(2, keepdims=True))
        mixed = np.einsum("htc,chd->thd", p / p.sum(2, keepdims=True), v)
        x = x + mixed.reshape(n, -1) @ w[b + "attn_output"].T
        h = norm(x, b + "ffn_norm")
        gate = h @ w[b + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up"].T)) @ w[b + "ffn_down"].T
    return norm(x, "output_norm") @ w["output"].T


@pytest.mark.parametrize("n", [1, 2, 5, MAX_NARROW, MAX_NARROW + 1, 16, 17, 40])
def test_batches_of_any_size_compute_the_same(tmp_path, n):
    model = LlamaModel(open_tiny(tmp_path))
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, 40)
    cache, parts = FakeCache(model.params), []
    for start in range(0, 40, n):
        part = tokens[start : start + n]
        parts.append(run(model, cache, part, range(len(part))))
    assert nmse(np.concatenate(parts), _by_hand(tokens)) < 1e-11


def test_logits_are_computed_for_the_wanted_rows(tmp_path):
    model = LlamaModel(open_tiny(tmp_path))
    every = run(model, FakeCache(model.params), range(20), range(20))
    assert every.shape == (20, N_VOCAB)
    for rows in (None, [3], [19, 0, 0], []):
        some = run(model, FakeCache(model.params), range(20), rows)
        np.testing.assert_allclose(
            some, every[[19] if rows is None else np.array(rows, int)], rtol=1e-4, atol=1e-5
        )
    assert model.n_rows_computed == 100


def test_logits_are_the_callers_own(tmp_path):
    model = LlamaModel(open_tiny(tmp_path))
    cache = FakeCache(model.params)
    first = run(model, cache, [1, 2])
    before = first.copy()
    run(model, cache, [3])
    np.testing.assert_array_equal(first, before)


def test_nan_in_the_cache_reaches_the_logits(tmp_path):
    model = LlamaModel(open_tiny(tmp_path))
    cache = FakeCache(model.params)
    run(model, cache, [1, 2, 3])
    cache.k[0][1] = np.nan
    assert np.isnan(run(model, cache, [4])).all()


def test_the_embedding_is_the_head_when_there_is_no_other(tmp_path):
    tied = weights(tied=True)
    model = LlamaModel(open_tiny(tmp_path, tensors=tied))
    (tmp_path / "twin").mkdir()
    untied = tied | {"output.weight": tied["token_embd.weight"]}
    twin = LlamaModel(open_tiny(tmp_path / "twin", tensors=untied))
    got, want = (run(m, FakeCache(m.params), [5, 6]) for m in (model, twin))
    np.testing.assert_array_equal(got, want)


def test_heads_may_be_wider_than_their_share_of_the_embedding(tmp_path):
    values = keys(attention__key_length=24, attention__value_length=24)
    model = LlamaModel(open_tiny(tmp_path, values, weights(head_dim=24)))
    assert model.config(n_ctx=8).head_dim == (24,) * N_LAYER
    assert np.isfinite(run(model, FakeCache(model.params), range(12))).all()


@pytest.mark.parametrize(
    ("tokens", "pos", "rows", "error", "text"),
    [
        ([N_VOCAB], [0], None, ConfigError, "vocabulary"),
        ([-1], [0], None, ConfigError, "vocabulary"),
        ([1], [0, 1], None, ShapeError, "pos"),
        ([], [], None, ShapeError, "tokens"),
        ([1.5], [0], None, ShapeError, "int32"),
        ([1], [0], [1], ConfigError, "rows"),
        ([1], [0], [-1], ConfigError, "rows"),
    ],
)
def test_impossible_calls_write_nothing(tmp_path, tokens, pos, rows, error, text):
    model = LlamaModel(open_tiny(tmp_path))
    cache = FakeCache(model.params)
    with pytest.raises(error, match=text):
        model.forward(np.array(tokens), np.array(pos), cache.step(np.array([0]), [0]), rows)
    assert model.n_rows_computed == 0
    assert len(cache.k[0]) == 0


def test_the_cache_follows_from_the_file(tmp_path):
    file = open_tiny(tmp_path, keys(rope__dimension_count=8, rope__freq_base=5e5))
    for config in (LlamaModel(file).config(), cache_config_of(file)):
        assert (config.n_ctx, config.n_layer, config.n_head_kv) == (512, N_LAYER, (2, 2))
        rope = config.rope_of(0)
        assert (rope.n_rot, rope.pairing, rope.freq_base) == (8, "normal", 5e5)
    config = cache_config_of(file, 64, type_k="f32", type_v="bf16", n_seq_max=3, v_trans=True)
    assert (config.n_ctx, config.type_k, config.type_v) == (64, "f32", "bf16")
    assert (config.n_seq_max, config.v_trans) == (3, True)


def test_linear_scaling_and_its_older_name(tmp_path):
    for scaling in (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scaling__type": "linear", "rope__scale_linear": 4.0},
    ):
        rope = cache_config_of(open_tiny(tmp_path, keys(**scaling))).rope_of(0)
        assert (rope.freq_scale, rope.ext_factor) == (0.25, 0)


def test_yarn(tmp_path):
    values = keys(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128,
        rope__scaling__attn_factor=1.5,
        rope__scaling__yarn_beta_fast=16.0,
    )
    rope = cache_config_of(open_tiny(tmp_path, values)).rope_of(0)
    assert (rope.freq_scale, rope.ext_factor, rope.n_ctx_orig) == (0.25, 1, 128)
    assert (rope.beta_fast, rope.beta_slow) == (16, 1)
    assert rope.magnitude == pytest.approx(1.5 * (1 + 0.1 * np.log(4)))


def test_frequency_factors_change_the_angles(tmp_path):
    factors = np.linspace(1, 8, N_EMBD // N_HEAD // 2).astype(np.float32)
    file = open_tiny(tmp_path, tensors=weights() | {"rope_freqs.weight": factors})
    model = LlamaModel(file)
    assert model.params.rope.freq_factors == tuple(factors.tolist())
    (tmp_path / "plain").mkdir()
    plain = LlamaModel(open_tiny(tmp_path / "plain"))
    a, b = (run(m, FakeCache(m.params), range(5)) for m in (model, plain))
    assert not np.allclose(a, b)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"general__architecture": "mamba"}, "general.architecture is 'mamba'"),
        ({"block_count": None}, "llama.block_count"),
        ({"embedding_length": 0}, "llama.embedding_length is 0"),
        ({"attention__head_count": True}, "llama.attention.head_count is True"),
        ({"attention__head_count_kv": 3}, "llama.attention.head_count_kv is 3"),
        ({"attention__head_count_kv": [2, 2]}, "llama.attention.head_count_kv"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"feed_forward_length": "many"}, "llama.feed_forward_length is 'many'"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, "rope.scaling.factor"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"rope__dimension_count": 7}, "llama.rope: n_rot 7"),
        ({"rope__dimension_count": 32}, "rope.dimension_count is 32"),
        ({"expert_count": 8}, "llama.expert_count is 8"),
        ({"attention__causal": False}, "llama.attention.causal is False"),
        ({"attention__sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"attention__scale": 0.5}, "llama.attention.scale is 0.5"),
        ({"rope__dimension_sections": [1, 1, 2, 0]}, "llama.rope.dimension_sections"),
    ],
)
def test_metadata_that_cannot_be_followed_is_refused_by_name(tmp_path, changes, text):
    with pytest.raises(ModelFileError, match=text):
        LlamaModel(open_tiny(tmp_path, keys(**changes)))


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("blk.0.attn_q.bias", (N_EMBD,), "tensor blk.0.attn_q.bias"),
        ("blk.2.attn_q.weight", (N_EMBD, N_EMBD), "tensor blk.2.attn_q.weight"),
        ("blk.0.ffn_gate_inp.weight", (4, N_EMBD), "tensor blk.0.ffn_gate_inp.weight"),
        ("rope_factors_long.weight", (8,), "tensor rope_factors_long.weight"),
        ("rope_freqs.weight", (3,), "tensor rope_freqs.weight has 3 values; 8"),
        ("blk.1.ffn_down.weight", (N_EMBD, N_FF + 1), "tensor blk.1.ffn_down.weight"),
        ("output_norm.weight", (N_EMBD - 1,), "tensor output_norm.weight"),
        ("output.weight", (N_VOCAB + 1, N_EMBD), "tensor output.weight"),
        ("blk.1.attn_k.weight", None, "lacks the tensor blk.1.attn_k.weight"),
        ("token_embd.weight", None, "lacks the tensor token_embd.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, name, shape, text):
    tensors = weights()
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = np.ones(shape, np.float32)
    with pytest.raises(ModelFileError, match=text):
        LlamaModel(open_tiny(tmp_path, tensors=tensors))
