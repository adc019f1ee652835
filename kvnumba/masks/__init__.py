"""Inputs for people who build their own graph over a cache: masks, biases and row indices.

`UnifiedCache.attend` needs none of this. A graph that multiplies all of the first ``n_kv`` cells
does; within a step::

    mask = kq_mask(cache.cells, step.batch, step.extent.n_kv)          # [n_tokens, n_kv]
    rows = row_index(step.cells, cache.cells.n_cells)                  # where K and V go

The rules are llama.cpp's, in its order (``llama-kv-cache.cpp``, set_input_kq_mask).
"""

from __future__ import annotations

from kvnumba.masks.bias import alibi_slopes, position_buckets
from kvnumba.masks.index import column_index, row_index
from kvnumba.masks.mask import kq_mask

__all__ = ["alibi_slopes", "column_index", "kq_mask", "position_buckets", "row_index"]
