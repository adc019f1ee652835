"""Decoding of every element kind, bit for bit against the gguf package."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_bytes import gguf_bytes

from kvnumba.errors import MissingExtraError, ModelFileError
from kvnumba.runner import quants
from kvnumba.runner.ggml_kinds import KINDS
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.kernels import blocks

NATIVE = sorted(quants.NATIVE_KINDS)
OTHERS = [6, 7, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 34, 35, 39]
ODD = 67
"""Values in a row of a plain kind: two blocks and a rest."""


def random_bytes(kind: int, n_rows: int, n: int) -> np.ndarray:
    """Random blocks whose scales are finite: subnormal, negative and zero ones among them."""
    rng = np.random.default_rng(kind)
    if kind == blocks.KIND_F32:
        return rng.standard_normal(n_rows * n).astype(np.float32).view(np.uint8)
    data = rng.integers(0, 256, n_rows * quants.row_bytes(kind, n)).astype(np.uint8)
    if kind in (blocks.KIND_F16, blocks.KIND_BF16):
        data[1::2] &= 0xBF  # no infinity, no NaN
        return data
    by_block = data.reshape(-1, blocks.BLOCK_BYTES[kind])
    by_block[:, 1] &= 0xBF
    if kind == blocks.KIND_Q4_1:
        by_block[:, 3] &= 0xBF
    return data


def rows_of(kind: int, n_rows: int, n: int) -> quants.Rows:
    return quants.Rows(kind, (n_rows, n), quants.row_bytes(kind, n), random_bytes(kind, n_rows, n))


def expected(rows: quants.Rows) -> np.ndarray:
    kind = GGMLQuantizationType(rows.kind)
    return dequantize(rows.data, kind).astype(np.float32).reshape(rows.shape)


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("n", [32, 96, ODD])
def test_kernels_decode_bit_for_bit(kind, n):
    if n == ODD and KINDS[kind].block > 1:
        n = 160
    rows = rows_of(kind, 7, n)
    np.testing.assert_array_equal(
        quants.decode(rows).view(np.uint32), expected(rows).view(np.uint32)
    )


@pytest.mark.parametrize("kind", NATIVE)
def test_the_plain_twin_decodes_the_same(kind):
    rows = rows_of(kind, 5, 64)
    plain = blocks.decode_plain(kind, rows.data).reshape(rows.shape)
    np.testing.assert_array_equal(plain.view(np.uint32), expected(rows).view(np.uint32))


def test_rows_are_picked_by_index():
    rows = rows_of(blocks.KIND_Q4_1, 9, 64)
    which = np.array([8, 0, 3, 3], np.int32)
    out = quants.pick(rows, which, np.empty((4, 64), np.float32))
    np.testing.assert_array_equal(out, expected(rows)[which])


@pytest.mark.parametrize("kind", NATIVE)
def test_block_sizes_agree_with_the_reader(kind):
    assert quants.row_bytes(kind, 64) == 64 // KINDS[kind].block * KINDS[kind].block_bytes


def _file(tmp_path, kind: int, n_rows: int, data: bytes) -> GGUFFile:
    path = tmp_path / "one.gguf"
    n = KINDS[kind].block * 2
    path.write_bytes(
        gguf_bytes({"general.architecture": "llama"}, [("w", [n, n_rows], kind, data)])
    )
    return GGUFFile(path)


@pytest.mark.parametrize("kind", OTHERS, ids=lambda k: KINDS[k].name)
def test_other_kinds_are_decoded_at_load(tmp_path, kind):
    rng = np.random.default_rng(kind)
    data = rng.integers(0, 64, 3 * 2 * KINDS[kind].block_bytes).astype(np.uint8)
    rows = quants.read_rows(_file(tmp_path, kind, 3, data.tobytes()), "w")
    assert rows.kind == blocks.KIND_F32
    want = dequantize(data.reshape(3, -1), GGMLQuantizationType(kind)).astype(np.float32)
    np.testing.assert_array_equal(quants.decode(rows), want)


def test_native_kinds_stay_the_bytes_of_the_file(tmp_path):
    data = random_bytes(blocks.KIND_Q8_0, 3, 64)
    file = _file(tmp_path, blocks.KIND_Q8_0, 3, data.tobytes())
    rows = quants.read_rows(file, "w")
    assert rows.shape == (3, 64)
    assert np.shares_memory(rows.data, file.tensor_bytes("w"))


def test_integers_are_no_weights(tmp_path):
    file = _file(tmp_path, 26, 3, bytes(24))
    with pytest.raises(ModelFileError, match=r"tensor w is I32.*cannot decode"):
        quants.read_rows(file, "w")


def test_without_the_gguf_package_rare_kinds_are_refused(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_gguf(name: str, *args: Any, **kw: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kw)

    file = _file(tmp_path, 7, 3, bytes(3 * 2 * KINDS[7].block_bytes))
    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(MissingExtraError, match=r"tensor w is Q5_1.*kvnumba\[run\]"):
        quants.read_rows(file, "w")
