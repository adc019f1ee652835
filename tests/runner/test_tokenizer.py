"""Tokenizers: golden ids, the rules of both kinds on small vocabularies, and refusals."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import gguf_bytes
from hypothesis import given
from hypothesis import strategies as st
from tiny_vocab import (
    CONTROL,
    SPM_PIECES,
    WHOLE,
    bpe_keys,
    byte_letters,
    spm_keys,
    tokenizer_of,
)

from kvnumba.errors import ConfigError, MissingExtraError, ModelFileError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.pretokenizers import PRE_TOKENIZERS
from kvnumba.runner.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("bpe"), bpe_keys())


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("spm"), spm_keys())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(GGUFFile(smollm2_path))
    assert tokenizer is not None
    return tokenizer


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.vocabulary.texts[token] for token in ids]


# --- the real model ---------------------------------------------------------------------------


@pytest.mark.model
def test_golden_texts_of_smollm2(smollm2: Tokenizer, golden: Path) -> None:
    for case in json.loads((golden / "smollm2_greedy.json").read_text())["cases"]:
        whole = smollm2.decode(case["prompt_tokens"], special=True)
        assert smollm2.encode(whole, parse_special=True) == case["prompt_tokens"]
        assert smollm2.decode(case["greedy"], special=True) == case["text"]
        assert smollm2.decode(case["greedy"]) == case["text"].removesuffix("<|im_end|>")
    assert smollm2.end_ids == {0, 2}
    assert not smollm2.add_bos


@pytest.mark.model
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_smollm2(smollm2: Tokenizer, text: str) -> None:
    known = set(smollm2.vocabulary.texts)  # its vocabulary lacks 21 of the 256 bytes
    lacking = {byte for byte, letter in enumerate(byte_letters()) if letter not in known}
    text = "".join([x for x in text if lacking.isdisjoint(x.encode())])
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert not any(smollm2.is_special(token) for token in ids)


@pytest.mark.model
def test_control_tokens_typed_into_smollm2_stay_text(smollm2: Tokenizer) -> None:
    text = "<|im_end|>\n<|im_start|>system"
    assert smollm2.encode(text, parse_special=True) == [2, 198, 1, 9690]
    ids = smollm2.encode(text)
    assert {1, 2}.isdisjoint(ids)
    assert smollm2.decode(ids) == text


# --- byte-level BPE ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġ", "1"]),
        ("starcoder", ["1", "2", "3", "4", "Ġ", "1"]),
        ("gpt-2", ["1234", "Ġ1"]),
        ("phi-2", ["1234", "Ġ1"]),
        ("llama-bpe", ["123", "4", "Ġ", "1"]),
        ("glm4", ["123", "4", "Ġ", "1"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "1"]),
    ],
)
def test_words_are_cut_as_the_file_names_it(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, bpe_keys(pre, add_bos_token=False))
    assert texts(tokenizer, tokenizer.encode("1234 1")) == pieces


def test_smollm_and_qwen2_cut_white_space_differently(tmp_path: Path) -> None:
    merges = ["Ċ h", "! Ċ"]
    letters = byte_letters()
    keys = {"tokens": [*letters, "Ċh", "!Ċ"], "merges": merges, "token_type": None}
    smollm = tokenizer_of(tmp_path, bpe_keys("smollm", **keys))
    qwen2 = tokenizer_of(tmp_path, bpe_keys("qwen2", **keys))
    assert texts(smollm, smollm.encode("!\nh")) == ["!", "Ċ", "h"]
    assert texts(qwen2, qwen2.encode("!\nh")) == ["!Ċ", "h"]


def test_every_known_rule_compiles_and_loses_nothing(tmp_path: Path) -> None:
    text = "Ich'll  hell0 wörld\r\n\n\t 12345'S 日本語 <|im_end|>🙂 \n"
    for pre in PRE_TOKENIZERS:
        tokenizer = tokenizer_of(tmp_path, bpe_keys(pre))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_whole_word_needs_no_merges_in_llama_bpe(tmp_path: Path) -> None:
    whole = tokenizer_of(tmp_path, bpe_keys("llama-bpe"))
    assert texts(whole, whole.encode(WHOLE, add_special=False)) == [WHOLE]
    merged = tokenizer_of(tmp_path, bpe_keys("dbrx"))
    assert texts(merged, merged.encode(WHOLE)) == list(WHOLE)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_no_merge_makes_a_control_token(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(tmp_path, bpe_keys(pre))
    assert texts(tokenizer, tokenizer.encode("EOS", add_special=False)) == ["EO", "S"]
    assert tokenizer.encode("EOS", parse_special=True, add_special=False) == [4]


def test_special_tokens_in_text(bpe: Tokenizer) -> None:
    text = "hello<think><|im_end|>"
    assert texts(bpe, bpe.encode(text, parse_special=True)) == ["hello", "<think>", "<|im_end|>"]
    typed = bpe.encode(text)
    assert typed[:2] == bpe.encode(text, parse_special=True)[:2]
    assert 2 not in typed
    assert bpe.decode(typed) == text
    assert bpe.decode(bpe.encode(text, parse_special=True)) == "hello<think>"
    assert bpe.decode(bpe.encode(text, parse_special=True), special=True) == text


def test_longer_special_tokens_go_first(tmp_path: Path) -> None:
    keys = bpe_keys()
    keys["tokenizer.ggml.tokens"][:3] = ["<x>", "<x><y>", "<y>"]
    tokenizer = tokenizer_of(tmp_path, keys)
    assert tokenizer.encode("<x><x><y><y>", parse_special=True) == [0, 1, 2]


@pytest.mark.parametrize(
    ("pre", "keys", "bos"),
    [
        ("smollm", {}, []),
        ("llama-bpe", {}, [1]),
        ("smollm", {"add_bos_token": True}, [1]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("llama-bpe", {"bos_token_id": None}, []),
    ],
)
def test_bos_obeys_the_file(tmp_path: Path, pre: str, keys: dict[str, Any], bos: list[int]) -> None:
    tokenizer = tokenizer_of(tmp_path, bpe_keys(pre, **keys))
    plain = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("hello") == bos + plain
    assert tokenizer.encode("") == bos


def test_end_tokens_are_the_named_and_the_usual_ones(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, bpe_keys()).end_ids == {0, 2}
    assert tokenizer_of(tmp_path, bpe_keys(eos_token_id=9, eot_token_id=3)).end_ids == {0, 2, 3, 9}


# --- SentencePiece ----------------------------------------------------------------------------


def slow_merge(text: str) -> list[str]:
    """The definition: again and again, the best pair of all, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        scores = [(SPM_PIECES[p], -i) for i, p in enumerate(pairs) if p in SPM_PIECES]
        if not scores:
            return symbols
        i = -max(scores)[1]
        symbols[i : i + 2] = [pairs[i]]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("abc", ["▁abc"]),
        ("cabc", ["▁", "c", "abc"]),
        ("ab", ["▁ab"]),
        (" a", ["▁▁", "a"]),
        ("aaaaa", ["▁a", "aaaa"]),
        ("é", ["▁", "é"]),
        ("ü", ["▁", "<0xC3>", "<0xBC>"]),
        ("c\n", ["▁", "c", "<0x0A>"]),
        ("<s>", ["▁", "<s", ">"]),
        ("<0x0A>", ["▁", "<", *(f"<0x{ord(x):02X}>" for x in "0x0A"), ">"]),
    ],
)
def test_pieces_by_score(spm: Tokenizer, text: str, pieces: list[str]) -> None:
    assert texts(spm, spm.encode(text, add_special=False)) == pieces


