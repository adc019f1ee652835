"""Several positions per token (M-RoPE): kept with the cells, followed by attention, or refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvnumba.batch import Batch
from kvnumba.composite_config import HybridConfig, WindowConfig
from kvnumba.config import CacheConfig, RopeConfig
from kvnumba.errors import (
    CannotShiftError,
    ConfigError,
    DamagedError,
    NoSlotError,
    PositionError,
    ShapeError,
)
from kvnumba.extra_positions import ExtraPositions
from kvnumba.hybrid import HybridCache
from kvnumba.mapping import IS_LINUX
from kvnumba.masks import kq_mask
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.store.fingerprint import Fingerprint
from kvnumba.store.session import Session
from kvnumba.streams import StreamsCache
from kvnumba.unified import UnifiedCache

HEAD_DIM = 4


def config(**changes):
    values = {
        "n_layer": 1,
        "n_ctx": 40,
        "n_head_kv": 1,
        "head_dim": HEAD_DIM,
        "type_k": "f32",
        "type_v": "f32",
        "n_pos": 4,
        "n_seq_max": 3,
        "rope": RopeConfig(4, "neox"),
    }
    return CacheConfig(**{**values, **changes})


def image(width, height, t):
    """Positions of an image's patches, row by row: t, y, x and an extra one."""
    y, x = np.divmod(np.arange(width * height), width)
    return np.stack([np.full_like(x, t), t + y, t + x, 0 * x])


def image_batch(width, height, t, **options):
    return Batch(pos=image(width, height, t), embeddings=np.ones((width * height, 8)), **options)


def placed(cache, *batches):
    """Place batches; return the cells of each."""
    out = []
    for batch in batches:
        for step in cache.prepare(batch):
            step.apply().commit()
            out.append(step.cells)
    return out


@pytest.fixture
def cache():
    with UnifiedCache(config()) as cache:
        yield cache


def held(cells, where):
    """(x, y, token) of cells, as the reference stores them."""
    return [(*cells.extra.xy[:, i].tolist(), int(cells.token[i])) for i in where]


def test_what_a_cell_keeps(cache):
    text, patches, more = placed(cache, [7, 8], image_batch(2, 2, 2), Batch([9], pos=[4]))
    assert held(cache.cells, text) == [(0, 0, 7), (1, 1, 8)]
    assert held(cache.cells, patches) == [(2, 2, -1), (3, 2, -1), (2, 3, -1), (3, 3, -1)]
    assert held(cache.cells, more) == [(4, 4, 9)]
    assert cache.cells.pos[patches].tolist() == [2] * 4
    assert cache.seq_pos_max(0) == 4
    assert cache.cells.sections(patches).tolist() == image(2, 2, 2)[:3].tolist()
    cache.check()


@pytest.mark.parametrize("n_pos", [3, 4])
def test_sections_of_a_direct_placement(n_pos):
    with UnifiedCache(config(n_pos=n_pos)) as cache:
        cache.place([5, 6], image(2, 1, 3)[:n_pos], 0)
        assert held(cache.cells, [5, 6]) == [(3, 3, -1), (4, 3, -1)]
        cache.commit()
        cache.place([9], [8], 1)
        assert held(cache.cells, [9]) == [(8, 8, -1)]


def test_parts_of_a_batch_keep_their_own(cache):
    steps = cache.prepare(image_batch(3, 2, 0), n_ubatch=4)
    assert [s.n_tokens for s in steps] == [4, 2]
    for step in steps:
        step.apply().commit()
    cells = np.concatenate([s.cells for s in steps])
    assert cache.cells.sections(cells).tolist() == image(3, 2, 0)[:3].tolist()


FREEING = {
    "seq_rm": lambda c: c.seq_rm(0, 2, 3),
    "seq_rm of all": lambda c: c.seq_rm(-1, 2, 3),
    "seq_keep": lambda c: c.seq_keep(1),
    "clear": lambda c: c.clear(),
}


