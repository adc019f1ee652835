"""The recurrent cache as plain Python: the specification that the real one must meet.

Nothing here is clever and nothing is imported from kvnumba. There are no cells: a sequence is the
list of tokens that shaped its state, and how many of its past states are kept. `state_of` turns
such a list into a number that no other list gives, so bytes tell whose state a cache hands out.
"""

from __future__ import annotations

MAX_POS = 2**31 - 2
NO_END = 2**31 - 1


class RefusedError(Exception):
    """An operation is not possible; nothing was changed."""


class PendingError(RefusedError):
    """Tokens are placed but neither accepted nor undone."""


class BadArgumentError(RefusedError):
    """An id, a position, a divisor or a range is impossible."""


class SharedStateError(RefusedError):
    """``shared="refuse"``, and other sequences have the state, too."""


def resolved(p0, p1):
    """Return the bounds of ``[p0, p1)``: a negative bound is no bound."""
    return 0 if p0 < 0 else min(p0, NO_END), NO_END if p1 < 0 else min(p1, NO_END)


def advance(state, token, il, kind):
    """Return the 64-bit state after one more token, in one layer; `kind` is 0 for r, 1 for s.

    Nothing has the state 0.
    """
    state = (state ^ (token + 1) * 0x9E3779B97F4A7C15 ^ (2 * il + kind + 1) << 40) % 2**64
    state = (state ^ state >> 29) * 0xBF58476D1CE4E5B9 % 2**64
    return state ^ state >> 32 or 1


def state_of(tokens, il, kind):
    """Return the state after some tokens."""
    state = 0
    for token in tokens:
        state = advance(state, token, il, kind)
    return state


