"""`Memory`: what every cache can do, whatever it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvnumba.status import Extent, Status, combine_status
from kvnumba.steps import Step, Steps

if TYPE_CHECKING:
    from kvnumba.batch import Batch
    from kvnumba.splitting import Ubatch


@runtime_checkable
class Memory(Protocol):
    """What all caches have in common: the loop, the verbs of llama.h, and the queries.

    One meaning of positions for all kinds: `seq_pos_max` is the position of a sequence's last
    token, so the next one is ``seq_pos_max + 1``. `seq_pos_min` is the least held position that
    the sequence can be cut back to and go on from: ``seq_rm(s, p + 1, -1)`` works for every held
    ``p`` from `seq_pos_min` to `seq_pos_max`. Both are -1 for an empty sequence only. Removing a
    whole sequence always works.

    A refused operation changes nothing. `seq_rm` says so by False, for a reason that `refusal`
    tells beforehand; everything else raises.
    """

    def prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps[Any]:
        """Split a batch and find room for all of it; nothing is placed yet."""

    def try_prepare(self, batch: Batch | Any, n_ubatch: int | None = None) -> Steps[Any]:
        """Prepare a batch; a lack of room is a status, not an exception."""

    def prepare_ubatches(self, batch: Batch, ubatches: list[Ubatch]) -> Steps[Any]:
        """Find room for a batch that was split by someone else."""

    def init_full(self) -> Extent:
        """Return the greatest extent that any step can have."""

    def update(self) -> bool:
        """Do deferred work; return whether there was any."""

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens ``[p0, p1)`` of a sequence (-1: of all), or refuse."""

    def refusal(self, seq_id: int, p0: int = -1, p1: int = -1) -> str | None:
        """Return why `seq_rm` would refuse, None when it would not."""

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` have what `src` has in ``[p0, p1)``."""

    def seq_keep(self, seq_id: int) -> None:
        """Remove everything but one sequence."""

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions ``[p0, p1)`` of a sequence."""

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions ``[p0, p1)`` of a sequence by `d`."""

    def seq_pos_min(self, seq_id: int) -> int:
        """Return the least position the sequence can be cut back to, -1 when it is empty."""

    def seq_pos_max(self, seq_id: int) -> int:
        """Return the position of the last token, -1 when the sequence is empty."""

    @property
    def can_shift(self) -> bool:
        """Whether `seq_add` and `seq_div` can work at all."""

    def clear(self, data: bool = False) -> None:
        """Empty the memory; with `data` also give its bytes back."""

    def check(self) -> None:
        """Test every invariant."""

    def close(self) -> None:
        """Let go of memory and files."""


__all__ = ["Extent", "Memory", "Status", "Step", "Steps", "combine_status"]