@pytest.mark.parametrize("name", FREEING)
def test_a_freed_cell_forgets_them(cache, name):
    text, patches = placed(cache, [7, 8], image_batch(2, 2, 2))
    FREEING[name](cache)
    assert not cache.cells.used.any() or not cache.cells.extra.xy[:, patches].any()
    assert cache.cells.extra.xy[0, text].tolist() == ([0, 1] if "rm" in name else [0, 0])
    placed(cache, Batch([1] * 6, pos=range(10, 16)))
    used = cache.cells.listed(cache.cells.used)
    assert (cache.cells.extra.xy[:, used[-6:]] >= 10).any()
    cache.check()


def test_rollback_and_a_batch_without_room_leave_nothing(cache):
    (step,) = cache.prepare(image_batch(2, 2, 5))
    step.apply()
    assert cache.cells.extra.xy[:, step.cells].all()
    step.rollback()
    assert not cache.cells.extra.xy.any()
    with pytest.raises(NoSlotError):
        cache.prepare(image_batch(7, 6, 0))
    assert not cache.cells.extra.xy.any()


def test_sharing_and_defragmentation_carry_them_along(cache):
    placed(cache, [1, 2, 3], image_batch(3, 2, 3))
    cache.seq_cp(0, 1)
    cache.seq_rm(0, 0, 3)
    cache.seq_rm(1, 0, 3)
    cache.defrag()
    assert cache.update()
    cells = np.sort(cache.cells.members(1))
    assert cells.tolist() == list(range(6)), "they moved to the front"
    found = sorted(cache.cells.sections(cells).T.tolist())
    assert found == sorted(image(3, 2, 3)[:3].T.tolist())
    assert not cache.cells.extra.xy[:, 6:].any()
    cache.check()


def test_a_copy_of_the_cells_has_its_own(cache):
    (patches,) = placed(cache, image_batch(2, 2, 1))
    before = cache.cells.copy()
    cache.seq_rm(0)
    placed(cache, Batch([5] * 4, pos=range(20, 24)))
    assert before.sections(patches).tolist() == image(2, 2, 1)[:3].tolist()
    cache.cells.restore(before)
    assert cache.cells.sections(patches).tolist() == image(2, 2, 1)[:3].tolist()


def test_split_cells_get_them_too(cache):
    (patches,) = placed(cache, image_batch(2, 1, 1, seq_ids=[[0, 1], [0, 1]]))
    where = np.array([30, 31], np.int32)
    cache.cells.split(1, patches, where)
    assert np.array_equal(cache.cells.sections(where), cache.cells.sections(patches))
    cache.check()


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_pos", [3, 4])
def test_positions_cannot_be_moved(n_pos):
    with UnifiedCache(config(n_pos=n_pos)) as cache:
        assert not cache.can_shift
        assert not cache.config.can_shift
        placed(cache, [1, 2, 3], Batch([4, 5], pos=image(2, 1, 3)[:3]))
        before = [a.copy() for a in (*cache.cells.state, cache.cells.extra.xy)]
        for call in (
            lambda: cache.seq_add(0, 1, -1, 5),
            lambda: cache.seq_add(0, 1, -1, -1),
            lambda: cache.seq_div(0, 0, -1, 2),
        ):
            with pytest.raises(CannotShiftError, match="cannot be rotated"):
                call()
        after = (*cache.cells.state, cache.cells.extra.xy)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert not cache.has_shift


@pytest.mark.skipif(not IS_LINUX, reason="sessions need Linux")
def test_sessions_refuse_them_in_one_line(tmp_path):
    c = config()
    with pytest.raises(ConfigError, match="n_pos 4: sessions keep one position") as caught:
        Session.create(tmp_path / "s", c, Fingerprint.of_config(c))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s").exists()
    with UnifiedCache(c, tmp_path / "rows") as cache:  # mapped rows alone have no metadata
        assert placed(cache, image_batch(2, 2, 0))[0].size == 4


