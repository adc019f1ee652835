"""`RecurrentVerbs`: removing, rewinding, sharing, keeping and moving sequences of states."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from kvnumba.batch import MAX_POS
from kvnumba.cells import NO_END, Cells
from kvnumba.errors import PositionError, SharedCellError
from kvnumba.guard import Guard
from kvnumba.recurrent_cells import RecurrentCells
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.verbs import checked_delta, checked_divisor

log = logging.getLogger(__name__)


class RecurrentVerbs:
    """The five verbs of llama.h, in its argument order, for states that hold many tokens at once.

    ``[p0, p1)`` is half-open; a negative bound means no bound. Bad arguments raise and change
    nothing.

    A state cannot forget single tokens. What can be removed is a whole sequence, or its last
    tokens as far back as states are kept (``config.n_rewind``).
    """

    config: RecurrentConfig
    cells: RecurrentCells
    guard: Guard
    is_seed: bool

    def _check_none_pending(self) -> None:
        raise NotImplementedError

    def _changed(self) -> None:
        """Note that the cells change: prepared batches are stale, applied ones are for good."""
        raise NotImplementedError

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens ``[p0, p1)`` of a sequence (-1: of all, or of none).

        With all of a sequence's tokens in the range the sequence is removed. With its last tokens
        in the range it goes back to the state before them, if that is kept. Sequences that share
        its state are left as they are.

        Returns
        -------
        bool
            False, and nothing is changed, where `refusal` has a reason. True also when the range
            holds no token.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        s = self.cells.check_seq_id(seq_id, allow_all=True)
        p0, p1 = Cells.check_range(p0, p1)
        with self.guard:
            self._check_none_pending()
            reason = self._refusal(s, p0, p1)
            if reason is not None:
                log.warning("seq_rm(%d, %d, %d) refused: %s", s, p0, p1, reason)
                return False
            self._changed()
            for i, ids in list(self._cells_of(s)):
                self._rm(i, ids, p0, p1)
        return True

    def _cells_of(self, s: int) -> Iterator[tuple[int, list[int]]]:
        """Go through the cells of a sequence (-1: of all), with those of its ids that are meant."""
        if s < 0:
            yield from self.cells
        elif self.cells.tail[s] >= 0:
            yield int(self.cells.tail[s]), [s]

    def _rm(self, i: int, ids: list[int], p0: int, p1: int) -> None:
        """Do a removal that `_refusal` has nothing against."""
        c = self.cells
        first, last = c.span(i)
        if self.is_seed:
            if p0 <= c.pos[i] < p1:
                c.remove(i, ids)
        elif p0 < p1 and p0 <= last and p1 > first:
            if p0 <= first:
                c.remove(i, ids)
                return
            j = c.entry_before(i, p0)
            assert j is not None
            c.rewind(i if len(ids) == len(c.ids_of(i)) else c.split(ids[0]), j)

    def refusal(self, seq_id: int, p0: int = -1, p1: int = -1) -> str | None:
        """Return why `seq_rm` would refuse, None when it would not.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible.
        """
        s = self.cells.check_seq_id(seq_id, allow_all=True)
        return self._refusal(s, *Cells.check_range(p0, p1))

    def _refusal(self, s: int, p0: int, p1: int) -> str | None:
        if self.is_seed and s < 0:
            is_plain = p0 == p1 or (p0 == 0 and p1 == NO_END)
            return None if is_plain else "of all sequences everything is removed, or nothing"
        ask = self._seed_refusal if self.is_seed else self._cell_refusal
        for i, ids in self._cells_of(s):
            reason = ask(i, p0, p1)
            if reason is not None:
                return f"sequence {ids[0]}: {reason}"
        return None

    def _seed_refusal(self, i: int, p0: int, p1: int) -> str | None:
        pos = self.cells.pos[i]
        if 0 < p0 <= pos or 0 < p1 <= pos:
            return f"a part of the tokens up to {pos} cannot be taken out of a state"
        return None

    def _cell_refusal(self, i: int, p0: int, p1: int) -> str | None:
        c = self.cells
        first, last = c.span(i)
        if p0 >= p1 or p0 > last or p1 <= first or (p0 <= first and p1 > last):
            return None
        if p1 <= last:
            return (
                f"tokens up to {p1 - 1} are in the same state as those up to {last}; only the last "
                "ones can be taken back"
            )
        if c.entry_before(i, p0) is not None:
            return None
        if p0 <= c.past_max[i]:
            return (
                f"a batch went back behind position {c.past_max[i]}: no state holds just the "
                f"tokens below {p0}"
            )
        return (
            f"the state before position {p0} is not kept (the oldest is after {c.oldest_pos(i)}); "
            "raise n_rewind, or remove the sequence and start anew"
        )

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the state of `src`, and the states that are kept. Nothing is copied.

        What `dst` held is dropped. An empty `src`, or range, is as good as a small one: with an
        empty `src` `dst` becomes empty, with an empty range nothing happens.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible, or the range does not cover `src`: a state can only be
            had whole.
        """
        src, dst = self.cells.check_seq_id(src), self.cells.check_seq_id(dst)
        p0, p1 = Cells.check_range(p0, p1)
        if src == dst or (p0 >= p1 and not self.is_seed):
            return
        with self.guard:
            self._check_none_pending()
            c = self.cells
            i = int(c.tail[src])
            if i >= 0 and not self.is_seed:
                first, last = c.span(i)
                if p0 > first or p1 <= last:
                    raise PositionError(
                        f"[{p0}, {p1}) is a part of sequence {src}, which has {first} to {last}; a "
                        "state can only be copied whole: leave the range out"
                    )
            self._changed()
            c.detach(dst)
            c.tail[dst] = i

    def seq_keep(self, seq_id: int) -> None:
        """Remove everything but one sequence.

        Raises
        ------
        SequenceError
            If the id is impossible.
        """
        s = self.cells.check_seq_id(seq_id)
        with self.guard:
            self._check_none_pending()
            self._changed()
            self.cells.keep(s)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions ``[p0, p1)`` of a sequence.

        Only numbers change, no state. Sequences that share the state follow ``config.shared``: they
        move along, the call is refused, or this sequence gets a cell of its own. When the last
        token comes to lie below 0 the sequence is removed; kept states that do are dropped, and
        so are those of which it can no longer be told which tokens came after them.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible, or a kept state would come beyond ``2**31 - 2``.
        SharedCellError
            ``shared="refuse"`` and others share the state.
        """
        s, (p0, p1) = self.cells.check_seq_id(seq_id), Cells.check_range(p0, p1)
        by = checked_delta(delta)
        if by != 0 and p0 < p1:
            self._move(s, p0, p1, by, 1)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions ``[p0, p1)`` of a sequence by `d`; as `seq_add`.

        Raises
        ------
        SequenceError, PositionError
            If an argument is impossible (`d` must be at least 1).
        """
        s, (p0, p1) = self.cells.check_seq_id(seq_id), Cells.check_range(p0, p1)
        by = checked_divisor(d)
        if by != 1 and p0 < p1:
            self._move(s, p0, p1, 0, by)

    def _move(self, s: int, p0: int, p1: int, delta: int, d: int) -> None:
        c = self.cells
        with self.guard:
            self._check_none_pending()
            for i, _ in self._cells_of(s):
                first, last = c.span(i)
                if p0 > last or p1 <= first:
                    return
                kept = c.row_pos[i, : c.n_kept[i]]
                high = int(max(kept[(kept >= p0) & (kept < p1)], default=0))
                if high + delta > MAX_POS:
                    raise PositionError(
                        f"position {high} + {delta} is beyond {MAX_POS}; use a smaller delta"
                    )
                if len(c.ids_of(i)) > 1 and self.config.shared == "refuse":
                    raise SharedCellError(
                        f"the state of sequence {s} belongs to {c.ids_of(i)}; "
                        'use shared="copy" to give it one of its own'
                    )
                self._changed()
                if len(c.ids_of(i)) > 1 and self.config.shared == "copy":
                    i = c.split(s)
                c.move(i, p0, p1, delta, d, self.is_seed)
                if c.pos[i] < 0 and not self.is_seed:
                    c.remove(i, c.ids_of(i))

    def seq_pos_min(self, seq_id: int) -> int:
        """Return the least position that a sequence can be cut back to, -1 when it is empty.

        That is the position of the oldest state that is kept; see `kvnumba.memory.Memory`.
        """
        i = int(self.cells.tail[self.cells.check_seq_id(seq_id)])
        return self.cells.oldest_pos(i) if i >= 0 else -1

    def seq_pos_max(self, seq_id: int) -> int:
        """Return the position of a sequence's last token, -1 when it is empty."""
        i = int(self.cells.tail[self.cells.check_seq_id(seq_id)])
        return int(self.cells.pos[i]) if i >= 0 else -1

    @property
    def can_shift(self) -> bool:
        """Whether positions may change after the fact: always, no state depends on them."""
        return True