class Life:
    """What shaped a state: tokens and positions, in the order in which they came.

    ``n_kept`` of the states are kept: those after all tokens, after all but the last, and so on.
    A state is kept while all later tokens are above it. Several sequences can have one life; it is
    never changed, but replaced. `is_exact`: a cache that notes little more than the least and the
    greatest position knows as well as this list where the tokens are.
    """

    def __init__(self, tokens=(), pos=(), n_kept=0, is_exact=True):
        self.tokens, self.pos = list(tokens), list(pos)
        self.n_kept, self.is_exact = n_kept, is_exact

    @property
    def last(self):
        """The position of the last token."""
        return self.pos[-1]

    def after(self, tokens, pos, depth):
        """Return the life with some more tokens."""
        new = Life(self.tokens, self.pos, self.n_kept, self.is_exact)
        for token, p in zip(tokens, pos, strict=True):
            new.n_kept = min(depth, new.n_kept + 1) if not new.pos or p > new.last else 1
            new.tokens.append(token)
            new.pos.append(p)
        return new

    def hit(self, p0, p1):
        """Return which tokens are at positions ``[p0, p1)``."""
        p0, p1 = resolved(p0, p1)
        return [k for k, p in enumerate(self.pos) if p0 <= p < p1]

    def left_without(self, p0, p1):
        """Return how many tokens are left when a range is taken out; None: that is not possible."""
        n, hit = len(self.tokens), self.hit(p0, p1)
        if not hit:
            return n
        first = hit[0]
        is_end = hit == list(range(first, n))
        return first if is_end and (first == 0 or n - first < self.n_kept) else None

    def is_known(self, p0, p1):
        """Whether a cache must know what a removal means; else it may refuse it."""
        p0, p1 = resolved(p0, p1)
        if p0 >= p1 or (p0 == 0 and p1 == NO_END):
            return True
        return self.is_exact and (p1 <= min(self.pos) or p1 > max(self.pos))

    def cut(self, n):
        """Return the life that ended after `n` tokens."""
        n_kept = self.n_kept - (len(self.tokens) - n)
        return Life(self.tokens[:n], self.pos[:n], n_kept, self.is_exact)

    def least_cut(self):
        """Return the least position whose successors can be removed: all, or none, of them."""
        kept = range(len(self.pos) - self.n_kept, len(self.pos))
        fit = [self.pos[k] for k in kept if self.left_without(self.pos[k] + 1, -1) == k + 1]
        return min(fit, default=self.last)

    def moved(self, p0, p1, delta, d):
        """Return the life with other positions; None when its end is below 0.

        States are dropped with which position tells no more which tokens they have.
        """
        p0, p1 = resolved(p0, p1)
        pos = [(p + delta) // d if p0 <= p < p1 else p for p in self.pos]
        if pos[-1] < 0:
            return None
        n_kept = 1
        while n_kept < self.n_kept and 0 <= pos[-n_kept - 1] < pos[-n_kept]:
            n_kept += 1
        n_hit = len(self.hit(p0, p1))
        low, high = min(self.pos), max(self.pos)
        is_run = all(p == low + k for k, p in enumerate(self.pos))
        is_apart = p0 <= low < high < p1 or p0 > high or p1 <= low
        is_exact = self.is_exact and (is_run or is_apart or n_hit == len(pos))
        pos = [min(max(p, 0), MAX_POS) for p in pos]
        return Life(self.tokens, pos, n_kept, is_exact)


class NaiveStates:
    """Sequences 0 to ``n_seq_max - 1``, each with the life that its state stands for.

    Up to `n_rewind` tokens of each can be taken back. `shared` says what moving positions does to
    the other sequences of a life: "move" them, "refuse", or leave them the old one ("copy").
    """

    def __init__(self, n_seq_max, n_rewind=0, shared="move"):
        self.n_seq_max, self.depth, self.shared = n_seq_max, n_rewind + 1, shared
        self.lives = {}
        self.applied = []  # [lives before, is pending] of the steps of the batch at work

    # -- asking -------------------------------------------------------------------------------

    def check_id(self, seq_id, all_allowed=False):
        """Refuse an id outside the range (-1, all sequences, only where it makes sense)."""
        if not (0 <= seq_id < self.n_seq_max or (all_allowed and seq_id == -1)):
            raise BadArgumentError(f"seq_id {seq_id}")

    def check_none_pending(self):
        """Refuse while placed tokens are neither accepted nor undone."""
        if any(is_pending for _, is_pending in self.applied):
            raise PendingError

    def groups(self):
        """Return the sequences that share a life, once for each life."""
        found = {}
        for s, life in sorted(self.lives.items()):
            found.setdefault(id(life), []).append(s)
        return list(found.values())

    def seq_pos_max(self, seq_id):
        """Return the position of the last token, -1 when the sequence is empty."""
        self.check_id(seq_id)
        return self.lives[seq_id].last if seq_id in self.lives else -1

    def seq_pos_min(self, seq_id):
        """Return the least position that the sequence can be cut back to, -1 when it is empty."""
        self.check_id(seq_id)
        return self.lives[seq_id].least_cut() if seq_id in self.lives else -1

    def state(self, seq_id, il, kind):
        """Return the state of a sequence, 0 when it is empty."""
        return state_of(self.lives[seq_id].tokens, il, kind) if seq_id in self.lives else 0

    def is_known(self, seq_id, p0, p1):
        """Whether a cache must know what a removal means; else it may refuse it."""
        lives = self.lives.values() if seq_id == -1 else [self.lives.get(seq_id)]
        return all(life is None or life.is_known(p0, p1) for life in lives)

    def refuses(self, seq_id, p0, p1):
        """Whether a removal is not possible."""
        self.check_id(seq_id, all_allowed=True)
        lives = self.lives.values() if seq_id == -1 else [self.lives.get(seq_id)]
        return any(life is not None and life.left_without(p0, p1) is None for life in lives)

    # -- placing ------------------------------------------------------------------------------

    def counted_on(self, seq_ids):
        """Return the next position of each token's sequences, counted on within the batch."""
        last, pos = {}, []
        for ids in seq_ids:
            for s in ids:
                self.check_id(s)
            p = 1 + max(last.get(s, self.seq_pos_max(s)) for s in ids)
            if p > MAX_POS:
                raise BadArgumentError("beyond the last position")
            pos.append(p)
            last.update(dict.fromkeys(ids, p))
        return pos

    def begin(self):
        """Note that a new batch is placed: the one before is there to stay."""
        self.check_none_pending()
        self.applied = []

    def place(self, sets, tokens, pos):
        """Give each set of sequences its tokens. They go on from the life of the first of them."""
        before = dict(self.lives)
        for ids, more, where in zip(sets, tokens, pos, strict=True):
            life = before.get(ids[0], Life()).after(more, where, self.depth)
            self.lives.update(dict.fromkeys(ids, life))
        self.applied.append([before, True])

    def accept(self, k):
        """Let the tokens of step `k` stay."""
        self.applied[k][1] = False

    def undo_from(self, k):
        """Undo step `k` of the batch and all later ones."""
        self.lives = self.applied[k][0]
        del self.applied[k:]

    # -- the verbs ----------------------------------------------------------------------------

    def changed(self):
        """Note that the batch before can no longer be undone."""
        self.check_none_pending()
        self.applied = []

    def clear(self):
        """Remove everything."""
        self.lives, self.applied = {}, []

    def seq_rm(self, seq_id, p0, p1):
        """Remove whole sequences, or their last tokens; all of that or nothing."""
        self.check_id(seq_id, all_allowed=True)
        self.check_none_pending()
        if self.refuses(seq_id, p0, p1):
            return False
        self.changed()
        ids = list(self.lives) if seq_id == -1 else [seq_id]
        new = {}  # those that had one life go on to have one
        for s in ids:
            life = self.lives.pop(s, None)
            n = life.left_without(p0, p1) if life else 0
            if n:
                same = n == len(life.tokens)
                self.lives[s] = life if same else new.setdefault(id(life), life.cut(n))
        return True

    def seq_cp(self, src, dst, p0, p1):
        """Let `dst` have the life of `src`, and no longer its own."""
        self.check_id(src)
        self.check_id(dst)
        low, high = resolved(p0, p1)
        if src == dst or low >= high:
            return
        self.check_none_pending()
        life = self.lives.get(src)
        if life is not None and len(life.hit(p0, p1)) < len(life.tokens):
            raise BadArgumentError("a part of a state")
        self.changed()
        self.lives.pop(dst, None)
        if life is not None:
            self.lives[dst] = life

    def seq_keep(self, seq_id):
        """Remove all other sequences."""
        self.check_id(seq_id)
        self.changed()
        self.lives = {s: life for s, life in self.lives.items() if s == seq_id}

    def seq_add(self, seq_id, p0, p1, delta):
        """Move positions; a sequence whose last token would get below 0 is removed."""
        self.check_id(seq_id)
        if abs(delta) > MAX_POS:
            raise BadArgumentError(f"delta {delta}")
        self.move(seq_id, p0, p1, delta, 1)

    def seq_div(self, seq_id, p0, p1, d):
        """Divide positions."""
        self.check_id(seq_id)
        if not 1 <= d <= MAX_POS:
            raise BadArgumentError(f"divisor {d}")
        self.move(seq_id, p0, p1, 0, d)

    def move(self, seq_id, p0, p1, delta, d):
        """Replace positions in the range by ``(pos + delta) // d``."""
        low, high = resolved(p0, p1)
        if (delta == 0 and d == 1) or low >= high:
            return
        self.check_none_pending()
        life = self.lives.get(seq_id)
        if life is None or low > max(life.pos) or high <= min(life.pos):
            return
        kept = [k for k in life.hit(p0, p1) if k >= len(life.pos) - life.n_kept]
        if any(life.pos[k] + delta > MAX_POS for k in kept):
            raise BadArgumentError("beyond the last position")
        sharers = [s for s, other in self.lives.items() if other is life]
        if len(sharers) > 1 and self.shared == "refuse":
            raise SharedStateError
        self.changed()
        new = life.moved(p0, p1, delta, d)
        for s in sharers if self.shared == "move" else [seq_id]:
            del self.lives[s]
            if new is not None:
                self.lives[s] = new
