"""`WindowCache`: layers that see everything, and layers with a sliding window, as one cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvnumba.batch import Batch
from kvnumba.cells import Cells
from kvnumba.composite import CompositeCache
from kvnumba.composite_config import WindowConfig
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

    def _range_of(self, seq_id: int, p0: int, p1: int) -> tuple[int, int]:
        low, high = self.base.cells.pos_bounds(seq_id)
        return Cells.check_range(-1, -1) if p0 <= low and high < p1 else (p0, p1)

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
            self._check_move(s, p0, p1, by, 1)
            for part in (self.base, self.window):
                part.seq_add(s, p0, p1, by)
            self._version += 1

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
            self._check_move(s, p0, p1, 0, by)
            for part in (self.base, self.window):
                part.seq_div(s, p0, p1, by)
            self._version += 1

    def _check_move(self, s: int, p0: int, p1: int, delta: int, d: int) -> None:
        self._check_none_pending()
        for part in (self.base, self.window):
            part._check_move(s, p0, p1, delta, d)

    def __repr__(self) -> str:
        return f"WindowCache(base={self.base!r}, window={self.window!r})"
