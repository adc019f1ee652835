"""Attention cells beside recurrent states as plain Python: what the hybrid cache must do.

Nothing is imported from kvnumba. Of the recurrent part nothing is modelled but the truth: a state
is what a list of tokens has made of it, and only some of a sequence's past states are kept. Both
parts hold the same tokens; what would make them differ is refused.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import NamedTuple

import naive
from naive_window import NaiveWindow


class Life(NamedTuple):
    """The tokens that shaped a sequence's state, and after how many of them states are kept."""

    tokens: tuple = ()
    kept: tuple = ()

    def after(self, tokens, depth):
        """Return it with more tokens, which came in one ubatch."""
        n = len(self.tokens) + len(tokens)
        new = range(n - min(len(tokens), depth) + 1, n + 1)
        return Life(self.tokens + tuple(tokens), (*self.kept, *new)[-depth:])

    def cut(self, n):
        """Return it as it was after `n` tokens."""
        return Life(self.tokens[:n], tuple(k for k in self.kept if k <= n))


class NaiveHybrid:
    """`attention` is a `naive.NaiveCells` or a `NaiveWindow`; `depth` states are kept of each."""

    def __init__(self, attention, depth):
        self.attention, self.depth = attention, depth
        self.n_seq_max = attention.n_seq_max
        self.lives = {}
        self.n_pending = 0

    @property
    def cells(self):
        """The cells that hold all tokens."""
        part = self.attention
        return part.base if isinstance(part, NaiveWindow) else part

    def positions(self, seq_id):
        """Return the position of each token that a sequence holds in the attention part."""
        cells = self.cells
        return {cells.cells[i].token: cells.cells[i].pos for i in cells.members(seq_id)}

    def life(self, seq_id):
        """Return the life of a sequence, an empty one if it is empty."""
        return self.lives.get(seq_id, Life())

    # -- asking -------------------------------------------------------------------------------

    def broken(self):
        """Return in what the parts differ, None when they agree."""
        for s in range(self.n_seq_max):
            tokens, pos = self.life(s).tokens, self.positions(s)
            if set(tokens) != set(pos) or len(tokens) != len(pos):
                return f"sequence {s}: the state has {tokens}, the cells have {sorted(pos)}"
            if tokens and pos[tokens[-1]] != max(pos.values()):
                return f"sequence {s}: its last token does not have the greatest position"
        return None

    def has_hole(self, seq_id):
        """Whether positions do not follow on each other; a real cache may then refuse more."""
        pos = [self.positions(seq_id)[t] for t in self.life(seq_id).tokens]
        return any(b - a != 1 for a, b in pairwise(pos))

    def seq_pos_max(self, seq_id):
        """Return the position of the last token, -1 when there is none."""
        return self.cells.seq_pos_max(seq_id)

    def seq_pos_min(self, seq_id):
        """Return the least held position from which on every held one can be cut back to."""
        self.cells.check_id(seq_id)
        low = -1
        for p in sorted(set(self.positions(seq_id).values()), reverse=True):
            if self.refuses(seq_id, p + 1, -1):
                break
            low = p
        return low

    def check_none_pending(self):
        """Refuse while steps await `commit` or `rollback`."""
        if self.n_pending:
            raise naive.PendingError

    # -- placing ------------------------------------------------------------------------------

    def prepare(self, seq_ids, n_ubatch, way):
        """Return positions and what `apply` wants for each step, or refuse; nothing is changed."""
        part, n = self.attention, len(seq_ids)
        self.check_none_pending()
        if isinstance(part, NaiveWindow):
            return part.prepare(None, seq_ids, n_ubatch, [way])
        pos, slots = part.prepare(None, seq_ids, n_ubatch)
        cells = [i for where in slots for i in where]
        assert len(cells) == n
        plan = [(mine, cells[sum(map(len, way[:k])) :][: len(mine)]) for k, mine in enumerate(way)]
        return pos, plan

    def apply(self, step, sets, pos, seq_ids, tokens):
        """Place a step. Its tokens lie set by set, equally many of each set of sequences."""
        mine, part = step[0], self.attention
        if isinstance(part, NaiveWindow):
            part.apply(step, pos, seq_ids, tokens)
            part.commit()
        else:
            part.place(step[1], *([of[t] for t in mine] for of in (pos, seq_ids, tokens)))
            part.commit()
        n = len(mine) // len(sets)
        before = dict(self.lives)
        for q, ids in enumerate(sets):
            new = [tokens[t] for t in mine[q * n : (q + 1) * n]]
            for s in ids:
                self.lives[s] = before.get(s, Life()).after(new, self.depth)

    # -- the verbs ----------------------------------------------------------------------------

    def clear(self):
        """Empty both parts."""
        self.attention.clear()
        self.lives = {}

    def refuses(self, seq_id, p0, p1):
        """Whether a sequence cannot lose ``[p0, p1)``: in the cells, or because of its state."""
        part, tokens = self.attention, self.life(seq_id).tokens
        pos = self.positions(seq_id)
        left = tuple(t for t in tokens if not naive.in_range(pos[t], p0, p1))
        if left in ((), tokens):
            return False
        if isinstance(part, NaiveWindow) and part.refuses(seq_id, p0, p1):
            return True
        return left != tokens[: len(left)] or len(left) not in self.life(seq_id).kept

    def seq_rm(self, seq_id, p0, p1):
        """Remove a range of a sequence (-1: of each) from both parts, or from none."""
        self.cells.check_id(seq_id, all_allowed=True)
        self.check_none_pending()
        ids = range(self.n_seq_max) if seq_id == -1 else [seq_id]
        if any(self.refuses(s, p0, p1) for s in ids):
            return False
        assert self.attention.seq_rm(seq_id, p0, p1) is True
        self.follow()
        return True

    def follow(self):
        """Cut the lives to the tokens that the cells still hold."""
        for s in list(self.lives):
            n = len(self.positions(s))
            self.lives[s] = self.lives[s].cut(n)
            if n == 0:
                del self.lives[s]

    def seq_keep(self, seq_id):
        """Remove all other sequences."""
        self.check_none_pending()
        self.attention.seq_keep(seq_id)
        self.follow()

    def seq_cp(self, src, dst, p0, p1):
        """Make `dst` what `src` is; a state can only be had whole."""
        self.cells.check_id(src)
        self.cells.check_id(dst)
        low, high = naive.resolved(p0, p1)
        if src == dst or low >= high:
            return
        self.check_none_pending()
        if not all(naive.in_range(p, p0, p1) for p in self.positions(src).values()):
            raise naive.BadArgumentError("a part of a state")
        assert self.attention.seq_rm(dst, -1, -1) is True
        self.attention.seq_cp(src, dst, -1, -1)
        self.lives.pop(dst, None)
        if src in self.lives:
            self.lives[dst] = self.lives[src]

    def seq_add(self, seq_id, p0, p1, delta):
        """Move positions; none may fall below 0, unless all of its sequence do."""
        self.move("seq_add", seq_id, p0, p1, delta)

    def seq_div(self, seq_id, p0, p1, d):
        """Divide positions."""
        self.move("seq_div", seq_id, p0, p1, d)

    def move(self, name, seq_id, p0, p1, by):
        """Do it to both parts; if they would differ then, to none."""
        self.check_none_pending()
        before = copy.deepcopy((self.attention, self.lives))
        try:
            getattr(self.attention, name)(seq_id, p0, p1, by)
            for s in [s for s in self.lives if not self.positions(s)]:
                del self.lives[s]
            if self.broken() is not None:
                raise naive.BadArgumentError(self.broken())
        except naive.RefusedError:
            self.attention, self.lives = before
            raise

    def update(self):
        """Do the deferred work of the cells."""
        self.check_none_pending()
        return self.attention.update()
