"""`Tensors`: weights taken out of a model file, and the certainty that none was left out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvnumba.errors import ModelFileError
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.linear import Linear
from kvnumba.runner.quants import decode, read_rows


class Tensors:
    """Takes tensors out of a file, checks shapes, and remembers what was taken.

    Parameters
    ----------
    file : GGUFFile
    known : iterable of str
        Tensors that somebody else takes.

    Raises
    ------
    ModelFileError
        From the methods, if a tensor is missing or has another shape. The message names it.
    """

    def __init__(self, file: GGUFFile, known: Iterable[str] = ()):
        self.file, self.taken = file, set(known)

    def n_rows(self, name: str) -> int:
        """Return the size of a tensor's first dimension."""
        self.file.tensor_bytes(name)
        return self.file.tensors[name].shape[0]

    def matrix(self, name: str, n_out: int, n_in: int) -> Linear:
        """Take a matrix of `n_out` rows, as the file's bytes."""
        self._check(name, (n_out, n_in))
        return Linear(read_rows(self.file, name))

    def matrices(self, name: str, n_outs: tuple[int, ...], n_in: int) -> tuple[Linear, ...]:
        """Take a matrix whose rows are those of several matrices, one below the other."""
        self._check(name, (sum(n_outs), n_in))
        rows, parts, first = read_rows(self.file, name), [], 0
        for n_out in n_outs:
            start, stop = first * rows.row_bytes, (first + n_out) * rows.row_bytes
            parts.append(Linear(rows._replace(shape=(n_out, n_in), data=rows.data[start:stop])))
            first += n_out
        return tuple(parts)

    def values(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Take a tensor of one or two dimensions as float32, shape `shape`, C order."""
        self._check(name, shape)
        return decode(read_rows(self.file, name)).reshape(shape)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self.file.tensor_bytes(name)
        found = self.file.tensors[name].shape
        if found != shape:
            raise ModelFileError(
                f"{self.file.path}: tensor {name} is {list(found)}; {list(shape)} wanted"
            )
        self.taken.add(name)

    def expect_all_used(self) -> None:
        """Refuse a file with tensors that nobody took."""
        unused = [name for name in self.file.tensors if name not in self.taken]
        if unused:
            raise ModelFileError(
                f"{self.file.path}: tensor {unused[0]} ({len(unused)} like it) is not known to "
                "this runner (biases, experts and adapters are not done), so its results would "
                "be wrong"
            )
