"""``kvnumba warmup``: compile every kernel once, so that the first real run does not wait."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np

from kvnumba.cli.output import print_json
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
    warm_conversions()
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


def warm_cache(type_name: str, v_trans: bool) -> None:
    """Run every operation of a small cache once."""
    from kvnumba.batch import Batch
    from kvnumba.config import CacheConfig, RopeConfig
    from kvnumba.unified import UnifiedCache

    config = CacheConfig(
        n_layer=2,
        n_ctx=128,
        n_head_kv=1,
        head_dim=8,
        n_seq_max=4,
        type_k=type_name,
        type_v=type_name,
        v_trans=v_trans,
        rope=(RopeConfig(8), RopeConfig(8, "neox")),
        shared="copy",
        placement="ring" if v_trans else "scatter",
    )
    with UnifiedCache(config) as cache:
        for n, seq_id in ((64, 0), (1, 0), (3, 1)):
            (step,) = cache.prepare(Batch(np.zeros(n, np.int32), seq_ids=seq_id))
            row, q = np.zeros((n, 8), np.float32), np.zeros((n, 2, 8), np.float32)
            with step:
                for il in range(2):
                    step.write(il, row, row)
                    step.attend(il, q)
        cache.seq_cp(0, 2, 0, 8)
        cache.seq_rm(0, 20, 30)
        cache.seq_add(0, 0, -1, 1)
        cache.seq_div(1, 0, -1, 2)
        cache.defrag()
        cache.update()
        cache.seq_rm(-1, 50, -1)
        cache.find_slot(2, contiguous=True)
        cache.place(cache.find_slot(2, contiguous=False), [90, 91], 3)
        cache.rollback()
        cache.view()
        cache.seq_keep(0)
        cache.cells.tokens_of(0)
        cache.cells.rebuild()
        cache.check()
        for read in (cache.layers.read_k, cache.layers.read_v):
            read(0, np.arange(2, dtype=np.int32))


def warm_session() -> None:
    """Make a small session, commit to it, change it, and open it again."""
    from kvnumba.batch import Batch
    from kvnumba.config import CacheConfig, RopeConfig
    from kvnumba.store.fingerprint import Fingerprint
    from kvnumba.store.session import Session

    config = CacheConfig(n_layer=1, n_ctx=64, n_head_kv=1, head_dim=8, rope=RopeConfig(8))
    fingerprint = Fingerprint.of_config(config)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "session")
        with Session.create(path, config, fingerprint) as session:
            (step,) = session.cache.prepare(Batch([1, 2, 3]))
            with step:
                step.write(0, *np.zeros((2, 3, 8), np.float32))
            session.commit()
            session.cache.seq_add(0, 1, -1, 1)
            session.commit()
        Session.open(path, fingerprint).close()


def warm_conversions() -> None:
    """Convert arrays between float32 and the half types once."""
    from kvnumba.kernels import half

    wide, narrow = np.zeros(8, np.float32), np.zeros(8, np.uint16)
    half.f16_to_f32_kernel(narrow, wide)
    half.bf16_to_f32_kernel(narrow, wide)
    half.f32_to_f16_kernel(wide, narrow)
    half.f32_to_bf16_kernel(wide, narrow)


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
