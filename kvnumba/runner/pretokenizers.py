"""How byte-level BPE models cut text into words: a table of names and regular expressions.

GGUF files name the rule (``tokenizer.ggml.pre``); the expressions are those of the models' own
``tokenizer.json`` files.
"""

from __future__ import annotations

from typing import NamedTuple

from kvnumba.errors import ModelFileError


class PreTokenizer(NamedTuple):
    """One rule.

    Attributes
    ----------
    regexes : tuple of str
        Applied one after another; each cuts the pieces of the one before at its matches.
    ignore_merges : bool
        A word that is a token as a whole is taken without merging.
    add_bos : bool
        What a file that does not say so means for the token at the beginning.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
    ),
    (PreTokenizer((_GPT2,)), "gpt-2 phi-2 mpt olmo jais trillion"),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 pixtral lfm2",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe glm4"),
    (PreTokenizer((_QWEN2,)), "qwen2 deepseek-r1-qwen stablelm2 hunyuan"),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule for rule, names in _RULES for name in names.split()
}
"""By the name that ``tokenizer.ggml.pre`` gives."""


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """Look up a rule; `source` is the file's name for the message.

    Raises
    ------
    ModelFileError
        If the name is not in the table: guessing would give other tokens than the model learned.
    """
    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{source}: tokenizer.ggml.pre is {name!r}, which is not supported; "
            f"known: {', '.join(sorted(PRE_TOKENIZERS))}; token ids can still be given directly"
        )
    return PRE_TOKENIZERS[name]
