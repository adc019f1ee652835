"""The unified cache against the oracle: any operations in any order, valid and invalid."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from judged import Judged

from kvnumba.batch import Batch
from kvnumba.errors import KVCacheError, StepError

ENDINGS = st.sampled_from(["commit", "commit", "commit", "rollback", "leave"])


class UnifiedMachine(RuleBasedStateMachine):
    """Calls both with the same arguments; every field and row is compared after each rule."""

    judged = None

    @initialize(
        n_cells=strategies.n_cells,
        n_seq_max=strategies.n_seq_max,
        placement=st.sampled_from(["scatter", "ring"]),
        shared=st.sampled_from(["move", "refuse", "copy"]),
        n_spare=st.sampled_from([0, 0, 3]),
        v_trans=st.booleans(),
    )
    def start(self, n_cells, n_seq_max, placement, shared, n_spare, v_trans):
        self.judged = Judged(n_cells, n_seq_max, placement, shared, n_spare, v_trans)
        self.cache, self.oracle = self.judged.cache, self.judged.oracle
        self.judged.plant_nan()
        self.n_seq_max = n_seq_max

    @invariant()
    def agree(self):
        if self.judged is not None:
            self.judged.compare()

    def teardown(self):
        if self.judged is not None:
            self.cache.close()

    def draw_tokens(self, data):
        pos, ids = data.draw(strategies.tokens(self.oracle.n_cells, self.n_seq_max), label="batch")
        return pos, ids, [1000 + t for t in range(len(pos))]

    def draw_id(self, data):
        return data.draw(strategies.any_seq_ids(self.n_seq_max), label="seq_id")

    # -- placing ------------------------------------------------------------------------------

    @rule(data=st.data(), contiguous=st.sampled_from([None, None, True, False]), ending=ENDINGS)
    def place_found(self, data, contiguous, ending):
        pos, ids, tokens = self.draw_tokens(data)
        slot = self.judged.call("find_slot", len(pos), contiguous)
        if slot is not None and self.judged.place(slot, pos, ids, tokens) and ending != "leave":
            self.judged.call(ending)

    @rule(data=st.data(), ending=ENDINGS)
    def place_at(self, data, ending):
        """Cells of the caller's choice: taken ones, repeated ones, ones that do not exist."""
        n = self.oracle.n_cells
        cell = st.one_of(st.integers(0, n - 1), st.integers(0, n - 1), st.integers(-1, n))
        where = data.draw(st.lists(cell, max_size=4), label="cells")
        ids = data.draw(strategies.id_lists(self.n_seq_max), label="ids")
        pos = data.draw(strategies.positions, label="pos")
        pos = [min(pos + t, strategies.MAX_POS) for t in range(len(where))]
        if self.judged.place(where, pos, [ids] * len(where), pos) and ending != "leave":
            self.judged.call(ending)

    @rule(data=st.data())
    def place_with_bad_arguments(self, data):
        slot = self.oracle.free_cells()[:1]
        if not slot:
            return
        bad_id = data.draw(strategies.bad_seq_ids(self.n_seq_max))
        bad_pos = data.draw(st.sampled_from([-1, -7, 2**31 - 1]))
        for pos, ids in ([3], [[bad_id]]), ([bad_pos], [[0]]), ([3], [[]]), ([3], [[0, 0]]):
            self.judged.call("place", slot, pos, ids, [5])

    @rule(data=st.data(), n_ubatch=st.integers(1, 70), counted=st.booleans(), end=ENDINGS)
    def decode(self, data, n_ubatch, counted, end):
        """A batch by its steps; the ending befalls one of them."""
        pos, ids, tokens = self.draw_tokens(data)
        steps, plan = self.judged.prepare(None if counted else pos, ids, n_ubatch, tokens)
        if not steps:
            return
        pos, slots = plan
        last = data.draw(st.integers(0, len(slots) - 1), label="step that ends differently")
        for k, (step, where) in enumerate(zip(steps, slots, strict=True)):
            part = slice(k * n_ubatch, (k + 1) * n_ubatch)
            self.judged.apply(step, where, pos[part], ids[part], tokens[part])
            if k < last or end == "commit":
                step.commit()
                self.oracle.accept(where)
            elif end == "rollback":
                step.rollback()
                self.oracle.undo([where])
                return
            else:
                return

    @rule(data=st.data(), n_ubatch=st.integers(1, 40), commit_last=st.booleans())
    def decode_and_undo_all(self, data, n_ubatch, commit_last):
        pos, ids, tokens = self.draw_tokens(data)
        steps, plan = self.judged.prepare(pos, ids, n_ubatch, tokens)
        if not steps:
            return
        slots = plan[1]
        n_done = data.draw(st.integers(0, len(slots)), label="steps done")
        for k, where in enumerate(slots[:n_done]):
            part = slice(k * n_ubatch, (k + 1) * n_ubatch)
            self.judged.apply(steps[k], where, pos[part], ids[part], tokens[part])
            if k + 1 < n_done or commit_last:
                steps[k].commit()
                self.oracle.accept(where)
        steps.rollback()
        if n_done:
            self.oracle.undo(slots[:n_done])

    @rule(data=st.data())
    def a_stale_step_is_refused(self, data):
        steps, _ = self.judged.prepare([0], [[0]], 1, [7])
        if not steps:
            return
        s = self.draw_id(data)
        self.judged.call("seq_rm", s, 0, 2)
        self.judged.call("seq_cp", 0, self.n_seq_max - 1, -1, -1)
        if self.n_seq_max > 1:
            with pytest.raises(StepError):
                steps[0].apply()

    @precondition(lambda self: self.judged is not None and self.oracle.pending)
    @rule(ending=st.sampled_from(["commit", "rollback"]))
    def end_pending(self, ending):
        self.judged.call(ending)

    # -- the verbs ----------------------------------------------------------------------------

    @rule(data=st.data(), p=strategies.ranges(), for_all=st.sampled_from([False] * 5 + [True]))
    def seq_rm(self, data, p, for_all):
        self.judged.call("seq_rm", -1 if for_all else self.draw_id(data), *p)

    @rule(data=st.data(), p=strategies.ranges())
    def seq_cp(self, data, p):
        self.judged.call("seq_cp", self.draw_id(data), self.draw_id(data), *p)

    @rule(data=st.data(), rare=st.integers(0, 3))
    def seq_keep(self, data, rare):
        if rare == 0:
            self.judged.call("seq_keep", self.draw_id(data))

    @rule(data=st.data(), p=strategies.ranges(), delta=strategies.deltas)
    def seq_add(self, data, p, delta):
        self.judged.call("seq_add", self.draw_id(data), *p, delta)

    @rule(data=st.data(), p=strategies.ranges(), d=strategies.divisors)
    def seq_div(self, data, p, d):
        self.judged.call("seq_div", self.draw_id(data), *p, d)

    @rule(data_too=st.booleans(), rare=st.integers(0, 5))
    def clear(self, data_too, rare):
        if rare == 0:
            self.cache.clear(data=data_too)
            self.oracle.clear()

    @rule(bad=st.sampled_from(["0", 1.0, None, True, [0]]))
    def arguments_of_other_kinds_are_refused(self, bad):
        c = self.cache
        for call in (
            lambda: c.seq_rm(bad, 0, 1),
            lambda: c.seq_cp(bad, 0, 0, 1),
            lambda: c.seq_cp(0, bad, 0, 1),
            lambda: c.seq_keep(bad),
            lambda: c.seq_add(bad, 0, 1, 1),
            lambda: c.seq_div(bad, 0, 1, 2),
            lambda: c.seq_pos_max(bad),
            lambda: c.seq_rm(0, bad, 1),
            lambda: c.seq_add(0, 0, bad, 1),
        ):
            with pytest.raises(KVCacheError):
                call()

    # -- deferred work, pins, spoiled rows ----------------------------------------------------

    @rule()
    def update(self):
        self.judged.call("update")

    @rule(limit=st.sampled_from([None, None, 0, 1, 2, 5]), now=st.booleans())
    def defrag(self, limit, now):
        self.judged.call("defrag", limit)
        if now:
            self.judged.call("update")

    @rule(limit=st.sampled_from([None, 0, 1, 2, 3]))
    def defrag_plan(self, limit):
        ids, n_moves = self.oracle.defrag_plan(limit)
        src, dst, n_runs = self.cache.defrag_plan(limit)
        assert n_runs == n_moves
        wanted = {i: t for i, t in enumerate(ids) if t not in (i, len(ids))}
        assert dict(zip(src.tolist(), dst.tolist(), strict=True)) == wanted

    @rule(data=st.data(), how=st.sampled_from(["none", "used", "some"]))
    def pin(self, data, how):
        n = self.oracle.n_cells
        some = st.lists(st.integers(0, n - 1), unique=True, max_size=12)
        cells = self.oracle.members(-1) if how == "used" else []
        self.judged.pin(sorted(data.draw(some)) if how == "some" else cells)

    @rule()
    def plant_nan(self):
        self.judged.plant_nan()

    # -- questions ----------------------------------------------------------------------------

    @rule(n_listed=st.integers(0, 5))
    def view(self, n_listed):
        view = self.cache.view(n_listed)
        pos, listed = self.oracle.view(n_listed)
        assert view.pos.tolist() == pos
        assert view.seq_ids.tolist() == listed
        assert (view.used, view.n_tokens) == (self.oracle.used, self.oracle.n_tokens)
        assert (view.max_contiguous, view.max_contiguous_idx) == self.oracle.longest_hole()

    @rule()
    def sizes(self):
        padding = self.cache.padding
        assert self.cache.n_kv() == self.oracle.n_kv(padding)
        assert self.cache.fragmentation() == self.oracle.fragmentation(padding)
        assert self.cache.defrag_sched(1e-9) is False

    @rule(data=st.data())
    def questions_about_sequences(self, data):
        s = self.draw_id(data)
        self.judged.call("seq_pos_min", s)
        self.judged.call("seq_pos_max", s)

    @rule(n_tokens=st.integers(-2, 300), contiguous=st.sampled_from([None, True, False]))
    def find_only(self, n_tokens, contiguous):
        self.judged.call("find_slot", n_tokens, contiguous)


TestUnified = UnifiedMachine.TestCase
TestUnified.settings = settings(stateful_step_count=40, report_multiple_bugs=False)


def test_a_bare_batch_continues_sequence_0():
    judged = Judged(16, 4, "scatter", "move")
    for step in judged.cache.prepare([5, 6]):
        with step:
            judged.oracle.place(step.cells.tolist(), [0, 1], [[0], [0]], [5, 6])
            judged.oracle.commit()
            judged.write(step.cells.tolist(), step.write)
    judged.compare()
    (step,) = judged.cache.prepare(Batch(np.array([7])))
    assert step.pos.tolist() == [2]
