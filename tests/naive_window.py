"""A full part and a window part as plain Python: the specification of the cache that pairs them.

Nothing here is clever and nothing is imported from kvnumba. `WindowCells` adds to the plain cells
what a sliding window adds: cells that nobody will see again are given out anew. `NaiveWindow` holds
the same tokens in a part that forgets nothing and in one with a window, and knows the truth: what a
sequence's next token sees must be in the window part, always. What would break that is refused.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import naive

PAD = 256


class WindowLostError(naive.RefusedError):
    """A sequence would go on where its window has been used anew."""


def is_masked(kind, n, p0, p1):
    """Whether a token at `p1` does not see one at ``p0 <= p1``; a window of 0 hides nothing."""
    if n == 0:
        return False
    if kind == "standard":
        return p1 - p0 >= n
    if kind == "chunked":
        return p0 < p1 // n * n
    assert kind == "symmetric"
    return abs(p1 - p0) > n // 2


def n_window_cells(n_base, window, n_seq_max, n_ubatch, full_size=False):
    """Return the cells of a window part: all windows and a ubatch, rounded up, or as the base."""
    if full_size:
        return n_base
    n = window * n_seq_max + n_ubatch
    return min(n_base, (n + PAD - 1) // PAD * PAD)


def split_simple(seq_ids, n_ubatch):
    """Return which tokens go together: stretches of the batch."""
    n = len(seq_ids)
    return [list(range(t, min(t + n_ubatch, n))) for t in range(0, n, n_ubatch)]


def split_equal(seq_ids, n_ubatch):
    """Return which tokens go together: equally many of each sequence, of one sequence each."""
    waiting = {}
    for t, (s,) in enumerate(seq_ids):
        waiting.setdefault(s, []).append(t)
    parts = []
    while waiting:
        chosen = sorted(waiting, key=lambda s: waiting[s][0])[:n_ubatch]
        n = min(n_ubatch // len(chosen), *(len(waiting[s]) for s in chosen))
        parts.append([t for s in chosen for t in waiting[s][:n]])
        for s in chosen:
            del waiting[s][:n]
        waiting = {s: left for s, left in waiting.items() if left}
    return parts


class WindowCells(naive.NaiveCells):
    """Cells of which hidden ones are given out anew.

    `order` says which first: "ring", as the reference (whatever comes next from `search_start`
    on), or "behind" (free ones from the lowest on, then those furthest behind their sequence).
    """

    def __init__(self, n_cells, n_seq_max, window, kind="standard", order="behind", **options):
        super().__init__(n_cells, n_seq_max, **options)
        self.window, self.kind, self.order = window, kind, order

    def masks(self, p0, p1):
        """Whether a token at `p1` does not see one at `p0`."""
        return is_masked(self.kind, self.window, p0, p1)

    def is_hidden(self, i):
        """Whether a cell's only owner does not see it from its next position on.

        Its last token is none: the parts must agree on where a sequence ends.
        """
        if len(self.cells[i].seqs) != 1:
            return False
        (s,) = self.cells[i].seqs
        last = self.seq_pos_max(s)
        return self.cells[i].pos < last and self.masks(self.cells[i].pos, last + 1)

    def is_usable(self, i):
        """Whether a new token may have the cell."""
        return self.cells[i].is_free or self.is_hidden(i)

    def find_usable(self, n):
        """Return cells for `n` tokens; nothing is changed."""
        found = self.usable_in_ring(n) if self.order == "ring" else self.usable_behind()
        if len(found) < n:
            raise naive.NoSlotError(f"{n} of {len(found)}")
        return found[:n]

    def usable_in_ring(self, n):
        """Return usable cells in the order of the reference's search: each is tested once."""
        start = self.search_start
        if start > self.used + 2 * n or start >= self.n_cells:
            start = 0
        around = [i % self.n_cells for i in range(start, start + self.n_cells)]
        return [i for i in around if self.is_usable(i)]

    def usable_behind(self):
        """Return free cells, then hidden ones, those furthest behind first."""
        behind = []
        for i in range(self.n_cells):
            if self.is_hidden(i):
                (s,) = self.cells[i].seqs
                behind.append((self.cells[i].pos - self.seq_pos_max(s), s, i))
        return self.free_cells() + [i for _, _, i in sorted(behind)]

    def overwrite(self, where, pos, seq_ids, tokens=None):
        """Place tokens, also in hidden cells; their owners lose all up to what was overwritten."""
        tokens = [-1] * len(where) if tokens is None else tokens
        last = {}
        for i in where:
            for s in self.cells[i].seqs:
                last[s] = max(last.get(s, -1), self.cells[i].pos)
        self.free(where)
        for i, p, ids, token in zip(where, pos, seq_ids, tokens, strict=True):
            self.place([i], [p], [ids], [token])
        self.commit()
        for s, p in last.items():
            low = min((self.cells[i].pos for i in self.members(s)), default=p + 1)
            if low <= p:
                self.seq_rm(s, low, p + 1)
        self.search_start = where[-1] + 1 if where else self.search_start

    def snapshot(self):
        """Return everything that placing changes."""
        return [c.copy() for c in self.cells], self.search_start, self.next_tag

    def restore(self, snapshot):
        """Go back to a snapshot."""
        cells, self.search_start, self.next_tag = snapshot
        self.cells = [c.copy() for c in cells]

    def plan(self, ubatches):
        """Return cells for each ubatch ``(pos, seq_ids)``, or refuse; nothing is changed."""
        before = self.snapshot()
        slots = []
        try:
            for pos, seq_ids in ubatches:
                slots.append(self.find_usable(len(pos)))
                self.overwrite(slots[-1], pos, seq_ids)
        finally:
            self.restore(before)
        return slots


