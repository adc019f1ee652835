"""``kvnumba warmup``: compile every kernel once, so that the first real run does not wait."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from kvnumba.cli.output import print_json
from kvnumba.cli.warm_caches import (
    warm_cache,
    warm_conversions,
    warm_mamba,
    warm_masks,
    warm_recurrent,
    warm_session,
)
from kvnumba.errors import ModelFileError

DESCRIPTION = (
    "Compile every kernel of the cache, and those that a model needs, into the cache on disk. "
    "Without --model: SmolLM2-135M-Instruct if it is installed."
)


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    p = commands.add_parser("warmup", help="compile all kernels", description=DESCRIPTION)
    p.add_argument("--model", metavar="GGUF", help="also compile what this model needs")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do the command; return its exit code."""
    start = time.perf_counter()
    for type_name in ("f32", "f16", "bf16"):
        _progress(f"cache kernels, {type_name}")
        for v_trans in (False, True):
            warm_cache(type_name, v_trans)
        warm_recurrent(type_name)
    warm_conversions()
    warm_masks()
    warm_mamba()
    if sys.platform == "linux":
        warm_session()
    model = _model_path(args.model)
    if model is not None:
        _progress("model kernels")
        warm_model(model)
    seconds = time.perf_counter() - start
    compiled, idle = kernel_names()
    if args.json:
        print_json(
            {
                "n_kernels": len(compiled),
                "not_compiled": idle,
                "model": None if model is None else str(model),
                "seconds": round(seconds, 3),
            }
        )
    else:
        print(f"{len(compiled)} kernels ready in {seconds:.1f} s")
    return 0


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[Kcompiling {what} ...", end="", file=sys.stderr, flush=True)
        if what == "model kernels":
            print("\r\x1b[K", end="", file=sys.stderr)


def _model_path(given: str | None) -> Any:
    from kvnumba.runner.loading import default_model_path

    if given is not None:
        return given
    try:
        return default_model_path()
    except ModelFileError:
        return None


def warm_model(path: Any) -> None:
    """Run a model on one, a few and many tokens."""
    from kvnumba.batch import Batch
    from kvnumba.runner.loading import Model
    from kvnumba.unified import UnifiedCache

    net = Model(path).net
    with UnifiedCache(net.config(n_ctx=128)) as cache:
        for n in (1, 3, 64):
            tokens = np.zeros(n, np.int32)
            (step,) = cache.prepare(Batch(tokens))
            with step:
                net.forward(tokens, step.pos, step, None)


def kernel_names() -> tuple[list[str], list[str]]:
    """Return the compiled functions of the loaded modules: those ready, and those never called."""
    ready, idle = set(), set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("kvnumba."):
            continue
        for value in list(vars(module).values()):
            if hasattr(value, "py_func") and value.__module__ == name:
                label = f"{name.removeprefix('kvnumba.')}.{value.__name__}"
                # Helpers are compiled into their callers.
                if getattr(value, "signatures", None):
                    ready.add(label)
                elif value.__name__.endswith("_kernel"):
                    idle.add(label)
    return sorted(ready), sorted(idle)
