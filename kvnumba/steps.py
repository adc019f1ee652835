"""`Step` and `Steps`: a prepared batch, placed and computed one ubatch at a time, in any cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import numpy as np

from kvnumba.errors import NoSlotError, StepError
from kvnumba.status import Status

if TYPE_CHECKING:
    from kvnumba.batch import Batch
    from kvnumba.splitting import Ubatch


class Placer(Protocol):
    """What steps ask of the cache that they belong to."""

    def _apply(self, step: Any) -> int:
        """Place a planned step; return the cache's version from then on."""

    def _accept(self, step: Any) -> None:
        """Let an applied step stay."""

    def _undo(self, steps: Sequence[Any]) -> int:
        """Undo applied or committed steps, in the order of their application.

        Returns the cache's version from then on.
        """

    def _check_version(self, version: int) -> None:
        """Raise StepError unless the cache is as it was at `version`."""

    def _check_pending(self, step: Any) -> None:
        """Raise StepError unless the step's tokens are placed and neither accepted nor undone."""


class Step:
    """One ubatch: `apply`, compute each layer, then `commit` or `rollback`.

    As a context manager it applies on entry, commits on exit, and rolls back on an exception.

    Attributes
    ----------
    ubatch : Ubatch
        The tokens, how they are grouped, and where in the batch they come from.
    plan : object
        Where they go, as the cache has planned it.
    """

    def __init__(self, steps: Steps[Any], ubatch: Ubatch, plan: Any):
        self._steps, self.ubatch, self.plan = steps, ubatch, plan
        self._state = "planned"

    @property
    def batch(self) -> Batch:
        """The tokens of this ubatch, positions filled in."""
        return self.ubatch.batch

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
        """Give the tokens their places. All layers are to be computed next.

        Raises
        ------
        StepError
            If the step was applied before, or the cache changed since it was prepared.
        """
        self._expect("planned", "apply")
        self._steps.version = self._steps.cache._apply(self)
        self._state = "applied"
        return self

    def commit(self) -> None:
        """Accept the tokens: they stay."""
        self._expect("applied", "commit")
        self._steps.cache._accept(self)
        self._state = "committed"

    def rollback(self) -> None:
        """Undo the placement: the cache is as before `apply`."""
        self._expect("applied", "rollback")
        self._steps.cache._check_pending(self)
        self._steps.version = self._steps.cache._undo([self])
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
            self._steps.has_failed = True
            self.rollback()


S = TypeVar("S", bound=Step)


class Steps(Sequence[S], Generic[S]):
    """The ubatches of a prepared batch, in order.

    As a context manager it rolls the whole batch back on an exception.

    Attributes
    ----------
    batch : Batch
        The whole batch, positions filled in.
    ubatches : list of Ubatch
        Its parts; see `kvnumba.splitting.output_index` for the order of results.
    error : NoSlotError or None
        Why there are no steps, after `try_prepare` in a cache without room.
    has_failed : bool
        Whether the computation of a step ended in an exception.
    """

    def __init__(
        self,
        cache: Any,
        batch: Batch,
        ubatches: Sequence[Ubatch],
        plans: Sequence[Any],
        version: int,
        step_type: type[S],
        error: NoSlotError | None = None,
    ):
        self.cache, self.batch, self.version = cache, batch, version
        self.ubatches, self.error, self.has_failed = list(ubatches), error, False
        self._steps = [
            step_type(self, ubatch, plan) for ubatch, plan in zip(ubatches, plans, strict=True)
        ]

    @property
    def status(self) -> Status:
        """Prepared (SUCCESS), without room, or failed in computing."""
        if self.error is not None:
            return Status.FAILED_PREPARE
        return Status.FAILED_COMPUTE if self.has_failed else Status.SUCCESS

    @overload
    def __getitem__(self, i: int) -> S: ...
    @overload
    def __getitem__(self, i: slice) -> list[S]: ...
    def __getitem__(self, i: int | slice) -> S | list[S]:
        return self._steps[i]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[S]:
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
        self.undo(done)

    def last_before(self, undone: Sequence[S]) -> S | None:
        """Return the last step that is applied or committed and not among `undone`."""
        left = [s for s in self._steps if s.state in ("applied", "committed") and s not in undone]
        return left[-1] if left else None

    def undo(self, done: Sequence[S]) -> None:
        """Undo some of the steps, in a cache that nothing but this batch has changed since."""
        self.cache._check_version(self.version)
        self.version = self.cache._undo(done)
        for step in done:
            step._state = "rolled back"

    def __enter__(self) -> Steps[S]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.has_failed = True
            self.rollback()


def tried(cache: Any, batch: Any, n_ubatch: int | None, step_type: type[S]) -> Steps[S]:
    """Return ``cache.prepare(batch, n_ubatch)``, or no steps and the error for want of room."""
    try:
        prepared: Steps[S] = cache.prepare(batch, n_ubatch)
    except NoSlotError as error:
        return Steps(cache, batch, (), (), -1, step_type, error)
    return prepared
