"""`Committed`: the state that the last durable commit names, and what has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from kvnumba.cells import Cells
from kvnumba.errors import ConfigError, DamagedError
from kvnumba.kernels.bits import n_words
from kvnumba.kernels.diff import (
    apply_cells_kernel,
    apply_words_kernel,
    cell_changes_kernel,
    word_changes_kernel,
)
from kvnumba.store import blocks
from kvnumba.store.blocks import Buffer

Blocks = list[tuple[int, bytes]]
_ROOM = 4096


class Committed:
    """A copy of the metadata as of the last commit.

    Attributes
    ----------
    cells : Cells
        Its `pinned` is not used.
    user : dict of str to bytes
        The caller's data.
    search_start : int
    packs : list of bytes
        Ids of the packs, in the order of their cells.
    """

    def __init__(self, n_cells: int, n_seq_max: int):
        self.cells = Cells(n_cells, n_seq_max)
        self.user: dict[str, bytes] = {}
        self.search_start = 0
        self.packs: list[bytes] = []
        self._n_words = 0  # words beyond these are empty

    @property
    def n_cells(self) -> int:
        """Cells that exist."""
        return self.cells.n_cells

    def changes(
        self,
        cells: Cells,
        user: Mapping[str, bytes],
        search_start: int,
        packs: list[bytes],
    ) -> Blocks:
        """Return what must be written so that this state becomes the given one.

        Raises
        ------
        ConfigError
            If an entry of `user` is not bytes under a name.
        """
        out: Blocks = []
        n = max(self._n_words, n_words(cells.cell_max))
        if (changed := self._changed_cells(cells, n)) is not None:
            out.append((blocks.CELLS, changed))
        if (changed := self._changed_words(cells, n)) is not None:
            out.append((blocks.WORDS, changed))
        if entries := self._changed_user(user):
            out.append((blocks.USER, blocks.pack_user(entries)))
        if search_start != self.search_start:
            out.append((blocks.PLACE, blocks.pack_place(search_start)))
        if packs != self.packs:
            out.append((blocks.PACKS, b"".join(packs)))
        return out

    def _changed_cells(self, cells: Cells, n: int) -> bytes | None:
        old = self.cells
        now = cells.pos, cells.shift, cells.token, old.pos, old.shift, old.token
        return _packed(
            lambda runs, tokens: cell_changes_kernel(runs, tokens, *now, n),
            blocks.CELL_RUN,
            np.int32,
        )

    def _changed_words(self, cells: Cells, n: int) -> bytes | None:
        return _packed(
            lambda runs, values: word_changes_kernel(runs, values, cells.seq, self.cells.seq, n),
            blocks.WORD_RUN,
            np.uint64,
        )

    def _changed_user(self, user: Mapping[str, bytes]) -> dict[str, bytes | None]:
        out: dict[str, bytes | None] = {}
        if not isinstance(user, Mapping):
            raise ConfigError(f"session.user is {type(user).__name__}; a dict of bytes wanted")
        for name, value in user.items():
            if not isinstance(name, str) or not isinstance(value, bytes):
                raise ConfigError(
                    f"session.user[{name!r}] is {type(value).__name__}; bytes under a str wanted"
                )
            try:
                name.encode()
            except UnicodeEncodeError:
                raise ConfigError(
                    f"session.user[{name!r}]: the name cannot be written in UTF-8; use another"
                ) from None
            if self.user.get(name) != value:
                out[name] = value
        out.update({name: None for name in self.user if name not in user})
        return out

    def apply(self, changes: Iterable[tuple[int, Buffer]]) -> None:
        """Make the changes that `changes` returned or a file holds. Bitmaps follow at `settle`.

        Raises
        ------
        DamagedError
            If a block contradicts itself. The state is then of no use.
        """
        c = self.cells
        for kind, data in changes:
            if kind == blocks.CELLS:
                runs, tokens = blocks.unpack_runs(data, blocks.CELL_RUN, np.int32)
                reach = apply_cells_kernel(c.pos, c.shift, c.token, runs, tokens, c.n_cells)
                self._reach("cells", reach, n_words(reach))
            elif kind == blocks.WORDS:
                runs, values = blocks.unpack_runs(data, blocks.WORD_RUN, np.uint64)
                reach = apply_words_kernel(c.seq, runs, values)
                self._reach("bitmap words", reach, reach)
            elif kind == blocks.USER:
                for name, value in blocks.unpack_user(data):
                    if value is None:
                        self.user.pop(name, None)
                    else:
                        self.user[name] = value
            elif kind == blocks.PLACE:
                self.search_start = blocks.unpack_place(data, c.n_cells)
            elif kind == blocks.PACKS:
                self.packs = blocks.unpack_packs(data)

    def _reach(self, what: str, reach: int, n: int) -> None:
        if reach < 0:
            raise DamagedError(f"a list of {what} contradicts itself")
        self._n_words = max(self._n_words, n)

    def settle(self) -> None:
        """Compute what follows from the bitmaps, and test every invariant.

        Raises
        ------
        DamagedError
            Names the first broken one.
        """
        self.cells.rebuild()
        self._n_words = n_words(self.cells.cell_max)
        self.cells.check()

    def everything(self) -> Blocks:
        """Return the whole state as changes of an empty one."""
        self.cells.rebuild()
        empty = Committed(self.n_cells, self.cells.n_seq_max)
        return empty.changes(self.cells, self.user, self.search_start, self.packs)

    def grown(self, n_cells: int) -> Committed:
        """Return the same state with more cells."""
        if n_cells == self.n_cells:
            return self
        out = Committed(n_cells, self.cells.n_seq_max)
        out.apply(self.everything())
        out.settle()
        return out

    def fill(self, cells: Cells) -> None:
        """Copy the metadata into a cache's cells, and pin what it names."""
        mine = self.cells
        for name in ("pos", "shift", "token", "seq", "used", "shared"):
            getattr(cells, name)[:] = getattr(mine, name)
        cells.pinned[:] = mine.used

    def check_packs(self, n_slots: int) -> None:
        """Raise DamagedError unless every used cell lies in a pack of `n_slots`."""
        if self.cells.cell_max > len(self.packs) * n_slots:
            raise DamagedError(
                f"cell {self.cells.cell_max - 1} is used, there are only {len(self.packs)} packs"
            )


def _packed(
    fill: Callable[[np.ndarray, np.ndarray], tuple[int, int]], width: int, dtype: type
) -> bytes | None:
    """Return the block of what a kernel lists; None if that is nothing.

    The kernel says how much there is: once more, with room for all, if it was too much.
    """
    runs: np.ndarray = np.empty((_ROOM, width), np.int32)
    items: np.ndarray = np.empty(_ROOM, dtype)
    n_runs, n_items = fill(runs, items)
    if n_runs > _ROOM or n_items > _ROOM:
        runs, items = np.empty((n_runs, width), np.int32), np.empty(n_items, dtype)
        fill(runs, items)
    return blocks.pack_runs(runs[:n_runs], items[:n_items]) if n_runs else None
