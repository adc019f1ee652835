"""The unified cache against the oracle: any operations in any order, valid and invalid."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from judged import ROPES, Judged

from kvnumba.batch import Batch
from kvnumba.errors import KVCacheError, StepError

ENDINGS = strategies.mostly(st.sampled_from(["commit"] * 4 + ["rollback"]), st.just("leave"), 12)


class UnifiedMachine(RuleBasedStateMachine):
    """Calls both with the same arguments; every field and row is compared after each rule."""

    judged = None
    sizes, shared = strategies.SIZES["two"], "copy"

    @initialize(
        data=st.data(),
        n_seq_max=strategies.n_seq_max,
        placement=st.sampled_from(["scatter", "ring"]),
        n_spare=st.sampled_from([0, 3]),
        layout=st.tuples(st.booleans(), st.sampled_from([ROPES, ROPES, (None,) * len(ROPES)])),
        prefilled=strategies.prefilled,
    )
    def start(self, data, n_seq_max, placement, n_spare, layout, prefilled):
        n_cells = data.draw(st.sampled_from(self.sizes), label="n_cells")
        self.judged = Judged(n_cells, n_seq_max, placement, self.shared, n_spare, *layout)
        self.cache, self.oracle = self.judged.cache, self.judged.oracle
        self.n_seq_max = n_seq_max
        n = int(prefilled * self.oracle.n_ctx)
        ids = data.draw(st.lists(strategies.id_lists(n_seq_max), min_size=1, max_size=3))
        where, pos = list(range(n)), [i // len(ids) for i in range(n)]
        self.judged.place(where, pos, [ids[i % len(ids)] for i in range(n)], where)
        self.judged.call("commit")
        self.pin_cells(data, data.draw(strategies.pinnings))

    @invariant()
    def agree(self):
        if self.judged is not None:
            self.judged.compare()
            self.judged.plant_nan()

    def teardown(self):
        if self.judged is not None:
            self.cache.close()

    # -- what to call with --------------------------------------------------------------------

    def draw_tokens(self, data):
        sizes = self.oracle.n_cells, self.oracle.n_free, self.n_seq_max
        pos, ids = data.draw(strategies.tokens(*sizes), label="batch")
        return pos, ids, [1000 + t for t in range(len(pos))]

    def draw_id(self, data):
        held = sorted({s for c in self.oracle.cells for s in c.seqs})
        return data.draw(strategies.ids_around(held, self.n_seq_max), label="seq_id")

    def positions_of(self, seq_id):
        return sorted({self.oracle.cells[i].pos for i in self.oracle.members(seq_id)})

    def draw_range(self, data, seq_id):
        return data.draw(strategies.ranges_around(self.positions_of(seq_id)), label="p0, p1")

    # -- placing ------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        contiguous=st.sampled_from([None, None, True, False]),
        ending=ENDINGS,
    )
    def place_found(self, data, contiguous, ending):
        pos, ids, tokens = self.draw_tokens(data)
        slot = self.judged.call("find_slot", len(pos), contiguous)
        if slot is not None and self.judged.place(slot, pos, ids, tokens) and ending != "leave":
            self.judged.call(ending)

    @rule(data=st.data(), ending=ENDINGS)
    def place_at(self, data, ending):
        """Cells of the caller's choice: taken ones, repeated ones, ones that do not exist."""
        free, n = self.oracle.free_cells(), self.oracle.n_cells
        one = st.sampled_from(free or [0])
        cell = st.one_of(one, one, one, st.integers(-1, n))
        where = data.draw(st.lists(cell, max_size=4), label="cells")
        ids = data.draw(strategies.id_lists(self.n_seq_max), label="ids")
        pos = data.draw(strategies.positions, label="pos")
        pos = [min(pos + t, strategies.MAX_POS) for t in range(len(where))]
        if self.judged.place(where, pos, [ids] * len(where), pos) and ending != "leave":
            self.judged.call(ending)

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

    @rule(ending=st.sampled_from(["commit", "rollback"]))
    def end_pending(self, ending):
        self.judged.call(ending)

    # -- the verbs ----------------------------------------------------------------------------

    @rule(data=st.data(), for_all=strategies.one_in(6))
    def seq_rm(self, data, for_all):
        s = -1 if for_all else self.draw_id(data)
        self.judged.call("seq_rm", s, *self.draw_range(data, s))

    @rule(data=st.data())
    def seq_cp(self, data):
        s, other = self.draw_id(data), data.draw(strategies.seq_ids(self.n_seq_max))
        self.judged.call("seq_cp", s, other, *self.draw_range(data, s))

    @rule(data=st.data(), delta=st.sampled_from([1, -1, 3, -3]), times=st.sampled_from([2, 1]))
    def fork_and_shift(self, data, delta, times):
        """Share cells, then move one of the sharers: twice in a row with a shift still pending."""
        s, p = self.draw_id(data), data.draw(st.sampled_from([(0, 4), (0, -1), (3, 9)]))
        for other in strategies.EDGE_IDS[:times]:
            self.judged.call("seq_cp", s, (s + 1 + other) % self.n_seq_max, *p)
            self.judged.call("seq_add", s, *p, delta)

    @rule(data=st.data())
    def seq_add(self, data):
        s = self.draw_id(data)
        delta = data.draw(strategies.deltas_around(self.positions_of(s)), label="delta")
        self.judged.call("seq_add", s, *self.draw_range(data, s), delta)

    @rule(data=st.data(), d=strategies.divisors)
    def seq_div(self, data, d):
        s = self.draw_id(data)
        self.judged.call("seq_div", s, *self.draw_range(data, s), d)

    # -- deferred work ------------------------------------------------------------------------

    @rule()
    def update(self):
        self.judged.call("update")

    @rule(limit=st.sampled_from([None, None, 0, 1, 2, 5]), now=st.booleans())
    def defrag(self, limit, now):
        self.judged.call("defrag", limit)
        if now:
            self.judged.call("update")

    # -- what seldom happens, and questions ---------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(["nothing", "nothing", "others", "all"]))
    def empty(self, data, what):
        if what == "others":
            self.judged.call("seq_keep", self.draw_id(data))
        if what == "all":
            self.cache.clear(data=data.draw(st.booleans()))
            self.oracle.clear()

    @rule(data=st.data(), how=strategies.pinnings)
    def pin(self, data, how):
        self.pin_cells(data, how)

    def pin_cells(self, data, how):
        n = self.oracle.n_cells
        if how == "some":
            some = st.lists(st.integers(0, n - 1), unique=True, max_size=12)
            self.judged.pin(sorted(data.draw(some, label="pinned")))
        else:
            half = range(data.draw(st.integers(0, 2)), n, 2)
            self.judged.pin({"none": [], "used": self.oracle.members(-1), "half": list(half)}[how])

    @rule(data=st.data(), kind=st.sampled_from(["place", "stale", "kinds", "kinds"]))
    def what_is_refused(self, data, kind):
        if kind == "place":
            self.place_with_bad_arguments(data)
        elif kind == "stale":
            self.apply_a_stale_step(data)
        else:
            self.call_with_other_kinds(data.draw(st.sampled_from(["0", 1.0, None, True, [0]])))

    def place_with_bad_arguments(self, data):
        slot = self.oracle.free_cells()[:1]
        if not slot:
            return
        bad_id = data.draw(strategies.bad_seq_ids(self.n_seq_max))
        bad_pos = data.draw(st.sampled_from([-1, -7, 2**31 - 1]))
        for pos, ids in ([3], [[bad_id]]), ([bad_pos], [[0]]), ([3], [[]]), ([3], [[0, 0]]):
            self.judged.call("place", slot, pos, ids, [5])
        for cell in -1, self.oracle.n_cells, self.oracle.n_cells + 63:
            self.judged.call("place", [*slot, cell], [3, 3], [[0], [0]], [5, 5])
        where = self.oracle.free_cells()[: max(0, self.oracle.n_free) + 1]
        if self.judged.place(where, where, [[0]] * len(where), where):
            self.judged.call("rollback")

    def apply_a_stale_step(self, data):
        """A step planned before the cells changed must not be applied."""
        steps, _ = self.judged.prepare([0], [[0]], 1, [7])
        if not steps:
            return
        s, other = self.draw_id(data), data.draw(strategies.seq_ids(self.n_seq_max))
        verbs = ("seq_rm", s, 0, 2), ("seq_cp", s, other, 0, -1), ("seq_keep", s), ("clear",)
        shifts = ("seq_add", s, 0, -1, 1), ("seq_div", s, 0, -1, 2)
        before = self.judged.contents()
        self.judged.call(*data.draw(st.sampled_from(verbs + shifts), label="meanwhile"))
        if self.judged.contents() != before:
            with pytest.raises(StepError):
                steps[0].apply()

    def call_with_other_kinds(self, bad):
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

    @rule(
        data=st.data(),
        n_listed=st.integers(0, 5),
        limit=st.sampled_from([None, 0, 1, 2, 3]),
    )
    def ask(self, data, n_listed, limit):
        self.compare_views(n_listed)
        self.compare_defrag_plans(limit)
        self.compare_sizes()
        s = self.draw_id(data)
        self.judged.call("seq_pos_min", s)
        self.judged.call("seq_pos_max", s)
        n_tokens = data.draw(st.integers(-1, self.oracle.n_cells + 1), label="n_tokens")
        for contiguous in (True, False, None):
            self.judged.call("find_slot", n_tokens, contiguous)

    def compare_views(self, n_listed):
        view = self.cache.view(n_listed)
        pos, listed = self.oracle.view(n_listed)
        assert view.pos.tolist() == pos
        assert view.seq_ids.tolist() == listed
        assert (view.used, view.n_tokens) == (self.oracle.used, self.oracle.n_tokens)
        assert (view.max_contiguous, view.max_contiguous_idx) == self.oracle.longest_hole()

    def compare_defrag_plans(self, limit):
        ids, n_moves = self.oracle.defrag_plan(limit)
        src, dst, n_runs = self.cache.defrag_plan(limit)
        assert n_runs == n_moves
        wanted = {i: t for i, t in enumerate(ids) if t not in (i, len(ids))}
        assert dict(zip(src.tolist(), dst.tolist(), strict=True)) == wanted

    def compare_sizes(self):
        padding = self.cache.padding
        assert self.cache.n_kv() == self.oracle.n_kv(padding)
        assert self.cache.fragmentation() == self.oracle.fragmentation(padding)
        assert self.cache.defrag_sched(1e-9) is False


