"""Text to token ids and back, with the vocabulary of the model file."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from kvnumba.errors import ConfigError, ModelFileError
from kvnumba.runner.bpe import BytePairModel
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.spm import SentencePieceModel
from kvnumba.runner.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary


class Tokenizer:
    """Turns text into token ids and back.

    Special tokens are found as text first, the longest ones first; what lies between goes to the
    model's own algorithm. Two kinds exist: *control* tokens steer the model and are recognised
    only where the caller asks for it; *user-defined* tokens are words and always recognised.

    Not done: special cases that llama.cpp ties to a model's name or to a token's text rather
    than to metadata (phi-3 strips white space after special tokens; ``</s>`` of type normal).

    Parameters
    ----------
    vocabulary : Vocabulary
    model : BytePairModel or SentencePieceModel
    add_bos : bool
        Whether `encode` puts `bos_id` in front.
    chat_template : str, optional
        Source of the model's chat template.

    Attributes
    ----------
    n_vocab : int
    bos_id, eos_id : int or None
    end_ids : frozenset of int
        Tokens that end an answer.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: BytePairModel | SentencePieceModel,
        add_bos: bool,
        chat_template: str | None = None,
    ):
        self.vocabulary, self._model = vocabulary, model
        self.n_vocab = len(vocabulary)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.end_ids = vocabulary.end_ids
        self.add_bos = add_bos and self.bos_id is not None
        self.chat_template = chat_template
        self._silent = frozenset(vocabulary.ids_of_types(UNKNOWN, CONTROL))
        self.control_texts = _longest_first(vocabulary.by_text(self._silent))
        words = vocabulary.by_text(vocabulary.ids_of_types(USER_DEFINED))
        self._word_ids = frozenset(words.values())
        self._words = _longest_first(words)
        self._specials = _longest_first(dict(self.control_texts) | words)

    def encode(self, text: str, parse_special: bool = False, add_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text : str
        parse_special : bool
            Recognise control tokens in the text. False for anything a user may have written:
            there ``<|im_end|>`` is ten letters and not the end of the turn.
        add_special : bool
            Put the beginning-of-sequence token in front, if the model is one that wants it.

        Raises
        ------
        ConfigError
            If the text holds half characters (lone surrogates).
        MissingExtraError
            If a package that is needed is not installed.
        """
        ids = self.encode_pieces(self.split(text, parse_special))
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def split(self, text: str, parse_special: bool = True) -> list[int | str]:
        """Return ids of special tokens, and the plain texts between them."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text is not valid Unicode at character {error.start}: {error.reason}"
            ) from None
        pieces: list[int | str] = [text] if text else []
        for special, token in self._specials if parse_special else self._words:
            if special in text:
                pieces = [part for piece in pieces for part in _cut(piece, special, token)]
        return pieces

    def encode_pieces(self, pieces: Iterable[int | str], starts: bool = True) -> list[int]:
        """Return the ids of texts and special tokens in order; control tokens are not parsed.

        Parameters
        ----------
        pieces : iterable of int or str
        starts : bool
            False if the first piece continues a text.
        """
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                starts = True
            elif piece:
                ids.extend(self._model.encode_text(piece, starts))
                starts = False
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD.

        Parameters
        ----------
        ids : iterable of int
        special : bool
            Show control tokens too.

        Raises
        ------
        ModelFileError
            If an id is not in the vocabulary.
        """
        stream = self.stream(special)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self, special: bool = False) -> TextStream:
        """Return a decoder that is fed one token at a time."""
        return TextStream(self, special)

    def text_of(self, token: int | None) -> str:
        """Return a token's text as the vocabulary has it; empty for None."""
        return "" if token is None else self.vocabulary.texts[token]

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token or a user-defined word."""
        return token in self._silent or token in self._word_ids

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of one token; none for a control token unless `special`."""
        if not 0 <= token < self.n_vocab:
            raise ModelFileError(f"token {token} is not in the vocabulary of {self.n_vocab} tokens")
        if token in self._silent:
            return self.text_of(token).encode("utf-8") if special else b""
        if token in self._word_ids:
            return self.text_of(token).encode("utf-8")
        return self._model.piece(token)

    @property
    def space_prefix(self) -> bool:
        """Whether text at the start and after special tokens is encoded with a space in front."""
        return self._model.space_prefix


class TextStream:
    """Decodes tokens as they come; a character is given out when its last byte has come."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._starts = True

    def push(self, token: int) -> str:
        """Return the text that became complete with this token."""
        piece = self._tokenizer.piece(token, self._special)
        if self._starts and self._tokenizer.space_prefix and piece.startswith(b" "):
            piece = piece[1:]
        self._starts = self._tokenizer.is_special(token)
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return what is left: U+FFFD if the last character never became complete."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """Return the tokenizer of a model file; None if it has none.

    Raises
    ------
    ModelFileError
        If the file's tokenizer is of a kind that is not supported, or damaged. The message names
        the key.
    """
    name = file.get("tokenizer.ggml.model", "none")
    if name == "none":
        return None
    model: BytePairModel | SentencePieceModel
    if name == "gpt2":
        vocabulary = Vocabulary(file)
        model = BytePairModel(file, vocabulary)
    elif name == "llama":
        vocabulary = Vocabulary(file, default_bos=1, default_eos=2, default_unknown=0)
        model = SentencePieceModel(file, vocabulary)
    else:
        raise ModelFileError(
            f"{file.path}: tokenizer.ggml.model is {name!r}, which is not supported; "
            "known: gpt2, llama, none; token ids can still be given directly"
        )
    template = file.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"{file.path}: tokenizer.chat_template is no string")
    add_bos = bool(file.get("tokenizer.ggml.add_bos_token", model.add_bos))
    return Tokenizer(vocabulary, model, add_bos, template)


def _longest_first(tokens: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(tokens.items(), key=lambda item: -len(item[0]))


def _cut(piece: int | str, special: str, token: int) -> list[int | str]:
    if isinstance(piece, int) or special not in piece:
        return [piece]
    parts: list[int | str] = []
    for i, text in enumerate(piece.split(special)):
        if i:
            parts.append(token)
        if text:
            parts.append(text)
    return parts