def test_a_cache_keeps_no_more_positions_than_it_says():
    with UnifiedCache(config(n_pos=3)) as cache:
        with pytest.raises(PositionError, match=r"pos has 4 .* keeps 3"):
            cache.prepare(image_batch(2, 2, 0))
        with pytest.raises(PositionError, match="keeps 3"):
            cache.place([0], image(1, 1, 0), 0)
        assert not cache.used
    with UnifiedCache(config(n_pos=1)) as cache:
        assert cache.cells.extra is None
        assert cache.cells.sections(np.arange(3)) is None
        with pytest.raises(PositionError, match=r"keeps 1.*n_pos=4"):
            cache.prepare(image_batch(2, 2, 0))
        with pytest.raises(PositionError, match="keeps 1"):
            cache.attend(0, np.ones((1, 1, HEAD_DIM), np.float32), image(1, 1, 0))
        with pytest.raises(ShapeError):
            cache.place([0], image(2, 1, 0), 0)
        assert not cache.used


def test_a_window_and_several_positions_do_not_go_together(cache):
    with pytest.raises(ConfigError, match="window 8 does not go with n_pos 4"):
        config(window=8)
    with pytest.raises(ConfigError, match="n_pos 4"):
        WindowConfig(config(n_layer=2), 8, (True, False))
    placed(cache, [1])
    with pytest.raises(ConfigError, match="window 2: with n_pos 4"):
        cache.attend(0, np.ones((1, 1, HEAD_DIM), np.float32), [0], window=2)


def test_gaps_are_usual_and_not_warned_of(cache, caplog):
    caplog.set_level(logging.WARNING)
    placed(cache, [1], image_batch(3, 3, 1), Batch([2], pos=[4]))
    assert not caplog.records
    with UnifiedCache(config(n_pos=1)) as other:
        placed(other, [1], Batch([2], pos=[4]))
    assert "token 0 has position 4" in caplog.text


def test_strict_rules_of_batches_know_of_them(cache):
    placed(cache, [1, 2])
    image_batch(2, 2, 2).validate(cache)
    Batch([5], pos=[9]).validate(cache)  # a gap after an image
    with pytest.raises(PositionError, match="it must be 2 or more"):
        Batch([5], pos=[1]).validate(cache)
    with pytest.raises(PositionError, match="one position for an embedding"):
        Batch(pos=[2], embeddings=np.ones((1, 4))).validate(cache)


def test_damage_is_found(cache):
    (cells,) = placed(cache, [1])
    cache.cells.extra._xy[1, cells[0]] = -3
    with pytest.raises(DamagedError, match=f"cell {cells[0]}: x 0 and y -3"):
        cache.check()


# -- attention ------------------------------------------------------------------------------------


def attention(q, k, v, sees):
    """Plain attention of one head, float64; rows of `sees` say which cells each query sees."""
    out = np.zeros(q.shape)
    for t, row in enumerate(sees):
        if row.any():
            scores = k[row].astype(np.float64) @ q[t, 0] / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out[t, 0] = weights / weights.sum() @ v[row]
    return out


def sees(cell_sections, q_sections):
    """Cells whose (t, y, x) is not beyond the query's, one by one."""
    cells, queries = (list(map(tuple, s[:3].T.tolist())) for s in (cell_sections, q_sections))
    return np.array([[cell <= query for cell in cells] for query in queries])


def same(pos):
    return np.tile(np.asarray(pos), (3, 1))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [(2, 2), (5, 4)])  # decode and prefill
