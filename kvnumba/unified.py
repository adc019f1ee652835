"""`UnifiedCache`: the transformer KV cache. Several sequences share one pool of cells."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import numpy as np

from kvnumba import upkeep
from kvnumba.batch import pack_ids
from kvnumba.batch_rules import split_sections
from kvnumba.cells import Cells, is_whole
from kvnumba.config import CacheConfig
from kvnumba.config_fields import expect
from kvnumba.errors import ConfigError, DamagedError
from kvnumba.extra_positions import check_sections
from kvnumba.guard import Guard
from kvnumba.layers import KVLayers
from kvnumba.placement import Placement
from kvnumba.placing import TokenPlacing
from kvnumba.reading import Reader
from kvnumba.sliding import Sliding
from kvnumba.unified_steps import UnifiedStep
from kvnumba.upkeep import NO_LIMIT


class UnifiedCache(TokenPlacing):
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
        expect(config, CacheConfig)
        self._set_up(config, KVLayers(config, path))

    @classmethod
    def over(cls, config: CacheConfig, layers: KVLayers) -> UnifiedCache:
        """Build a cache over layers that exist already (used by sessions)."""
        cache = cls.__new__(cls)
        cache._set_up(config, layers)
        return cache

    def _set_up(self, config: CacheConfig, layers: KVLayers) -> None:
        self.config, self.layers = config, layers
        self.cells = Cells(config.n_cells, config.n_seq_max, config.n_pos)
        self.reader = Reader(config, self.cells, layers)
        self.guard = Guard()
        self.placement = Placement(config, self.cells)
        self.sliding = Sliding(config, self.cells)
        self.has_shift = False
        self._pending: list[np.ndarray] = []
        self._last_step: UnifiedStep | None = None
        self._defrag_limit: int | None = None
        self._version = 0

    @property
    def pinned(self) -> np.ndarray:
        """Bitmap of the cells that the last durable commit names, see `Cells.pinned`."""
        return self.cells.pinned

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
            self.sliding.lost.fill(-1)
            self._pending.clear()
            self._last_step = None
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
        pos : array_like of int, shape (n_tokens,) or (n_pos, n_tokens)
            A query sees its sequence's cells at positions up to its own.
        seq_ids : int or sequence
            As in `Batch`; each query looks through its first id.
        out : ndarray, shape (n_tokens, n_head, head_dim_v), float32, modified in place, optional
        scale : float, optional
            Factor on the scores; default ``1 / sqrt(head_dim)``.
        window : int, optional
            Only the last `window` positions, the query's own included; 0: all. Default: the
            cache's.
        soft_cap : float, optional
            Scores are ``cap * tanh(score / cap)``; 0: as they are.

        Returns
        -------
        out : ndarray
            A query that sees nothing gets zeros.
        """
        q_pos, sections = split_sections(pos, len(q))
        check_sections(sections, self.config.n_pos)
        id_start, ids = pack_ids(seq_ids, len(q))
        self._check_ids(ids)
        groups = self.reader.look_up(q_pos, ids[id_start[:-1]], sections)
        if self.config.window:
            options.setdefault("window", self.config.window)
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
