"""The pair of full and window part against its oracle: any operations in any order."""

from __future__ import annotations

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
from judged_window import JudgedWindow

from kvnumba.errors import KVCacheError, StepError

ENDINGS = st.sampled_from(["commit", "commit", "commit", "rollback", "all back"])
N_SEQ_MAX = 3
IDS = st.integers(0, N_SEQ_MAX - 1)


class WindowMachine(RuleBasedStateMachine):
    """Calls both with the same arguments; everything is compared after each rule."""

    judged = None
    shared, kind = "copy", "standard"

    @initialize(
        sizes=st.sampled_from([(12, 8), (12, 4), (9, 1), (20, 4), (16, 8), (24, 7)]),
        n_base=st.sampled_from([70, 40, 130]),
        v_trans=st.booleans(),
        prefilled=st.lists(st.integers(0, 5), max_size=8),
    )
    def start(self, sizes, n_base, v_trans, prefilled):
        n_window, window = sizes
        self.judged = JudgedWindow(
            n_base, n_window, N_SEQ_MAX, window, self.kind, self.shared, v_trans=v_trans
        )
        self.cache = self.judged.cache
        for k, n in enumerate(prefilled):
            self.run_batch([[k % 2]] * n, 4, "commit", 0)

    @invariant()
    def agree(self):
        if self.judged is not None:
            self.judged.compare()

    def teardown(self):
        if self.judged is not None:
            self.cache.close()

    @property
    def oracle(self):
        return self.judged.oracle

    # -- what to call with --------------------------------------------------------------------

    def positions_of(self, seq_id):
        return sorted({self.oracle.base.cells[i].pos for i in self.oracle.base.members(seq_id)})

    def draw_id(self, data):
        held = [s for s in range(N_SEQ_MAX) if self.positions_of(s)]
        return data.draw(strategies.ids_around(held, N_SEQ_MAX), label="seq_id")

    def draw_range(self, data, seq_id):
        known = range(N_SEQ_MAX) if seq_id == -1 else [seq_id] if 0 <= seq_id < N_SEQ_MAX else []
        held = [p for s in known for p in self.positions_of(s)]
        low = [p for s in known if (p := self.oracle.seq_pos_min(s)) >= 0]
        if low:
            edge = st.sampled_from(low).flatmap(
                lambda p: st.sampled_from([(p + 1, -1), (p, -1), (p + 2, -1), (0, p), (p, p + 1)])
            )
            return data.draw(edge | strategies.ranges_around(held), label="p0, p1")
        return data.draw(strategies.ranges_around(held), label="p0, p1")

    # -- placing ------------------------------------------------------------------------------

    def run_batch(self, seq_ids, n_ubatch, ending, n_done, pos=None):
        prepared = self.judged.prepare(seq_ids, n_ubatch, pos)
        if prepared is None:
            return
        steps, planned, tokens = prepared
        before = [part.snapshot() for part in self.oracle.parts]
        n_done = len(steps) if ending == "commit" else min(n_done, len(steps))
        for k in range(n_done):
            self.judged.apply(steps[k], planned, planned[1][k], tokens)
            if ending == "rollback" and k == n_done - 1:
                steps[k].rollback()
                self.oracle.rollback()
            else:
                steps[k].commit()
        if ending == "all back":
            steps.rollback()
            for part, snapshot in zip(self.oracle.parts, before, strict=True):
                part.restore(snapshot)
        self.oracle.commit()

    @rule(
        data=st.data(),
        n_tokens=st.sampled_from([1, 2, 3, 4, 5, 8, 12, 30]),
        n_ubatch=st.integers(1, 8),
        ids=st.lists(st.lists(IDS, min_size=1, max_size=1), min_size=1, max_size=3),
        ending=ENDINGS,
        n_done=st.integers(0, 8),
    )
    def decode(self, data, n_tokens, n_ubatch, ids, ending, n_done):
        in_turn = data.draw(st.booleans(), label="in turn")
        seq_ids = [ids[t % len(ids)] for t in range(n_tokens)]
        self.run_batch(seq_ids if in_turn else sorted(seq_ids), n_ubatch, ending, n_done)

    @rule(
        ids=st.lists(st.lists(IDS, min_size=1, max_size=3, unique=True), min_size=1, max_size=6),
        n_ubatch=st.integers(1, 4),
        ending=ENDINGS,
        n_done=st.integers(0, 4),
    )
    def decode_shared(self, ids, n_ubatch, ending, n_done):
        self.run_batch(ids, n_ubatch, ending, n_done)

    @rule(seq_id=IDS, gap=st.integers(1, 12), n=st.integers(1, 4))
    def decode_behind_a_gap(self, seq_id, gap, n):
        p = self.oracle.seq_pos_max(seq_id) + 1 + gap
        self.run_batch([[seq_id]] * n, 4, "commit", 0, list(range(p, p + n)))

    # -- the verbs ----------------------------------------------------------------------------

    @rule(data=st.data(), for_all=strategies.one_in(6))
    def seq_rm(self, data, for_all):
        s = -1 if for_all else self.draw_id(data)
        self.judged.seq_rm(s, *self.draw_range(data, s))

    @rule(data=st.data(), other=IDS, whole=st.booleans())
    def seq_cp(self, data, other, whole):
        s = self.draw_id(data)
        p = (-1, -1) if whole else self.draw_range(data, s)
        self.judged.call("seq_cp", s, other, *p)

    @rule(data=st.data())
    def seq_add(self, data):
        s = self.draw_id(data)
        held = self.positions_of(s) if 0 <= s < N_SEQ_MAX else []
        delta = data.draw(strategies.deltas_around(held), label="delta")
        self.judged.call("seq_add", s, *self.draw_range(data, s), delta)

    @rule(data=st.data(), keep=st.integers(0, 4), n=st.integers(1, 8))
    def shift_context(self, data, keep, n):
        s = self.draw_id(data)
        self.judged.seq_rm(s, keep, keep + n)
        self.judged.call("seq_add", s, keep + n, -1, -n)

    @rule(data=st.data(), d=strategies.divisors)
    def seq_div(self, data, d):
        s = self.draw_id(data)
        self.judged.call("seq_div", s, *self.draw_range(data, s), d)

    @rule()
    def update(self):
        self.judged.call("update")

    @rule(data=st.data(), what=st.sampled_from(["nothing", "nothing", "others", "all"]))
    def empty(self, data, what):
        if what == "others":
            self.judged.call("seq_keep", self.draw_id(data))
        if what == "all":
            self.cache.clear(data=data.draw(st.booleans()))
            self.oracle.clear()

    # -- what is refused ----------------------------------------------------------------------

    @rule(data=st.data())
    def verbs_while_pending(self, data):
        prepared = self.judged.prepare([[0]], 1)
        if prepared is None:
            return
        (step,), planned, tokens = prepared
        self.judged.apply(step, planned, planned[1][0], tokens)
        for call in (
            ("seq_rm", 0, 0, 1),
            ("seq_cp", 0, 1, 0, -1),
            ("seq_keep", 0),
            ("seq_add", 0, 0, -1, 1),
            ("seq_div", 0, 0, -1, 2),
            ("update",),
        ):
            self.judged.call(*call)
        step.rollback()
        self.oracle.rollback()

    @rule(data=st.data())
    def apply_a_stale_step(self, data):
        prepared = self.judged.prepare([[0]], 1)
        if prepared is None:
            return
        before = self.judged.frozen()
        s = self.draw_id(data)
        self.judged.call(*data.draw(st.sampled_from([("seq_keep", s), ("seq_add", s, 0, -1, 1)])))
        if self.judged.frozen() != before:
            with pytest.raises(StepError):
                prepared[0][0].apply()

    @rule(bad=st.sampled_from(["0", 1.0, None, True, [0]]))
    def call_with_other_kinds(self, bad):
        c, before = self.cache, self.judged.frozen()
        for call in (
            lambda: c.seq_rm(bad, 0, 1),
            lambda: c.refusal(bad, 0, 1),
            lambda: c.seq_cp(bad, 0, 0, 1),
            lambda: c.seq_cp(0, bad, 0, 1),
            lambda: c.seq_keep(bad),
            lambda: c.seq_add(bad, 0, 1, 1),
            lambda: c.seq_div(bad, 0, 1, 2),
            lambda: c.seq_pos_max(bad),
            lambda: c.seq_pos_min(bad),
            lambda: c.seq_rm(0, bad, 1),
            lambda: c.seq_add(0, 0, bad, 1),
            lambda: c.seq_div(0, 0, 1, -1),
        ):
            with pytest.raises(KVCacheError):
                call()
        assert self.judged.frozen() == before


@pytest.mark.parametrize("kind", ["standard", "chunked", "symmetric"])
@pytest.mark.parametrize("shared", ["copy", "move", "refuse"])
def test_any_operations_in_any_order(shared, kind):
    n_examples = max(10, settings.default.max_examples // 5)
    limits = settings(max_examples=n_examples, stateful_step_count=30, report_multiple_bugs=False)
    fixed = {"shared": shared, "kind": kind}
    run_state_machine_as_test(type("WindowMachine", (WindowMachine,), fixed), settings=limits)
