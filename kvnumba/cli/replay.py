"""``kvnumba replay``: do again what a real llama.cpp did, and compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvnumba.cli.output import print_json
from kvnumba.errors import ConfigError

DESCRIPTION = (
    "Replay an operation trace (.jsonl or .jsonl.gz) and compare after every operation, or run a "
    "logits chain (.json) on its model. Exit code 1 if anything differs."
)
SHOWN = 20


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    p = commands.add_parser("replay", help="replay a recorded trace", description=DESCRIPTION)
    p.add_argument("file", metavar="FILE", help="trace (.jsonl, .jsonl.gz) or chain (.json)")
    p.add_argument("--model", metavar="GGUF", help="model of a chain (default: as the chain says)")
    p.add_argument("--type-k", metavar="T", help="element type of K (default: the chain's)")
    p.add_argument("--type-v", metavar="T", help="element type of V (default: the chain's)")
    p.add_argument("--logits", metavar="OUT.npz", help="write the chain's logits there")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do the command; return its exit code."""
    path = Path(args.file)
    if path.suffix == ".json":
        from kvnumba.replay.chains import replay_chain

        report = replay_chain(path, args.model, args.type_k, args.type_v, args.logits)
    else:
        if args.model or args.type_k or args.type_v or args.logits:
            raise ConfigError("--model, --type-k, --type-v and --logits go with a .json chain")
        from kvnumba.replay.traces import replay_traces

        report = replay_traces(path)
    n = len(report.mismatches)
    if args.json:
        print_json(
            {
                "file": str(path),
                "traces": report.n_traces,
                "ops": report.n_ops,
                "values": report.n_values,
                "n_mismatches": n,
                "mismatches": [vars(m) for m in report.mismatches[:1000]],
                **report.details,
            }
        )
    else:
        for mismatch in report.mismatches[:SHOWN]:
            print(mismatch)
        if n > SHOWN:
            print(f"... and {n - SHOWN} more")
        for key, value in report.details.items():
            print(f"{key}: {value}")
        print(
            f"{path.name}: {report.n_traces} traces, {report.n_ops} operations, "
            f"{report.n_values} values compared, {n} mismatches"
        )
    return 1 if n else 0
