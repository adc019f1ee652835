"""The recurrent cache of spring 2025 as plain Python, cell by cell, as recordings show it.

Nothing here is imported from kvnumba. What a recurrent cache should do is in `naive_recurrent`.
"""

from __future__ import annotations

from naive_recurrent import NO_END, resolved


class SeedCell:
    """One cell; it is empty without sequences, whatever its position says."""

    def __init__(self):
        self.pos = -1
        self.seqs = set()


class SeedCells:
    """`n_cells` cells, at most one of them for each sequence.

    `head` is where the search for an empty cell begins. `slip` is an error of the recordings, not
    of the cache: a cell that a `seq_cp` once emptied shows its position less 1, for good.
    """

    def __init__(self, n_cells):
        self.cells = [SeedCell() for _ in range(n_cells)]
        self.head = 0
        self.slip = [0] * n_cells

    # -- asking -------------------------------------------------------------------------------

    def cell_of(self, s):
        """Return the number of a sequence's cell, None when it has none."""
        return next((i for i, c in enumerate(self.cells) if s in c.seqs), None)

    @property
    def used(self):
        """Cells with a sequence."""
        return sum(1 for c in self.cells if c.seqs)

    @property
    def n_tokens(self):
        """Sum over the cells of their sequences."""
        return sum(len(c.seqs) for c in self.cells)

    def seq_pos_max(self, s):
        """Return the position of a sequence's last token, -1 when it is empty."""
        i = self.cell_of(s)
        return -1 if i is None else self.cells[i].pos

    def longest_hole(self):
        """Return length and start of the longest run of cells without a member, first wins."""
        best, best_start, start = 0, -1, 0
        for i, c in enumerate(self.cells):
            if c.seqs:
                start = i + 1
            elif i + 1 - start > best:
                best, best_start = i + 1 - start, start
        return best, best_start

    def next_empty(self, start):
        """Return the first cell without a sequence, from `start` on and around the end."""
        n = len(self.cells)
        return next(i % n for i in range(start, start + n) if not self.cells[i % n].seqs)

    # -- changing -----------------------------------------------------------------------------

    def leave(self, s, i):
        """Take a sequence out of a cell; return whether that emptied it."""
        self.cells[i].seqs.discard(s)
        if self.cells[i].seqs:
            return False
        self.cells[i].pos = -1
        return True

    def decode(self, tokens):
        """Place a batch of ``(position, sequence)``, equally many of each; all fits, always."""
        if self.head > self.used + 2 * len(tokens):
            self.head = 0
        last = {s: p for p, s in tokens}
        order = sorted(last, reverse=True)
        search, where = self.head, []
        for s in order:
            i = self.cell_of(s)
            if i is None or len(self.cells[i].seqs) > 1:
                search = self.next_empty(search)
                if i is not None:
                    self.leave(s, i)
                self.cells[search].seqs = {s}
                i = search
            where.append(i)
        first = min(where)
        for q, s in enumerate(order):
            self.swap(self.cell_of(s), first + q)
            self.cells[first + q].pos = last[s]
        self.head = first + len(tokens)
        if self.head >= len(self.cells):
            self.head = 0

    def swap(self, a, b):
        """Let two cells trade places."""
        self.cells[a], self.cells[b] = self.cells[b], self.cells[a]

    def seq_rm(self, s, p0, p1):
        """Remove whole sequences; a part of one is refused, also a part in front."""
        p0, p1 = resolved(p0, p1)
        if s < 0 and p0 != p1 and (p0, p1) != (0, NO_END):
            return False
        pos = -1 if s < 0 else self.seq_pos_max(s)
        if 0 < p0 <= pos or 0 < p1 <= pos:
            return False
        for i, c in enumerate(self.cells):
            if c.seqs and p0 <= c.pos < p1 and (s < 0 or s in c.seqs):
                c.seqs = set() if s < 0 else c.seqs
                if self.leave(s, i):
                    self.head = min(self.head, i)
        return True

    def seq_cp(self, a, b):
        """Let `b` share the cell of `a`; it leaves its own."""
        if a == b:
            return
        i = self.cell_of(b)
        if i is not None and self.leave(b, i):
            self.slip[i] = -1
        i = self.cell_of(a)
        if i is not None:
            self.cells[i].seqs.add(b)

    def seq_keep(self, s):
        """Remove all other sequences; the search then begins at the first cell without `s`."""
        for i, c in enumerate(self.cells):
            if s in c.seqs:
                c.seqs = {s}
            else:
                self.cells[i] = SeedCell()
                self.head = min(self.head, i)

    def move(self, s, p0, p1, new_pos):
        """Change the position of a sequence's cell if it is in the range; also to below 0."""
        p0, p1 = resolved(p0, p1)
        i = self.cell_of(s)
        if i is not None and p0 <= self.cells[i].pos < p1:
            self.cells[i].pos = new_pos(self.cells[i].pos)

    def clear(self):
        """Empty all cells."""
        self.cells = [SeedCell() for _ in self.cells]
        self.head = 0
