"""`CellQueries`: what can be asked of any cache made of cells; nothing here changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnumba.cells import is_whole
from kvnumba.config import MAX_SEQ
from kvnumba.errors import SequenceError
from kvnumba.view import CacheView

if TYPE_CHECKING:
    from kvnumba.cells import Cells
    from kvnumba.config import CacheConfig
    from kvnumba.placement import Placement
    from kvnumba.sliding import Sliding


class CellQueries:
    """Counts, positions, sizes and views over `config`, `cells` and `placement`."""

    config: CacheConfig
    cells: Cells
    placement: Placement
    sliding: Sliding

    def seq_pos_min(self, seq_id: int) -> int:
        """Return the least held position that a sequence can be cut back to, -1 when it is empty.

        Without a window that is the least position held. With one, tokens after it still see all
        that they would have seen; see `kvnumba.memory.Memory`.
        """
        return self.sliding.pos_min(self.cells.check_seq_id(seq_id))

    def seq_pos_max(self, seq_id: int) -> int:
        """Return the greatest position of a sequence, -1 when it is empty."""
        return int(self.cells.pos_bounds(self.cells.check_seq_id(seq_id))[1])

    def pos_max(self) -> int:
        """Return the greatest position of all cells, -1 when the cache is empty."""
        return int(self.cells.pos_bounds(-1)[1])

    def cell_max(self) -> int:
        """Return one more than the highest used cell, 0 when none is used."""
        return int(self.cells.cell_max)

    @property
    def used(self) -> int:
        """Cells with an owner."""
        return int(self.cells.n_used)

    @property
    def n_free(self) -> int:
        """Cells that may still be given out: limited by ``n_ctx``, and never pinned ones."""
        return self.placement.n_free

    @property
    def n_tokens(self) -> int:
        """Sum over the cells of their owners."""
        return int(self.cells.n_tokens)

    @property
    def padding(self) -> int:
        """The reference's padding of `n_kv`: 256 cells with flash attention, else 32."""
        return 256 if self.config.flash_attn else 32

    def n_kv(self) -> int:
        """Return how many cells, from the first, a padded attention graph would look at."""
        pad = self.padding
        return min(self.cells.n_cells, max(pad, (self.cell_max() + pad - 1) // pad * pad))

    @property
    def size_k_bytes(self) -> int:
        """Bytes of K for ``n_ctx`` cells."""
        return self.config.size_k_bytes

    @property
    def size_v_bytes(self) -> int:
        """Bytes of V for ``n_ctx`` cells."""
        return self.config.size_v_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of K and V for ``n_ctx`` cells."""
        return self.size_k_bytes + self.size_v_bytes

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """Return a copy of the cells' state, listing at most `n_seq_max` owners per cell."""
        n = self.config.n_seq_max if n_seq_max is None else n_seq_max
        if not is_whole(n) or not 0 <= n <= MAX_SEQ:
            raise SequenceError(
                f"n_seq_max {n_seq_max!r} must be a whole number from 0 to {MAX_SEQ}"
            )
        return CacheView.of(self.cells, int(n))

    def fragmentation(self) -> float:
        """Return the share of the cells in reach of attention that hold nothing, padding aside."""
        n_kv = self.n_kv()
        return max(0.0, 1.0 - (self.used + self.padding) / n_kv)