class NaiveWindow:
    """The pair. `base` and `window` are its parts; a tag stands for the same token in both."""

    def __init__(
        self,
        n_base,
        n_window,
        n_seq_max,
        window,
        kind="standard",
        shared="move",
        order="behind",
    ):
        self.n_seq_max = n_seq_max
        self.base = WindowCells(n_base, n_seq_max, 0, shared=shared, order=order)
        self.window = WindowCells(n_window, n_seq_max, window, kind, order, shared=shared)
        self.undo = []  # one pair of snapshots per step that may be rolled back

    @property
    def parts(self):
        """Both parts."""
        return self.base, self.window

    # -- the truth ----------------------------------------------------------------------------

    def held(self, part, seq_id):
        """Return what a sequence holds in a part, as a set of ``(position, tag)``."""
        return {(part.cells[i].pos, part.cells[i].tag) for i in part.members(seq_id)}

    def positions(self, part, seq_id):
        """Return the positions that a sequence holds in a part, ascending."""
        return sorted(part.cells[i].pos for i in part.members(seq_id))

    def needed(self, seq_id, pos):
        """Return what a token of the sequence at `pos` sees of it in the window layers."""
        held = self.held(self.base, seq_id)
        return {(p, t) for p, t in held if p < pos and not self.window.masks(p, pos)}

    def can_go_on(self, seq_id, last):
        """Whether the window part has what a token after `last` sees, and `last` itself."""
        held = self.held(self.window, seq_id)
        return last in dict(held) and self.needed(seq_id, last + 1) <= held

    def broken(self):
        """Return what is untrue in the window part, None when nothing is."""
        for s in range(self.n_seq_max):
            base = self.held(self.base, s)
            if not self.held(self.window, s) <= base:
                return f"sequence {s}: the window part holds what the base does not"
            if base and not self.can_go_on(s, max(base)[0]):
                return f"sequence {s}: its next token sees what the window part has lost"
        return None

    def check(self):
        """Fail unless the window part is true."""
        assert self.broken() is None, self.broken()

    def has_hole(self, seq_id):
        """Whether a sequence lacks positions between its first and last, or has some twice.

        A real cache may then refuse more than it must: it notes up to where a sequence has lost
        cells, and not which of those positions had a token.
        """
        held = self.positions(self.base, seq_id)
        return any(b - a != 1 for a, b in pairwise(held))

    # -- asking -------------------------------------------------------------------------------

    def seq_pos_max(self, seq_id):
        """Return the position of the last token, -1 when there is none."""
        return self.base.seq_pos_max(seq_id)

    def seq_pos_min(self, seq_id):
        """Return the least held position from which on every held one can be cut back to."""
        self.base.check_id(seq_id)
        low = -1
        for p in reversed(self.positions(self.window, seq_id)):
            if not self.can_go_on(seq_id, p):
                break
            low = p
        return low

    # -- placing ------------------------------------------------------------------------------

    def splits(self, seq_ids, n_ubatch):
        """Return the ways to split a batch, the preferred one first."""
        ways = [split_simple(seq_ids, n_ubatch)]
        if len({s for ids in seq_ids for s in ids}) > 1 and all(len(ids) == 1 for ids in seq_ids):
            ways.append(split_equal(seq_ids, n_ubatch))
        return ways

    def prepare(self, pos, seq_ids, n_ubatch, ways=None):
        """Return positions and ``(tokens, base cells, window cells)`` of each step, or refuse.

        Nothing is changed. `ways` are the splits to try, if not those of `splits`.
        """
        for ids in seq_ids:
            for s in ids:
                self.base.check_id(s)
        self.check_none_pending()
        pos = self.base.counted_on(seq_ids) if pos is None else pos
        for way in ways or self.splits(seq_ids, n_ubatch):
            ubatches = [([pos[t] for t in part], [seq_ids[t] for t in part]) for part in way]
            try:
                slots = [part.plan(ubatches) for part in self.parts]
            except naive.NoSlotError:
                continue
            return pos, list(zip(way, *slots, strict=True))
        raise naive.NoSlotError("in none of the ways")

    def apply(self, step, pos, seq_ids, tokens):
        """Place a step of `prepare`; the arguments are those of the whole batch."""
        mine, *slots = step
        tag = self.base.next_tag
        self.undo.append([part.snapshot() for part in self.parts])
        for part, where in zip(self.parts, slots, strict=True):
            part.next_tag = tag
            part.overwrite(where, *([of[t] for t in mine] for of in (pos, seq_ids, tokens)))

    def commit(self):
        """Accept all steps: they can no longer be undone here."""
        self.undo = []

    def rollback(self):
        """Undo the last step that is not committed."""
        for part, snapshot in zip(self.parts, self.undo.pop(), strict=True):
            part.restore(snapshot)

    def check_none_pending(self):
        """Refuse while steps await `commit` or `rollback`."""
        if self.undo:
            raise naive.PendingError

    # -- the verbs ----------------------------------------------------------------------------

    def clear(self):
        """Empty both parts."""
        for part in self.parts:
            part.clear()
        self.undo = []

    def refuses(self, seq_id, p0, p1):
        """Whether a sequence cannot lose ``[p0, p1)``.

        Taking the last tokens needs a window to go on from; nothing else brings anything in sight.
        """
        held = self.positions(self.base, seq_id)
        left = [p for p in held if not naive.in_range(p, p0, p1)]
        if not left or max(left) == max(held):
            return False
        return not self.can_go_on(seq_id, max(left))

    def seq_rm(self, seq_id, p0, p1):
        """Remove a range of a sequence (-1: of each) from both parts, or from none."""
        self.base.check_id(seq_id, all_allowed=True)
        self.check_none_pending()
        ids = range(self.n_seq_max) if seq_id == -1 else [seq_id]
        if any(self.refuses(s, p0, p1) for s in ids):
            return False
        for part in self.parts:
            part.seq_rm(seq_id, p0, p1)
        return True

    def seq_keep(self, seq_id):
        """Remove all other sequences."""
        self.call_both("seq_keep", seq_id)

    def seq_cp(self, src, dst, p0, p1):
        """Let `dst` join the cells of `src` in a range."""
        self.call_both("seq_cp", src, dst, p0, p1)

    def seq_add(self, seq_id, p0, p1, delta):
        """Move positions in both parts."""
        self.call_both("seq_add", seq_id, p0, p1, delta)

    def seq_div(self, seq_id, p0, p1, d):
        """Divide positions in both parts."""
        self.call_both("seq_div", seq_id, p0, p1, d)

    def call_both(self, name, *args):
        """Do it to both parts; if that is impossible or breaks the truth, to none."""
        self.check_none_pending()
        before = copy.deepcopy(self.parts)
        try:
            for part in self.parts:
                getattr(part, name)(*args)
            if self.broken() is not None:
                raise WindowLostError(self.broken())
        except naive.RefusedError:
            self.base, self.window = before
            raise

    def update(self):
        """Rotate K where a shift is pending."""
        self.check_none_pending()
        done = [part.update() for part in self.parts]
        return any(done)
