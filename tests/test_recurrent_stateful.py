"""The recurrent cache against the oracle: any operations in any order, valid and invalid."""

from __future__ import annotations

from contextlib import nullcontext, suppress

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
from judged_recurrent import JudgedStates
from naive_recurrent import BadArgumentError
from strategies import MAX_POS, mostly

from kvnumba.errors import KVCacheError, NoSlotError, StepError

N_SEQ_MAX = st.sampled_from([4, 6, 3, 2, 1, 65, 256])
ENDINGS = mostly(st.sampled_from(["commit"] * 4 + ["rollback", "all"]), st.just("leave"), 12)


def some_ids(n_max):
    """Valid sequence ids, neighbours among them: all of a few, else those at the bitmaps' ends."""
    return [s for s in (0, 1, 2, 3, 4, 5, 62, 63, 64, 254, 255) if s < n_max]


@st.composite
def batches(draw, n_max, is_coupled):
    """Return the ids of each token: some runs, one after the other or interleaved."""
    ids = some_ids(n_max)
    if is_coupled:
        few = st.lists(st.sampled_from(ids), min_size=1, max_size=3, unique=True)
        runs = draw(st.lists(few, min_size=1, max_size=4))
    else:
        runs = [[s] for s in draw(st.lists(st.sampled_from(ids), min_size=1, max_size=6))]
    if draw(strategies.one_in(3)):
        runs = [[s] for s in draw(st.permutations(ids))]
    lengths = draw(
        st.one_of(
            st.integers(1, 5).map(lambda n: [n] * len(runs)),
            st.lists(st.integers(0, 7), min_size=len(runs), max_size=len(runs)),
        )
    )
    turns = [(t, q) for q, n in enumerate(lengths) for t in range(n)]
    if draw(st.booleans()):
        turns.sort()
    return [runs[q] for _, q in turns]


