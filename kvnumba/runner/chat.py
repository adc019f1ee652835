"""Chat templates: from messages to token ids, with control tokens in messages kept as text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from kvnumba.errors import ConfigError, MissingExtraError, ModelFileError
from kvnumba.runner.tokenizer import Tokenizer

Message = Mapping[str, Any]


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True
) -> str:
    """Return messages in the model's chat template, as text.

    Parameters
    ----------
    tokenizer : Tokenizer
    messages : sequence of dict
        Each with ``role`` and ``content``, as everyone has them.
    add_generation_prompt : bool
        End with the beginning of the answer.

    Raises
    ------
    ModelFileError
        If the model has no template, or one that does not work.
    ConfigError
        If a message lacks its role or content, or the template refuses the messages.
    MissingExtraError
        If `jinja2` is not installed.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"the message {message!r} has no role; e.g. 'user' is wanted")
        if "content" not in message:
            raise ConfigError(f"the message of role {message['role']!r} has no content")
    source = tokenizer.vocabulary.source
    if tokenizer.chat_template is None:
        raise ModelFileError(
            f"{source} has no chat template (tokenizer.chat_template): prompt it without --chat"
        )
    template = _compiled(tokenizer.chat_template, source)
    try:
        text: str = template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            bos_token=tokenizer.text_of(tokenizer.bos_id),
            eos_token=tokenizer.text_of(tokenizer.eos_id),
        )
    except ConfigError:
        raise
    except Exception as error:  # a template is a program from the file: it may raise anything
        raise ModelFileError(f"{source}: tokenizer.chat_template fails: {error}") from error
    return text


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True
) -> list[int]:
    """Return the token ids of a chat from its beginning.

    Control tokens are those that the template writes; what looks like one in a message stays
    text. Without such text the ids are those of the rendered chat as a whole.

    Parameters and errors are those of `render`.
    """
    guard = _Guard(tokenizer)
    text = render(tokenizer, guard.hide(messages), add_generation_prompt)
    ids = tokenizer.encode_pieces(guard.split(text))
    bos = tokenizer.bos_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def encode_turn(
    tokenizer: Tokenizer, message: Message, held: np.ndarray | Sequence[int]
) -> list[int]:
    """Return what has to follow `held` so that the chat goes on with `message`.

    This is the end of the last answer as the template writes it (without the end token if `held`
    already ends with it), the message, and the beginning of the next answer.

    Parameters
    ----------
    tokenizer : Tokenizer
    message : dict
        With ``role`` and ``content``.
    held : sequence of int
        All tokens so far, from the beginning to the last answer. If empty, the chat begins.

    Raises
    ------
    ModelFileError
        As `render`; and if the template does not show the answer before the message as it is, so
        that nothing can be appended to it.
    """
    if not len(held):
        return encode_chat(tokenizer, [message])
    # Digits that nobody can guess stand for the earlier turns, whose text is not needed.
    answer = _digits()
    earlier = [{"role": "user", "content": _digits()}, {"role": "assistant", "content": answer}]
    guard = _Guard(tokenizer)
    text = render(tokenizer, [*earlier, *guard.hide([message])])
    if text.count(answer) != 1:
        raise ModelFileError(
            f"{tokenizer.vocabulary.source}: tokenizer.chat_template does not show an earlier "
            "answer exactly once, so a turn cannot be appended; start a new session"
        )
    pieces = guard.split(text.partition(answer)[2])
    last = int(held[-1])
    if last in tokenizer.end_ids:
        pieces = _after_end(pieces, last)
        return tokenizer.encode_pieces(pieces, starts=True)
    return tokenizer.encode_pieces(pieces, starts=tokenizer.is_special(last))


class _Guard:
    """Keeps control tokens in messages out of the template's reach.

    Before rendering, each text of a control token is replaced by digits that nobody can guess;
    after rendering, the control tokens found are the template's own, and the digits are put back
    as plain text. Templates may trim, cut or repeat a message meanwhile.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._mark = tokenizer, _digits()
        self._hidden: list[str] = []

    def hide(self, value: Any) -> Any:
        """Return messages (or any part of them) with the texts of control tokens replaced."""
        if isinstance(value, str):
            for text, _ in self._tokenizer.control_texts:
                if text in value:
                    value = value.replace(text, f"{self._mark}{len(self._hidden):06d}")
                    self._hidden.append(text)
            return value
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def split(self, text: str) -> list[int | str]:
        """Return the special tokens of a rendered text, and what lies between, put back."""
        pieces: list[int | str] = []
        for piece in self._tokenizer.split(text):
            if isinstance(piece, int) or self._mark not in piece:
                pieces.append(piece)
            else:
                shown = re.sub(self._mark + r"(\d{6})", self._text, piece)
                pieces.extend(self._tokenizer.split(shown, parse_special=False))
        return pieces

    def _text(self, match: re.Match[str]) -> str:
        return self._hidden[int(match[1])]


def _digits() -> str:
    # Digits survive trimming, case changes and escaping; 40 of them are 133 random bits.
    return f"{secrets.randbelow(10**40):040d}"


def _after_end(pieces: list[int | str], end: int) -> list[int | str]:
    """Drop the end token of an answer, and white space that a template puts before it."""
    for i, piece in enumerate(pieces):
        if piece == end:
            return pieces[i + 1 :]
        if isinstance(piece, int) or piece.strip():
            break
    return pieces


@lru_cache(maxsize=8)
def _compiled(template: str, source: str) -> Any:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError(
            "chat templates need the jinja2 package: pip install 'kvnumba[run]'"
        ) from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ModelFileError(
            f"{source}: tokenizer.chat_template cannot be read: {error}"
        ) from error


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Jinja's own filter escapes for HTML, which models have not learned."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"the model's chat template refuses the messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
