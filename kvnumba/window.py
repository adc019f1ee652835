"""`WindowCache`: layers that see everything, and layers with a sliding window, as one cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvnumba.batch import Batch
from kvnumba.cells import Cells
from kvnumba.composite import CompositeCache
from kvnumba.composite_config import WindowConfig
from kvnumba.config_fields import expect
from kvnumba.errors import WindowLostError
from kvnumba.files import folder_of, make_folder
from kvnumba.splitting import Ubatch, split_equal, split_simple
from kvnumba.unified import UnifiedCache
from kvnumba.verbs import checked_delta, checked_divisor


def part_paths(
    path: str | os.PathLike[str] | None, names: tuple[str, ...]
) -> tuple[Path | None, ...]:
    """Make a new folder, and return those for the files of each part in it."""
    if path is None:
        return (None,) * len(names)
    folder = folder_of(path)
    make_folder(folder)
    return tuple(folder / name for name in names)


class WindowCache(CompositeCache):
    """Base part and window part (the reference's iSWA cache).

    The window part has fewer cells: those that no later token sees are used anew. What was lost
    by that is known: a sequence is never cut back to where its window has a hole.

    Parameters
    ----------
    config : WindowConfig
    path : path-like, optional
        A new or empty folder for mapped files. Default: anonymous memory.

    Attributes
    ----------
    base, window : UnifiedCache
        The parts. Change them through this object only.
    """

    part_names = ("base", "window")

    def __init__(self, config: WindowConfig, path: str | os.PathLike[str] | None = None):
        expect(config, WindowConfig)
        paths = part_paths(path, self.part_names)
        self.base = UnifiedCache(config.base_part, paths[0])
        self.window = UnifiedCache(config.window_part, paths[1])
        counts, route = [0, 0], []
        for is_window in config.is_window:
            route.append((int(is_window), counts[is_window]))
            counts[is_window] += 1
        self._set_up(config, (self.base, self.window), route)

    def _splits(self, batch: Batch, n_ubatch: int) -> Iterator[list[Ubatch]]:
        yield split_simple(batch, n_ubatch)
        if len(set(batch.ids.tolist())) > 1:
            yield split_equal(batch, n_ubatch)

    def _removals(self, s: int, p0: int, p1: int) -> Iterator[tuple[int, int, int]]:
        """Yield what a removal asks of both parts: everything, where the base is left empty."""
        for of in range(self.config.n_seq_max) if s < 0 else (s,):
            low, high = self.base.cells.pos_bounds(of)
            is_whole = p0 <= low and high < p1
            yield of, *(Cells.check_range(-1, -1) if is_whole else (p0, p1))

    @property
    def used(self) -> int:
        """Cells of the base in use."""
        return self.base.used

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the cells of `src` in ``[p0, p1)``, in both parts.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        WindowLostError
            If `dst` would go on where the window of `src` has been used anew.
        """
        src, dst = self._check_seq_id(src), self._check_seq_id(dst)
        p0, p1 = Cells.check_range(p0, p1)
        if src == dst:
            return
        with self.guard:
            self._check_none_pending()
            self.window.seq_cp(src, dst, p0, p1)  # this one may refuse
            self.base.seq_cp(src, dst, p0, p1)
            self._version += 1

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions ``[p0, p1)`` of a sequence, in both parts or in none.

        Raises
        ------
        As `UnifiedCache.seq_add`.
        """
        s, (p0, p1) = self._check_seq_id(seq_id), Cells.check_range(p0, p1)
        by = checked_delta(delta)
        if by == 0 or p0 >= p1:
            return
        with self.guard:
            lost_cells = self._check_move(s, p0, p1, by, 1)
            for part in (self.base, self.window):
                part.seq_add(s, p0, p1, by)
            self._note_moved(lost_cells)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions ``[p0, p1)`` of a sequence by `d`, in both parts or in none.

        Raises
        ------
        As `UnifiedCache.seq_div`.
        """
        s, (p0, p1) = self._check_seq_id(seq_id), Cells.check_range(p0, p1)
        by = checked_divisor(d)
        if by == 1 or p0 >= p1:
            return
        with self.guard:
            lost_cells = self._check_move(s, p0, p1, 0, by)
            for part in (self.base, self.window):
                part.seq_div(s, p0, p1, by)
            self._note_moved(lost_cells)

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens ``[p0, p1)`` of a sequence (-1: of all) from both parts, or from none.

        Returns, raises: as `CompositeCache.seq_rm`.
        """
        done = super().seq_rm(seq_id, p0, p1)
        if done:
            for s in np.flatnonzero(self.window.sliding.lost >= 0).tolist():
                self._note_lost(s)
        return done

    def _note_lost(self, s: int) -> None:
        """Forget that tokens were lost that the base does not have any more either."""
        lost = self.window.sliding.lost
        lost[s] = self.base.cells.pos_bounds(s, 0, int(lost[s]) + 1)[1]

    def _check_move(self, s: int, p0: int, p1: int, delta: int, d: int) -> dict[int, np.ndarray]:
        """Raise what a move would raise; return the base's cells of what others have lost."""
        self._check_none_pending()
        for part in (self.base, self.window):
            part._check_move(s, p0, p1, delta, d)
        lost = self.window.sliding.lost
        if self.base.config.shared != "move" or not (lost >= 0).any():
            return {}
        for of in np.flatnonzero(self.base.cells.seq.any(axis=1)).tolist():
            if of != s:
                self._check_sharer(of, s, p0, p1, delta, d)
        return {of: self._lost_cells(of) for of in np.flatnonzero(lost >= 0).tolist()}

    def _lost_cells(self, s: int) -> np.ndarray:
        """Return the base's cells of a sequence's tokens up to the last one that was lost."""
        members = self.base.cells.members(s)
        lost: np.ndarray = members[self.base.cells.pos[members] <= self.window.sliding.lost[s]]
        return lost

    def _check_sharer(self, of: int, s: int, p0: int, p1: int, delta: int, d: int) -> None:
        """Refuse to move a token of two sequences where one of them has lost it, and both see it.

        What the two share in the base they may not share in the window part any more.
        """
        base, window, sliding = self.base.cells, self.window.cells, self.window.sliding
        in_base, in_window = (_shared_pos(cells, s, of, p0, p1) for cells in (base, window))
        if len(in_base) == len(in_window):
            return
        mine = window.pos[window.members(of)]
        stay = np.setdiff1d(mine[(mine >= p0) & (mine < p1)], in_window)
        if np.isin(stay, in_base).any():
            raise WindowLostError(
                f"window lost: sequence {s} has lost tokens in [{p0}, {p1}) that sequence {of}, "
                "which shares them, still has; they cannot move for both"
            )
        members, lost = base.members(of), int(sliding.lost[of])
        pos = base.pos[members].astype(np.int64)
        moved = np.isin(members, base.members(s)) & (pos >= p0) & (pos < p1)
        new = np.where(moved, (pos + delta) // d, pos)
        mark = int(new[pos <= lost].max(initial=-1))
        sliding.check_end(of, mark, int(new.max()), f"moving [{p0}, {p1}) of sequence {s}")

    def _note_moved(self, lost_cells: dict[int, np.ndarray]) -> None:
        for s, cells in lost_cells.items():
            self.window.sliding.lost[s] = self.base.cells.pos[cells].max(initial=-1)
        self._version += 1

    def __repr__(self) -> str:
        return f"WindowCache(base={self.base!r}, window={self.window!r})"


def _shared_pos(cells: Cells, a: int, b: int, p0: int, p1: int) -> np.ndarray:
    """Return the positions in a range of the cells that two sequences share."""
    pos: np.ndarray = cells.pos[cells.listed(cells.seq[a] & cells.seq[b])]
    return pos[(pos >= p0) & (pos < p1)]