class RecurrentMachine(RuleBasedStateMachine):
    """Calls both with the same arguments; all is compared after each rule."""

    judged = None
    n_rewind = 1

    @initialize(
        n_seq_max=N_SEQ_MAX,
        shared=st.sampled_from(["move", "copy", "refuse"]),
        n_more_cells=st.sampled_from([0, 0, 2]),
        types=st.sampled_from([("f32", "f32"), ("f32", "f32"), ("f16", "bf16")]),
    )
    def start(self, n_seq_max, shared, n_more_cells, types):
        self.judged = JudgedStates(n_seq_max, self.n_rewind, shared, n_more_cells, types)
        self.cache, self.oracle = self.judged.cache, self.judged.oracle
        self.n_seq_max = n_seq_max

    @invariant()
    def agree(self):
        if self.judged is not None:
            self.judged.compare()
            self.judged.spoil_rows()

    def teardown(self):
        if self.judged is not None:
            self.cache.close()

    # -- what to call with --------------------------------------------------------------------

    def draw_id(self, data):
        held = sorted(self.oracle.lives)
        return data.draw(strategies.ids_around(held, self.n_seq_max), label="seq_id")

    def draw_valid_id(self, data):
        return data.draw(st.sampled_from(some_ids(self.n_seq_max)), label="valid seq_id")

    def draw_range(self, data, s):
        """Mostly the end of what a sequence has: after one of its last tokens, and no end."""
        life = self.oracle.lives.get(s)
        held = life.pos[-6:] if life is not None else []
        end = st.sampled_from(held or [0]).flatmap(lambda p: st.tuples(st.just(p), st.just(-1)))
        some = strategies.ranges_around(sorted(set(held + (life.pos[:1] if life else []))))
        return data.draw(st.one_of(end, some), label="p0, p1")

    def draw_positions(self, data, ids):
        """Positions that follow on, but for a jump ahead or back, a gap, or the same again."""
        try:
            pos = self.oracle.counted_on(ids)
        except BadArgumentError:
            return None
        t, jump = data.draw(
            st.tuples(st.integers(0, len(pos)), st.sampled_from([0, 1, 5, -1, -2, -9, MAX_POS])),
            label="jump",
        )
        return [min(max(p + (k >= t) * jump, 0), MAX_POS) for k, p in enumerate(pos)]

    # -- batches ------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        n_ubatch=st.sampled_from([64, 64, 1, 2, 3, 5, 8]),
        kind=mostly(st.just("follow"), st.sampled_from(["coupled", "jump"]), 3),
        ending=ENDINGS,
    )
    def decode(self, data, n_ubatch, kind, ending):
        """A batch by its steps; the ending befalls one of them."""
        ids = data.draw(batches(self.n_seq_max, kind == "coupled"), label="ids")
        pos = None
        if kind == "jump" and not self.cache.n_pending:
            pos = self.draw_positions(data, ids)
        steps = self.judged.prepare(pos, ids, n_ubatch)
        if not steps:
            return
        last = data.draw(st.integers(0, len(steps) - 1), label="step that ends differently")
        for k, step in enumerate(steps):
            self.judged.apply(step, k == 0)
            self.agree()
            if k < last or ending == "commit":
                self.judged.commit(step)
            elif ending == "rollback":
                self.judged.rollback(step)
                self.cannot_go_on(steps[k + 1 :])
                return
            elif ending == "all":
                self.judged.rollback_all(steps)
                self.cannot_go_on(steps[k + 1 :])
                return
            else:
                return

    def cannot_go_on(self, later):
        """A state goes on from the one before: without it, later steps are refused."""
        before = self.judged.everything()
        for step in later:
            with pytest.raises(StepError):
                step.apply()
        assert self.judged.everything() == before

    @rule(data=st.data(), seq_id=st.integers(0, 5), n=st.integers(1, 5))
    def decode_one_by_one(self, data, seq_id, n):
        for _ in range(n):
            if self.judged.feed(None, [[min(seq_id, self.n_seq_max - 1)]]) is None:
                return
            self.judged.spoil_rows()

    @rule(data=st.data(), n_ubatch=st.integers(1, 3))
    def several_steps_pending(self, data, n_ubatch):
        """Steps are accepted and undone in any order; a few of them at once are under way."""
        ids = data.draw(batches(self.n_seq_max, False), label="ids")
        steps = self.judged.prepare(None, ids, n_ubatch)
        for k, step in enumerate((steps or ())[:3]):
            if self.lacks_rows(step, k):
                break
            self.judged.apply(step, k == 0)
            self.agree()
        for _ in range(4):
            pending = [s for s in self.judged.steps if s.state == "applied"]
            if not steps or not pending:
                return
            act, k = data.draw(
                st.tuples(
                    st.sampled_from(["commit", "rollback", "all", "leave"]), st.integers(0, 2)
                )
            )
            if act == "leave":
                return
            if act == "all":
                self.judged.rollback_all(steps)
                return
            getattr(self.judged, act)(pending[k % len(pending)])
            self.agree()

    def lacks_rows(self, step, n_pending):
        """Whether the rows do not suffice for one more pending step; then nothing changes."""
        rows = len(self.judged.free_rows())
        if rows >= step.n_seqs * step.n_states or not n_pending:
            return False
        before = self.judged.everything()
        with pytest.raises(NoSlotError):
            step.apply()
        assert self.judged.everything() == before
        return True

    @rule(ending=st.sampled_from(["commit", "rollback"]))
    def end_pending(self, ending):
        """End whatever is under way, from the last step on backwards."""
        for step in reversed(list(self.judged.steps)):
            if step.state == "applied":
                getattr(self.judged, ending)(step)

    @rule(data=st.data())
    def undo_the_batch(self, data):
        """The batch at work can be undone until something else happens."""
        if self.oracle.applied:
            self.judged.rollback_all(self.judged.steps[0]._steps)
        elif self.judged.steps:
            before = self.judged.everything()
            with pytest.raises(StepError):
                self.judged.steps[0]._steps.rollback()
            assert self.judged.everything() == before

    @rule(data=st.data(), n_ubatch=st.sampled_from([64, 2]))
    def a_step_fails(self, data, n_ubatch):
        """An exception while computing undoes the step, or the batch around it."""
        ids = data.draw(batches(self.n_seq_max, False), label="ids")
        whole = data.draw(st.booleans(), label="whole batch")
        steps = self.judged.prepare(None, ids, n_ubatch)
        if not steps:
            return
        fails = data.draw(st.integers(0, len(steps) - 1), label="step that fails")
        lives = dict(self.oracle.lives)
        for k in range(fails):
            self.judged.apply(steps[k], k == 0)
            self.judged.commit(steps[k])
        if fails == 0:
            self.oracle.begin()
            self.judged.steps = []

        with suppress(ArithmeticError), steps if whole else nullcontext(), steps[fails] as step:
            step.read(0)
            step.write(0, *(np.full((step.n_seqs, step.n_states, w), 3.0, "f4") for w in (8, 9)))
            raise ArithmeticError
        assert steps[fails].state == "rolled back"
        if whole:
            self.oracle.lives, self.oracle.applied, self.judged.steps = lives, [], []
        self.cannot_go_on(steps[fails + 1 :])

    # -- the verbs ----------------------------------------------------------------------------

    @rule(data=st.data(), for_all=strategies.one_in(6))
    def seq_rm(self, data, for_all):
        s = self.draw_id(data)
        self.judged.seq_rm(-1 if for_all else s, *self.draw_range(data, s))

    @rule(data=st.data(), n_back=st.integers(1, 5), n_more=st.integers(0, 3))
    def go_back_and_on(self, data, n_back, n_more):
        """What a speculative decoder does: the last tokens out, others in their place."""
        s = self.draw_id(data)
        if s not in self.oracle.lives:
            return
        self.judged.seq_rm(s, max(0, self.oracle.lives[s].last + 1 - n_back), -1)
        self.agree()
        self.judged.feed(None, [[s]] * n_more)

    @rule(data=st.data(), n=st.integers(1, 3), n_back=st.integers(0, 3), at_once=st.booleans())
    def fork(self, data, n, n_back, at_once):
        """Share a state; then one of the sharers goes back, and all go on."""
        s = self.draw_id(data)
        if s not in self.oracle.lives or self.cache.n_pending:
            return
        others = [self.draw_valid_id(data) for _ in range(n)]
        for other in others:
            self.judged.seq_cp(s, other, -1, -1)
        self.judged.seq_rm(others[0], max(0, self.oracle.lives[s].last + 1 - n_back), -1)
        self.agree()
        ids = [[other] for other in dict.fromkeys([s, *others]) if other in self.oracle.lives]
        for more in [ids] if at_once else [[one] for one in ids]:
            self.judged.feed(None, more)
            self.agree()

    @rule(data=st.data(), part=strategies.one_in(5))
    def seq_cp(self, data, part):
        s, other = self.draw_id(data), self.draw_valid_id(data)
        self.judged.seq_cp(s, other, *(self.draw_range(data, s) if part else (-1, -1)))

    @rule(data=st.data())
    def seq_add(self, data):
        s = self.draw_id(data)
        life = self.oracle.lives.get(s)
        delta = data.draw(strategies.deltas_around(life.pos if life else []), label="delta")
        self.judged.move("seq_add", s, *self.draw_range(data, s), delta)

    @rule(data=st.data(), d=strategies.divisors)
    def seq_div(self, data, d):
        s = self.draw_id(data)
        self.judged.move("seq_div", s, *self.draw_range(data, s), d)

    @rule()
    def commit_durably(self):
        """What is kept now is on disk from here on: however many batches follow, it stays."""
        if not self.cache.n_pending:
            self.judged.pin()

    @rule(ending=st.sampled_from(["commit", "rollback"]))
    def end_all_at_once(self, ending):
        """The cache ends what is pending, in order; not when a later step is accepted already."""
        flags = [is_pending for _, is_pending in self.oracle.applied]
        before = self.judged.everything()
        if ending == "rollback" and flags != sorted(flags):
            with pytest.raises(StepError):
                self.cache.rollback()
            assert self.judged.everything() == before
            return
        getattr(self.cache, ending)()
        for k in reversed(range(len(flags))):
            if flags[k] and ending == "commit":
                self.oracle.accept(k)
            elif flags[k]:
                self.oracle.undo_from(k)
                self.judged.steps.pop()

    @rule(data=st.data(), what=st.sampled_from(["nothing", "nothing", "others", "all"]))
    def empty(self, data, what):
        if what == "others":
            self.judged.call("seq_keep", self.draw_id(data))
        if what == "all":
            self.cache.clear(data=data.draw(st.booleans()))
            self.oracle.clear()
            self.judged.steps = []

    # -- what is refused ----------------------------------------------------------------------

    @rule(data=st.data())
    def apply_a_stale_step(self, data):
        """A step planned before the cache changed must not be applied."""
        if self.cache.n_pending:
            return
        steps = self.judged.prepare([3], [[0]], 1)
        s, other = self.draw_id(data), self.draw_valid_id(data)
        verbs = ("seq_rm", s, -1, -1), ("seq_cp", s, other, -1, -1), ("seq_keep", s), ("clear",)
        shifts = ("seq_add", s, 0, -1, 1), ("seq_div", s, 0, -1, 2)
        lives = self.oracle.lives
        before = dict(lives)
        self.judged.call(*data.draw(st.sampled_from(verbs + shifts), label="meanwhile"))
        if self.oracle.lives != before:
            self.cannot_go_on(steps)

    @rule(bad=st.sampled_from(["0", 1.0, None, True, [0]]))
    def call_with_other_kinds(self, bad):
        c = self.cache
        before = self.judged.everything()
        for call in (
            lambda: c.seq_rm(bad, 0, 1),
            lambda: c.seq_cp(bad, 0),
            lambda: c.seq_cp(0, bad),
            lambda: c.seq_keep(bad),
            lambda: c.seq_add(bad, 0, 1, 1),
            lambda: c.seq_div(bad, 0, 1, 2),
            lambda: c.seq_pos_max(bad),
            lambda: c.seq_pos_min(bad),
            lambda: c.refusal(bad),
            lambda: c.state(0, bad),
            lambda: c.seq_rm(0, bad, 1),
            lambda: c.seq_add(0, 0, bad, 1),
            lambda: c.prepare([1], bad) if bad is not None else c.seq_rm(None),
        ):
            with pytest.raises(KVCacheError):
                call()
        assert self.judged.everything() == before


