"""Small caches of every kind, driven through every operation, so that every kernel is compiled."""

from __future__ import annotations

import os
import tempfile

import numpy as np


def warm_cache(type_name: str, v_trans: bool) -> None:
    """Run every operation of a small cache once."""
    from kvnumba.batch import Batch
    from kvnumba.config import CacheConfig, RopeConfig
    from kvnumba.unified import UnifiedCache

    config = CacheConfig(
        n_layer=2,
        n_ctx=128,
        n_head_kv=1,
        head_dim=8,
        n_seq_max=4,
        type_k=type_name,
        type_v=type_name,
        v_trans=v_trans,
        rope=(RopeConfig(8), RopeConfig(8, "neox")),
        shared="copy",
        placement="ring" if v_trans else "scatter",
    )
    with UnifiedCache(config) as cache:
        for n, seq_id in ((64, 0), (1, 0), (3, 1)):
            (step,) = cache.prepare(Batch(np.zeros(n, np.int32), seq_ids=seq_id))
            row, q = np.zeros((n, 8), np.float32), np.zeros((n, 2, 8), np.float32)
            with step:
                for il in range(2):
                    step.write(il, row, row)
                    step.attend(il, q)
        cache.seq_cp(0, 2, 0, 8)
        cache.seq_rm(0, 20, 30)
        cache.seq_add(0, 0, -1, 1)
        cache.seq_div(1, 0, -1, 2)
        cache.defrag()
        cache.update()
        cache.seq_rm(-1, 50, -1)
        cache.find_slot(2, contiguous=True)
        cache.place(cache.find_slot(2, contiguous=False), [90, 91], 3)
        cache.rollback()
        cache.view()
        cache.seq_keep(0)
        cache.cells.tokens_of(0)
        cache.cells.rebuild()
        cache.check()
        for read in (cache.layers.read_k, cache.layers.read_v):
            read(0, np.arange(2, dtype=np.int32))


def warm_session() -> None:
    """Make a small session, commit to it, change it, and open it again."""
    from kvnumba.batch import Batch
    from kvnumba.config import CacheConfig, RopeConfig
    from kvnumba.store.fingerprint import Fingerprint
    from kvnumba.store.session import Session

    config = CacheConfig(n_layer=1, n_ctx=64, n_head_kv=1, head_dim=8, rope=RopeConfig(8))
    fingerprint = Fingerprint.of_config(config)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "session")
        with Session.create(path, config, fingerprint) as session:
            (step,) = session.cache.prepare(Batch([1, 2, 3]))
            with step:
                step.write(0, *np.zeros((2, 3, 8), np.float32))
            session.commit()
            session.cache.seq_add(0, 1, -1, 1)
            session.commit()
        Session.open(path, fingerprint).close()


def warm_conversions() -> None:
    """Convert arrays between float32 and the half types once."""
    from kvnumba.kernels import half

    wide, narrow = np.zeros(8, np.float32), np.zeros(8, np.uint16)
    half.f16_to_f32_kernel(narrow, wide)
    half.bf16_to_f32_kernel(narrow, wide)
    half.f32_to_f16_kernel(wide, narrow)
    half.f32_to_bf16_kernel(wide, narrow)


def warm_recurrent(type_name: str) -> None:
    """Run every operation of a small recurrent cache, and the kernels for graph builders."""
    from kvnumba.batch import Batch
    from kvnumba.kernels import states
    from kvnumba.recurrent import RecurrentCache
    from kvnumba.recurrent_config import RecurrentConfig

    config = RecurrentConfig(
        1, 4, 4, n_seq_max=3, n_rewind=1, type_r=type_name, type_s=type_name, shared="copy"
    )
    with RecurrentCache(config) as cache:
        for n in (2, 1):
            (step,) = cache.prepare(Batch(np.zeros(2 * n, np.int32), seq_ids=[0] * n + [1] * n))
            with step:
                cache_rows = [np.repeat(a[:, None], step.n_states, 1) for a in step.read(0)]
                step.write(0, *cache_rows)
        for step in cache.prepare(Batch(np.zeros(2, np.int32)), 1):
            step.apply()
        cache.rollback()
        cache.seq_cp(0, 2)
        cache.seq_add(0, 0, -1, 1)
        cache.seq_rm(2, 2, -1)
        cache.seq_keep(0)
        cache.check()
        rows = np.array([0, -1], np.int32)
        states.zero_rows_kernel(cache.rows.r[0], rows)
        states.copy_states_kernel(cache.rows.r[0], rows, rows)


def warm_masks() -> None:
    """Make masks of every form, small and large, and row numbers."""
    from kvnumba.batch import Batch
    from kvnumba.cells import Cells
    from kvnumba.masks import column_index, kq_mask, position_buckets, row_index

    small, large = Cells(64, 1), Cells(1 << 13, 1)
    for dtype in ("f32", "f16", "bool"):
        kq_mask(small, Batch([1], [0]), 64, dtype=dtype)
        kq_mask(large, Batch([1] * 64, range(64)), 1 << 13, dtype=dtype)
    position_buckets(small, Batch([1], [0]), 64)
    row_index(np.zeros(2, np.int32), 64)
    column_index(np.zeros(2, np.int32), 64, 4)


def warm_mamba() -> None:
    """Run the kernels of the mamba forward pass that no other model needs."""
    from kvnumba.runner.kernels.conv import convolve_kernel
    from kvnumba.runner.kernels.scan import BLOCK, scan_kernel

    d_inner, d_state, d_conv = 8, 4, 4
    rows, states = np.zeros((1, d_inner), np.float32), np.zeros((1, d_state), np.float32)
    r, s = np.zeros((1, d_inner * (d_conv - 1)), np.float32), np.zeros((1, 32), np.float32)
    history = np.zeros((1, d_conv - 1, d_inner), np.float32)
    weights = np.zeros((d_conv, d_inner), np.float32)
    convolve_kernel(rows.copy(), r[None].copy(), history, r, rows, weights, rows[0], 1)
    work, a = np.zeros((1, 2, BLOCK), np.float32), np.zeros((d_inner, d_state), np.float32)
    scan_kernel(
        rows.copy(), s[None].copy(), work, s, rows, rows, rows, states, states, a, rows[0], rows[0],
        1,
    )  # fmt: skip
