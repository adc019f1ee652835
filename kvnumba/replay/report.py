"""`Report`: how many values were compared, and which differ."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Mismatch:
    """One value that differs: where, what came out, what was recorded."""

    trace: int
    op: int
    field: str
    got: Any
    want: Any

    def __str__(self) -> str:
        return (
            f"trace {self.trace}, op {self.op}, {self.field}: got {self.got!r}, want {self.want!r}"
        )


@dataclass
class Report:
    """The outcome of a replay.

    Attributes
    ----------
    n_traces, n_ops, n_values : int
        Traces replayed, operations in them, single values compared.
    n_ops_here : int
        Index of the operation at work.
    mismatches : list of Mismatch
    details : dict
        Further figures, for example errors per step of a logits chain.
    """

    n_traces: int = 0
    n_ops: int = 0
    n_values: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    n_ops_here: int = 0

    def compare(self, name: str, got: Any, want: Any) -> None:
        """Compare one value, or two lists: their lengths, then entry by entry."""
        if isinstance(got, list) and isinstance(want, list):
            if len(got) != len(want):
                self.differ(f"{name} length", len(got), len(want))
            for i, (g, w) in enumerate(zip(got, want, strict=False)):
                self.compare(f"{name}[{i}]", g, w)
            return
        self.n_values += 1
        if type(got) is not type(want) or got != want:
            self.differ(name, got, want)

    def differ(self, name: str, got: Any, want: Any) -> None:
        """Note that a value of the operation at work differs."""
        if not isinstance(want, (int, float, str, type(None))):
            want = reprlib.repr(want)  # it may be long, or nested beyond what can be printed
        self.mismatches.append(Mismatch(self.n_traces, self.n_ops_here, name, got, want))