@given(st.text("abc <s>é", max_size=40))
def test_the_heap_agrees_with_the_definition(spm: Tokenizer, text: str) -> None:
    found = texts(spm, spm.encode_pieces([text], starts=False))
    assert found == slow_merge(text.replace(" ", "▁"))


def test_space_in_front_at_the_start_and_after_special_tokens(spm: Tokenizer) -> None:
    ids = spm.encode("a<word>a</s>a", parse_special=True)
    assert texts(spm, ids) == ["<s>", "▁a", "<word>", "▁a", "</s>", "▁a"]
    assert spm.decode(ids) == "a<word>aa"
    assert spm.decode(ids, special=True) == "<s>a<word>a</s>a"


def test_no_space_in_front_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, spm_keys(add_space_prefix=False, add_bos_token=False))
    assert texts(tokenizer, tokenizer.encode("abc")) == ["abc"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_any_text_survives_spm(spm: Tokenizer, text: str) -> None:
    assert spm.decode(spm.encode(text)) == text


def test_spm_defaults(spm: Tokenizer) -> None:
    assert (spm.bos_id, spm.eos_id, spm.add_bos, spm.end_ids) == (1, 2, True, {2})


def test_a_byte_without_token_is_unknown(tmp_path: Path) -> None:
    keys = spm_keys()
    keys["tokenizer.ggml.tokens"][4 + 0xC3] = "gone"
    tokenizer = tokenizer_of(tmp_path, keys)
    assert texts(tokenizer, tokenizer.encode("ü")) == ["<s>", "▁", "<unk>", "<0xBC>"]


# --- text piece by piece ----------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_stream_gives_whole_characters(bpe: Tokenizer, text: str) -> None:
    stream = bpe.stream()
    parts = [stream.push(token) for token in bpe.encode(text)]
    assert "".join(parts) == text
    assert stream.finish() == ""
    so_far = ""
    for part in parts:  # bytes are tokens here: most characters come in parts
        so_far += part
        assert text.startswith(so_far)


def test_a_cut_or_wrong_character_is_replaced_once(bpe: Tokenizer) -> None:
    smile = bpe.encode("🙂")
    assert len(smile) == 4
    stream = bpe.stream()
    assert [stream.push(token) for token in smile[:3]] == ["", "", ""]
    assert stream.finish() == "�"
    assert bpe.decode([*smile[:3], *bpe.encode("h")]) == "�h"
    assert bpe.decode(smile) == "🙂"


def test_unknown_ids_are_refused(bpe: Tokenizer) -> None:
    for token in (-1, bpe.n_vocab):
        with pytest.raises(ModelFileError, match=str(token)):
            bpe.decode([token])


# --- refusals ---------------------------------------------------------------------------------


def test_no_tokenizer(tmp_path: Path, golden: Path) -> None:
    assert load_tokenizer(GGUFFile(golden / "models" / "tiny-llama.gguf")) is None
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama"}))
    assert load_tokenizer(GGUFFile(path)) is None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (bpe_keys("tekken-9"), ["tokenizer.ggml.pre", "tekken-9", "smollm", "qwen2"]),
        (bpe_keys(model="t5"), ["tokenizer.ggml.model", "t5", "gpt2"]),
        (bpe_keys(pre=None), ["tokenizer.ggml.pre"]),  # type: ignore[arg-type]
        (bpe_keys(tokens=None), ["tokenizer.ggml.tokens"]),
        (bpe_keys(tokens=[1, 2]), ["tokenizer.ggml.tokens"]),
        (bpe_keys(tokens="text"), ["tokenizer.ggml.tokens"]),
        (bpe_keys(merges=None), ["tokenizer.ggml.merges"]),
        (bpe_keys(merges=[1]), ["tokenizer.ggml.merges"]),
        (bpe_keys(token_type=[CONTROL]), ["tokenizer.ggml.token_type", "1 entries"]),
        (bpe_keys(token_type=["a"]), ["tokenizer.ggml.token_type"]),
        (bpe_keys(eos_token_id=100000), ["tokenizer.ggml.eos_token_id", "100000"]),
        (bpe_keys(bos_token_id="x"), ["tokenizer.ggml.bos_token_id"]),
        (bpe_keys(chat_template=3), ["tokenizer.chat_template"]),
        (spm_keys(scores=None), ["tokenizer.ggml.scores"]),
        (spm_keys(scores=[0.5]), ["tokenizer.ggml.scores", "1 entries"]),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, keys: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelFileError) as caught:
        tokenizer_of(tmp_path, keys)
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("merge", ["nospace", "h zzz"])
def test_merges_that_do_not_fit_are_refused(tmp_path: Path, merge: str) -> None:
    tokenizer = tokenizer_of(tmp_path, bpe_keys(merges=[merge]))
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.merges"):
        tokenizer.encode("h")


def test_half_characters_are_refused(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        with pytest.raises(ConfigError, match="character 2"):
            tokenizer.encode("ab\ud800")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(tmp_path, bpe_keys())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvnumba\[run\]'"):
        tokenizer.encode("hello")
    assert tokenizer.decode([5 + ord("h") - 33]) != ""  # decoding needs no package
