"""A cache with streams against its oracle: any operations in any order, valid and invalid."""

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
from judged_streams import JudgedStreams

from kvnumba.errors import KVCacheError, StepError

ENDINGS = st.sampled_from(["commit", "commit", "commit", "rollback", "all back"])
MAPS = [(0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 1, 0), (1, 0, 2, 0), (0, 0, 0, 0)]
IDS = st.integers(0, 3)


class StreamsMachine(RuleBasedStateMachine):
    """Calls both with the same arguments; everything is compared after each rule."""

    judged = None
    shared = "copy"

    @initialize(
        n_cells=st.sampled_from([12, 5, 70]),
        stream_of=st.sampled_from(MAPS),
        v_trans=st.booleans(),
        prefilled=st.lists(st.tuples(IDS, st.integers(1, 5)), max_size=4),
    )
    def start(self, n_cells, stream_of, v_trans, prefilled):
        self.judged = JudgedStreams(n_cells, stream_of, self.shared, v_trans)
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
        if not 0 <= seq_id < 4:
            return []
        part = self.oracle.stream(seq_id)
        return sorted({part.cells[i].pos for i in part.members(seq_id)})

    def draw_id(self, data):
        held = [s for s in range(4) if self.positions_of(s)]
        return data.draw(strategies.ids_around(held, 4), label="seq_id")

    def draw_range(self, data, seq_id):
        known = range(4) if seq_id == -1 else [seq_id]
        held = [p for s in known for p in self.positions_of(s)]
        return data.draw(strategies.ranges_around(held), label="p0, p1")

    # -- placing ------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        n_tokens=st.sampled_from([1, 1, 2, 3, 5, 8]),
        n_ubatch=st.integers(1, 8),
        ids=st.lists(st.lists(IDS, min_size=1, max_size=1), min_size=1, max_size=4),
        ending=ENDINGS,
        n_done=st.integers(0, 8),
    )
    def decode(self, data, n_tokens, n_ubatch, ids, ending, n_done):
        in_turn = data.draw(st.booleans(), label="in turn")
        seq_ids = [ids[t % len(ids)] for t in range(n_tokens)]
        self.judged.run(seq_ids if in_turn else sorted(seq_ids), n_ubatch, ending, n_done)

    @rule(
        ids=st.lists(st.lists(IDS, min_size=1, max_size=3, unique=True), min_size=1, max_size=6),
        n_ubatch=st.integers(1, 4),
        ending=ENDINGS,
        of_one_stream=strategies.one_in(5).map(lambda no: not no),
    )
    def decode_shared(self, ids, n_ubatch, ending, of_one_stream):
        if of_one_stream:
            of = self.oracle.stream_of
            ids = [[s for s in some if of[s] == of[some[0]]] for some in ids]
        self.judged.run(ids, n_ubatch, ending, 1)

    # -- the verbs ----------------------------------------------------------------------------

    @rule(data=st.data(), for_all=strategies.one_in(6))
    def seq_rm(self, data, for_all):
        s = -1 if for_all else self.draw_id(data)
        self.judged.call("seq_rm", s, *self.draw_range(data, s))

    @rule(data=st.data(), other=strategies.mostly(IDS, st.sampled_from([-1, 4, 64])))
    def seq_cp(self, data, other):
        s = self.draw_id(data)
        whole = st.just((-1, -1))
        self.judged.call("seq_cp", s, other, *data.draw(whole | st.just((0, 1)), label="p0, p1"))

    @rule(data=st.data(), other=IDS)
    def seq_cp_of_a_range(self, data, other):
        s = self.draw_id(data)
        self.judged.call("seq_cp", s, other, *self.draw_range(data, s))

    @rule(data=st.data())
    def seq_add(self, data):
        s = self.draw_id(data)
        delta = data.draw(strategies.deltas_around(self.positions_of(s)), label="delta")
        self.judged.call("seq_add", s, *self.draw_range(data, s), delta)

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

    @rule(s=IDS)
    def verbs_while_pending(self, s):
        prepared = self.judged.prepare([[s]], 1)
        if prepared is None:
            return
        (step,), pos, tokens = prepared
        self.judged.apply(step, [[s]], pos, tokens)
        for other in range(4):
            for call in (
                ("seq_rm", other, 0, 1),
                ("seq_rm", -1, 0, 1),
                ("seq_cp", other, (other + 1) % 4, -1, -1),
                ("seq_keep", other),
                ("seq_add", other, 0, -1, 1),
                ("seq_div", other, 0, -1, 2),
                ("update",),
            ):
                self.judged.call(*call)
        step.rollback()
        for part in self.oracle.streams:
            part.rollback()

    @rule(data=st.data())
    def apply_a_stale_step(self, data):
        prepared = self.judged.prepare([[0]], 1)
        if prepared is None:
            return
        before, s = self.judged.frozen(), self.draw_id(data)
        verbs = [("seq_keep", s), ("seq_add", s, 0, -1, 1), ("seq_cp", s, 0, -1, -1)]
        self.judged.call(*data.draw(st.sampled_from(verbs)))
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
            lambda: c.stream(bad),
            lambda: c.seq_rm(0, bad, 1),
            lambda: c.seq_add(0, 0, bad, 1),
            lambda: c.seq_div(0, 0, 1, -1),
        ):
            with pytest.raises(KVCacheError):
                call()
        assert self.judged.frozen() == before


@pytest.mark.parametrize("shared", ["copy", "move", "refuse"])
def test_any_operations_in_any_order(shared):
    n_examples = max(10, settings.default.max_examples // 5)
    limits = settings(max_examples=n_examples, stateful_step_count=30, report_multiple_bugs=False)
    machine = type("StreamsMachine", (StreamsMachine,), {"shared": shared})
    run_state_machine_as_test(machine, settings=limits)
