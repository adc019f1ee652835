"""Byte-level BPE (``tokenizer.ggml.model = gpt2``), by the `tokenizers` library."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from kvnumba.errors import MissingExtraError, ModelFileError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.gguf_values import StringArray
from kvnumba.runner.pretokenizers import pre_tokenizer
from kvnumba.runner.vocabulary import CONTROL, UNKNOWN, Vocabulary


def _byte_letters() -> list[str]:
    """Return GPT-2's letter of each byte: itself if printable, else the next one from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(printable)))
    return [letters[byte] for byte in range(256)]


_BYTE_OF = {letter: byte for byte, letter in enumerate(_byte_letters())}


class BytePairModel:
    """Cuts plain text into tokens by merge rank.

    The library's objects are made at the first `encode_text`. A byte that the vocabulary has no
    token for is left out, as llama.cpp does (SmolLM2 lacks some control characters).

    Parameters
    ----------
    file : GGUFFile
    vocabulary : Vocabulary

    Raises
    ------
    ModelFileError
        If the file lacks the merges, or its pre-tokenizer is not known.
    """

    space_prefix = False

    def __init__(self, file: GGUFFile, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        name = file.require("tokenizer.ggml.pre")
        self._rule = pre_tokenizer(name, file.path)
        merges = file.require("tokenizer.ggml.merges")
        if not isinstance(merges, StringArray):
            raise ModelFileError(f"{file.path}: tokenizer.ggml.merges is no list of strings")
        self._merges = merges.tolist()
        self.add_bos = self._rule.add_bos

    def encode_text(self, text: str, starts: bool) -> list[int]:
        """Return the ids of plain text; `starts` (nothing but a special token before) is unused.

        Raises
        ------
        MissingExtraError
            If `tokenizers` is not installed.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token: int) -> bytes:
        """Return the bytes that one ordinary token stands for."""
        text = self.vocabulary.texts[token]
        try:
            return bytes([_BYTE_OF[letter] for letter in text])
        except KeyError:  # added to the vocabulary as plain text
            return text.encode("utf-8")

    @cached_property
    def _backend(self) -> Any:
        try:
            from tokenizers import Regex, Tokenizer
            from tokenizers.models import BPE
            from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
        except ImportError as error:
            raise MissingExtraError(
                "turning text into tokens needs the tokenizers package: pip install 'kvnumba[run]'"
            ) from error
        vocab, merges = self._plain_vocab()
        try:
            model = BPE(vocab, merges, ignore_merges=self._rule.ignore_merges)
        except Exception as error:  # the library raises bare Exception for a merge without token
            raise ModelFileError(
                f"{self.vocabulary.source}: tokenizer.ggml.merges do not fit "
                f"tokenizer.ggml.tokens: {error}"
            ) from error
        backend = Tokenizer(model)
        backend.pre_tokenizer = Sequence(
            [Split(Regex(regex), "isolated") for regex in self._rule.regexes]
            + [ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        return backend

    def _plain_vocab(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return what text may become: control tokens are left out, so no merge can make one."""
        vocabulary = self.vocabulary
        control = vocabulary.by_text(vocabulary.ids_of_types(UNKNOWN, CONTROL))
        is_plain = ~np.isin(vocabulary.types, (UNKNOWN, CONTROL))
        vocab = vocabulary.by_text(np.flatnonzero(is_plain).tolist())
        merges = []
        for merge in self._merges:
            cut = merge.find(" ", 1)  # the first token may itself begin with a space
            if cut < 0:
                raise ModelFileError(
                    f"{vocabulary.source}: tokenizer.ggml.merges has {merge!r}, not two tokens"
                )
            left, right = merge[:cut], merge[cut + 1 :]
            if not (left in control or right in control or left + right in control):
                merges.append((left, right))
        return vocab, merges
