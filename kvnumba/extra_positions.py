"""`ExtraPositions`: x and y of each cell, for models with several positions per token (M-RoPE).

A token has sections t, y, x (and a fourth that no cell keeps). Section t is the cell's position,
and orders tokens; y and x order those of one t, row by row: tokens of an image see each other so.
A token of text has the same position in all sections. Source: llama-kv-cells.h (llama_kv_cell_ext)
and llama-kv-cache.cpp (apply_ubatch, set_input_kq_mask).
"""

from __future__ import annotations

import numpy as np

from kvnumba.errors import DamagedError, PositionError


def check_sections(sections: np.ndarray | None, n_pos: int) -> None:
    """Test that tokens do not have more positions than a cache keeps.

    Raises
    ------
    PositionError
        If they do.
    """
    if sections is not None and len(sections) > n_pos:
        raise PositionError(
            f"pos has {len(sections)} positions a token, this cache keeps {n_pos}; give as many, "
            f"or make it with n_pos={len(sections)}"
        )


class ExtraPositions:
    """x and y beside the positions of some cells.

    What a freed cell had is forgotten whenever anybody looks: it follows from the positions alone,
    so no way of freeing cells can leave something behind.

    Parameters
    ----------
    pos : ndarray, shape (n,), int32
        Position of each cell, -1 where it is free; read again at each call.
    """

    def __init__(self, pos: np.ndarray):
        self._pos = pos
        self._xy = np.zeros((2, len(pos)), np.int32)

    @property
    def xy(self) -> np.ndarray:
        """x (row 0) and y (row 1) of each cell, shape ``(2, n)``, int32; 0 where it is free."""
        self._xy[:, self._pos < 0] = 0
        return self._xy

    def place(self, cells: np.ndarray, pos: np.ndarray, sections: np.ndarray | None) -> None:
        """Store those of new tokens.

        Parameters
        ----------
        cells, pos : ndarray, shape (n_tokens,), int32
        sections : ndarray, shape (3 or 4, n_tokens), int32, or None
            t, y, x; without them, x and y are the position.
        """
        self._xy[0, cells] = pos if sections is None else sections[2]
        self._xy[1, cells] = pos if sections is None else sections[1]

    def follow(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copy those of the cells `src` to `dst`; no cell is in both."""
        self._xy[:, dst] = self._xy[:, src]

    def sections(self, cells: np.ndarray) -> np.ndarray:
        """Return t, y, x of some cells, shape ``(3, n)``, int32."""
        return np.stack((self._pos[cells], self._xy[1, cells], self._xy[0, cells]))

    def restore(self, other: ExtraPositions) -> None:
        """Take over what another one of the same size holds."""
        self._xy[:] = other._xy

    def check(self) -> None:
        """Test the invariants.

        Raises
        ------
        DamagedError
            If an x or y is negative; names the first cell.
        """
        bad = np.flatnonzero((self.xy < 0).any(axis=0))
        if len(bad):
            x, y = self._xy[:, bad[0]]
            raise DamagedError(f"cell {bad[0]}: x {x} and y {y} must not be negative")

    def ranked(
        self,
        cells: np.ndarray,
        cell_pos: np.ndarray,
        q_pos: np.ndarray,
        sections: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers for tokens and cells that compare as their positions do, y and x included.

        A causal query sees a cell if the cell's (t, y, x) is not beyond its own.

        Parameters
        ----------
        cells, cell_pos : ndarray, shape (n,), int32
            Cells, and their positions.
        q_pos : ndarray, shape (n_tokens,), int32
            Positions of queries.
        sections : ndarray, shape (3 or 4, n_tokens), int32, or None
            Their t, y, x; None: the same in all.

        Returns
        -------
        q_rank, cell_rank : ndarray, int32
            The positions themselves where y and x decide nothing.
        """
        x, y = self._xy[:, cells]
        if sections is None:
            near = cell_pos >= q_pos.min(initial=np.iinfo(np.int32).max)
            if np.array_equal(x[near], cell_pos[near]) and np.array_equal(y[near], cell_pos[near]):
                return q_pos, cell_pos
        q_y, q_x = (q_pos, q_pos) if sections is None else (sections[1], sections[2])
        keys = np.stack([np.append(x, q_x), np.append(y, q_y), np.append(cell_pos, q_pos)])
        order = np.lexsort(keys)
        is_new = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
        rank = np.zeros(keys.shape[1], np.int32)
        rank[order[1:]] = np.cumsum(is_new)
        return rank[len(cells) :], rank[: len(cells)]
