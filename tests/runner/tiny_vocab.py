"""Small vocabularies of both kinds, as model files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf_bytes import gguf_bytes

from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, WORD, BYTE = 1, 2, 3, 4, 6
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BPE_SPECIALS = [
    ("<|endoftext|>", CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<think>", WORD),
    ("EOS", CONTROL),
]
MERGES = ["1 2", "12 3", "123 4", "h e", "l l", "he ll", "hell o", "Ġ h", "Ġ 1", "E O", "EO S"]
WHOLE = "abc"
"""A word of the BPE vocabulary that no merge makes."""


def byte_letters() -> list[str]:
    """GPT-2's letters, written down from its description: printable bytes are themselves."""
    letters, n_other = [], 0
    for byte in range(256):
        if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD):
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n_other))
            n_other += 1
    return letters


def bpe_keys(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """All keys of a small BPE tokenizer; a change to None removes a key."""
    made = [merge.replace(" ", "") for merge in MERGES if merge != "EO S"]
    texts = [text for text, _ in BPE_SPECIALS] + byte_letters() + made + [WHOLE]
    types = [kind for _, kind in BPE_SPECIALS] + [NORMAL] * (len(texts) - len(BPE_SPECIALS))
    keys = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    return _changed(keys, changes)


SPM_PIECES = {
    "▁": -1.0,
    "▁▁": -1.5,
    "a": -9.0,
    "b": -9.5,
    "c": -9.5,
    "ab": -2.0,
    "bc": -1.0,
    "abc": -3.0,
    "▁a": -2.0,
    "▁ab": -4.0,
    "▁abc": -6.0,
    "aa": -5.0,
    "aaaa": -5.5,
    "<": -9.0,
    "s": -9.0,
    ">": -9.0,
    "<s": -1.0,
    "é": -9.0,
}


def spm_keys(**changes: Any) -> dict[str, Any]:
    """All keys of a small SentencePiece tokenizer."""
    texts = ["<unk>", "<s>", "</s>", "<word>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, WORD] + [BYTE] * 256 + [NORMAL] * len(SPM_PIECES)
    keys = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts + list(SPM_PIECES),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * len(texts) + list(SPM_PIECES.values()),
    }
    return _changed(keys, changes)


def tokenizer_of(folder: Path, keys: dict[str, Any]) -> Tokenizer:
    path = folder / "tiny.gguf"
    path.write_bytes(gguf_bytes(keys))
    tokenizer = load_tokenizer(GGUFFile(path))
    assert tokenizer is not None
    return tokenizer


def _changed(keys: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, item in changes.items():
        prefix = "tokenizer." if name == "chat_template" else "tokenizer.ggml."
        keys[prefix + name] = item
    return {key: item for key, item in keys.items() if item is not None}
