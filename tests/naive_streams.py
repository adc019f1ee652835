"""Several pools of cells as plain Python: what a cache with streams must do.

Nothing is imported from kvnumba. Each sequence lives in one stream; a stream is a `NaiveCells`.
"""

from __future__ import annotations

import naive


class NaiveStreams:
    """`n_cells` cells in each stream; ``stream_of[s]`` is the stream of sequence `s`."""

    def __init__(self, n_cells, stream_of, shared="move"):
        self.stream_of = list(stream_of)
        self.n_seq_max = len(self.stream_of)
        n = max(self.stream_of) + 1
        self.streams = [naive.NaiveCells(n_cells, self.n_seq_max, shared=shared) for _ in range(n)]

    def stream(self, seq_id):
        """Return the cells of a sequence's stream."""
        self.streams[0].check_id(seq_id)
        return self.streams[self.stream_of[seq_id]]

    # -- asking -------------------------------------------------------------------------------

    @property
    def used(self):
        """Cells in use, all streams."""
        return sum(part.used for part in self.streams)

    def seq_pos_min(self, seq_id):
        """Return the least position of a sequence, -1 when it is empty."""
        return self.stream(seq_id).seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id):
        """Return the greatest position of a sequence, -1 when it is empty."""
        return self.stream(seq_id).seq_pos_max(seq_id)

    def check_none_pending(self):
        """Refuse while placed tokens await `commit` or `rollback`."""
        for part in self.streams:
            part.check_none_pending()

    # -- placing ------------------------------------------------------------------------------

    def counted_on(self, seq_ids):
        """Return the next position of each token's sequences; they share a stream."""
        last, pos = {}, []
        for ids in seq_ids:
            p = 1 + max(last.get(s, self.seq_pos_max(s)) for s in ids)
            if p > naive.MAX_POS:
                raise naive.BadArgumentError("beyond the last position")
            pos.append(p)
            last.update(dict.fromkeys(ids, p))
        return pos

    def prepare(self, seq_ids):
        """Return positions; refuse a batch that does not fit in all its streams. Changes nothing.

        Where cells are taken from the lowest on, any way to split gives each stream the same.
        """
        for ids in seq_ids:
            if len({id(self.stream(s)) for s in ids}) > 1:
                raise naive.BadArgumentError("a cell lies in one stream")
        self.check_none_pending()
        pos = self.counted_on(seq_ids)
        for n, part in enumerate(self.streams):
            n_tokens = sum(self.stream_of[ids[0]] == n for ids in seq_ids)
            if n_tokens > part.n_free:
                raise naive.NoSlotError(f"{n_tokens} of {part.n_free} in stream {n}")
        return pos

    def apply(self, pos, seq_ids, tokens):
        """Place the tokens of a step; returns (stream, cell) of each."""
        where = []
        for p, ids, token in zip(pos, seq_ids, tokens, strict=True):
            part = self.stream(ids[0])
            (i,) = part.find_slot(1)
            part.place([i], [p], [ids], [token])
            where.append((self.stream_of[ids[0]], i))
        return where

    def commit(self):
        """Accept all placed tokens."""
        for part in self.streams:
            part.commit()

    # -- the verbs ----------------------------------------------------------------------------

    def clear(self):
        """Empty all streams."""
        for part in self.streams:
            part.clear()

    def seq_rm(self, seq_id, p0, p1):
        """Take a sequence (-1: each) out of a range."""
        self.streams[0].check_id(seq_id, all_allowed=True)
        self.check_none_pending()
        for part in self.streams if seq_id == -1 else [self.stream(seq_id)]:
            part.seq_rm(seq_id, p0, p1)
        return True

    def seq_keep(self, seq_id):
        """Remove all other sequences, in all streams."""
        self.streams[0].check_id(seq_id)
        self.check_none_pending()
        for part in self.streams:
            part.seq_keep(seq_id)

    def seq_cp(self, src, dst, p0, p1):
        """Share cells within a stream; across streams copy the whole sequence, rows and all."""
        here, there = self.stream(src), self.stream(dst)
        if src == dst:
            return
        self.check_none_pending()
        if here is there:
            here.seq_cp(src, dst, p0, p1)
            return
        members = here.members(src)
        if len(here.members_in(src, p0, p1)) < len(members):
            raise naive.BadArgumentError("a part of a sequence")
        n_own = sum(there.cells[i].seqs == {dst} for i in there.members(dst))
        if len(members) > there.n_free + n_own:
            raise naive.NoSlotError(f"{len(members)} of {there.n_free} and {n_own} of its own")
        there.seq_rm(dst, -1, -1)
        for i, target in zip(members, there.free_cells(), strict=False):
            there.cells[target] = here.cells[i].copy()
            there.cells[target].seqs = {dst}

    def seq_add(self, seq_id, p0, p1, delta):
        """Move positions."""
        self.stream(seq_id)
        self.check_none_pending()
        self.stream(seq_id).seq_add(seq_id, p0, p1, delta)

    def seq_div(self, seq_id, p0, p1, d):
        """Divide positions."""
        self.stream(seq_id)
        self.check_none_pending()
        self.stream(seq_id).seq_div(seq_id, p0, p1, d)

    def update(self):
        """Rotate K where a shift is pending."""
        self.check_none_pending()
        done = [part.update() for part in self.streams]
        return any(done)
