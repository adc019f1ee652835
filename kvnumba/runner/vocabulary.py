"""The token table of a model file: texts, types, scores, and the tokens with a role."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvnumba.errors import ModelFileError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.gguf_values import StringArray

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_END_TEXTS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|EOT|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|return|>",
)
"""Tokens that end an answer whatever the metadata says: chat models often name only one."""


class Vocabulary:
    """What the ``tokenizer.ggml.*`` keys say about tokens.

    Parameters
    ----------
    file : GGUFFile
    default_bos, default_eos, default_unknown : int, optional
        Used when the file does not name them and has that many tokens.

    Attributes
    ----------
    source : str
        The file's name, for messages.
    texts : list of str
        One per token, as the model stores it.
    types : numpy.ndarray of shape (n_vocab,), int64
    bos_id, eos_id, unknown_id : int or None
    end_ids : frozenset of int
        Tokens that end an answer.

    Raises
    ------
    ModelFileError
        If a key is missing, of the wrong type or length, or names a token that does not exist.
    """

    def __init__(
        self,
        file: GGUFFile,
        default_bos: int | None = None,
        default_eos: int | None = None,
        default_unknown: int | None = None,
    ):
        self.source, self._file = file.path, file
        tokens = file.require("tokenizer.ggml.tokens")
        if not isinstance(tokens, StringArray) or not len(tokens):
            raise ModelFileError(f"{self.source}: tokenizer.ggml.tokens is no list of strings")
        self.texts = tokens.tolist()
        types = self.numbers("tokenizer.ggml.token_type", "iu")
        self.types = np.full(len(self.texts), NORMAL) if types is None else types.astype(np.int64)
        self.bos_id = self._token("bos", default_bos)
        self.eos_id = self._token("eos", default_eos)
        self.unknown_id = self._token("unknown", default_unknown)
        self.end_ids = self._find_end_ids()

    def __len__(self) -> int:
        return len(self.texts)

    def numbers(self, key: str, kinds: str) -> np.ndarray | None:
        """Return an array with one number per token, or None if the file lacks it.

        Parameters
        ----------
        key : str
        kinds : str
            Allowed ``dtype.kind`` letters.
        """
        array = self._file.get(key)
        if array is None:
            return None
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds:
            raise ModelFileError(f"{self.source}: {key} is no list of numbers")
        if len(array) != len(self.texts):
            raise ModelFileError(
                f"{self.source}: {key} has {len(array)} entries, "
                f"tokenizer.ggml.tokens has {len(self.texts)}"
            )
        return array

    def ids_of_types(self, *types: int) -> list[int]:
        """Return the ids of all tokens of these types, ascending."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def by_text(self, ids: Iterable[int]) -> dict[str, int]:
        """Return text to id for these tokens, without empty texts."""
        return {self.texts[i]: i for i in ids if self.texts[i]}

    def _token(self, role: str, default: int | None) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        token = self._file.get(key)
        if token is None:
            return default if default is None or default < len(self.texts) else None
        if not isinstance(token, int) or not 0 <= token < len(self.texts):
            raise ModelFileError(
                f"{self.source}: {key} is {token!r}, the vocabulary has {len(self.texts)} tokens"
            )
        return token

    def _find_end_ids(self) -> frozenset[int]:
        marked = self.by_text(self.ids_of_types(CONTROL, USER_DEFINED))
        ids = {marked[text] for text in _END_TEXTS if text in marked}
        named = (self.eos_id, self._token("eot", None), self._token("eom", None))
        return frozenset(ids.union(token for token in named if token is not None))
