"""Trace files (``.jsonl`` or ``.jsonl.gz``): reading them, and asking for what must be there."""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvnumba.errors import StateFormatError

# A trace holds the state of every cell after every operation: no recording comes near this.
MAX_CELLS = 1 << 20


def read_traces(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the traces of a file, one JSON object a line; blank lines at the end are allowed.

    Raises
    ------
    StateFormatError
        If the file cannot be read or a line is no trace.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    blank = 0
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for n, line in enumerate(lines, 1):
                if not line.strip():
                    blank = blank or n
                    continue
                if blank:
                    raise StateFormatError(f"{path}, line {blank} is blank; a trace is wanted")
                yield _parse_trace(line, f"{path}, line {n}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise StateFormatError(f"{path} cannot be read as traces: {error}") from None


def _parse_trace(line: str, where: str) -> dict[str, Any]:
    try:
        trace = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StateFormatError(f"{where} cannot be read as JSON: {error}") from None
    if not isinstance(trace, dict) or not {"n_cells", "n_seq_max", "ops"} <= set(trace):
        raise StateFormatError(f"{where}: no trace; n_cells, n_seq_max and ops are wanted")
    if not isinstance(trace["ops"], list) or not trace["ops"]:
        raise StateFormatError(f"{where}: ops must be a list of at least one operation")
    return trace


def recorded(values: dict[str, Any], key: str) -> Any:
    """Return a field of an operation, or of the cells after it.

    Raises
    ------
    StateFormatError
        If it was not recorded.
    """
    if key not in values:
        raise StateFormatError(f"{values.get('op')!r} lacks the key {key!r}")
    return values[key]


def recorded_list(values: dict[str, Any], key: str) -> list[Any]:
    """Return such a field, which must be a list."""
    found = recorded(values, key)
    if not isinstance(found, list):
        raise StateFormatError(f"{key} is {reprlib.repr(found)}; a list is wanted")
    return found


def check_n_cells(n_cells: int) -> None:
    """Raise StateFormatError for more cells than any recording has."""
    if n_cells > MAX_CELLS:
        raise StateFormatError(f"n_cells {n_cells} is beyond {MAX_CELLS}")
