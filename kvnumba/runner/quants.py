"""Element kinds of weights: which stay as the file's bytes, and how the others are decoded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvnumba.errors import MissingExtraError, ModelFileError
from kvnumba.runner.ggml_kinds import KINDS
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.kernels.blocks import BLOCK_BYTES, row_bytes
from kvnumba.runner.kernels.project import pick_rows_kernel

NATIVE_KINDS = frozenset(BLOCK_BYTES)
"""ggml ids of the kinds that kernels read in place: F32, F16, BF16, Q4_0, Q4_1, Q8_0."""
_F32 = 0


class Rows(NamedTuple):
    """A matrix of weights as bytes.

    Attributes
    ----------
    kind : int
        ggml id, one of NATIVE_KINDS.
    shape : tuple of int
        Rows, and weights per row.
    row_bytes : int
    data : ndarray of uint8, shape (rows * row_bytes,)
    """

    kind: int
    shape: tuple[int, int]
    row_bytes: int
    data: np.ndarray


def read_rows(file: GGUFFile, name: str) -> Rows:
    """Take a tensor of one or two dimensions from a file, in place where kernels know its kind.

    Other kinds are decoded to float32 here, once, by the ``gguf`` package.

    Raises
    ------
    ModelFileError
        If the file lacks the tensor, or nobody can decode its kind.
    MissingExtraError
        If the kind needs the ``gguf`` package and that is not installed.
    """
    data = file.tensor_bytes(name)
    info = file.tensors[name]
    n_in = info.shape[-1]
    shape = (int(np.prod(info.shape[:-1])), n_in)
    if info.kind in NATIVE_KINDS:
        return Rows(info.kind, shape, row_bytes(info.kind, n_in), data)
    decoded = decode_by_gguf(data, info.kind, shape, f"{file.path}: tensor {name}")
    return Rows(_F32, shape, 4 * n_in, decoded.reshape(-1).view(np.uint8))


def decode_by_gguf(
    data: np.ndarray, kind: int, shape: tuple[int, int], what: str = "the tensor"
) -> np.ndarray:
    """Decode the bytes of any kind that the ``gguf`` package knows.

    Returns
    -------
    ndarray of float32, shape `shape`, C order
    """
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise MissingExtraError(
            f"{what} is {KINDS[kind].name}, which the package gguf decodes; "
            "install it with pip install 'kvnumba[run]'"
        ) from None
    try:
        decoded = quants.dequantize(data.reshape(shape[0], -1), GGMLQuantizationType(kind))
    except (NotImplementedError, ValueError, KeyError) as error:
        raise ModelFileError(
            f"{what} is {KINDS[kind].name}, which this runner cannot decode ({error}); "
            "requantize the model to Q8_0 or Q4_1"
        ) from None
    return np.ascontiguousarray(decoded.reshape(shape), np.float32)


def decode(rows: Rows) -> np.ndarray:
    """Return all weights as float32, shape ``rows.shape``."""
    every = np.arange(rows.shape[0], dtype=np.int32)
    return pick(rows, every, np.empty(rows.shape, np.float32))


def pick(rows: Rows, which: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Decode the rows of the indices ``which[n]`` (int32) to ``out[n, n_in]``; return `out`."""
    pick_rows_kernel(out, rows.data, rows.kind, rows.row_bytes, which)
    return out
