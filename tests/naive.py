"""The unified cache as plain Python, cell by cell: the specification that the real one must meet.

Nothing here is clever and nothing is imported from kvnumba. A cell is an object with a set of
sequence ids; every rule is a loop over the cells. The rows of K and V are stood for by two
numbers: `tag`, which says whose row a cell carries, and `rotation`, by how many positions K was
rotated since it was written.
"""

from __future__ import annotations

MAX_POS = 2**31 - 2
NO_END = 2**31 - 1


class RefusedError(Exception):
    """An operation is not possible; nothing was changed (but see `find_slot`)."""


class NoSlotError(RefusedError):
    """Not enough free cells now."""


class NeverFitsError(NoSlotError):
    """More cells are asked for than there are."""


class SharedCellsError(RefusedError):
    """``shared="refuse"``, and a cell of the range belongs to another sequence too."""


class PendingError(RefusedError):
    """Tokens are placed but neither accepted nor undone."""


class BadArgumentError(RefusedError):
    """An id, a position, a divisor or a cell is impossible."""


class Cell:
    """One cell; ``Cell()`` is a free one."""

    def __init__(self):
        self.pos = -1
        self.shift = 0
        self.seqs = set()
        self.token = -1
        self.tag = None
        self.rotation = 0

    @property
    def is_free(self):
        """Whether no sequence holds the cell."""
        return not self.seqs

    def copy(self):
        """Return an equal cell."""
        new = Cell()
        new.pos, new.shift, new.token = self.pos, self.shift, self.token
        new.seqs = set(self.seqs)
        new.tag, new.rotation = self.tag, self.rotation
        return new


def resolved(p0, p1):
    """Return the bounds of ``[p0, p1)``: a negative bound is no bound."""
    return 0 if p0 < 0 else min(p0, NO_END), NO_END if p1 < 0 else min(p1, NO_END)


def in_range(pos, p0, p1):
    """Whether ``p0 <= pos < p1``, where a negative bound is no bound."""
    low, high = resolved(p0, p1)
    return low <= pos < high


def is_empty_range(p0, p1):
    """Whether the two bounds, resolved, are the same."""
    low, high = resolved(p0, p1)
    return low == high


