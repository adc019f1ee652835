"""The hybrid cache against its oracle: any operations in any order, valid and invalid."""

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
from judged_hybrid import JudgedHybrid

from kvnumba.errors import KVCacheError, StepError

ENDINGS = st.sampled_from(["commit", "commit", "commit", "rollback", "all back"])
N_SEQ_MAX = 4
IDS = st.integers(0, N_SEQ_MAX - 1)


class HybridMachine(RuleBasedStateMachine):
    """Calls both with the same arguments; everything is compared after each rule."""

    judged = None
    shared, n_window = "copy", 0

    @initialize(
        n_ctx=st.sampled_from([24, 70]),
        n_rewind=st.sampled_from([0, 1, 2, 5]),
        prefilled=st.lists(st.tuples(IDS, st.integers(1, 5)), max_size=4),
    )
    def start(self, n_ctx, n_rewind, prefilled):
        self.judged = JudgedHybrid(n_ctx, N_SEQ_MAX, n_rewind, self.shared, self.n_window)
        self.cache = self.judged.cache
        for s, n in prefilled:
            self.judged.run([[s]] * n)

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
        return sorted(set(self.oracle.positions(seq_id).values()))

    def draw_id(self, data):
        held = [s for s in range(N_SEQ_MAX) if self.positions_of(s)]
        return data.draw(strategies.ids_around(held, N_SEQ_MAX), label="seq_id")

    def draw_range(self, data, seq_id):
        known = range(N_SEQ_MAX) if seq_id == -1 else [seq_id] if 0 <= seq_id < N_SEQ_MAX else []
        held = [p for s in known for p in self.positions_of(s)]
        near = strategies.ranges_around(held)
        if held:
            tail = st.integers(0, 4).map(lambda n: (max(held) + 1 - n, -1))
            near = tail | near
        return data.draw(near, label="p0, p1")

    # -- placing ------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        n_tokens=st.sampled_from([1, 1, 2, 3, 5, 8, 20]),
        n_ubatch=st.integers(1, 8),
        ids=st.lists(st.lists(IDS, min_size=1, max_size=1), min_size=1, max_size=3),
        ending=ENDINGS,
        n_done=st.integers(0, 8),
    )
    def decode(self, data, n_tokens, n_ubatch, ids, ending, n_done):
        in_turn = data.draw(st.booleans(), label="in turn")
        seq_ids = [ids[t % len(ids)] for t in range(n_tokens)]
        self.judged.run(seq_ids if in_turn else sorted(seq_ids), n_ubatch, ending, n_done)

    @rule(data=st.data(), n=st.integers(1, 4), n_ubatch=st.integers(1, 4), ending=ENDINGS)
    def decode_shared(self, data, n, n_ubatch, ending):
        """Tokens of several sequences, which share a state, or have none."""
        s = data.draw(IDS)
        tail = self.cache.recurrent.cells.tail.tolist()
        alike = [o for o in range(N_SEQ_MAX) if tail[o] == tail[s]]
        self.judged.run([alike] * n, n_ubatch, ending, 1)

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

    @rule(data=st.data(), whole=st.booleans())
    def seq_add(self, data, whole):
        s = self.draw_id(data)
        held = self.positions_of(s) if 0 <= s < N_SEQ_MAX else []
        delta = data.draw(strategies.deltas_around(held), label="delta")
        p = (-1, -1) if whole else self.draw_range(data, s)
        self.judged.call("seq_add", s, *p, delta)

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

    @rule()
    def verbs_while_pending(self):
        prepared = self.judged.prepare([[0]], 1)
        if prepared is None:
            return
        (step,), _, _ = prepared
        step.apply()
        self.oracle.n_pending = 1
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
        self.oracle.n_pending = 0

    @rule(data=st.data())
    def apply_a_stale_step(self, data):
        prepared = self.judged.prepare([[0]], 1)
        if prepared is None:
            return
        before, s = self.judged.frozen(), self.draw_id(data)
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


@pytest.mark.parametrize("n_window", [0, 12])
@pytest.mark.parametrize("shared", ["copy", "move", "refuse"])
def test_any_operations_in_any_order(shared, n_window):
    n_examples = max(10, settings.default.max_examples // 5)
    limits = settings(max_examples=n_examples, stateful_step_count=30, report_multiple_bugs=False)
    fixed = {"shared": shared, "n_window": n_window}
    run_state_machine_as_test(type("HybridMachine", (HybridMachine,), fixed), settings=limits)