@pytest.mark.parametrize("n_rewind", [0, 1, 3])
def test_any_operations_in_any_order(n_rewind):
    machine = type("RecurrentMachine", (RecurrentMachine,), {"n_rewind": n_rewind})
    n_examples = max(8, settings.default.max_examples // 2)
    limits = settings(max_examples=n_examples, stateful_step_count=40, report_multiple_bugs=False)
    run_state_machine_as_test(machine, settings=limits)


@pytest.mark.parametrize("n_rewind", [0, 2])
def test_an_empty_batch_has_no_steps(n_rewind):
    judged = JudgedStates(2, n_rewind)
    assert len(judged.prepare(None, [], 4)) == 0
    assert len(judged.prepare([], [], 4)) == 0
    judged.compare()


@pytest.mark.parametrize("n_rewind", [0, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_rows_suffice_however_long_ago_the_last_durable_commit_was(n, n_rewind):
    """Every batch can be undone as a whole, and what is on disk stays: both at once."""
    judged, ids = JudgedStates(n, n_rewind), [[s] for s in range(n)]
    judged.feed(None, ids * 6)
    judged.pin()
    for n_turns in (n_rewind + 1, 7, 1, 12):
        steps = judged.feed(None, ids * n_turns, n * (n_rewind + 1))
        judged.compare()
    judged.rollback_all(steps)
    judged.compare()
