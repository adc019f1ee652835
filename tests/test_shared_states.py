"""What a move of positions does to a state that several sequences hold, alone and in a hybrid."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba import Batch, CacheConfig, HybridCache, HybridConfig, RecurrentCache, RecurrentConfig
from kvnumba.errors import PositionError, SharedCellError

RECURRENT = {"n_layer": 1, "n_embd_r": 2, "n_embd_s": 1, "n_seq_max": 3}
ATTENTION = {"n_layer": 1, "n_ctx": 16, "n_head_kv": 1, "head_dim": 2, "n_seq_max": 3}


def recurrent(shared):
    return RecurrentCache(RecurrentConfig(**RECURRENT, shared=shared))


def hybrid(shared):
    attention = CacheConfig(**ATTENTION, shared=shared)
    return HybridCache(HybridConfig(attention, RecurrentConfig(**RECURRENT), (False, True)))


def feed(cache, n, seq_id=0):
    for step in cache.prepare(Batch(np.arange(n), seq_ids=seq_id)):
        with step:
            if isinstance(cache, HybridCache):
                step.write(0, *np.ones((2, n, 2), np.float32))
            il = int(isinstance(cache, HybridCache))
            step.write(il, np.full((1, 2), n, np.float32), np.ones((1, 1), np.float32))
    cache.check()


@pytest.mark.parametrize("make", [recurrent, hybrid])
@pytest.mark.parametrize(("shared", "ends"), [("move", [5, 5]), ("copy", [5, 3])])
def test_sharers_move_along_or_stay(make, shared, ends):
    cache = make(shared)
    feed(cache, 4)
    cache.seq_cp(0, 1)
    cache.seq_add(0, 0, -1, 2)
    cache.update()
    cache.check()
    assert [cache.seq_pos_max(s) for s in (0, 1)] == ends
    states = cache.recurrent if make is hybrid else cache
    assert np.array_equal(states.state(0, 0)[0], states.state(0, 1)[0])


@pytest.mark.parametrize("make", [recurrent, hybrid])
def test_moves_of_a_shared_state_can_be_refused(make):
    cache = make("refuse")
    feed(cache, 4)
    cache.seq_cp(0, 1)
    with pytest.raises(SharedCellError):
        cache.seq_add(0, 0, -1, 2)
    with pytest.raises(SharedCellError):
        cache.seq_div(1, 0, -1, 2)
    assert [cache.seq_pos_max(s) for s in (0, 1)] == [3, 3]
    cache.seq_rm(1)
    cache.seq_div(0, 0, -1, 2)
    assert cache.seq_pos_max(0) == 1
    cache.check()


def test_a_move_that_would_part_the_ends_of_a_hybrid_is_refused():
    cache = hybrid("move")
    feed(cache, 4)
    with pytest.raises(PositionError, match="its last one"):
        cache.seq_add(0, 0, 2, 5)
    with pytest.raises(PositionError, match="its last one"):
        cache.seq_add(0, 3, -1, -2)
    cache.check()
    cache.seq_add(0, 2, -1, 5)
    cache.check()
    assert cache.seq_pos_max(0) == 8