def machine_of(words, shared):
    """Return the machine for bitmaps of that many words and one rule for shared cells."""
    fixed = {"sizes": strategies.SIZES[words], "shared": shared}
    return type("UnifiedMachine", (UnifiedMachine,), fixed)


@pytest.mark.parametrize("shared", ["copy", "move", "refuse"])
@pytest.mark.parametrize("words", strategies.SIZES)
def test_any_operations_in_any_order(words, shared):
    n_examples = max(10, settings.default.max_examples // 5)
    limits = settings(max_examples=n_examples, stateful_step_count=40, report_multiple_bugs=False)
    run_state_machine_as_test(machine_of(words, shared), settings=limits)


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


@pytest.mark.parametrize("placement", ["scatter", "ring"])
def test_a_cache_of_one_cell(placement):
    judged = Judged(1, 1, placement, "copy")
    assert judged.place([0], [5], [[0]], [9])
    judged.call("commit")
    judged.call("find_slot", 1)
    judged.call("seq_add", 0, 0, -1, -5)
    judged.call("update")
    judged.compare()
    judged.call("seq_rm", 0, 0, 1)
    assert judged.call("find_slot", 1) == [0]
    judged.compare()


@pytest.mark.parametrize(
    "verb",
    [
        ("seq_rm", 0, 1, 2),
        ("seq_cp", 0, 1, 0, 1),
        ("seq_keep", 1),
        ("seq_add", 0, 0, -1, 1),
        ("seq_div", 0, 1, -1, 2),
        ("clear",),
    ],
)
def test_a_step_is_stale_after(verb):
    judged = Judged(8, 2, "scatter", "move")
    assert judged.place([0, 1], [0, 1], [[0], [0]], [5, 6])
    judged.call("commit")
    steps, _ = judged.prepare([2], [[0]], 1, [7])
    judged.call(*verb)
    with pytest.raises(StepError):
        steps[0].apply()
    judged.compare()