def test_patches_of_one_image_see_those_before_them(cache, size, reverse):
    rng = np.random.default_rng(0)
    n = size[0] * size[1]
    order = slice(None, None, -1 if reverse else 1)
    sections = np.hstack([same(range(3)), image(*size, 3)[:3, order], same([3 + max(size)])])
    k, v = rng.standard_normal((2, n + 4, HEAD_DIM), np.float32)
    q = rng.standard_normal((n + 4, 1, HEAD_DIM), np.float32)
    batches = [
        Batch([1, 2, 3]),
        Batch(pos=sections[:, 3 : 3 + n], embeddings=np.ones((n, 2))),
        Batch([4], pos=[3 + max(size)]),
    ]
    first = 0
    for batch in batches:
        (step,) = cache.prepare(batch)
        rows = slice(first, first + step.n_tokens)
        first = rows.stop
        step.apply().write(0, k[rows], v[rows])
        seen = sees(sections[:, :first], sections[:, rows])
        want = attention(q[rows], k[:first], v[:first], seen)
        np.testing.assert_allclose(step.attend(0, q[rows]), want, atol=1e-5)
        by_pos = cache.attend(0, q[rows], sections[:, rows])
        np.testing.assert_allclose(by_pos, want, atol=1e-5)
        n_kv = step.extent.n_kv
        mask = kq_mask(cache.cells, step.batch, n_kv, dtype="bool")
        assert np.array_equal(mask[:, :first], seen)
        step.commit()
    # A query of text at the image's t has the same y and x: the image's later rows are hidden.
    want = attention(q[:1], k, v, sees(sections, same([3])))
    np.testing.assert_allclose(cache.attend(0, q[:1], [3]), want, atol=1e-5)
    want = attention(q, k, v, np.ones((n + 4, n + 4), bool))
    found = cache.attend(0, q, sections, causal=False)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_each_sequence_has_its_own(cache):
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 8, HEAD_DIM), np.float32)
    q = rng.standard_normal((8, 1, HEAD_DIM), np.float32)
    ids = [0, 1, 0, 1, 1, 0, 0, 1]
    sections = np.hstack([image(2, 2, 0), image(2, 2, 0)])[:3, [0, 4, 1, 5, 6, 3, 2, 7]]
    (step,) = cache.prepare(Batch(pos=sections, embeddings=np.ones((8, 2)), seq_ids=ids))
    step.apply().write(0, k, v)
    seen = sees(sections, sections) & (np.array(ids)[:, None] == np.array(ids))
    np.testing.assert_allclose(step.attend(0, q), attention(q, k, v, seen), atol=1e-5)


def test_ranks_compare_as_the_positions_do():
    rng = np.random.default_rng(2)
    for is_text in (False, True) * 20:
        n, n_q = rng.integers(0, 30), rng.integers(1, 6)
        pos = np.full(64, -1, np.int32)
        pos[:n] = rng.integers(0, 4, n)
        sections = rng.integers(0, 4, (3, n)).astype(np.int32)
        sections[0] = pos[:n]
        extra = ExtraPositions(pos)
        cells = np.arange(n, dtype=np.int32)
        extra.place(cells, pos[:n], sections)
        q = same(rng.integers(0, 4, n_q)) if is_text else rng.integers(0, 4, (3, n_q))
        q = q.astype(np.int32)
        q_rank, rank = extra.ranked(cells, pos[:n], q[0], None if is_text else q)
        assert q_rank.dtype == rank.dtype == np.int32
        assert np.array_equal(rank <= q_rank[:, None], sees(sections, q).reshape(n_q, n))


def test_text_alone_is_ranked_by_its_positions():
    pos = np.arange(64, dtype=np.int32)
    extra = ExtraPositions(pos)
    extra.place(pos, pos, None)
    q = np.array([70, 64], np.int32)
    q_rank, rank = extra.ranked(pos, pos, q, None)
    assert q_rank is q
    assert rank is pos


# -- in the caches that combine two ---------------------------------------------------------------


def test_streams_copy_them_across():
    with StreamsCache(config(n_seq_max=2), 2) as cache:
        (step,) = cache.prepare(image_batch(2, 2, 1))
        step.apply().commit()
        cache.seq_cp(0, 1)
        here, there = (cache.stream(s).cells for s in (0, 1))
        found = there.sections(there.members(1))
        assert np.array_equal(found, here.sections(here.members(0)))
        assert found.tolist() == image(2, 2, 1)[:3].tolist()
        assert not cache.can_shift


def test_hybrids_keep_them_and_refuse_to_move():
    recurrent = RecurrentConfig(1, 4, 4, n_seq_max=3)
    with HybridCache(HybridConfig(config(), recurrent, (False, True))) as cache:
        for step in cache.prepare(image_batch(2, 2, 1)):
            step.apply().commit()
        cells = cache.attention.cells
        assert cells.sections(cells.members(0)).tolist() == image(2, 2, 1)[:3].tolist()
        with pytest.raises(CannotShiftError):
            cache.seq_add(0, 0, -1, 2)
    narrow = HybridConfig(config(n_pos=3), recurrent, (False, True))
    with HybridCache(narrow) as cache, pytest.raises(PositionError, match="keeps 3"):
        cache.prepare(image_batch(2, 2, 1))
