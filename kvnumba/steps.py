"""`Step` and `Steps`: a prepared batch, placed and computed one ubatch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from kvnumba.batch import Batch
from kvnumba.errors import StepError

if TYPE_CHECKING:
    from kvnumba.unified import UnifiedCache


class Step:
    """One ubatch: `apply`, `write` and `attend` for each layer, then `commit` or `rollback`.

    As a context manager it applies on entry, commits on exit, and rolls back on an exception.

    Attributes
    ----------
    batch : Batch
        The tokens of this ubatch, positions filled in.
    cells : ndarray, shape (n_tokens,), int32
        The cell of each token.
    """

    def __init__(self, steps: Steps, batch: Batch, cells: np.ndarray):
        self._steps, self.batch, self.cells = steps, batch, cells
        self._state = "planned"
        self._groups: list[tuple[Any, ...]] = []
        self._looked_up = -1

    @property
    def state(self) -> str:
        """``"planned"``, ``"applied"``, ``"committed"`` or ``"rolled back"``."""
        return self._state

    @property
    def version(self) -> int:
        """The cache's version that the batch was prepared or last worked at."""
        return self._steps.version

    @property
    def pos(self) -> np.ndarray:
        """Positions of the tokens, shape ``(n_tokens,)``, int32."""
        assert self.batch.pos is not None
        return self.batch.pos

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return self.batch.n_tokens

    def _expect(self, state: str, call: str) -> None:
        if self._state != state:
            raise StepError(f"{call}() on a step that is {self._state}; it must be {state}")

    def apply(self) -> Step:
        """Give the tokens their cells. K and V of all layers are to be written next.

        Raises
        ------
        StepError
            If the step was applied before, or the cache changed since it was prepared.
        """
        self._expect("planned", "apply")
        self._steps.version = self._steps.cache._apply(self)
        self._state = "applied"
        return self

    def write(self, il: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store K and V of layer `il`.

        Parameters
        ----------
        il : int
        k, v : ndarray, shapes (n_tokens, n_embd_k), (n_tokens, n_embd_v), float32
            K already rotated for the tokens' positions.
        """
        self._expect("applied", "write")
        self._steps.cache._check_pending(self.cells)
        self._steps.cache.layers.write(il, self.cells, k, v)

    def attend(
        self, il: int, q: np.ndarray, out: np.ndarray | None = None, **options: Any
    ) -> np.ndarray:
        """Attend from each token to what its first sequence holds up to its position.

        Parameters, returns: as `UnifiedCache.attend`.
        """
        self._expect("applied", "attend")
        reader = self._steps.cache.reader
        if self._looked_up != reader.n_look_ups:  # someone else has used the buffers since
            self._steps.cache._check_pending(self.cells)
            self._groups = reader.look_up(self.pos, self.batch.first_ids())
            self._looked_up = reader.n_look_ups
        return reader.attend(il, q, self._groups, out, **options)

    def commit(self) -> None:
        """Accept the tokens: they stay."""
        self._expect("applied", "commit")
        self._steps.cache._accept(self.cells)
        self._state = "committed"

    def rollback(self) -> None:
        """Undo the placement: the cells are empty again."""
        self._expect("applied", "rollback")
        self._steps.cache._check_pending(self.cells)
        self._steps.cache._undo(self.cells)
        self._steps.version = self._steps.cache._version
        self._state = "rolled back"

    def __enter__(self) -> Step:
        return self.apply()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state != "applied":
            return
        if kind is None:
            self.commit()
        else:
            self.rollback()


class Steps(Sequence[Step]):
    """The ubatches of a prepared batch, in order.

    Attributes
    ----------
    batch : Batch
        The whole batch, positions filled in.
    """

    def __init__(self, cache: UnifiedCache, batch: Batch, slots: list[np.ndarray], version: int):
        self.cache, self.batch, self.version = cache, batch, version
        self._steps: list[Step] = []
        start = 0
        for cells in slots:
            self._steps.append(Step(self, batch.part(start, start + len(cells)), cells))
            start += len(cells)

    @overload
    def __getitem__(self, i: int) -> Step: ...
    @overload
    def __getitem__(self, i: slice) -> list[Step]: ...
    def __getitem__(self, i: int | slice) -> Step | list[Step]:
        return self._steps[i]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def rollback(self) -> None:
        """Undo the whole batch: also the steps that were committed.

        Raises
        ------
        StepError
            If the cache was changed by anything but this batch's steps meanwhile.
        """
        done = [s for s in self._steps if s.state in ("applied", "committed")]
        if not done:
            return
        self.cache._check_version(self.version)
        self.cache._undo(np.concatenate([s.cells for s in done]))
        self.version = self.cache._version
        for s in done:
            s._state = "rolled back"
