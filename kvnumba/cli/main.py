"""The ``kvnumba`` command: one subcommand per file; exit codes 0 good, 1 no, 2 could not."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvnumba import __version__
from kvnumba.errors import KVCacheError

COMMANDS = ("run", "replay", "plan", "map", "warmup")


class _Parser(argparse.ArgumentParser):
    """argparse, with errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; documentation is generated from it too."""
    from kvnumba.cli import map_cells, plan, replay, run, warmup

    parser = _Parser(prog="kvnumba", description="A memory-mapped KV cache for CPUs.")
    parser.add_argument("--version", action="version", version=f"kvnumba {__version__}")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log what the library does to stderr"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (run, replay, plan, map_cells, warmup):
        module.add_parser(commands)
    return parser


def run_command(argv: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if args.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        code: int = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KVCacheError as error:
        return _fail(args, error)
    except BrokenPipeError:  # the reader of our output has gone; Python flushes again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(args, "nobody reads the output any more")
    except OSError as error:
        return _fail(args, error)
    except KeyboardInterrupt:
        return _fail(args, "interrupted")
    return code


def _fail(args: argparse.Namespace, error: Any) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"kvnumba {args.command}: {message}", file=sys.stderr)
    return 2
