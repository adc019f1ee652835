"""A cache in plain NumPy, float32 rows and float64 attention: what the forward pass is tried on."""

from __future__ import annotations

from typing import Any

import numpy as np


class FakeCache:
    """Sequences as sets of ids on a growing list of cells.

    Parameters
    ----------
    params : LlamaParams
    """

    def __init__(self, params: Any):
        self.params = params
        self.pos = np.empty(0, np.int64)
        self.seqs: list[set[int]] = []
        self.k = [np.empty((0, params.n_head_kv, params.head_dim)) for _ in range(params.n_layer)]
        self.v = [np.empty((0, params.n_head_kv, params.head_dim_v)) for _ in range(params.n_layer)]

    def step(self, pos: np.ndarray, seq_ids: list[int]) -> FakeStep:
        """Give the tokens cells at the end and return their step."""
        first = len(self.pos)
        self.pos = np.concatenate([self.pos, pos])
        self.seqs += [{s} for s in seq_ids]
        return FakeStep(self, first, np.asarray(pos), seq_ids)

    def _hits(self, seq_id: int, p0: int, p1: int) -> list[int]:
        p0, p1 = max(0, p0), (1 << 40 if p1 < 0 else p1)
        return [i for i, s in enumerate(self.seqs) if seq_id in s and p0 <= self.pos[i] < p1]

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        for i in self._hits(src, p0, p1):
            self.seqs[i].add(dst)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        for i in self._hits(seq_id, p0, p1):
            self.seqs[i].remove(seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        cells = self._hits(seq_id, p0, p1)
        self.pos[cells] += delta
        turn = np.exp(1j * delta * self.params.rope.theta())
        n_rot = self.params.rope.n_rot
        for k in self.k:
            rows = k[cells]
            pairs = (rows[..., 0:n_rot:2] + 1j * rows[..., 1:n_rot:2]) * turn
            rows[..., 0:n_rot:2], rows[..., 1:n_rot:2] = pairs.real, pairs.imag
            k[cells] = rows


class FakeStep:
    """What `LlamaModel.forward` writes to and attends through."""

    def __init__(self, cache: FakeCache, first: int, pos: np.ndarray, seq_ids: list[int]):
        self.cache, self.first, self.pos, self.seq_ids = cache, first, pos, seq_ids

    def write(self, il: int, k: np.ndarray, v: np.ndarray) -> None:
        """Append the rows."""
        p, c = self.cache.params, self.cache
        c.k[il] = np.concatenate([c.k[il], k.reshape(-1, p.n_head_kv, p.head_dim)])
        c.v[il] = np.concatenate([c.v[il], v.reshape(-1, p.n_head_kv, p.head_dim_v)])

    def attend(self, il: int, q: np.ndarray, out: np.ndarray) -> None:
        """Attend from each token to the cells of its sequence up to its position."""
        c, n_group = self.cache, self.cache.params.n_head // self.cache.params.n_head_kv
        for s in set(self.seq_ids):
            cells = np.array([i for i, members in enumerate(c.seqs) if s in members])
            k, v = c.k[il][cells].repeat(n_group, 1), c.v[il][cells].repeat(n_group, 1)
            rows = [t for t, seq_id in enumerate(self.seq_ids) if seq_id == s]
            scores = np.einsum("thd,chd->htc", q[rows].astype(np.float64), k, optimize=True)
            scores /= np.sqrt(q.shape[2])
            scores[:, c.pos[cells][None, :] > self.pos[rows][:, None]] = -np.inf
            weights = np.exp(scores - scores.max(2, keepdims=True))
            weights /= weights.sum(2, keepdims=True)
            out[rows] = np.einsum("htc,chd->thd", weights, v, optimize=True)
