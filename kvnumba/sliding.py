"""`Sliding`: which cells a window hides, their new use, and what cannot be reached after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvnumba.cells import NO_END, Cells
from kvnumba.config import CacheConfig
from kvnumba.errors import WindowLostError
from kvnumba.kernels import cells as kernels
from kvnumba.layers import KVLayers
from kvnumba.placement import Placement, Slot

if TYPE_CHECKING:
    from kvnumba.batch import Batch
    from kvnumba.splitting import Ubatch


class Overwritten(NamedTuple):
    """What a slot of used cells replaces: enough to bring it back byte for byte."""

    cells: Cells
    lost: np.ndarray
    freed: np.ndarray
    rows: list[tuple[np.ndarray, np.ndarray]]


class Sliding:
    """The window of a cache. Without one (``config.window == 0``) nothing is ever hidden.

    A cell may be used anew when exactly one sequence holds it and that sequence's next token does
    not see it; but the last token of a sequence stays. Cells furthest behind go first, and a
    sequence whose cell goes loses what lies before it too: the positions it holds stay without
    gaps.

    Attributes
    ----------
    lost : ndarray, shape (n_seq_max,), int32
        The greatest position of each sequence whose cell was used anew, -1 for none.
    """

    def __init__(self, config: CacheConfig, cells: Cells):
        self._config, self._cells = config, cells
        self.lost = np.full(config.n_seq_max, -1, np.int32)

    def hides(self, p0: Any, p1: Any) -> Any:
        """Return whether a token at `p1` does not see one at ``p0 <= p1``; arrays broadcast."""
        n, kind = self._config.window, self._config.window_kind
        if n == 0:
            return np.zeros(np.broadcast(p0, p1).shape, bool)[()]
        if kind == "chunked":
            return p0 < p1 // n * n
        return p1 - p0 >= (n if kind == "standard" else n // 2 + 1)

    # -- what can still be reached ------------------------------------------------------------

    def pos_min(self, seq_id: int) -> int:
        """Return the least held position of a sequence that it can go on from, -1 if empty."""
        lost = int(self.lost[seq_id])
        if lost < 0:
            return int(self._cells.pos_bounds(seq_id)[0])
        pos = self._cells.pos[self._cells.members(seq_id)].astype(np.int64)
        return int(pos[self.hides(lost, pos + 1)].min(initial=NO_END)) if len(pos) else -1

    def refusal(self, seq_id: int, p0: int, p1: int) -> str | None:
        """Return why a sequence cannot lose ``[p0, p1)``, None when it can.

        Only a cut at the end brings tokens back into sight; `p0` 0 removes everything.
        """
        lost, last = int(self.lost[seq_id]), int(self._cells.pos_bounds(seq_id)[1])
        if lost < 0 or p0 == 0 or not p0 <= last < p1:
            return None
        new_last = int(self._cells.pos_bounds(seq_id, 0, p0)[1])
        if new_last >= 0 and self.hides(lost, new_last + 1):
            return None
        return (
            f"window lost: sequence {seq_id} cut at {p0} would see positions up to {lost}, whose "
            f"cells were used anew; it can be cut back to {self.pos_min(seq_id) + 1} at least, or "
            "be removed"
        )

    # -- the verbs ----------------------------------------------------------------------------

    def removed(self, seq_id: int, p0: int, p1: int) -> None:
        """Note that ``[p0, p1)`` of a sequence is gone."""
        if (p0 == 0 and p1 > self.lost[seq_id]) or not self._cells.seq[seq_id].any():
            self.lost[seq_id] = -1

    def checked_copy(self, src: int, dst: int, p0: int, p1: int) -> int:
        """Return what `dst` will have lost with ``[p0, p1)`` of `src`.

        Raises
        ------
        WindowLostError
            If its next token would see some of it.
        """
        if not (self.lost[src] >= 0 or self.lost[dst] >= 0):
            return -1
        lost_src = min(int(self.lost[src]), p1 - 1)
        lost = max(int(self.lost[dst]), lost_src if lost_src >= p0 else -1)
        last = max(self._last(dst), int(self._cells.pos_bounds(src, p0, p1)[1]))
        self.check_end(dst, lost, last, f"copying [{p0}, {p1}) of sequence {src}")
        return lost

    def checked_move(self, seq_id: int, p0: int, p1: int, delta: int, d: int) -> np.ndarray:
        """Return `lost` as it will be after ``pos = (pos + delta) // d`` in a range.

        With ``shared="move"`` sequences that share moved cells move along. What else they have lost
        stays where it is.

        Raises
        ------
        WindowLostError
            If a sequence's next token would see what it has lost.
        """
        lost = self.lost.copy()
        if not (lost >= 0).any():
            return lost
        cells = self._cells.members(seq_id)
        pos = self._cells.pos[cells]
        moved = cells[(pos >= p0) & (pos < p1)]
        for s in np.flatnonzero(lost >= 0).tolist():
            mine = self._cells.members(s)
            ours = np.isin(mine, moved)
            if s != seq_id and not (ours.any() and self._config.shared == "move"):
                continue
            mark = self.moved_mark(int(lost[s]), p0, p1, delta, d)
            lost[s] = mark if s == seq_id else max(int(lost[s]), mark)
            new = self._cells.pos[mine].astype(np.int64)
            new[ours] = (new[ours] + delta) // d
            self.check_end(s, int(lost[s]), int(new.max()), f"moving [{p0}, {p1})")
        return lost

    @staticmethod
    def moved_mark(lost: int, p0: int, p1: int, delta: int, d: int) -> int:
        """Return how far lost tokens may reach after a move; held cells or not, they move along."""
        if lost < p0:
            return lost
        moved = (min(lost, p1 - 1) + delta) // d
        return max(moved, lost if lost >= p1 else p0 - 1, -1)

    def _last(self, seq_id: int) -> int:
        return int(self._cells.pos_bounds(seq_id)[1])

    def check_end(self, seq_id: int, lost: int, last: int, what: str) -> None:
        """Raise WindowLostError if a sequence that ends at `last` would next see what it lost."""
        if lost >= 0 and not (last >= 0 and self.hides(lost, last + 1)):
            raise WindowLostError(
                f"window lost: after {what}, sequence {seq_id} would go on at {last + 1} and see "
                f"positions up to {lost}, whose cells were used anew; use whole sequences, or "
                "compute it again"
            )

    # -- placing ------------------------------------------------------------------------------

    def plan(self, placement: Placement, ubatches: Sequence[Ubatch]) -> list[Slot]:
        """Find cells for every ubatch on a copy of the metadata; nothing is changed.

        Raises
        ------
        NoSlotError
            If not all of it fits, hidden cells included.
        WindowLostError
            If a token would see what was used anew.
        """
        trial = Sliding(self._config, self._cells.copy())
        trial.lost[:] = self.lost
        slots = []
        for ubatch in ubatches:
            slot = trial._find(ubatch.n_tokens)
            trial.place(slot, ubatch)
            trial.check_sight(ubatch.batch)
            slots.append(slot)
        return slots

    def check_sight(self, batch: Batch) -> None:
        """Refuse tokens that would see what their sequences have lost.

        Raises
        ------
        WindowLostError
            If there is one.
        """
        if batch.pos is None or not (self.lost >= 0).any():
            return
        of_token = np.repeat(np.arange(batch.n_tokens), np.diff(batch.id_start))
        lost = self.lost[batch.ids].astype(np.int64)
        bad = np.flatnonzero((lost >= 0) & ~self.hides(lost, batch.pos[of_token].astype(np.int64)))
        if len(bad):
            raise WindowLostError(
                f"window lost: a token at position {batch.pos[of_token[bad[0]]]} of sequence "
                f"{batch.ids[bad[0]]} would see positions up to {lost[bad[0]]}, whose cells were "
                "used anew"
            )

    def _find(self, n: int) -> Slot:
        placement = Placement(self._config, self._cells)
        free = placement.find_any(min(n, max(0, placement.n_free)))
        if len(free) == n:
            return Slot(free)
        taken = self._hidden()[: n - len(free)]
        if len(free) + len(taken) < n:
            raise placement.no_slot(n, "free or hidden")
        return Slot(np.concatenate((free, taken)), taken)

    def _hidden(self) -> np.ndarray:
        """Return the cells that may be used anew, those furthest behind first, int32."""
        c = self._cells
        found, behind = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for s in np.flatnonzero(c.seq.any(axis=1)).tolist():
            alone = c.listed(c.seq[s] & ~c.shared & ~c.pinned)
            pos, last = c.pos[alone].astype(np.int64), self._last(s)
            hidden = self.hides(pos, last + 1) & (pos < last)
            found.append(alone[hidden])
            behind.append(last - pos[hidden])
        order = np.argsort(-np.concatenate(behind), kind="stable")
        return np.concatenate(found)[order]

    def place(self, slot: Slot, ubatch: Ubatch) -> None:
        """Free the used cells of a slot, and give all of it to a ubatch's tokens."""
        c, batch = self._cells, ubatch.batch
        if len(slot.taken):
            self._give_up(slot.taken)
        assert batch.pos is not None
        c.place(slot.cells, batch.pos, batch.tokens, batch.id_start, batch.ids, batch.sections)

    def _give_up(self, taken: np.ndarray) -> None:
        c = self._cells
        owners, up_to = [], []
        for s in np.flatnonzero(c.seq.any(axis=1)).tolist():
            words = c.seq[s][taken >> 6] >> (taken & 63).astype(np.uint64)
            mine = taken[words & np.uint64(1) != 0]
            if len(mine):
                owners.append(s)
                up_to.append(int(c.pos[mine].max()))
        kernels.drop_cells_kernel(*c.state, taken)
        for s, p in zip(owners, up_to, strict=True):
            c.rm(s, 0, p + 1)
            self.lost[s] = max(int(self.lost[s]), p)

    # -- undoing ------------------------------------------------------------------------------

    def save(self, slot: Slot, layers: KVLayers) -> Overwritten:
        """Copy what a slot of used cells is about to free: later steps may fill it all."""
        trial = Sliding(self._config, self._cells.copy())
        trial._give_up(slot.taken)
        freed = trial._cells.listed(self._cells.used & ~trial._cells.used)
        rows = []
        for k, v in zip(layers.k, layers.v, strict=True):
            rows.append((k[freed], v[:, freed] if self._config.v_trans else v[freed]))
        return Overwritten(self._cells.copy(), self.lost.copy(), freed, rows)

    def bring_back(self, old: Overwritten, layers: KVLayers) -> None:
        """Put back what `save` has copied, rows and metadata."""
        for il, (k, v) in enumerate(old.rows):
            layers.k[il][old.freed] = k
            if self._config.v_trans:
                layers.v[il][:, old.freed] = v
            else:
                layers.v[il][old.freed] = v
        self._cells.restore(old.cells)
        self.lost[:] = old.lost
