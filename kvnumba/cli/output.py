"""Printing shared by the commands: JSON, bytes for people, and a progress bar."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout, and nothing else."""
    json.dump(value, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")


def human_bytes(n: float) -> str:
    """Return a byte count for people, for example ``"22.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


class Progress:
    """A progress bar on stderr, shown only when that is a terminal."""

    WIDTH = 32

    def __init__(self, what: str):
        self._what, self._start = what, time.perf_counter()
        self._shown = sys.stderr.isatty()

    def __call__(self, n_done: int, n_total: int) -> None:
        """Draw `n_done` of `n_total`; ends the line when they are equal."""
        if not self._shown:
            return
        seconds = max(1e-9, time.perf_counter() - self._start)
        filled = self.WIDTH * n_done // max(1, n_total)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        print(
            f"\r{self._what} [{bar}] {n_done}/{n_total} tokens, {n_done / seconds:.0f}/s",
            end="\n" if n_done == n_total else "",
            file=sys.stderr,
            flush=True,
        )
