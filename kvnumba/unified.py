"""`UnifiedCache`: the transformer KV cache. Several sequences share one pool of cells."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import numpy as np

from kvnumba import upkeep
from kvnumba.batch import Batch, checked_positions, int32_array, pack_ids
from kvnumba.cells import Cells, is_whole
from kvnumba.config import CacheConfig
from kvnumba.errors import (
    ConfigError,
    DamagedError,
    ShapeError,
    StepError,
)
from kvnumba.guard import Guard
from kvnumba.kernels import cells as kernels
from kvnumba.layers import KVLayers
from kvnumba.placement import Placement
from kvnumba.reading import Reader
from kvnumba.steps import Step, Steps
from kvnumba.upkeep import NO_LIMIT
from kvnumba.verbs import SequenceVerbs


class UnifiedCache(SequenceVerbs):
    """KV cache of a transformer.

    Parameters
    ----------
    config : CacheConfig
        Sizes, types, rope, placement.
    path : path-like, optional
        A new or empty folder for the mapped files. Default: anonymous memory. (Sessions are
        reopened by `kvnumba.Session.open`, never by this constructor.)

    Attributes
    ----------
    config : CacheConfig
    cells : Cells
        Metadata; change it through the verbs only.
    layers : KVLayers
        ``layers.k[il]`` and ``layers.v[il]`` are plain arrays over the mapping.
    guard : Guard
        Entered by every change: one thread, one process.

    Notes
    -----
    The verbs, their argument order and ranges are llama.h's. ``[p0, p1)`` is half-open; a negative
    bound means no bound. Bad arguments raise and change nothing.
    """

    def __init__(self, config: CacheConfig, path: str | os.PathLike[str] | None = None):
        self._set_up(config, KVLayers(config, path))

    @classmethod
    def over(cls, config: CacheConfig, layers: KVLayers) -> UnifiedCache:
        """Build a cache over layers that exist already (used by sessions)."""
        cache = cls.__new__(cls)
        cache._set_up(config, layers)
        return cache

    def _set_up(self, config: CacheConfig, layers: KVLayers) -> None:
        self.config, self.layers = config, layers
        self.cells = Cells(config.n_cells, config.n_seq_max)
        self.reader = Reader(config, self.cells, layers)
        self.guard = Guard()
        self.placement = Placement(config, self.cells)
        self.has_shift = False
        self._pending: list[np.ndarray] = []
        self._defrag_limit: int | None = None
        self._version = 0

    @property
    def pinned(self) -> np.ndarray:
        """Bitmap of the cells that the last durable commit names, see `Cells.pinned`."""
        return self.cells.pinned

    # -- placing tokens -----------------------------------------------------------------------

    def find_slot(self, n_tokens: int, contiguous: bool | None = None) -> np.ndarray:
        """Find free cells; they stay free.

        Parameters
        ----------
        n_tokens : int
            Cells wanted.
        contiguous : bool, optional
            One run of adjacent cells, or any. Default: the reference's circular search with
            ``placement="ring"`` (which moves `search_start`, on failure too), else any.

        Returns
        -------
        cells : ndarray, shape (n_tokens,), int32, ascending

        Raises
        ------
        CacheFullError
            If the cache has fewer cells than that: it can never fit.
        NoSlotError
            If that many are not free now; says how many wait for a session commit.
        """
        n = self.placement.checked_count(n_tokens)
        with self.guard:
            if contiguous is None and self.placement.is_ring:
                return self.placement.find_ring(n)
            return self.placement.find_run(n) if contiguous else self.placement.find_any(n)

    def place(self, cells: Any, pos: Any, seq_ids: Any, tokens: Any = None) -> None:
        """Put tokens into free cells; they are pending until `commit` or `rollback`.

        Parameters
        ----------
        cells : array_like of int, shape (n_tokens,)
            Free cells, each named once, for example from `find_slot`.
        pos : array_like of int, shape (n_tokens,)
        seq_ids : int, sequence of int, or sequence of sequences of int
            As in `Batch`.
        tokens : array_like of int, shape (n_tokens,), optional
            Token ids; default: unknown.

        Raises
        ------
        ShapeError, PositionError, SequenceError, NoSlotError
            If an argument is impossible or a cell is not free.
        """
        where = int32_array(cells, "cells")
        new_pos = checked_positions(pos, len(where))
        id_start, ids = pack_ids(seq_ids, len(where))
        self._check_ids(ids)
        new_tokens = np.full(len(where), -1, np.int32)
        if tokens is not None:
            new_tokens = int32_array(tokens, "tokens")
            if len(new_tokens) != len(where):
                raise ShapeError(f"{len(new_tokens)} tokens for {len(where)} cells")
        with self.guard:
            self.placement.check_free(where)
            self.layers.reserve(int(where.max(initial=-1)) + 1)
            self._place(where, new_pos, new_tokens, id_start, ids)
            self._version += 1

    def _check_ids(self, ids: np.ndarray) -> None:
        for s in (ids.min(initial=0), ids.max(initial=0)):
            self.cells.check_seq_id(int(s))

    def _place(self, where: np.ndarray, *tokens: np.ndarray) -> None:
        c = self.cells
        pos, token, id_start, ids = tokens
        kernels.place_kernel(
            c.pos, c.token, c.seq, c.used, where, pos, token, id_start, ids, c.shared
        )
        if len(where):
            self._pending.append(where)

    def commit(self) -> None:
        """Accept all pending tokens."""
        with self.guard:
            for cells in list(self._pending):
                self._accept(cells)

    def rollback(self) -> None:
        """Empty the cells of all pending tokens."""
        with self.guard:
            if self._pending:
                self._undo(np.concatenate(self._pending))

    def _check_pending(self, cells: np.ndarray) -> None:
        if not any(p is cells for p in self._pending):
            raise StepError(
                "this step's tokens are no longer pending: the cache was committed, rolled back or "
                "cleared meanwhile"
            )

    def _accept(self, cells: np.ndarray) -> None:
        with self.guard:
            self._check_pending(cells)
            self._pending = [p for p in self._pending if p is not cells]
            self.placement.accepted(cells)

    def _undo(self, cells: np.ndarray) -> None:
        with self.guard:
            self._changed()
            kernels.drop_cells_kernel(*self.cells.state, cells)
            gone = set(cells.tolist())
            self._pending = [p for p in self._pending if int(p[0]) not in gone]
            if len(cells):
                self.placement.freed(int(cells.min()))

    def _apply(self, step: Step) -> int:
        """Place a step's tokens; return the version by which its batch is known from now on."""
        with self.guard:
            self._check_version(step.version)
            batch = step.batch
            self._changed()  # batches prepared beside this one may have planned the same cells
            self.placement.began(step.cells)
            self._place(step.cells, step.pos, batch.tokens, batch.id_start, batch.ids)
            return self._version

    def _check_version(self, version: int) -> None:
        if version != self._version:
            raise StepError("the cache was changed since this batch was prepared; prepare it again")

    def prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps:
        """Apply pending updates, split a batch, and find cells for all of it.

        Parameters
        ----------
        batch : Batch or array_like of int
            Tokens; bare token ids continue sequence 0.
        n_ubatch : int, optional
            Most tokens per step; default ``config.n_ubatch``.

        Returns
        -------
        steps : Steps
            ``for step in steps: step.apply(); step.write(...); step.attend(...); step.commit()``.

        Raises
        ------
        NoSlotError, CacheFullError
            If not all of it fits: nothing is placed. (Deferred work that was asked for before, a
            shift or a defragmentation, may have been done.)
        DiskFullError
            If the files cannot grow by that much.
        SequenceError, PositionError, ShapeError, StepError
            If the batch is impossible, or an earlier one is still pending.
        """
        batch = batch if isinstance(batch, Batch) else Batch(batch)
        if n_ubatch is None:
            n_ubatch = self.config.n_ubatch
        if not is_whole(n_ubatch) or n_ubatch < 1:
            raise ConfigError(f"n_ubatch {n_ubatch!r} must be a whole number of at least 1")
        if batch.n_tokens > self.config.n_batch:
            raise ShapeError(
                f"a batch of {batch.n_tokens} tokens is larger than n_batch {self.config.n_batch}; "
                "split it or raise n_batch"
            )
        self._check_ids(batch.ids)
        self.placement.checked_count(batch.n_tokens)
        with self.guard:
            self._check_none_pending()
            batch = self.cells.with_positions(batch)
            if not self.placement.is_ring:  # refuse before the deferred work, where that is certain
                self.placement.check_limit(batch.n_tokens)
            self._update()
            plan = self.placement.plan(batch.n_tokens, int(n_ubatch))
            self.layers.reserve(max((int(c.max()) + 1 for c in plan), default=0))
            return Steps(self, batch, plan, self._version)

    # -- the verbs ----------------------------------------------------------------------------

    def clear(self, data: bool = False) -> None:
        """Empty every cell, pending ones too.

        Parameters
        ----------
        data : bool
            Also give the rows' memory and disk space back; they then read as zeros. No row is
            touched. (Rows that a session's last commit names are kept.)
        """
        with self.guard:
            if data:
                self.layers.check_writable()
            self._changed()
            self.cells.clear()
            self._pending.clear()
            self.search_start, self.has_shift, self._defrag_limit = 0, False, None
            if data and not self.cells.pinned.any():
                self.layers.clear()

    # -- deferred work ------------------------------------------------------------------------

    def update(self) -> bool:
        """Apply pending shifts to K, then a requested defragmentation.

        Returns
        -------
        bool
            Whether anything was done.

        Raises
        ------
        NoSlotError
            If committed rows must move and there are not enough free cells for them.
        DiskFullError
            If the files cannot grow; nothing is changed.
        """
        with self.guard:
            self._check_none_pending()
            return self._update()

    def _update(self) -> bool:
        n_done = 0
        if self.has_shift:
            n_done = upkeep.apply_shift(self.config, self.cells, self.layers, self.placement)
            self.has_shift = False
        limit, self._defrag_limit = self._defrag_limit, None
        if limit is not None:
            n_moved = upkeep.apply_defrag(self.cells, self.layers, limit)
            if n_moved:
                self.search_start = self.used
            n_done += n_moved
        if n_done:
            self._changed()
        return n_done > 0

    def defrag(self, max_moves: int | None = None) -> None:
        """Ask for a defragmentation at the next `update`.

        Parameters
        ----------
        max_moves : int, optional
            Most runs of adjacent cells to move; default: no limit.
        """
        limit = _move_limit(max_moves)
        with self.guard:
            self._defrag_limit = limit

    def defrag_plan(self, max_moves: int | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """Plan a defragmentation; nothing is changed.

        Returns
        -------
        src, dst : ndarray, int32
            The cells that would move, and where to.
        n_moves : int
            Runs of adjacent cells among them.
        """
        return upkeep.plan_defrag(self.cells, _move_limit(max_moves))

    def defrag_sched(self, threshold: float) -> bool:
        """Ask for a defragmentation if it is worth it; returns whether it was asked for.

        As in the reference: at least 2048 cells in reach, and `fragmentation` above `threshold`.
        """
        if not isinstance(threshold, (int, float, np.integer, np.floating)):
            raise ConfigError(f"threshold {threshold!r} must be a number")
        if threshold <= 0 or self.n_kv() < 2048 or self.fragmentation() <= threshold:
            return False
        self.defrag()
        return True

    def check(self) -> None:
        """Test every invariant.

        Raises
        ------
        DamagedError
            Names the first broken one.
        """
        self.cells.check()
        if not self.has_shift and len(self.cells.shifted()):
            raise DamagedError("a cell has a pending shift that the cache does not know of")

    def attend(
        self,
        il: int,
        q: np.ndarray,
        pos: Any,
        seq_ids: Any = 0,
        out: np.ndarray | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Attend from queries to the cells of layer `il`, in place.

        Parameters
        ----------
        il : int
            Layer.
        q : ndarray, shape (n_tokens, n_head, head_dim), float32
            Queries, already rotated; `n_head` is a multiple of the layer's KV heads.
        pos : array_like of int, shape (n_tokens,)
            A query sees its sequence's cells at positions up to its own.
        seq_ids : int or sequence
            As in `Batch`; each query looks through its first id.
        out : ndarray, shape (n_tokens, n_head, head_dim_v), float32, modified in place, optional
        scale : float, optional
            Factor on the scores; default ``1 / sqrt(head_dim)``.
        window : int, optional
            Only the last `window` positions, the query's own included; 0: all.
        soft_cap : float, optional
            Scores are ``cap * tanh(score / cap)``; 0: as they are.

        Returns
        -------
        out : ndarray
            A query that sees nothing gets zeros.
        """
        q_pos = checked_positions(pos, len(q))
        id_start, ids = pack_ids(seq_ids, len(q))
        self._check_ids(ids)
        groups = self.reader.look_up(q_pos, ids[id_start[:-1]])
        return self.reader.attend(il, q, groups, out, **options)

    def close(self) -> None:
        """Release the mapping. Arrays that were handed out then read zeros."""
        with self.guard:
            self.layers.close()

    def __enter__(self) -> UnifiedCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return (
            f"UnifiedCache({c.n_layer} layers, {self.used}/{c.n_ctx} cells used, "
            f"K {c.type_k}, V {c.type_v}, {self.size_bytes / 2**20:.1f} MiB)"
        )


def _move_limit(max_moves: Any) -> int:
    if max_moves is None:
        return NO_LIMIT
    if not is_whole(max_moves) or max_moves < 0:
        raise ConfigError(f"max_moves {max_moves!r} must be a whole number of at least 0")
    return min(int(max_moves), NO_LIMIT)
