"""`Status` of a prepared batch or an update, and the `Extent` that a compute graph looks at."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Status(IntEnum):
    """How far a batch or an update came; the numbers are the reference's (llama-memory.h)."""

    SUCCESS = 0
    NO_UPDATE = 1
    FAILED_PREPARE = 2
    FAILED_COMPUTE = 3

    @property
    def is_failure(self) -> bool:
        """Whether something failed."""
        return self >= Status.FAILED_PREPARE


def combine_status(a: Status, b: Status) -> Status:
    """Return the status of two memories that work as one.

    The first failure wins; otherwise it is a success if either is, and no update if neither is.
    """
    for status in (a, b):
        if status.is_failure:
            return status
    return Status.SUCCESS if Status.SUCCESS in (a, b) else Status.NO_UPDATE


class Extent(NamedTuple):
    """Which cells a compute graph has to look at.

    Attributes
    ----------
    head : int
        First cell of the slot (recurrent: of the gathered range); 0 when `is_full`.
    n_kv : int
        Cells, from the first (recurrent: from `head`), that the graph reads; all when `is_full`.
    size : int
        Cells that exist.
    is_full : bool
        True for the extent that a graph must be reserved for.
    """

    head: int
    n_kv: int
    size: int
    is_full: bool = False
