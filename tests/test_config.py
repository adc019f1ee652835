"""Sizes and rope tables that follow from a configuration; impossible ones are refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvnumba.cli.main import run_command
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.dtypes import KV_TYPES, kv_type
from kvnumba.errors import ConfigError

GOOD = {"n_layer": 2, "n_ctx": 64, "n_head_kv": 2, "head_dim": 16}


def test_sizes():
    config = CacheConfig(**GOOD, type_k="f16", type_v="f32")
    assert config.bytes_per_cell_k == 2 * 2 * 16 * 2
    assert config.bytes_per_cell_v == 2 * 2 * 16 * 4
    assert config.size_k_bytes == 64 * config.bytes_per_cell_k
    assert config.size_v_bytes == 64 * config.bytes_per_cell_v


def test_sizes_are_64_bit():
    config = CacheConfig(n_layer=80, n_ctx=1_000_000, n_head_kv=8, head_dim=128)
    assert config.size_k_bytes == 80 * 1_000_000 * 1024 * 2 > 2**32


def test_per_layer_widths():
    config = CacheConfig(n_layer=2, n_ctx=8, n_head_kv=(1, 3), head_dim=(8, 4), head_dim_v=(8, 2))
    assert [config.n_embd_k(il) for il in range(2)] == [8, 12]
    assert [config.n_embd_v(il) for il in range(2)] == [8, 6]


def test_dict_round_trip_through_json():
    rope = RopeConfig(8, "neox", freq_factors=(1.0, 2.0, 3.0, 4.0))
    config = CacheConfig(**GOOD, rope=(rope, None), n_spare=3, shared="copy")
    assert CacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_layer": 0}, "n_layer"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"n_ctx": 2.5}, "n_ctx"),
        ({"n_ctx": True}, "n_ctx"),
        ({"n_ctx": 2**31}, "n_ctx"),
        ({"n_seq_max": 0}, "n_seq_max"),
        ({"n_seq_max": 1 << 17}, "n_seq_max"),
        ({"n_spare": -1}, "n_spare"),
        ({"n_head_kv": (1, 2, 3)}, "n_head_kv"),
        ({"head_dim": 0}, "head_dim"),
        ({"type_k": "q9_9"}, "q9_9"),
        ({"placement": "best"}, "placement"),
        ({"shared": "maybe"}, "shared"),
        ({"rope": RopeConfig(32)}, "n_rot"),
        ({"rope": (None,)}, "rope"),
        ({"n_head_kv": "ab"}, "n_head_kv"),
        ({"n_head_kv": None}, "n_head_kv"),
        ({"n_head_kv": 1.5}, "n_head_kv"),
        ({"head_dim": [1.5, 2]}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"head_dim": [16, True]}, "head_dim"),
        ({"head_dim": {"a": 1, "b": 2}}, "head_dim"),
        ({"head_dim_v": "a"}, "head_dim_v"),
        ({"rope": "x"}, "rope"),
        ({"rope": [1, 2]}, "rope"),
        ({"rope": [[None], None]}, "rope"),
        ({"rope": {"n_rot": 8}}, "rope"),
        ({"can_shift": "no"}, "can_shift"),
        ({"v_trans": "false"}, "v_trans"),
        ({"flash_attn": None}, "flash_attn"),
        ({"flash_attn": 1}, "flash_attn"),
        ({"type_k": None}, "type_k"),
        ({"type_k": ["f16"]}, "type_k"),
        ({"type_v": True}, "type_v"),
        ({"placement": ["ring"]}, "placement"),
        ({"placement": {}}, "placement"),
        ({"shared": []}, "shared"),
        ({"n_pos": 2}, "n_pos 2 is not one of"),
        ({"n_pos": 5}, "n_pos"),
        ({"n_pos": True}, "n_pos"),
        ({"n_pos": 3.0}, "n_pos"),
        ({"n_pos": None}, "n_pos"),
        ({"n_pos": 3, "window": 8}, "n_pos"),
        ({"layer_map": (0, 1, 2)}, "layer_map"),
        ({"v_in_k": -1}, "v_in_k"),
    ],
)
def test_impossible_values_are_named(change, named):
    with pytest.raises(ConfigError, match=named):
        CacheConfig(**{**GOOD, **change})


@pytest.mark.parametrize("values", [{**GOOD, "n_layers": 2}, {"n_layer": 2}, {**GOOD, "rope": {}}])
def test_from_dict_names_bad_keys(values):
    with pytest.raises(ConfigError, match=r"n_layers|missing|rope"):
        CacheConfig.from_dict(values)


@pytest.mark.parametrize(
    "values",
    [
        {"n_rot": 7},
        {"n_rot": 8, "pairing": "other"},
        {"n_rot": 8, "freq_base": 0},
        {"n_rot": 8, "ext_factor": 1.0},
        {"n_rot": 8, "freq_factors": (1.0,)},
        {"n_rot": 8.0},
        {"n_rot": "8"},
        {"n_rot": True},
        {"n_rot": -2},
        {"n_rot": 8, "pairing": None},
        {"n_rot": 8, "pairing": ["neox"]},
        {"n_rot": 8, "freq_base": "x"},
        {"n_rot": 8, "freq_base": True},
        {"n_rot": 8, "freq_base": 10**400},
        {"n_rot": 8, "freq_base": math.inf},
        {"n_rot": 8, "freq_scale": math.nan},
        {"n_rot": 8, "freq_scale": np.float32(math.inf)},
        {"n_rot": 8, "attn_factor": math.inf},
        {"n_rot": 8, "attn_factor": None},
        {"n_rot": 8, "ext_factor": math.nan},
        {"n_rot": 8, "n_ctx_orig": 4096.0},
        {"n_rot": 8, "freq_factors": (1.0, 2.0, 0.0, 1.0)},
        {"n_rot": 8, "freq_factors": (1.0, 2.0, math.nan, 1.0)},
        {"n_rot": 8, "freq_factors": (1.0, 2.0, math.inf, 1.0)},
        {"n_rot": 8, "freq_factors": (1.0, 2.0, "3", 1.0)},
        {"n_rot": 8, "freq_factors": "1234"},
        {"n_rot": 8, "freq_factors": 1.0},
        {"n_rot": 8, "first": -1},
        {"n_rot": 8, "first": 2.0},
        {"n_rot": 8, "ext_factor": 1.0, "n_ctx_orig": 64, "beta_fast": 0},
        {"n_rot": 8, "ext_factor": 1.0, "n_ctx_orig": 64, "beta_slow": -1.0},
        {"n_rot": 8, "ext_factor": 1.0, "n_ctx_orig": 64, "beta_slow": 5e-324},
        {"n_rot": 8, "ext_factor": 1.0, "n_ctx_orig": 64, "freq_base": 1},
    ],
)
def test_impossible_rope_is_named(values):
    with pytest.raises(ConfigError, match=list(values)[-1]):
        RopeConfig(**values)


def test_numpy_values_become_plain_ones():
    rope = RopeConfig(
        np.int64(8),
        np.str_("neox"),
        np.float32(1e4),
        n_ctx_orig=np.uint32(4096),
        freq_factors=np.ones(4, np.float32),
    )
    config = CacheConfig(
        np.int32(2),
        np.int64(64),
        np.array([2, 2]),
        [np.int16(16), 16],
        type_k=np.int64(1),
        v_trans=np.bool_(True),
        rope=[rope, None],
        shared=np.str_("copy"),
    )
    assert CacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert CacheConfig.from_dict(config.to_dict()) == config
    assert type(config.rope) is tuple
    assert type(rope.freq_base) is float
    assert hash(config) == hash(CacheConfig.from_dict(config.to_dict()))


@pytest.mark.parametrize("name", ["rope", "head_dim", "n_ctx", "type_k", "placement", "other"])
def test_deeply_nested_values_are_refused(name):
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ConfigError, match=name):
        CacheConfig.from_dict({**GOOD, name: nested})
    while nested:  # freed from the outside in: the default way needs the C stack
        nested = nested[0]


def _plan(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    return run_command(["plan", "--config", str(path)])


THEIRS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**GOOD, "n_head_kv": "ab"}, "n_head_kv"),
        ({**GOOD, "rope": [[None], None]}, "rope"),
        ({**GOOD, "rope": {"n_rot": "8"}}, "n_rot"),
        ({**THEIRS, "head_dim": "a"}, "head_dim"),
        ({**THEIRS, "head_dim": 0}, "head_dim"),
        ({**THEIRS, "num_key_value_heads": "a"}, "num_key_value_heads"),
        ({**THEIRS, "num_key_value_heads": [4]}, "num_key_value_heads"),
        ({**THEIRS, "num_attention_heads": 0}, "num_attention_heads"),
        ({**THEIRS, "num_attention_heads": 4.5}, "num_attention_heads"),
        ({**THEIRS, "num_hidden_layers": "2"}, "num_hidden_layers"),
        ({**THEIRS, "hidden_size": None}, "hidden_size"),
        ({**THEIRS, "hidden_size": 3}, "head_dim"),
        ({**THEIRS, "max_position_embeddings": "8"}, "n_ctx"),
    ],
)
def test_plan_refuses_and_names_it(tmp_path, capsys, values, named):
    assert _plan(tmp_path, json.dumps(values)) == 2
    assert named in capsys.readouterr().err


def test_plan_refuses_what_json_cannot_read(tmp_path, capsys):
    for text in ("[" * 100_000, '{"n_layer": ' + "9" * 5000 + "}", '{"rope": ' + "[" * 900):
        assert _plan(tmp_path, text) == 2
    deep = json.dumps(GOOD)[:-1] + ', "rope": ' + "[" * 900 + "]" * 900 + "}"
    assert _plan(tmp_path, deep) == 2
    assert "rope" in capsys.readouterr().err


def test_plan_takes_null_for_the_default(tmp_path, capsys):
    values = {**THEIRS, "head_dim": None, "num_key_value_heads": None}
    assert _plan(tmp_path, json.dumps(values)) == 0
    assert "2 layers" in capsys.readouterr().out


def test_theta_plain_linear_and_factors():
    plain = RopeConfig(8).theta()
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(RopeConfig(8, freq_scale=0.25).theta(), plain / 4)
    factors = (1.0, 2.0, 4.0, 8.0)
    np.testing.assert_allclose(RopeConfig(8, freq_factors=factors).theta(), plain / factors)


def test_theta_yarn_keeps_fast_and_scales_slow_pairs():
    rope = RopeConfig(64, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=4096)
    plain = RopeConfig(64).theta()
    theta = rope.theta()
    np.testing.assert_allclose(theta[0], plain[0])  # many rotations: extrapolated
    np.testing.assert_allclose(theta[-1], plain[-1] / 4)  # few: interpolated
    assert (np.diff(theta) < 0).all()
    assert rope.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    assert RopeConfig(64, attn_factor=1.5).magnitude == 1.5


def test_kv_types_by_name_and_id():
    assert kv_type("f16") is kv_type(1) is KV_TYPES["f16"]
    assert KV_TYPES["bf16"].ggml_id == 30
    with pytest.raises(ConfigError, match="allowed: f32, f16, bf16"):
        kv_type("int4")
    assert KV_TYPES["f32"].row_bytes(5) == 20
