"""What makes two fingerprints differ, and how that is said."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from session_makers import make_config, make_fingerprint

from kvnumba.config import RopeConfig
from kvnumba.errors import DamagedError, FingerprintError
from kvnumba.store.fingerprint import Fingerprint

OTHER = {
    "architecture": "mamba",
    "weights": "x",
    "weights_kind": "whole",
    "tokenizer": "y",
    "adapters": ("lora",),
    "n_layer": 3,
    "type_k": "bf16",
    "type_v": "f32",
    "n_head_kv": (2, 3),
    "head_dim": (8, 9),
    "head_dim_v": (1, 8),
    "v_trans": True,
    "rope": (RopeConfig(4), None),
}
OTHER_ROPE = {
    "n_rot": 6,
    "first": 2,
    "pairing": "neox",
    "freq_base": 500.0,
    "freq_scale": 0.5,
    "ext_factor": 1.0,
    "attn_factor": 2.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "n_ctx_orig": 4096,
    "freq_factors": (1.0, 2.0, 3.0, 4.0),
}


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
def test_each_field_is_named(name):
    here = make_fingerprint()
    stored = replace(here, **{name: OTHER[name]})
    with pytest.raises(FingerprintError) as caught:
        here.compare(stored)
    error = caught.value
    assert error.field.split("[")[0] == name
    assert error.expected != error.found
    if name != "rope":
        assert (error.expected, error.found) == (getattr(here, name), OTHER[name])
    assert error.field in str(error)
    assert repr(error.found) in str(error)


@pytest.mark.parametrize("name", [f.name for f in fields(RopeConfig)])
def test_each_rope_field_is_named(name):
    base = RopeConfig(8, n_ctx_orig=2048)
    values = {name: OTHER_ROPE[name]}
    here = make_fingerprint(make_config(rope=(base, None)))
    stored = replace(here, rope=(replace(base, **values), None))
    with pytest.raises(FingerprintError) as caught:
        here.compare(stored)
    assert caught.value.field == f"rope[0].{name}"


def test_a_missing_rope_is_named():
    here = make_fingerprint()
    with pytest.raises(FingerprintError, match=r"rope\[1\]"):
        here.compare(replace(here, rope=(here.rope[0],) * 2))
    with pytest.raises(FingerprintError, match=r"rope\[0\]"):
        here.compare(replace(here, rope=(None, None)))


@pytest.mark.parametrize(
    "rope",
    [
        None,
        RopeConfig(8, "neox", 1e6, 0.25, 1.0, n_ctx_orig=10, freq_factors=(1, 2, 3, 0.1)),
        (RopeConfig(8), None),
    ],
)
def test_it_survives_json(rope):
    here = make_fingerprint(make_config(rope=rope), adapters=("a", "b"))
    stored = Fingerprint.from_dict(json.loads(json.dumps(here.to_dict())))
    assert stored == here
    here.compare(stored)


def test_sizes_that_may_change_do_not_matter():
    make_fingerprint(make_config(n_ctx=10)).compare(
        make_fingerprint(make_config(n_ctx=99, n_spare=3, n_ubatch=2, placement="ring"))
    )


@pytest.mark.parametrize("change", [{"rope": 3}, {"rope": [{"n_rot": 3}]}, {"extra": 1}])
def test_nonsense_is_damage(change):
    with pytest.raises(DamagedError, match="fingerprint"):
        Fingerprint.from_dict({**make_fingerprint().to_dict(), **change})
    with pytest.raises(DamagedError):
        Fingerprint.from_dict({})
