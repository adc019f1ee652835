"""The pair of full and window part: sizes, windows, cuts, what is refused, and going on after it.

`JudgedWindow` compares attention at every step with plain NumPy over the whole history.
"""

from __future__ import annotations

import numpy as np
import pytest
from judged_window import IS_WINDOW, JudgedWindow, part_of

from kvnumba.batch import Batch
from kvnumba.composite_config import WindowConfig
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, NoSlotError, StepError, WindowLostError
from kvnumba.window import WindowCache

KINDS = ["standard", "chunked", "symmetric"]


def sizes_of(n_base, window, n_seq_max, n_ubatch, **options):
    base = CacheConfig(
        n_layer=2, n_ctx=n_base, n_head_kv=1, head_dim=2, n_seq_max=n_seq_max, n_ubatch=n_ubatch
    )
    config = WindowConfig(base, window, (True, False), **options)
    return config.base_part.n_ctx, config.window_part.n_ctx


def held(judged, seq_id=0, part="window"):
    cells = getattr(judged.cache, part).cells
    return sorted(pos for _, pos, ids in part_of(cells) if seq_id in ids)


@pytest.fixture
def fed():
    """A pair as in the scenarios (window 8 in 12 cells) with 16 tokens: 0 to 3 are lost."""
    judged = JudgedWindow()
    judged.feed(16)
    assert held(judged) == list(range(4, 16))
    assert judged.cache.seq_pos_min(0) == 10  # the token at 11 sees 4 to 11
    return judged


# -- sizes and layers --------------------------------------------------------------------------


def test_the_window_part_has_room_for_all_windows_and_a_ubatch():
    assert sizes_of(8192, 512, 4, 512) == (8192, 2560)
    assert sizes_of(8192, 250, 1, 7) == (8192, 512)
    assert sizes_of(1000, 512, 4, 512) == (1000, 1000)
    assert sizes_of(8192, 512, 4, 512, full_size=True) == (8192, 8192)
    assert sizes_of(8192, 8, 1, 4, n_window_cells=12) == (8192, 12)


def test_a_pair_needs_layers_of_both_kinds():
    base = CacheConfig(n_layer=2, n_ctx=8, n_head_kv=1, head_dim=2)
    for flags in ((True, True), (False, False), (True,), (True, 0), "ab"):
        with pytest.raises(ConfigError):
            WindowConfig(base, 4, flags)
    for window in (0, -1, 2.0, True):
        with pytest.raises(ConfigError):
            WindowConfig(base, window, (True, False))


def test_layers_are_numbered_as_in_the_model(fed):
    assert [fed.cache.route(il) for il in range(4)] == [(1, 0), (0, 0), (1, 1), (0, 1)]
    with pytest.raises(ConfigError):
        fed.cache.route(len(IS_WINDOW))


def test_mapped_files_of_both_parts(tmp_path):
    base = CacheConfig(n_layer=2, n_ctx=8, n_head_kv=1, head_dim=2)
    with WindowCache(WindowConfig(base, 4, (True, False)), tmp_path / "pair") as cache:
        for step in cache.prepare(Batch(range(3))):
            with step:
                step.write(0, np.ones((3, 2), np.float32), np.ones((3, 2), np.float32))
        cache.check()
    assert {p.parent.name for p in tmp_path.rglob("*") if p.is_file()} >= {"base", "window"}


# -- T22: a window round trip ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_prompt", [7, 8, 9, 11, 12, 13, 16, 17, 40])
def test_each_step_attends_to_just_its_window(n_prompt, kind):
    judged = JudgedWindow(kind=kind)
    judged.feed(n_prompt)
    for _ in range(10):
        judged.feed(1)
    assert judged.cache.seq_pos_max(0) == n_prompt + 9


def run_on(cache, seq_id, n, rng):
    """Go on for `n` tokens with random K, V and queries; return all that attention gave."""
    out = []
    for _ in range(n):
        (step,) = cache.prepare(Batch([1], seq_ids=seq_id))
        with step:
            for il in range(len(IS_WINDOW)):
                k, v = (rng.standard_normal((1, w)).astype(np.float32) for w in width_of(il))
                step.write(il, k, v)
                q = rng.standard_normal((1, 2 * N_HEADS[il], DIMS[il])).astype(np.float32)
                out.append(step.attend(il, q).tobytes())
    return out


N_HEADS, DIMS = (1, 2, 1, 1), (4, 6, 2, 4)


