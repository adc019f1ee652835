"""Look-ups of an architecture's metadata keys, with their types checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvnumba.errors import ModelFileError
from kvnumba.runner.gguf_file import GGUFFile


class Keys:
    """The keys ``ARCHITECTURE.*`` of a file.

    Parameters
    ----------
    file : GGUFFile
    architecture : str

    Raises
    ------
    ModelFileError
        If the file is of another architecture; from the methods, if a key is missing or its value
        impossible. The message names the key.
    """

    def __init__(self, file: GGUFFile, architecture: str):
        if file.architecture != architecture:
            raise ModelFileError(
                f"{file.path}: general.architecture is {file.architecture!r}; "
                f"this forward pass is {architecture!r}"
            )
        self.file, self.architecture = file, architecture

    def fail(self, key: str, value: Any, wanted: str) -> ModelFileError:
        """Return the error for a value that is not `wanted`."""
        return ModelFileError(
            f"{self.file.path}: {self.architecture}.{key} is {value!r}; {wanted} wanted"
        )

    def has(self, key: str) -> bool:
        """Return whether the file has the key."""
        return f"{self.architecture}.{key}" in self.file.keys

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of any type; without a default the key must be there."""
        name = f"{self.architecture}.{key}"
        return self.file.require(name) if default is None else self.file.get(name, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(key, value, "a whole number of at least 1, the same for all layers,")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number of at least 0."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or not np.isfinite(value) or value < 0:
            raise self.fail(key, value, "a finite number of at least 0")
        return float(value)

    def refuse_what_is_not_done(self, harmless: Mapping[str, Any]) -> None:
        """Refuse keys that change the arithmetic, unless their value is the harmless one."""
        for key, allowed in harmless.items():
            value = self.get(key, allowed)
            if np.any(np.asarray(value) != allowed):
                raise self.fail(key, value, f"{allowed!r} (anything else is not done here)")
