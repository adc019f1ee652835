"""``kvnumba map``: a picture of a session's cells in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from kvnumba.cli.output import human_bytes, print_json

DESCRIPTION = (
    "Show which sequence holds which cells of a session: a digit or letter is a sequence, '+' "
    "several, '.' a free cell."
)
MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    p = commands.add_parser("map", help="picture of the cells", description=DESCRIPTION)
    p.add_argument("path", metavar="PATH", help="session folder")
    p.add_argument("--width", type=int, default=64, metavar="N", help="cells a line")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do the command; return its exit code."""
    from kvnumba.store.session import Session

    info = Session.inspect(args.path)
    view, config = info.cells, info.config
    owners = owner_marks(view.seq[:, : view.used.shape[0]], view.n_cells)
    sequences = [
        {
            "seq_id": s,
            "n_cells": len(view.members(s)),
            "pos_min": int(view.pos_bounds(s)[0]),
            "pos_max": int(view.pos_bounds(s)[1]),
        }
        for s in range(config.n_seq_max)
        if view.seq[s].any()
    ]
    per_cell = config.bytes_per_cell_k + config.bytes_per_cell_v
    if args.json:
        print_json(
            {
                "path": str(args.path),
                "n_cells": view.n_cells,
                "n_ctx": config.n_ctx,
                "used": int(view.n_used),
                "sequences": sequences,
                "cells": "".join(owners),
                "used_bytes": int(view.n_used) * per_cell,
            }
        )
        return 0
    for line in picture(owners, max(8, args.width)):
        print(line)
    for s in sequences:
        print(
            f"sequence {s['seq_id']}: {s['n_cells']} cells, positions {s['pos_min']} to "
            f"{s['pos_max']}"
        )
    used = int(view.n_used)
    print(f"{used} of {config.n_ctx} cells used, {human_bytes(used * per_cell)} of K and V")
    return 0


def owner_marks(seq: np.ndarray, n_cells: int) -> list[str]:
    """Return one character per cell: its owner's mark, ``+`` for several, ``.`` for none.

    Parameters
    ----------
    seq : ndarray, shape (n_seq_max, n_words), uint64
        Bitmaps of the sequences over the cells.
    n_cells : int
    """
    marks = ["."] * n_cells
    for s in range(seq.shape[0]):
        if not seq[s].any():
            continue
        bits = np.unpackbits(seq[s].view(np.uint8), bitorder="little")[:n_cells]
        for i in np.flatnonzero(bits):
            marks[i] = MARKS[s % len(MARKS)] if marks[i] == "." else "+"
    return marks


def picture(marks: list[str], width: int) -> list[str]:
    """Return lines of `width` cells with their first cell's number; equal lines are folded."""
    rows = ["".join(marks[i : i + width]) for i in range(0, len(marks), width)]
    lines: list[str] = []
    n_same = 0
    for n, row in enumerate(rows):
        is_last = n + 1 == len(rows)
        if n and row == rows[n - 1] and not is_last:
            n_same += 1
            continue
        if n_same:
            lines.append(f"{'':>9} (the same {n_same} more times)")
        n_same = 0
        lines.append(f"{n * width:>9} {row}")
    return lines