class NaiveCells:
    """`n_cells` cells, sequences 0 to ``n_seq_max - 1``.

    `placement` is "scatter" (the lowest free cells) or "ring" (one run, found by the reference's
    circular search from `search_start`). `shared` says what `seq_add` and `seq_div` do with cells
    that other sequences hold too: "move" them, "refuse", or work on a "copy". `pinned` is a set of
    cells whose rows must stay as they are: they are never given out, and a row that is to be
    rotated moves elsewhere (if K is rotated at all: `rotates`). Up to `n_ctx` cells may be in use.
    """

    def __init__(
        self, n_cells, n_seq_max, placement="scatter", shared="move", pinned=(), n_ctx=None
    ):
        self.n_cells, self.n_seq_max = n_cells, n_seq_max
        self.placement, self.shared = placement, shared
        self.n_ctx = n_cells if n_ctx is None else n_ctx
        self.pinned = set(pinned)
        self.rotates = True
        self.cells = [Cell() for _ in range(n_cells)]
        self.search_start = 0
        self.has_shift = False
        self.pending = []  # one list of cells per placement
        self.defrag_limit = "not asked for"
        self.next_tag = 0

    # -- what is where ------------------------------------------------------------------------

    def members(self, seq_id):
        """Return the cells of a sequence, or for -1 all cells in use, ascending."""
        if seq_id == -1:
            return [i for i in range(self.n_cells) if not self.cells[i].is_free]
        return [i for i in range(self.n_cells) if seq_id in self.cells[i].seqs]

    def members_in(self, seq_id, p0, p1):
        """Return those of them with a position in the range."""
        return [i for i in self.members(seq_id) if in_range(self.cells[i].pos, p0, p1)]

    def free_cells(self):
        """Return the cells that may be given out, ascending."""
        return [i for i in range(self.n_cells) if self.can_be_given(i)]

    def can_be_given(self, i):
        """Whether cell `i` is free and not pinned."""
        return self.cells[i].is_free and i not in self.pinned

    @property
    def used(self):
        """Cells that a sequence holds."""
        return len(self.members(-1))

    @property
    def n_tokens(self):
        """Sum over the cells of their sequences."""
        return sum(len(c.seqs) for c in self.cells)

    @property
    def n_free(self):
        """Cells that may still be given out."""
        return min(len(self.free_cells()), self.n_ctx - self.used)

    def seq_pos_min(self, seq_id):
        """Return the least position of a sequence, -1 when it is empty."""
        self.check_id(seq_id)
        return min((self.cells[i].pos for i in self.members(seq_id)), default=-1)

    def seq_pos_max(self, seq_id):
        """Return the greatest position of a sequence, -1 when it is empty."""
        self.check_id(seq_id)
        return max((self.cells[i].pos for i in self.members(seq_id)), default=-1)

    def pos_max(self):
        """Return the greatest position of all cells, -1 when there is none."""
        return max((c.pos for c in self.cells), default=-1)

    def cell_max(self):
        """Return one more than the highest cell in use, 0 when there is none."""
        return max((i + 1 for i in self.members(-1)), default=0)

    def n_kv(self, padding):
        """Return the cells a graph looks at: `cell_max` rounded up, at least one padding."""
        rounded = -(-self.cell_max() // padding) * padding
        return min(self.n_cells, max(padding, rounded))

    def fragmentation(self, padding):
        """Return the share of those cells that is neither used nor padding."""
        return max(0.0, 1.0 - (self.used + padding) / self.n_kv(padding))

    def longest_hole(self):
        """Return length and start of the longest run of cells without a member, first wins."""
        best, best_start, start = 0, -1, 0
        for i in range(self.n_cells):
            if not self.cells[i].is_free:
                start = i + 1
            elif i + 1 - start > best:
                best, best_start = i + 1 - start, start
        return best, best_start

    def view(self, n_seq_max):
        """Return positions, and the first `n_seq_max` ids of each cell padded with -1."""
        listed = []
        for c in self.cells:
            ids = sorted(c.seqs)[:n_seq_max]
            listed.append(ids + [-1] * (n_seq_max - len(ids)))
        return [c.pos for c in self.cells], listed

    # -- arguments ----------------------------------------------------------------------------

    def check_id(self, seq_id, all_allowed=False):
        """Refuse an id outside the range (-1, all sequences, only where it makes sense)."""
        if not (0 <= seq_id < self.n_seq_max or (all_allowed and seq_id == -1)):
            raise BadArgumentError(f"seq_id {seq_id}")

    def check_none_pending(self):
        """Refuse while placed tokens await `commit` or `rollback`."""
        if self.pending:
            raise PendingError

    # -- placing tokens -----------------------------------------------------------------------

    def find_slot(self, n, contiguous=None):
        """Return cells for `n` tokens. In a ring the search moves `search_start`, always."""
        if n < 0:
            raise BadArgumentError(f"{n} tokens")
        if n > self.n_ctx:
            raise NeverFitsError(f"{n} of {self.n_ctx}")
        if contiguous is None and self.placement == "ring":
            return self.find_in_ring(n)
        if n > self.n_free:
            raise NoSlotError(f"{n} of {self.n_free}")
        if not contiguous:
            return self.free_cells()[:n]
        for start in range(self.n_cells - n + 1):
            if all(self.can_be_given(i) for i in range(start, start + n)):
                return list(range(start, start + n))
        raise NoSlotError(f"no run of {n}")

    def find_in_ring(self, n):
        """First run of `n` free cells from `search_start` on, wrapping around the end."""
        if n == 0:
            return []
        if self.search_start > self.used + 2 * n:
            self.search_start = 0
        n_tested = 0
        while True:
            if self.search_start + n > self.n_cells:
                n_tested += self.n_cells - self.search_start
                self.search_start = 0
                continue
            run = list(range(self.search_start, self.search_start + n))
            taken = [i for i in run if not self.can_be_given(i)]
            if not taken:
                break
            n_tested += taken[0] + 1 - self.search_start
            self.search_start = taken[0] + 1
            if n_tested >= self.n_cells:
                raise NoSlotError(f"no run of {n}")
        if n > self.n_ctx - self.used:
            raise NoSlotError(f"{n} of {self.n_ctx - self.used}")
        return run

    def place(self, where, pos, seq_ids, tokens=None):
        """Put tokens into free cells, each with a fresh row; they stay pending."""
        tokens = [-1] * len(where) if tokens is None else tokens
        for i, p, ids in zip(where, pos, seq_ids, strict=True):
            if not 0 <= p <= MAX_POS or not ids or len(set(ids)) != len(ids):
                raise BadArgumentError(f"position {p}, ids {ids}")
            for s in ids:
                self.check_id(s)
            if not 0 <= i < self.n_cells or where.count(i) > 1:
                raise BadArgumentError(f"cell {i}")
        if not all(self.can_be_given(i) for i in where) or self.used + len(where) > self.n_ctx:
            raise NoSlotError("a cell is not free")
        for i, p, ids, token in zip(where, pos, seq_ids, tokens, strict=True):
            new = Cell()
            new.pos, new.seqs, new.token, new.tag = p, set(ids), token, self.next_tag
            self.cells[i] = new
            self.next_tag += 1
        if where:
            self.pending.append(list(where))

    def commit(self):
        """Accept what is pending; in a ring the next search begins behind it."""
        for where in list(self.pending):
            self.accept(where)

    def accept(self, where):
        """Accept one placement."""
        self.pending.remove(where)
        if self.placement == "ring":
            self.search_start = (where[0] + len(where)) % self.n_cells

    def rollback(self):
        """Empty all pending cells."""
        self.undo(self.pending)

    def undo(self, placements):
        """Empty the cells of some placements, pending or accepted."""
        freed = [i for where in placements for i in where]
        self.pending = [where for where in self.pending if where not in placements]
        self.free(freed)
        self.search_from_at_most(freed)

    def counted_on(self, seq_ids):
        """Return the next position of each token's sequences, counted on within the batch."""
        last = {}
        pos = []
        for ids in seq_ids:
            p = 1 + max(last.get(s, self.seq_pos_max(s)) for s in ids)
            if p > MAX_POS:
                raise BadArgumentError("beyond the last position")
            pos.append(p)
            last.update(dict.fromkeys(ids, p))
        return pos

    def prepare(self, pos, seq_ids, n_ubatch):
        """Plan a batch: update, then find a slot for each ubatch, on trial.

        Return positions and slots. Each slot is to be placed and accepted in turn. Where any free
        cells will do, too few of them are refused before the update: nothing is changed.
        """
        for ids in seq_ids:
            for s in ids:
                self.check_id(s)
        if len(seq_ids) > self.n_ctx:
            raise NeverFitsError(f"{len(seq_ids)} of {self.n_ctx}")
        self.check_none_pending()
        pos = self.counted_on(seq_ids) if pos is None else pos
        if self.placement == "scatter" and len(seq_ids) > self.n_free:
            raise NoSlotError(f"{len(seq_ids)} of {self.n_free}")
        self.update()
        if self.placement == "scatter" and len(seq_ids) > self.n_free:
            raise NoSlotError(f"{len(seq_ids)} of {self.n_free}")
        start, slots = self.search_start, []
        try:
            for t in range(0, len(pos), n_ubatch):
                slots.append(self.find_slot(len(pos[t : t + n_ubatch])))
                self.place(slots[-1], pos[t : t + n_ubatch], seq_ids[t : t + n_ubatch])
                self.accept(slots[-1])
        finally:
            self.free([i for where in slots for i in where])
        self.search_start = start
        return pos, slots

    def begin(self, where):
        """Note that a planned slot is placed now: as if just found."""
        if self.placement == "ring":
            self.search_start = where[0]

    def free(self, cells):
        """Make cells free: every field as in a new one."""
        for i in cells:
            self.cells[i] = Cell()

    def search_from_at_most(self, cells):
        """Let the search begin no later than the lowest of `cells`."""
        self.search_start = min([self.search_start, *cells])

    # -- the verbs ----------------------------------------------------------------------------

    def clear(self):
        """Free everything."""
        self.free(range(self.n_cells))
        self.search_start, self.has_shift = 0, False
        self.pending, self.defrag_limit = [], "not asked for"

    def seq_rm(self, seq_id, p0, p1):
        """Take a sequence (-1: all) out of a range; cells without a member become free."""
        self.check_id(seq_id, all_allowed=True)
        self.check_none_pending()
        freed = []
        for i in self.members_in(seq_id, p0, p1):
            self.cells[i].seqs -= self.cells[i].seqs if seq_id == -1 else {seq_id}
            if self.cells[i].is_free:
                freed.append(i)
        self.free(freed)
        self.search_from_at_most(freed)
        return True

    def seq_cp(self, src, dst, p0, p1):
        """Let `dst` join the cells of `src` in a range; `dst` keeps what it has."""
        self.check_id(src)
        self.check_id(dst)
        if src == dst:
            return
        self.check_none_pending()
        for i in self.members_in(src, p0, p1):
            self.cells[i].seqs.add(dst)
        self.search_start = 0

    def seq_keep(self, seq_id):
        """Remove all other sequences."""
        self.check_id(seq_id)
        self.check_none_pending()
        others = [i for i in range(self.n_cells) if seq_id not in self.cells[i].seqs]
        self.free(others)
        for i in self.members(seq_id):
            self.cells[i].seqs = {seq_id}
        self.search_from_at_most(others)

    def seq_add(self, seq_id, p0, p1, delta):
        """Move positions; a token that would get below 0 is removed for all its sequences."""
        self.check_id(seq_id)
        if abs(delta) > MAX_POS:
            raise BadArgumentError(f"delta {delta}")
        if delta == 0 or is_empty_range(p0, p1):
            return
        if any(self.cells[i].pos + delta > MAX_POS for i in self.members_in(seq_id, p0, p1)):
            raise BadArgumentError("beyond the last position")
        self.check_none_pending()
        self.separate(seq_id, p0, p1)
        freed = []
        for i in self.members_in(seq_id, p0, p1):
            self.cells[i].pos += delta
            self.cells[i].shift += delta
            self.has_shift = True
            if self.cells[i].pos < 0:
                freed.append(i)
        self.free(freed)
        self.search_start = min(freed, default=0)

    def seq_div(self, seq_id, p0, p1, d):
        """Divide positions, rounding down."""
        self.check_id(seq_id)
        if not 1 <= d <= MAX_POS:
            raise BadArgumentError(f"divisor {d}")
        if d == 1 or is_empty_range(p0, p1):
            return
        self.check_none_pending()
        self.separate(seq_id, p0, p1)
        for i in self.members_in(seq_id, p0, p1):
            new = self.cells[i].pos // d
            self.cells[i].shift += new - self.cells[i].pos
            self.cells[i].pos = new
            self.has_shift = True

    def separate(self, seq_id, p0, p1):
        """Before a sequence moves: what happens to cells that it shares."""
        both = [i for i in self.members_in(seq_id, p0, p1) if len(self.cells[i].seqs) > 1]
        if self.shared == "move" or not both:
            return
        if self.shared == "refuse":
            raise SharedCellsError
        if len(both) > self.n_free:
            raise NoSlotError(f"{len(both)} copies, {self.n_free} free")
        for i, target in zip(both, self.free_cells(), strict=False):
            own = self.cells[i].copy()
            own.seqs = {seq_id}
            self.cells[target] = own
            self.cells[i].seqs.remove(seq_id)

    # -- deferred work ------------------------------------------------------------------------

    def update(self):
        """Rotate K where a shift is pending, then defragment if asked to."""
        self.check_none_pending()
        shifted = [i for i in self.members(-1) if self.cells[i].shift != 0]
        stuck = [i for i in shifted if i in self.pinned] if self.rotates else []
        targets = self.free_cells()
        if len(stuck) > len(targets):
            raise NoSlotError(f"{len(stuck)} rotated rows, {len(targets)} free")
        for i in shifted:
            self.cells[i].rotation += self.cells[i].shift
            self.cells[i].shift = 0
        for i, target in zip(stuck, targets, strict=False):
            self.cells[target], self.cells[i] = self.cells[i], Cell()
        self.has_shift = False
        done = bool(shifted)
        if self.defrag_limit != "not asked for":
            limit, self.defrag_limit = self.defrag_limit, "not asked for"
            ids, n_moves = self.defrag_plan(limit)
            self.move(ids)
            if n_moves:
                self.search_start = self.used
                done = True
        return done

    def defrag(self, max_moves=None):
        """Ask for a defragmentation at the next `update`."""
        self.defrag_limit = max_moves

    def defrag_plan(self, max_moves=None):
        """Return ``ids`` (new cell of each cell below `cell_max`; `cell_max`: none) and moves.

        Holes below `used` are filled in order, each with the last cells that are still unmoved; a
        move is one run of adjacent cells that goes to one hole.
        """
        n_kv, n_used = self.cell_max(), self.used
        is_free = [c.is_free for c in self.cells]
        is_hole = [self.can_be_given(i) for i in range(self.n_cells)]
        ids = [n_kv] * n_kv
        n_moves = 0
        i0 = 0
        while i0 < n_used and max_moves != 0:
            if not is_hole[i0]:
                ids[i0] = n_kv if is_free[i0] else i0
                i0 += 1
                continue
            n_hole = 1
            while i0 + n_hole < n_used and is_hole[i0 + n_hole]:
                n_hole += 1
            first = n_kv  # the lowest of the last n_hole cells that can still move
            n_found = 0
            while n_found < n_hole:
                first -= 1
                n_found += not is_free[first] and ids[first] == n_kv
            n_filled, in_run = 0, False
            for i1 in range(first, n_kv):
                if is_free[i1] or ids[i1] != n_kv:
                    if n_moves == max_moves:
                        return ids, n_moves
                    in_run = False
                    continue
                ids[i1] = i0 + n_filled
                is_free[i0 + n_filled], is_free[i1] = False, True
                if not in_run:
                    n_moves += 1
                    in_run = True
                n_filled += 1
                if n_filled == n_hole:
                    break
            if n_moves == max_moves:
                return ids, n_moves
            i0 += n_hole
        return ids, n_moves

    def move(self, ids):
        """Move cells as a plan says."""
        for i, target in enumerate(ids):
            if target not in (i, len(ids)):
                self.cells[target] = self.cells[i]
                self.cells[i] = Cell()
