"""SentencePiece vocabularies (``tokenizer.ggml.model = llama``): merge the best score first."""

from __future__ import annotations

import heapq

from kvnumba.errors import ModelFileError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.vocabulary import BYTE, NORMAL, UNUSED, USER_DEFINED, Vocabulary

_SPACE = "\u2581"


class SentencePieceModel:
    """Cuts plain text into tokens by score.

    Source: SentencePiece's BPE: of all neighbours whose concatenation is a token, the pair with
    the best score is merged, the leftmost of equals, until none is left; what then is no token
    is spelled in byte tokens.

    Parameters
    ----------
    file : GGUFFile
    vocabulary : Vocabulary

    Raises
    ------
    ModelFileError
        If the file lacks the scores.
    """

    add_bos = True

    def __init__(self, file: GGUFFile, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        scores = vocabulary.numbers("tokenizer.ggml.scores", "f")
        if scores is None:
            raise ModelFileError(f"{file.path} lacks the key tokenizer.ggml.scores")
        self._scores: list[float] = scores.tolist()
        # Control and byte tokens are no text: a user who types "<s>" or "<0x0A>" means letters.
        self._ids = vocabulary.by_text(vocabulary.ids_of_types(NORMAL, USER_DEFINED, UNUSED))
        self._byte_ids = self._find_byte_ids()
        self._byte_of = {token: byte for byte, token in self._byte_ids.items()}
        self.space_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))

    def encode_text(self, text: str, starts: bool) -> list[int]:
        """Return the ids of plain text.

        Parameters
        ----------
        text : str
        starts : bool
            The text stands at the beginning or after a special token: it gets a space in front,
            if the model is one that wants it.
        """
        if starts and self.space_prefix:
            text = " " + text
        ids: list[int] = []
        for symbol in self._merge(text.replace(" ", _SPACE)):
            token = self._ids.get(symbol)
            if token is not None:
                ids.append(token)
            else:
                ids.extend(self._spell(symbol))
        return ids

    def piece(self, token: int) -> bytes:
        """Return the bytes that one ordinary token stands for."""
        byte = self._byte_of.get(token)
        if byte is not None:
            return bytes([byte])
        return self.vocabulary.texts[token].replace(_SPACE, " ").encode("utf-8")

    def _merge(self, text: str) -> list[str]:
        """Return the symbols left when nothing more can be merged.

        Symbols are a linked list; a merge leaves its right half empty. A heap entry is stale
        when the lengths it was made with no longer hold.
        """
        symbols = list(text)
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        heap: list[tuple[float, int, int, int]] = []

        def offer(i: int) -> None:
            if i < 0 or after[i] >= len(symbols):
                return
            merged = symbols[i] + symbols[after[i]]
            token = self._ids.get(merged)
            if token is not None:
                heapq.heappush(heap, (-self._scores[token], i, after[i], len(merged)))

        for i in range(len(symbols)):
            offer(i)
        while heap:
            _, i, j, n_letters = heapq.heappop(heap)
            is_stale = not symbols[i] or not symbols[j] or after[i] != j
            if is_stale or len(symbols[i]) + len(symbols[j]) != n_letters:
                continue
            symbols[i], symbols[j] = symbols[i] + symbols[j], ""
            after[i] = after[j]
            if after[i] < len(symbols):
                before[after[i]] = i
            offer(before[i])
            offer(i)
        return [symbol for symbol in symbols if symbol]

    def _spell(self, symbol: str) -> list[int]:
        """Return byte tokens for text that is no token; the unknown token for missing ones."""
        unknown = self.vocabulary.unknown_id
        ids = [self._byte_ids.get(byte, unknown) for byte in symbol.encode("utf-8")]
        return [token for token in ids if token is not None]

    def _find_byte_ids(self) -> dict[int, int]:
        """Return the token of each byte; these tokens are spelled ``<0x00>`` to ``<0xFF>``."""
        texts = self.vocabulary.by_text(self.vocabulary.ids_of_types(BYTE))
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {names[text]: token for text, token in texts.items() if text in names}
