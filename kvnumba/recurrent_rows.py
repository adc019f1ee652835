"""`StateRows`: the states themselves, in rows that are written once until they are free again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from kvnumba.errors import ConfigError, NoSlotError, ShapeError
from kvnumba.kernels import bits, recurrent, slots, states
from kvnumba.layers import KVLayers
from kvnumba.recurrent_config import RecurrentConfig


class NamesRows(Protocol):
    """Whatever rows must stay for."""

    def name_rows(self, bits: np.ndarray) -> None:
        """Set in `bits` (uint64 bitmap) every row that is wanted."""


class StateRows:
    """Rows of r and s of all layers, and which of them may be written.

    Parameters
    ----------
    config : RecurrentConfig
    path : path-like, optional
        A new or empty folder for the mapped files. Default: anonymous memory.

    Attributes
    ----------
    layers : KVLayers
    r, s : list of ndarray, shape (n_rows, row_items), storage dtype
        The states of each layer: plain arrays over the mapping.
    pinned : ndarray, shape (n_words,), uint64
        Bitmap of rows that the last durable commit names: not given out.
    """

    def __init__(self, config: RecurrentConfig, path: str | os.PathLike[str] | None = None):
        self.config = config
        self.layers = KVLayers(config.rows_config, path)
        self.r, self.s = self.layers.k, self.layers.v
        self.pinned = np.zeros(bits.n_words(config.n_rows), np.uint64)

    def find_free(self, n: int, holders: Iterable[NamesRows]) -> np.ndarray:
        """Return the `n` lowest rows that neither a holder nor a durable commit names, int32.

        This is the only place that decides which row may be overwritten.

        Raises
        ------
        NoSlotError
            If there are not that many.
        """
        named = np.zeros_like(self.pinned)
        for holder in holders:
            holder.name_rows(named)
        out = np.empty(n, np.int32)
        n_free = slots.find_free_kernel(named, self.pinned, self.config.n_rows, out)
        if n_free < n:
            n_waiting = bits.count_kernel(self.pinned & ~named)
            raise NoSlotError(
                f"{n} rows for states wanted, {n_free} are free and {n_waiting} wait for a session "
                "commit; commit or roll back earlier steps first",
                n,
                n_free,
                n_waiting,
            )
        return out

    def reserve(self, rows: np.ndarray) -> None:
        """Make rows safe to write; raises as `KVLayers.reserve`."""
        self.layers.reserve(int(rows.max(initial=-1)) + 1)

    def read(self, il: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return r and s of some rows (-1: zeros), float32, shapes ``(n, n_embd_*)``.

        Raises
        ------
        ConfigError
            If there is no such layer.
        """
        c = self.config
        self.check_layer(il)
        out = []
        for kind, storage, width in (
            (c.type_r, self.r[il], c.r_width(il)),
            (c.type_s, self.s[il], c.s_width(il)),
        ):
            part = np.empty((len(rows), width), np.float32)
            if width:
                states.gather_states(kind, storage, rows, part)
            out.append(part)
        return out[0], out[1]

    def write(self, il: int, rows: np.ndarray, r: np.ndarray, s: np.ndarray | None) -> None:
        """Store states in rows.

        Parameters
        ----------
        il : int
        rows : ndarray, shape (n_seqs, n_states), int32
            Free ones that `reserve` made safe.
        r, s : ndarray, shape (n_seqs, n_states, n_embd_r) and (..., n_embd_s), float32
            Without the middle axis when `n_states` is 1; s may be None where it has no values.

        Raises
        ------
        ShapeError, ConfigError
            If an argument is impossible; nothing is written.
        """
        c = self.config
        self.check_layer(il)
        self.layers.check_writable()
        flat_r = _flat("r", r, rows.shape, c.r_width(il))
        if s is None and c.s_width(il) == 0:
            s = np.empty((*rows.shape, 0), np.float32)
        flat_s = _flat("s", s, rows.shape, c.s_width(il))
        states.scatter_states(c.type_r, self.r[il], rows.reshape(-1), flat_r)
        if c.s_width(il):
            states.scatter_states(c.type_s, self.s[il], rows.reshape(-1), flat_s)

    def check_layer(self, il: int) -> None:
        """Raise ConfigError unless there is such a layer."""
        if not isinstance(il, (int, np.integer)) or not 0 <= il < self.config.n_layer:
            raise ConfigError(f"layer {il!r} is outside [0, {self.config.n_layer})")

    def clear(self) -> None:
        """Give the rows' memory and disk space back, unless a durable commit names some."""
        if not self.pinned.any():
            self.layers.clear()


class NamedRows:
    """Rows that something under way is about to write."""

    def __init__(self, rows: np.ndarray):
        self._rows = rows.reshape(-1)

    def name_rows(self, bits: np.ndarray) -> None:
        """Set the rows in `bits`."""
        recurrent.set_bits_kernel(self._rows, bits)


def _flat(name: str, array: object, shape: tuple[int, ...], width: int) -> np.ndarray:
    """Return states as ``(n_seqs * n_states, width)``."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        raise ShapeError(f"{name} is {getattr(array, 'dtype', type(array))}, float32 wanted")
    n_seqs, n_states = shape
    wanted = [(n_seqs, n_states, width)] + [(n_seqs, width)] * (n_states == 1)
    if array.shape not in wanted:
        raise ShapeError(
            f"{name} has shape {array.shape}, {wanted[0]} wanted: the last {n_states} states of "
            "each sequence, oldest first"
        )
    return np.ascontiguousarray(array).reshape(n_seqs * n_states, width)
