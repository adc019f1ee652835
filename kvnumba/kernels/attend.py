"""Attention over the cells in place: the entry that chooses between decode and prefill."""

from __future__ import annotations

import functools

import numba
import numpy as np

from kvnumba.kernels import attend_decode, attend_prefill
from kvnumba.kernels.half import KIND_F32, kind_id
from kvnumba.kernels.micro_panels import PANEL
from kvnumba.kernels.sight import NO_LIMIT, WINDOW_IDS

MAX_DECODE_QUERIES = 8
"""With more queries, tiles in float32 pay for their conversion."""
MIN_CELLS_PER_PART = 128
"""Fewer cells are not worth another thread."""
TILE_BYTES = 1 << 18
"""K and V bytes of a decode tile: half of a small second-level cache."""
MAX_PANELS = 8
"""Panels of query rows that share a conversion; their queries and sums stay in the cache."""


class Scratch:
    """Working memory of `attend_rows`, kept between calls.

    It grows with the number of queries, heads and threads, never with the number of cells. One
    object must not be used by two Python threads at once.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        return sum(a.nbytes for a in self._arrays.values())

    def get(self, name: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """Return the array of that name, made anew where the shape has changed."""
        array = self._arrays.get(name)
        if array is None or array.shape != shape:
            array = self._arrays[name] = np.empty(shape, dtype)
        return array


def attend_rows(
    kind_k, kind_v, q, k, v, n_head_kv, cells, cell_pos, q_pos, out, *,
    scale, v_trans=False, window=0, window_kind="standard", causal=True, soft_cap=0.0, scratch=None,
) -> None:  # fmt: skip
    """Compute ``softmax(scale * q k^T) v`` of each query over the cells that it sees.

    Query t sees a listed cell if ``cell_pos <= q_pos[t]`` (unless not causal) and the window, if
    there is one, holds it. Cells that are not listed are never read; what a query does
    not see never enters its result, whatever it holds. A query that sees nothing gets zeros.

    Parameters
    ----------
    kind_k, kind_v : {"f32", "f16", "bf16"} or int
        Element types of `k` and `v`, by ggml name or id.
    q : ndarray of float32, shape (n_q, n_head, dk), C order
    k : ndarray, shape (n_cells, n_head_kv * dk), C order
        Storage: float32, or uint16 for the half types.
    v : ndarray, shape (n_cells, n_head_kv * dv) or, with `v_trans`, (n_head_kv * dv, n_cells)
    n_head_kv : int
        Divides n_head; query head h uses KV head ``h // (n_head // n_head_kv)``.
    cells, cell_pos : ndarray of int32, shape (n,)
        The cells to attend to and their positions, in any order.
    q_pos : ndarray of int32, shape (n_q,)
    out : ndarray of float32, shape (n_q, n_head, dv), C order
        Result.
    scale : float
        Factor on the scores, usually ``1 / sqrt(dk)``.
    v_trans : bool
    window : int
        0 for none.
    window_kind : {"standard", "chunked", "symmetric"}
        The window holds a position p of a query at q if ``q - p < window``, if
        ``p >= q // window * window``, or if ``|q - p| <= window // 2``.
    causal : bool
        Otherwise later positions are seen too, as far as the window holds them.
    soft_cap : float
        If above 0, scores x become ``soft_cap * tanh(x / soft_cap)``.
    scratch : Scratch, optional
        Without it, working memory is allocated in each call.

    Notes
    -----
    Nothing is checked here: shapes, dtypes and cells (each within ``[0, n_cells)``) are the
    caller's promise. The result depends on the number of threads only by rounding.
    """
    kind_k, kind_v = kind_id(kind_k), kind_id(kind_v)
    items_k = k.view(np.uint16) if kind_k == KIND_F32 else k
    items_v = v.view(np.uint16) if kind_v == KIND_F32 else v
    attend = _decode if q.shape[0] <= MAX_DECODE_QUERIES else _prefill
    attend(
        scratch or Scratch(), q, items_k, items_v, cells, cell_pos, q_pos,
        (min(int(window), NO_LIMIT), WINDOW_IDS[window_kind], bool(causal)),
        (kind_k, kind_v, n_head_kv, bool(v_trans), float(scale), float(soft_cap)), out,
    )  # fmt: skip


def _decode(scratch, q, k, v, cells, cell_pos, q_pos, sight, options, out):
    n_q, n_head, _ = q.shape
    kind_k, _, n_head_kv, v_trans = options[:4]
    dv = out.shape[2]
    row_bytes = n_head_kv * (q.shape[2] * (4 if kind_k == KIND_F32 else 2) + 4 * dv)
    tile = min(64, max(16, TILE_BYTES // row_bytes // 16 * 16))
    n_threads = numba.get_num_threads()
    n_parts = max(1, min(n_threads, cells.shape[0] // MIN_CELLS_PER_PART))
    size = attend_decode.work_size(tile, n_head_kv, n_q * (n_head // n_head_kv), dv, v_trans)
    work = scratch.get("work", (n_threads, size))
    lists = scratch.get("lists", (n_threads, 3, tile), np.int32)
    ends = scratch.get("ends", (2, n_q), np.int32)
    qs = scratch.get("queries", (q.size,))
    attend_decode.attend_decode_kernel(
        _address(attend_decode), work, lists, ends, qs, q, k, v, work.view(np.uint16), cells,
        cell_pos, q_pos, *sight, *options, n_parts, out,
    )  # fmt: skip


def _prefill(scratch, q, k, v, cells, cell_pos, q_pos, sight, options, out):
    n_q, n_head, dk = q.shape
    n_head_kv = options[2]
    n_threads = numba.get_num_threads()
    all_panels = -(-n_q * (n_head // n_head_kv) // PANEL)
    n_panels = max(1, min(MAX_PANELS, all_panels * n_head_kv // (4 * n_threads)))
    size = attend_prefill.work_size(n_panels, dk, out.shape[2])
    work = scratch.get("panels", (n_threads, size))
    row_ends = scratch.get("row_ends", (n_threads, 2, n_panels * PANEL), np.int32)
    ends = scratch.get("ends", (2, n_q), np.int32)
    attend_prefill.attend_prefill_kernel(
        _address(attend_prefill), work, row_ends, ends, q, k, v, cells, cell_pos, q_pos, *sight,
        *options, n_panels, out,
    )  # fmt: skip


@functools.cache
def _address(module):
    """Return the address of a module's work on one part, compiled on first use."""
    return module.part_address()
