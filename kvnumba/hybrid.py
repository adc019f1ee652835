"""`HybridCache`: attention layers and recurrent layers of one model, as one cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from kvnumba.batch import Batch
from kvnumba.cells import Cells
from kvnumba.composite import CompositeCache, CompositeStep
from kvnumba.composite_config import HybridConfig, WindowConfig
from kvnumba.config_fields import expect
from kvnumba.errors import PositionError, SequenceError, SharedCellError
from kvnumba.recurrent import RecurrentCache
from kvnumba.splitting import Ubatch
from kvnumba.steps import Steps
from kvnumba.unified import UnifiedCache
from kvnumba.verbs import checked_delta, checked_divisor
from kvnumba.window import WindowCache, part_paths


class HybridCache(CompositeCache):
    """Attention part and recurrent part; both hold the same tokens, always.

    Parameters
    ----------
    config : HybridConfig
    path : path-like, optional
        A new or empty folder for mapped files. Default: anonymous memory.

    Attributes
    ----------
    attention : UnifiedCache or WindowCache
    recurrent : RecurrentCache
        The parts. Change them through this object only.
    """

    part_names = ("attention", "recurrent")

    def __init__(self, config: HybridConfig, path: str | os.PathLike[str] | None = None):
        expect(config, HybridConfig)
        paths = part_paths(path, self.part_names)
        self.attention: UnifiedCache | WindowCache
        if isinstance(config.attention, WindowConfig):
            self.attention = WindowCache(config.attention, paths[0])
        else:
            self.attention = UnifiedCache(config.attention, paths[0])
        self.recurrent = RecurrentCache(config.recurrent, paths[1])
        counts, route = [0, 0], []
        for is_recurrent in config.is_recurrent:
            route.append((int(is_recurrent), counts[is_recurrent]))
            counts[is_recurrent] += 1
        self._set_up(config, (self.attention, self.recurrent), route)

    def _splits(self, batch: Batch, n_ubatch: int) -> Iterator[list[Ubatch]]:
        yield self.recurrent.split(batch, n_ubatch, sequential=False)

    def prepare_ubatches(self, batch: Batch, ubatches: list[Ubatch]) -> Steps[CompositeStep]:
        """Find room for a batch that was split by someone else; see `prepare`.

        Raises
        ------
        SequenceError
            If a token's sequences do not have the same state: they do not have the same past.
        """
        state_of: list[object] = self.recurrent.cells.tail.tolist()
        for ubatch in ubatches:
            for ids in ubatch.seq_sets:
                if len({state_of[s] for s in ids}) > 1:
                    raise SequenceError(
                        f"a token belongs to sequences {ids}, which do not share a state; copy "
                        "one to the others first"
                    )
                for s in ids:
                    state_of[s] = ids, id(ubatch)
        return super().prepare_ubatches(batch, ubatches)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Make `dst` what `src` is, in both parts; what `dst` held is dropped.

        Raises
        ------
        SequenceError
            If an id is impossible.
        PositionError
            If the range does not cover the sequence: a state can only be copied whole.
        """
        src, dst = self._check_seq_id(src), self._check_seq_id(dst)
        p0, p1 = Cells.check_range(p0, p1)
        if src == dst or p0 >= p1:
            return
        with self.guard:
            self._check_none_pending()
            self.recurrent.seq_cp(src, dst, p0, p1)  # this one may refuse
            self._version += 1
            self.attention.seq_rm(dst)
            self.attention.seq_cp(src, dst)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions ``[p0, p1)`` of a sequence, in both parts or in none.

        Raises
        ------
        PositionError
            If the last token would not be the one with the greatest position any more.
        SequenceError, CannotShiftError, SharedCellError, NoSlotError, WindowLostError
            As `UnifiedCache.seq_add`.
        """
        s, (p0, p1) = self._check_seq_id(seq_id), Cells.check_range(p0, p1)
        by = checked_delta(delta)
        if by != 0 and p0 < p1:
            self._move(s, p0, p1, by, 1)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions ``[p0, p1)`` of a sequence by `d`, in both parts or in none.

        Raises
        ------
        As `seq_add`.
        """
        s, (p0, p1) = self._check_seq_id(seq_id), Cells.check_range(p0, p1)
        by = checked_divisor(d)
        if by != 1 and p0 < p1:
            self._move(s, p0, p1, 0, by)

    def _move(self, s: int, p0: int, p1: int, delta: int, d: int) -> None:
        with self.guard:
            self._check_none_pending()
            self._check_order(s, p0, p1, delta, d)
            for part in self.parts:  # the attention part refuses all that the other would
                if d == 1:
                    part.seq_add(s, p0, p1, delta)
                else:
                    part.seq_div(s, p0, p1, d)
            self._version += 1

    def _check_order(self, s: int, p0: int, p1: int, delta: int, d: int) -> None:
        """Refuse a move after which the parts would end at different positions."""
        cells = self.cells
        owners = np.flatnonzero(cells.seq.any(axis=1)) if self.shares_move else [s]
        mine = cells.members(s)
        tail = self.recurrent.cells.tail
        inside = mine[(cells.pos[mine] >= p0) & (cells.pos[mine] < p1)]
        for of in owners:
            theirs = cells.members(int(of))
            pos = cells.pos[theirs].astype(np.int64)
            moved = np.isin(theirs, inside)
            new = np.where(moved, (pos + delta) // d, pos)
            if not moved.any():
                continue
            if of != s and tail[of] != tail[s]:
                raise SharedCellError(
                    f"sequence {of} shares tokens in [{p0}, {p1}) with sequence {s}, but has a "
                    'state of its own by now; use shared="copy" to move them for one alone'
                )
            if (new < 0).any() and new.max() >= 0:
                raise PositionError(
                    f"moving [{p0}, {p1}) would drop the first tokens of sequence {of} from the "
                    "attention part; its state cannot forget them"
                )
            if new[np.argmax(pos)] != new.max():
                raise PositionError(
                    f"moving [{p0}, {p1}) of sequence {s} would put tokens of sequence {of} behind "
                    "its last one, where the recurrent part ends; move its end as well, and give "
                    'sharers cells of their own (shared="copy")'
                )

    @property
    def cells(self) -> Cells:
        """Metadata of the attention part's cells (of its base, with windows)."""
        part = self.attention
        return part.base.cells if isinstance(part, WindowCache) else part.cells

    @property
    def shares_move(self) -> bool:
        """Whether cells that several sequences hold move for all of them."""
        return self.recurrent.config.shared == "move"

    def __repr__(self) -> str:
        return f"HybridCache(attention={self.attention!r}, recurrent={self.recurrent!r})"
