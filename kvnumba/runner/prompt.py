"""From what the user typed to the token list of the whole prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from kvnumba.batch import int32_array
from kvnumba.errors import ConfigError, ModelFileError, ShapeError


def read_text(file: str | Path | None, prompt: str | None) -> str:
    """Return the document, a blank line, the question; either may be missing.

    Raises
    ------
    ConfigError
        If the file cannot be read as UTF-8 text, or both are missing.
    """
    parts = []
    if file is not None:
        try:
            parts.append(Path(file).read_text(encoding="utf-8").rstrip("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {file} cannot be read as UTF-8 text: {error}") from None
    if prompt is not None:
        parts.append(prompt)
    if not parts:
        raise ConfigError("no prompt: give --file, --prompt or --tokens")
    return "\n\n".join(parts)


def parse_token_list(text: str, n_vocab: int) -> np.ndarray:
    """Return the ids of a comma-separated list, int32; spaces around a number are allowed.

    Raises
    ------
    ConfigError
        If an entry is no whole number or not in ``[0, n_vocab)``.
    """
    parts = [part.strip(" ") for part in text.split(",")]
    if not all(re.fullmatch(r"-?[0-9]{1,10}", part) for part in parts):
        raise ConfigError(f"--tokens {text!r}: whole numbers separated by commas wanted")
    try:
        tokens = int32_array([int(part) for part in parts], "tokens")
    except ShapeError as error:
        raise ConfigError(f"--tokens {text!r}: {error}") from None
    bad = tokens[(tokens < 0) | (tokens >= n_vocab)]
    if len(bad):
        raise ConfigError(f"token id {bad[0]} is outside [0, {n_vocab}), the model's vocabulary")
    return tokens


def prompt_tokens(tokenizer: Any, text: str, chat: bool, held: np.ndarray) -> np.ndarray:
    """Return the token ids of the whole prompt, int32.

    Parameters
    ----------
    tokenizer : Tokenizer or None
    text : str
        What the user said; control tokens in it stay text.
    chat : bool
        Put it in the model's chat template, as the turn after what the session holds.
    held : ndarray, int32
        Tokens that the session holds; ignored without `chat`.

    Raises
    ------
    ModelFileError
        If the model file has no tokenizer (or, for `chat`, no template).
    """
    if tokenizer is None:
        raise ModelFileError(
            "the model file has no tokenizer (tokenizer.ggml.model): give the prompt as --tokens"
        )
    if not chat:
        return np.asarray(tokenizer.encode(text, parse_special=False), np.int32)
    from kvnumba.runner.chat import encode_chat, encode_turn

    if not len(held):
        return np.asarray(encode_chat(tokenizer, [{"role": "user", "content": text}]), np.int32)
    turn = encode_turn(tokenizer, {"role": "user", "content": text}, held)
    return np.concatenate([held, np.asarray(turn, np.int32)])
