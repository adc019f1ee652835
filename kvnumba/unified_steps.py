"""`UnifiedStep`: writing K and V of a ubatch, and attending from its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvnumba.placement import Slot
from kvnumba.sliding import Overwritten
from kvnumba.status import Extent
from kvnumba.steps import Step, Steps

if TYPE_CHECKING:
    from kvnumba.splitting import Ubatch


class UnifiedStep(Step):
    """One ubatch: `apply`, `write` and `attend` for each layer, then `commit` or `rollback`.

    Attributes
    ----------
    cells : ndarray, shape (n_tokens,), int32
        The cell of each token.
    overwritten : Overwritten or None
        What hidden cells held before this step used them anew; for `rollback`.
    """

    plan: Slot

    def __init__(self, steps: Steps[Any], ubatch: Ubatch, plan: Slot):
        super().__init__(steps, ubatch, plan)
        self.cells = plan.cells
        self.overwritten: Overwritten | None = None
        self._groups: list[tuple[Any, ...]] = []
        self._looked_up = -1

    @property
    def extent(self) -> Extent:
        """The cells that a compute graph over this step looks at, as the cache is now."""
        cache = self._steps.cache
        head = int(self.cells[0]) if len(self.cells) else 0
        return Extent(head, cache.n_kv(), cache.cells.n_cells)

    def write(self, il: int, k: np.ndarray, v: np.ndarray | None = None) -> None:
        """Store K and V of layer `il`.

        Parameters
        ----------
        il : int
            Layer of the model, see `CacheConfig.layer_map`.
        k, v : ndarray, shapes (n_tokens, n_embd_k), (n_tokens, n_embd_v), float32
            K already rotated for the tokens' positions. Layers of K alone take no V.

        Raises
        ------
        ConfigError
            If there is no such layer, or it reads the K and V of another.
        """
        self._expect("applied", "write")
        self._steps.cache._check_pending(self)
        cache = self._steps.cache
        cache.layers.write(cache.config.storage_to_write(il), self.cells, k, v)

    def attend(
        self, il: int, q: np.ndarray, out: np.ndarray | None = None, **options: Any
    ) -> np.ndarray:
        """Attend from each token to what its first sequence holds up to its position.

        Parameters, returns: as `UnifiedCache.attend`.
        """
        self._expect("applied", "attend")
        cache = self._steps.cache
        reader = cache.reader
        if cache.config.window:
            options.setdefault("window", cache.config.window)
        if self._looked_up != reader.n_look_ups:  # someone else has used the buffers since
            self._steps.cache._check_pending(self)
            batch = self.batch
            self._groups = reader.look_up(self.pos, batch.first_ids(), batch.sections)
            self._looked_up = reader.n_look_ups
        return reader.attend(il, q, self._groups, out, **options)