def width_of(il):
    return (N_HEADS[il] * DIMS[il],) * 2


@pytest.mark.parametrize("n_prompt", [7, 8, 9, 11, 12, 13, 16, 17, 40])
def test_a_fork_goes_on_bit_for_bit_as_its_source_would(n_prompt):
    """As a restored copy would have to."""
    plain, forked = JudgedWindow(), JudgedWindow()
    plain.feed(n_prompt)
    forked.feed(n_prompt)
    forked.call("seq_cp", 0, 2, -1, -1)
    forked.seq_rm(0, -1, -1)
    assert forked.cache.seq_pos_min(2) == plain.cache.seq_pos_min(0)
    results = [
        run_on(judged.cache, s, 10, np.random.default_rng(5))
        for judged, s in ((plain, 0), (forked, 2))
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("n_prompt", [8, 12, 13, 40])
def test_going_on_after_a_cut_is_as_never_having_gone_further(n_prompt):
    plain, cut = JudgedWindow(), JudgedWindow()
    plain.feed(n_prompt)
    cut.feed(n_prompt)
    cut.feed(3, n_ubatch=1)
    cut.seq_rm(0, n_prompt, -1)
    assert cut.cache.seq_pos_max(0) == n_prompt - 1
    for judged in (plain, cut):
        judged.next_token = 100
        for _ in range(10):
            judged.feed(1)
        assert held(judged, part="base") == list(range(n_prompt + 10))


# -- T23: cuts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [1, 8, 10, 28, 31, 32, 33, 34, 35, 36, 39, 40])
def test_a_cut_is_possible_just_while_the_window_is_held(p, kind):
    judged = JudgedWindow(kind=kind)
    judged.feed(40)
    low = held(judged)[0]
    judged.seq_rm(0, p, -1)
    if kind == "standard":
        assert (judged.cache.seq_pos_max(0) == p - 1) == (max(0, p - 7) >= low or p == 40)
    assert judged.cache.seq_pos_max(0) in (p - 1, 39)
    judged.feed(3, n_ubatch=1)
    assert judged.cache.seq_pos_max(0) in (p + 2, 42)


@pytest.mark.parametrize("n_window", [12, 40])
def test_append_30_and_cut_back_to_10_twenty_times(n_window):
    judged = JudgedWindow(n_base=40, n_window=n_window)
    judged.feed(10)
    for _ in range(20):
        judged.feed(30)
        assert judged.cache.base.used == 40
        if not judged.cache.seq_rm(0, 10, -1):
            assert n_window == 12
            assert "window lost" in judged.cache.refusal(0, 10, -1)
            assert judged.cache.seq_pos_max(0) == 39
            judged.seq_rm(0, -1, -1)
            judged.feed(10)
        else:
            assert n_window == 40
            judged.oracle.seq_rm(0, 10, -1)
        judged.compare()
        assert judged.cache.seq_pos_max(0) == 9
        assert held(judged, part="base") == list(range(10))


def test_the_whole_sequence_always_goes(fed):
    for p0, p1 in ((-1, -1), (0, -1), (0, 16), (0, 2**31 - 1)):
        fed.feed(30)
        assert fed.cache.refusal(0, p0, p1 if p1 != 16 else 46) is None
        fed.seq_rm(0, p0, p1 if p1 != 16 else 46)
        assert fed.cache.seq_pos_max(0) == fed.cache.seq_pos_min(0) == -1
        assert fed.cache.window.used == 0
        fed.feed(16)


def test_of_all_sequences_everything_or_what_each_allows(fed):
    fed.feed(3, 1)
    fed.seq_rm(-1, 2, -1)  # sequence 0 cannot, so 1 does not either
    assert fed.cache.seq_pos_max(1) == 2
    low = fed.cache.seq_pos_min(0)
    fed.seq_rm(-1, low + 1, -1)
    assert fed.cache.seq_pos_max(0) == low
    fed.seq_rm(-1, -1, -1)
    assert fed.cache.used == 0


def test_a_refused_cut_is_no_dead_end(fed):
    fed.seq_rm(0, 5, -1)
    fed.feed(5)
    assert held(fed, part="base") == list(range(21))


def test_the_parts_agree_on_the_next_position(fed):
    """The reference asks the window part, which may be empty where the full one is not."""
    fed.seq_rm(0, 12, -1)
    (step,) = fed.cache.prepare(Batch([5]))
    assert step.pos.tolist() == [12]


def test_without_what_was_lost_a_sequence_begins_later(fed):
    fed.seq_rm(0, 0, 4)
    fed.compare()
    assert fed.cache.seq_pos_min(0) == 4
    fed.seq_rm(0, 5, -1)
    fed.compare()
    assert held(fed) == held(fed, part="base") == [4]


def test_without_what_was_lost_a_later_sequence_begins_later_too():
    judged = JudgedWindow()
    steps, planned, tokens = judged.prepare([[0]] * 16, 4, list(range(8, 24)))
    for step, mine in zip(steps, planned[1], strict=True):
        judged.apply(step, planned, mine, tokens)
        step.commit()
    judged.oracle.commit()
    assert held(judged) == list(range(12, 24))
    judged.seq_rm(0, 5, 14)
    judged.compare()
    assert judged.cache.seq_pos_min(0) == 14


# -- which cells may be used anew --------------------------------------------------------------


def test_a_ubatch_never_takes_what_its_first_token_sees():
    """Judging by the last token's window would drop cells that the first one needs."""
    judged = JudgedWindow()
    judged.feed(12)
    before = judged.frozen()
    with pytest.raises(NoSlotError):
        judged.cache.prepare(Batch(range(6)), 6)  # 5 to 11 are in sight of 12: five are not
    assert judged.frozen() == before
    judged.feed(5, n_ubatch=5)


@pytest.mark.parametrize(("kind", "window"), [("standard", 1), ("symmetric", 1), ("chunked", 4)])
def test_an_idle_sequence_keeps_its_last_token(kind, window):
    judged = JudgedWindow(n_window=9, window=window, kind=kind)
    judged.feed(4)
    judged.feed(8, 1)
    assert judged.prepare([[1]] * 8, 8) is None
    judged.feed(12, 1)
    assert held(judged)[-1:] == [3]
    judged.feed(2)


def test_cells_that_two_sequences_hold_stay():
    judged = JudgedWindow(window=4)
    judged.feed(4)
    judged.call("seq_cp", 0, 1, -1, -1)
    judged.feed(20, 0, n_ubatch=2)
    assert held(judged, 1) == [0, 1, 2, 3]
    judged.feed(2, 1, n_ubatch=2)


def test_many_sequences(fed):
    judged = JudgedWindow(n_base=200, n_window=40, n_seq_max=130, window=4)
    ids = [0, 63, 64, 129]
    for _ in range(6):
        for s in ids:
            judged.feed(3, s)
    assert [judged.cache.seq_pos_max(s) for s in ids] == [17] * 4
    judged.seq_rm(64, 17, -1)
    judged.call("seq_keep", 129)
    judged.compare()


# -- batches that fail -------------------------------------------------------------------------


@pytest.mark.parametrize(("n_base", "ids"), [(15, [0] * 6), (64, [0, 0, 1, 1, 0, 0, 0, 0, 0, 0])])
def test_a_batch_of_which_only_a_part_fits_leaves_both_parts_as_they_are(n_base, ids):
    """The reference loses window cells that the trial's first ubatches have purged."""
    judged = JudgedWindow(n_base=n_base)
    judged.feed(12)
    judged.feed(1, 1)
    before = judged.frozen()
    for seq_ids in ([[s] for s in ids], [[0], [1]] * 8):
        with pytest.raises(NoSlotError):
            judged.cache.prepare(Batch(range(len(seq_ids)), seq_ids=seq_ids), n_ubatch=8)
        assert judged.frozen() == before
    assert judged.cache.seq_pos_min(0) == 7


@pytest.mark.parametrize("n_done", [1, 2, 3])
@pytest.mark.parametrize("v_trans", [False, True])
def test_a_whole_batch_goes_back_committed_steps_too(n_done, v_trans):
    judged = JudgedWindow(v_trans=v_trans)
    judged.feed(12)
    cells = [a.copy() for part in judged.cache.parts for a in part.cells.state]
    before = [part.snapshot() for part in judged.oracle.parts]
    steps, planned, tokens = judged.prepare([[0]] * 12, 4)
    for step, mine in list(zip(steps, planned[1], strict=True))[:n_done]:
        judged.apply(step, planned, mine, tokens)
        step.commit()
    steps.rollback()
    for part, snapshot in zip(judged.oracle.parts, before, strict=True):
        part.restore(snapshot)
    judged.oracle.commit()
    judged.compare()
    after = [a for part in judged.cache.parts for a in part.cells.state]
    assert all((a == b).all() for a, b in zip(cells, after, strict=True))
    judged.feed(12)


def test_going_back_brings_rows_back_that_were_dropped_and_then_overwritten():
    """Two cells at one position: one is used anew, the other dropped, and filled a step later."""
    judged = JudgedWindow(window=4)
    judged.feed(3)
    judged.call("seq_div", 0, 0, 2, 2)
    judged.call("update")
    before = [part.snapshot() for part in judged.oracle.parts]
    steps, planned, tokens = judged.prepare([[0]] * 12, 2)
    for step, mine in zip(steps, planned[1], strict=True):
        judged.apply(step, planned, mine, tokens)
        step.commit()
    steps.rollback()
    for part, snapshot in zip(judged.oracle.parts, before, strict=True):
        part.restore(snapshot)
    judged.oracle.commit()
    judged.compare()


def test_a_step_whose_computation_fails_is_undone_in_both_parts(fed):
    before = fed.cache.base.cells.copy().state, fed.cache.window.cells.copy().state
    with pytest.raises(ZeroDivisionError), fed.cache.prepare(Batch(range(4)), 4)[0]:
        _ = 1 // 0
    for old, part in zip(before, fed.cache.parts, strict=True):
        assert all((a == b).all() for a, b in zip(old, part.cells.state, strict=True))
    fed.compare()


def test_steps_go_back_last_one_first(fed):
    steps = fed.cache.prepare(Batch(range(8)), 4)
    for step in steps:
        step.apply()
    before = fed.frozen()
    with pytest.raises(StepError):
        steps[0].rollback()
    assert fed.frozen() == before
    steps[1].rollback()
    steps[0].rollback()
    assert fed.cache.seq_pos_max(0) == 15
    fed.cache.check()


# -- removals in the middle, copies and shifts -------------------------------------------------


def test_a_context_shift_that_keeps_the_windows_true(fed):
    fed.seq_rm(0, 4, 8)
    fed.call("seq_add", 0, 8, -1, -4)
    fed.compare()
    assert held(fed) == list(range(4, 12))
    fed.feed(6)


def test_a_context_shift_that_brings_lost_tokens_in_sight_is_refused(fed):
    fed.seq_rm(0, 4, 12)
    before = fed.frozen()
    with pytest.raises(WindowLostError, match="window lost"):
        fed.cache.seq_add(0, 12, -1, -8)
    with pytest.raises(WindowLostError, match="window lost"):
        fed.cache.seq_div(0, 0, -1, 4)
    assert fed.frozen() == before


@pytest.mark.parametrize("delta", [8, 12])
def test_lost_tokens_cannot_be_moved_into_sight(fed, delta):
    """No cell of the window part is in the range, but the full part would move its own."""
    fed.call("seq_add", 0, 0, 4, delta)
    fed.compare()
    assert held(fed, part="base") == list(range(16))


def test_tokens_that_only_some_of_their_sequences_have_lost_do_not_move_for_all():
    judged = JudgedWindow(window=4)
    judged.feed(4)
    judged.call("seq_cp", 0, 1, -1, -1)
    judged.feed(9)
    assert held(judged, 1) == [0, 1, 2, 3]
    assert held(judged)[0] > 3
    judged.call("seq_add", 0, 0, 4, 1)
    judged.compare()


def test_copies_that_could_not_go_on_are_refused(fed):
    before = fed.frozen()
    for p0, p1 in ((0, 8), (2, 7), (0, 5), (0, 1)):
        with pytest.raises(WindowLostError, match="window lost"):
            fed.cache.seq_cp(0, 1, p0, p1)
        assert fed.frozen() == before
    fed.call("seq_cp", 0, 1, 0, 12)
    fed.compare()
    fed.call("seq_cp", 0, 2, 4, -1)  # without what was lost: begins at 4
    fed.compare()
    assert fed.cache.seq_pos_min(2) == 4


def test_a_cleared_pair_forgets_what_was_lost(fed):
    fed.cache.clear()
    fed.oracle.clear()
    fed.feed(9)
    assert fed.cache.seq_pos_min(0) == 0


def test_a_token_whose_window_is_lost_is_refused(fed):
    """Placing takes any position, but not one that would silently see a hole."""
    before = fed.frozen()
    with pytest.raises(WindowLostError, match="window lost"):
        fed.cache.prepare(Batch([1], [8]))
    assert fed.frozen() == before
