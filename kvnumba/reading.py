"""Which cells the tokens of a ubatch may see, and attention over just those."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvnumba.batch import MAX_POS
from kvnumba.cells import Cells, is_whole
from kvnumba.config import WINDOW_KINDS, CacheConfig
from kvnumba.errors import ConfigError, ShapeError
from kvnumba.kernels.attend import Scratch, attend_rows
from kvnumba.kernels.visible import visible_cells_kernel
from kvnumba.layers import KVLayers


class Reader:
    """Attention over the cells in place.

    The visible cells of a ubatch are listed once and serve all layers; the lists live in buffers
    that are kept, so that a call allocates nothing that grows with the cache.

    Attributes
    ----------
    n_look_ups : int
        Calls of `look_up` so far; lists of an earlier one are overwritten.
    """

    def __init__(self, config: CacheConfig, cells: Cells, layers: KVLayers):
        self._config, self._cells, self._layers = config, cells, layers
        self._scratch = Scratch()
        self._buffers: list[np.ndarray] = []
        self.n_look_ups = 0

    def look_up(
        self, pos: np.ndarray, first_ids: np.ndarray, sections: np.ndarray | None = None
    ) -> list[tuple[Any, ...]]:
        """List the cells that tokens at `pos` may see: those of their first sequence.

        Parameters
        ----------
        pos, first_ids : ndarray, shape (n_tokens,), int32
        sections : ndarray, shape (n_pos, n_tokens), int32, optional
            All positions of each token, where it has several.

        Returns
        -------
        groups : list of (rows, q_pos, cells, cell_pos)
            One entry per sequence: which tokens (a slice when they are adjacent), their
            positions, and all cells of the sequence, for `attend` chooses among them: one list
            serves layers with and without a window, causal or not. With several positions per
            token, numbers that compare as those do stand for both. Valid until the next call.
        """
        self.n_look_ups += 1
        groups = []
        for g, s in enumerate(dict.fromkeys(first_ids.tolist())):
            rows = np.flatnonzero(first_ids == s)
            adjacent = rows[-1] - rows[0] + 1 == len(rows)
            q_pos = np.ascontiguousarray(pos[rows])
            cells, cell_pos = self._buffer(g)
            n = visible_cells_kernel(
                self._cells.seq[s], self._cells.pos, 0, MAX_POS, cells, cell_pos
            )
            cells, cell_pos = cells[:n], cell_pos[:n]
            if self._cells.extra is not None:
                mine = None if sections is None else sections[:, rows]
                q_pos, cell_pos = self._cells.extra.ranked(cells, cell_pos, q_pos, mine)
            where = slice(int(rows[0]), int(rows[-1]) + 1) if adjacent else rows
            groups.append((where, q_pos, cells, cell_pos))
        return groups

    def _buffer(self, g: int) -> np.ndarray:
        if g == len(self._buffers):
            self._buffers.append(np.empty((2, self._config.n_cells), np.int32))
        return self._buffers[g]

    def attend(
        self,
        il: int,
        q: np.ndarray,
        groups: list[tuple[Any, ...]],
        out: np.ndarray | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
        window_kind: str | None = None,
        causal: bool = True,
        soft_cap: float = 0.0,
    ) -> np.ndarray:
        """Attend from `q` to the listed cells of layer `il`; see `UnifiedCache.attend`.

        Parameters
        ----------
        il : int
            Layer of the model, see `CacheConfig.layer_map`.
        window : int, optional
            0 for none. Default: the cache's own.
        window_kind : {"standard", "chunked", "symmetric"}, optional
            See `CacheConfig.window_kind`. Default: the cache's own.
        causal : bool
            False: later positions are seen too, as far as the window holds them.

        Raises
        ------
        ConfigError, ShapeError
            If an option or a shape is impossible; nothing is written.
        """
        config = self._config
        il = config.storage_of(il)
        out = self._checked(il, q, groups, out)
        _check_options(scale, soft_cap)
        window = config.window if window is None else window
        window_kind = config.window_kind if window_kind is None else window_kind
        check_window(window, window_kind, causal)
        if window and config.n_pos > 1:
            raise ConfigError(f"window {window}: with n_pos {config.n_pos} there is none; use 0")
        options = {
            "scale": 1 / math.sqrt(config.k_head_dim(il)) if scale is None else scale,
            "window": window,
            "window_kind": window_kind,
            "causal": causal,
            "soft_cap": soft_cap,
        }
        for rows, q_pos, cells, cell_pos in groups:
            is_direct = isinstance(rows, slice) and config.has_v(il)
            width = config.v_head_dim(il) or config.k_head_dim(il)
            shape = (len(q_pos), out.shape[1], width)
            part = out[rows] if is_direct else np.empty(shape, np.float32)
            self._attend_group(
                il, np.ascontiguousarray(q[rows]), q_pos, cells, cell_pos, part, options
            )
            if not is_direct:
                out[rows] = part[:, :, : out.shape[2]]
        return out

    def _attend_group(
        self,
        il: int,
        q: np.ndarray,
        q_pos: np.ndarray,
        cells: np.ndarray,
        cell_pos: np.ndarray,
        out: np.ndarray,
        options: dict[str, Any],
    ) -> None:
        """Attend within one sequence. Without V, whole K rows are summed in its place."""
        c, k = self._config, self._layers.k[il]
        kind_v, v, v_trans = c.type_k, k, False
        if c.has_v(il):
            kind_v, v, v_trans = c.type_v, self._layers.v[il], c.v_trans
        attend_rows(
            c.type_k, kind_v, q, k, v, c.n_kv_heads(il), cells, cell_pos, q_pos, out,
            v_trans=v_trans, scratch=self._scratch, **options,
        )  # fmt: skip

    def _checked(
        self, il: int, q: np.ndarray, groups: list[tuple[Any, ...]], out: np.ndarray | None
    ) -> np.ndarray:
        config = self._config
        if not config.out_head_dim(il):
            raise ConfigError(
                f"layer {il} stores K alone (head_dim_v 0): say with v_in_k how many leading "
                "values of each K head serve as V"
            )
        n_head_kv, n_tokens = config.n_kv_heads(il), sum(len(g[1]) for g in groups)
        if not isinstance(q, np.ndarray) or not isinstance(out, np.ndarray | None):
            raise ShapeError("q and out must be numpy arrays")
        if (
            q.ndim != 3
            or q.shape[1] == 0
            or q.dtype != np.float32
            or q.shape[0] != n_tokens
            or q.shape[1] % n_head_kv
            or q.shape[2] != config.k_head_dim(il)
        ):
            raise ShapeError(
                f"q is {q.dtype} {q.shape}; float32 [{n_tokens}, multiple of {n_head_kv}, "
                f"{config.k_head_dim(il)}] wanted"
            )
        shape = (n_tokens, q.shape[1], config.out_head_dim(il))
        if out is None:
            return np.empty(shape, np.float32)
        if out.shape != shape or out.dtype != np.float32 or not out.flags.carray:
            raise ShapeError(
                f"out is {out.dtype} {out.shape}; writable float32 {list(shape)} in C order wanted"
            )
        return out


def check_window(window: Any, window_kind: Any, causal: Any) -> None:
    """Refuse options that say no rule about what a token sees.

    Raises
    ------
    ConfigError
        Names the option, what came and what is allowed.
    """
    if not is_whole(window) or window < 0:
        raise ConfigError(f"window {window!r} must be a whole number of at least 0 (0: no window)")
    if not isinstance(window_kind, str) or window_kind not in WINDOW_KINDS:
        raise ConfigError(f"window_kind {window_kind!r} must be one of {', '.join(WINDOW_KINDS)}")
    if not isinstance(causal, (bool, np.bool_)):
        raise ConfigError(f"causal {causal!r} must be True or False")


def _check_options(scale: Any, soft_cap: Any) -> None:
    number = (int, float, np.integer, np.floating)
    if scale is not None and not (isinstance(scale, number) and math.isfinite(scale)):
        raise ConfigError(f"scale {scale!r} must be a finite number")
    if not (isinstance(soft_cap, number) and math.isfinite(soft_cap) and soft_cap >= 0):
        raise ConfigError(f"soft_cap {soft_cap!r} must be a finite number of at least 0 (0: none)")
