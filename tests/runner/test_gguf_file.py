"""Reading GGUF files: what they say, and every way in which they can lie."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import gguf_bytes, string, tensor_row, value

from kvnumba.errors import ModelFileError
from kvnumba.runner.ggml_kinds import KINDS
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.gguf_values import StringArray

ARCH = {"general.architecture": "llama"}


def write(folder: Path, *args: Any, **options: Any) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(*args, **options))
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        GGUFFile(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def read_everything(path: Path) -> None:
    with GGUFFile(path) as file:
        for key in file.keys:
            found = file.get(key)
            if isinstance(found, StringArray):
                found.tolist()
        for name, info in file.tensors.items():
            assert file.tensor_bytes(name).nbytes == info.n_bytes
        file.weights_digest()


@pytest.mark.parametrize("version", [2, 3])
def test_values_and_tensors_are_read(tmp_path: Path, version: int) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write(
        tmp_path,
        ARCH
        | {"a": 7, "b": -3, "c": 0.5, "d": True, "e": "ünï", "f": [1, 2], "g": ["x", "", "yé"]}
        | {"h": [True, False], "i": ""},
        [("m", [4, 3], 0, matrix.tobytes()), ("q", [64], 8, bytes(range(68)))],
        version=version,
    )
    with GGUFFile(path) as file:
        assert file.architecture == "llama"
        assert [file.get(key) for key in "abcdei"] == [7, -3, 0.5, True, "ünï", ""]
        assert type(file.get("d")) is bool
        assert file.get("f").tolist() == [1, 2]
        assert file.get("h").tolist() == [True, False]
        strings = file.get("g")
        assert isinstance(strings, StringArray)
        assert (len(strings), strings.tolist(), strings[2]) == (3, ["x", "", "yé"], "yé")
        assert list(strings) == ["x", "", "yé"]
        assert file.get("missing") is None
        assert file.get("missing", 5) == 5
        info = file.tensors["m"]
        assert (info.shape, info.kind, info.n_bytes) == ((3, 4), 0, 48)
        np.testing.assert_array_equal(file.tensor_bytes("m").view(np.float32), matrix.ravel())
        assert file.tensor_bytes("q").tobytes() == bytes(range(68))


def test_tensors_are_plain_read_only_views(golden: Path) -> None:
    with GGUFFile(golden / "models" / "tiny-llama.gguf") as file:
        view = file.tensor_bytes("token_embd.weight")
        assert type(view) is np.ndarray
        assert view.dtype == np.uint8
        assert not view.flags.owndata
        assert not view.flags.writeable


def test_views_outlive_the_file(golden: Path) -> None:
    file = GGUFFile(golden / "models" / "tiny-llama.gguf")
    view = file.tensor_bytes("token_embd.weight")
    expected = view.tobytes()
    file.close()
    file.close()
    assert view.tobytes() == expected
    with pytest.raises(ModelFileError, match="closed"):
        file.tensor_bytes("token_embd.weight")
    with pytest.raises(ModelFileError, match="closed"):
        file.get("general.architecture")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama64", "tiny-mamba"])
def test_agrees_with_the_gguf_package(golden: Path, name: str) -> None:
    agrees_with_the_gguf_package(golden / "models" / f"{name}.gguf")


@pytest.mark.model
def test_agrees_with_the_gguf_package_on_smollm2(smollm2_path: Path) -> None:
    agrees_with_the_gguf_package(smollm2_path)


def agrees_with_the_gguf_package(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    other = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        for tensor in other.tensors:
            info = file.tensors[tensor.name]
            assert info.kind == int(tensor.tensor_type)
            assert info.shape[::-1] == tuple(tensor.shape)
            assert (info.offset, info.n_bytes) == (tensor.data_offset, tensor.n_bytes)
        keys = [key for key in other.fields if not key.startswith("GGUF.")]
        assert file.keys == keys
        for key in keys:
            found = file.get(key)
            found = found.tolist() if hasattr(found, "tolist") else found
            assert found == other.fields[key].contents()
        assert len(file.tensors) == len(other.tensors)


def test_sizes_of_kinds_agree_with_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    sizes = {int(kind): tuple(size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for kind_id, kind in KINDS.items():
        if kind_id in sizes:  # an older package knows fewer
            assert sizes[kind_id] == (kind.block, kind.block_bytes)
            assert gguf.GGMLQuantizationType(kind_id).name == kind.name


def test_missing_keys_and_tensors_are_named(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path, {"general.architecture": 5})) as file:
        with pytest.raises(ModelFileError, match=r"llama\.block_count"):
            file.require("llama.block_count")
        with pytest.raises(ModelFileError, match=r"output\.weight"):
            file.tensor_bytes("output.weight")
        with pytest.raises(ModelFileError, match=r"general\.architecture is 5"):
            _ = file.architecture


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    refused(path, "No such file")
    refused(tmp_path, "directory")
    for data in (b"", b"GGUF", b"GGUF" + bytes(10)):
        path.write_bytes(data)
        refused(path, "not a GGUF file")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refused(path, "not a GGUF file", "PK")
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    refused(path, "big-endian")
    for version in (0, 1, 4):
        path.write_bytes(gguf_bytes(ARCH, version=version))
        refused(path, f"version {version}")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, ARCH)
    path.chmod(0)
    refused(path, "Permission denied")


def test_split_models_are_refused(tmp_path: Path) -> None:
    refused(write(tmp_path, ARCH | {"split.count": 3}), "split.count", "3")
    GGUFFile(write(tmp_path, ARCH | {"split.count": 1})).close()


BIG = 2**63 + 11
STRINGS = struct.pack("<II", 9, 8)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        pytest.param(struct.pack("<IQ", 8, BIG), "takes", id="long string"),
        pytest.param(struct.pack("<IQ", 8, 2**64 - 8), "takes", id="string that wraps around"),
        pytest.param(STRINGS + struct.pack("<Q", BIG), "strings", id="many strings"),
        pytest.param(STRINGS + struct.pack("<QQ", 1, BIG), "takes", id="long string in array"),
        pytest.param(STRINGS + struct.pack("<QQ", 1, 2**64 - 8), "", id="string steps back"),
        pytest.param(STRINGS + struct.pack("<QQQ", 2, BIG, 1), "beyond", id="first of two is long"),
        pytest.param(struct.pack("<IIQ", 9, 0, BIG), "takes", id="many bytes"),
        pytest.param(struct.pack("<IIQ", 9, 10, 2**61), "takes", id="n * 8 overflows"),
        pytest.param(struct.pack("<IIQ", 9, 9, 1), "value type 9", id="array of arrays"),
        pytest.param(struct.pack("<I", 13), "value type 13", id="unknown type"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, raw: bytes, word: str) -> None:
    refused(write(tmp_path, [("some.key", raw)]), "some.key", word)


def test_counts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for counts in ((BIG, 0), (0, BIG), (1, 0), (0, 1)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
        refused(path)


def test_strings_that_are_no_utf8(tmp_path: Path) -> None:
    refused(write(tmp_path, [(b"\xff\xfe", value(1))]), "key 0", "UTF-8")  # type: ignore[list-item]
    with GGUFFile(write(tmp_path, {"one": b"\xff", "list": ["good", b"\xc3("]})) as file:
        with pytest.raises(ModelFileError, match=r"one.*UTF-8"):
            file.get("one")
        with pytest.raises(ModelFileError, match=r"list.*UTF-8"):
            file.get("list").tolist()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param(([64], 8, bytes(67)), ("ends at",), id="one byte short"),
        pytest.param(([2**40], 0, bytes(64)), ("ends at",), id="long"),
        pytest.param(([2**62, 4], 0, bytes(64)), ("ends at",), id="product overflows"),
        pytest.param(([33], 8, bytes(64)), ("33",), id="not whole blocks"),
        pytest.param(([32], 4, bytes(64)), ("kind 4",), id="withdrawn kind"),
        pytest.param(([32], 99, bytes(64)), ("kind 99",), id="unknown kind"),
        pytest.param(([], 0, bytes(64)), ("0 dimensions",), id="no dimension"),
        pytest.param(([1] * 5, 0, bytes(64)), ("5 dimensions",), id="five dimensions"),
    ],
)
def test_tensors_that_cannot_be_are_refused(tmp_path: Path, row: Any, words: Any) -> None:
    path = tmp_path / "model.gguf"
    sizes, kind, data = row
    whole = gguf_bytes(ARCH, [("blk.0.x", sizes, kind, data)])
    n_padding = -len(data) % 32
    path.write_bytes(whole[: len(whole) - n_padding])
    refused(path, "blk.0.x", *words)


def test_offsets_and_alignment_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def table(offset: int, alignment: Any = None) -> None:
        extra = {} if alignment is None else {"general.alignment": alignment}
        pairs = [(key, value(item)) for key, item in (ARCH | extra).items()]
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs))
        head += b"".join([string(key) + raw for key, raw in pairs])
        path.write_bytes(head + tensor_row("t", [8], 0, offset) + bytes(200))

    table(32)
    GGUFFile(path).close()
    table(8, alignment=8)
    GGUFFile(path).close()
    for offset in (16, 2**63, 2**64 - 32):
        table(offset)
        refused(path, "tensor t")
    for alignment in (0, 24, "32", -8, [32], 2**31):
        table(0, alignment)
        refused(path)
    path.write_bytes(gguf_bytes(ARCH, [("t", [8], 0, bytes(32))] * 2))
    refused(path, "tensor t", "twice")
    path.write_bytes(gguf_bytes([("k", value(1)), ("k", value(2))]))
    refused(path, "k", "twice")


def test_truncation_anywhere_is_refused(tmp_path: Path, golden: Path) -> None:
    data = (golden / "models" / "tiny-llama.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    with GGUFFile(path) as file:
        end = max(info.offset + info.n_bytes for info in file.tensors.values())
        n_head = min(info.offset for info in file.tensors.values())
    cuts = [*range(end - 1, n_head, -4099), *range(n_head, -1, -1)]
    for n in cuts:
        os.truncate(path, n)
        with pytest.raises(ModelFileError):
            GGUFFile(path)


@pytest.mark.parametrize("flip", [0xFF, 0x80, 0x01])
def test_a_flipped_byte_never_crashes(tmp_path: Path, golden: Path, flip: int) -> None:
    data = bytearray((golden / "models" / "tiny-llama.gguf").read_bytes())
    path = tmp_path / "flipped.gguf"
    path.write_bytes(data)
    with GGUFFile(path) as file:
        n_head = min(info.offset for info in file.tensors.values())
    n_refused = 0
    tracemalloc.start()
    try:
        with path.open("r+b", buffering=0) as stream:
            for i in range(n_head):
                os.pwrite(stream.fileno(), bytes([data[i] ^ flip]), i)
                try:
                    read_everything(path)
                except ModelFileError:
                    n_refused += 1
                os.pwrite(stream.fileno(), data[i : i + 1], i)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert n_head // 4 < n_refused < n_head


def big_file(folder: Path, changes: dict[int, int] | None = None, **keys: Any) -> GGUFFile:
    data = bytearray(2**20)
    for i, byte in (changes or {}).items():
        data[i] = byte
    return GGUFFile(write(folder, ARCH | keys, [("big", [2**18], 0, bytes(data))]))


def test_weights_digest_sees_metadata_and_samples(tmp_path: Path) -> None:
    plain = big_file(tmp_path).weights_digest()
    assert plain == big_file(tmp_path).weights_digest()
    assert len(plain) == 32
    assert big_file(tmp_path, x=1).weights_digest() != plain
    for seen in (0, 65535, 2**19, 2**20 - 65536, 2**20 - 1):
        assert big_file(tmp_path, {seen: 1}).weights_digest() != plain
    for unseen in (65536, 2**20 - 65537):
        assert big_file(tmp_path, {unseen: 1}).weights_digest() == plain
        assert big_file(tmp_path, {unseen: 1}).file_digest() != big_file(tmp_path).file_digest()


def test_tokenizer_digest_sees_the_tokenizer_only(tmp_path: Path) -> None:
    def digest(**keys: Any) -> str:
        return big_file(tmp_path, **keys).tokenizer_digest()

    plain = digest(**{"tokenizer.a": ["x", "y"], "tokenizer.b": 1})
    assert digest(**{"tokenizer.b": 1, "tokenizer.a": ["x", "y"], "llama.x": 3}) == plain
    assert digest(**{"tokenizer.b": 1, "tokenizer.a": ["x", "z"]}) != plain
    assert digest(**{"tokenizer.b": 2, "tokenizer.a": ["x", "y"]}) != plain
    assert digest(**{"tokenizer.a": ["x", "y"]}) != plain
