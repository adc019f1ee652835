"""How fast the runner's forward pass is, beside what the machine can do in the same run.

    python bench/bench_runner.py [--model FILE] [--context 512 4096] [--json]

Weights read per second are compared with a plain read of as many bytes, products of long batches
with numpy's sgemm. All figures are the best of several runs; the share of the CPU that other
processes took meanwhile is printed, because it spoils them. Results are checked after timing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from kvnumba.batch import Batch
from kvnumba.kernels.jit import njit
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.linear import Group, Multiplier
from kvnumba.runner.llama import LlamaModel
from kvnumba.runner.loading import default_model_path
from kvnumba.runner.ops import rms_norm, rope_tables, rotate, swiglu
from kvnumba.runner.quants import decode
from kvnumba.unified import UnifiedCache


class NoCache:
    """A step that stores nothing and attends to nothing: what is left is the forward pass."""

    def write(self, il: int, k: np.ndarray, v: np.ndarray) -> None:
        """Do nothing."""

    def attend(self, il: int, q: np.ndarray, out: np.ndarray) -> None:
        """Do nothing."""


@njit(parallel=True)
def read_kernel(words, out):
    """Add up 64-bit words, one part per thread: the fastest way to read memory there is here."""
    for part in numba.prange(out.shape[0]):
        n = words.shape[0] // out.shape[0]
        piece = words[part * n : (part + 1) * n]
        total = np.uint64(0)
        for j in range(piece.shape[0]):
            total += piece[j]
        out[part] = total


def best_ms(call: Callable[[], object], n_runs: int) -> float:
    """Return the shortest of several runs, in milliseconds."""
    times = []
    for _ in range(n_runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def cpu_ticks() -> int:
    """Return the clock ticks that all processes have used since boot; 0 where unknown."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0
    return sum(map(int, fields)) - int(fields[3]) - int(fields[4])


def groups_of(model: LlamaModel) -> list[Group]:
    """Return the matrices of all layers, those with a common input together."""
    return [g for la in model._layers for g in (la.qkv, la.attn_output, la.gate_up, la.ffn_down)]


def bytes_of(groups: list[Group]) -> int:
    """Return the bytes of weights."""
    return sum(w.nbytes for group in groups for w in group.weights)


def product_call(groups: list[Group], n: int, n_threads: int) -> Callable[[], None]:
    """Return a function that multiplies `n` tokens with all the matrices."""
    rng, multiply = np.random.default_rng(0), Multiplier(n_threads)
    xs = {k: rng.standard_normal((n, k)).astype(np.float32) for k in {g.n_in for g in groups}}
    outs = [tuple(np.empty((n, m), np.float32) for m in g.n_outs) for g in groups]

    def call() -> None:
        for group, out in zip(groups, outs, strict=True):
            multiply(xs[group.n_in], group, out)

    call()
    return call


def glue_call(model: LlamaModel, n: int, n_threads: int) -> Callable[[], None]:
    """Return a function that does all of a forward pass but products and attention."""
    p = model.params
    x, h, more = (np.ones((n, p.n_embd), np.float32) for _ in range(3))
    q = np.ones((n, p.n_head * p.head_dim), np.float32)
    k = np.ones((n, p.n_head_kv * p.head_dim), np.float32)
    gate, up = (np.ones((n, p.n_ff), np.float32) for _ in range(2))
    pos = np.arange(n, dtype=np.int32)

    def call() -> None:
        tables = rope_tables(p.rope, pos)
        for layer in model._layers:
            rms_norm(x, layer.attn_norm, p.eps, h, n_threads, more)
            rotate(q, k, tables, p.head_dim, False, n_threads)
            rms_norm(x, layer.ffn_norm, p.eps, h, n_threads, more)
            swiglu(gate, up, n_threads)

    call()
    return call


def check_products(model: LlamaModel, n: int, n_threads: int) -> float:
    """Return the largest error of a product against float64, relative to the largest result."""
    worst = 0.0
    for m in [m for group in groups_of(model)[:4] for m in group.linears]:
        x = np.random.default_rng(1).standard_normal((n, m.n_in)).astype(np.float32)
        out = np.empty((n, m.n_out), np.float32)
        Multiplier(n_threads)(x, Group(m), (out,))
        want = x.astype(np.float64) @ decode(m.rows).astype(np.float64).T
        worst = max(worst, float(np.abs(out - want).max() / np.abs(want).max()))
    return worst


def bench_decode(model: LlamaModel, n_runs: int) -> dict[str, float]:
    """Time the parts of one token."""
    n_threads = numba.get_num_threads()
    groups, head = groups_of(model), [model._head]
    n_bytes, n_head_bytes = bytes_of(groups), bytes_of(head)
    words = np.ones((n_bytes + n_head_bytes) // 8, np.uint64)
    sums = np.empty(n_threads, np.uint64)
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: read_kernel(words, sums),
        "layers": product_call(groups, 1, n_threads),
        "head": product_call(head, 1, n_threads),
        "glue": glue_call(model, 1, n_threads),
        "forward without cache": lambda: model.forward(
            np.zeros(1, np.int32), np.zeros(1, np.int32), NoCache()
        ),
    }
    ms = dict.fromkeys(calls, float("inf"))
    for _ in range(n_runs):
        for name, call in calls.items():
            ms[name] = min(ms[name], best_ms(call, 2))
    result = {f"{name}_ms": value for name, value in ms.items()}
    result["weights_GBps"] = (n_bytes + n_head_bytes) / (ms["layers"] + ms["head"]) / 1e6
    result["read_GBps"] = words.nbytes / ms["read"] / 1e6
    result["weights_to_read"] = result["weights_GBps"] / result["read_GBps"]
    result["error"] = check_products(model, 1, n_threads)
    return result


def bench_prefill(model: LlamaModel, n: int, n_runs: int) -> dict[str, float]:
    """Time the parts of a batch of `n` tokens."""
    n_threads = numba.get_num_threads()
    groups, p = groups_of(model), model.params
    n_flop = 2 * n * sum(group.n_weights for group in groups)
    a = np.ones((n, p.n_embd), np.float32)
    b = np.ones((p.n_ff, p.n_embd), np.float32)
    c = np.empty((n, p.n_ff), np.float32)
    tokens, pos = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    products, glue = product_call(groups, n, n_threads), glue_call(model, n, n_threads)
    ms = {"products": float("inf"), "sgemm": float("inf"), "glue": float("inf"), "forward": 1e9}
    for _ in range(n_runs):
        ms["products"] = min(ms["products"], best_ms(products, 1))
        ms["sgemm"] = min(ms["sgemm"], best_ms(lambda: np.matmul(a, b.T, out=c), 5))
        ms["glue"] = min(ms["glue"], best_ms(glue, 1))
        ms["forward"] = min(
            ms["forward"], best_ms(lambda: model.forward(tokens, pos, NoCache()), 1)
        )
    gflops = n_flop / ms["products"] / 1e6
    sgemm = 2 * n * p.n_embd * p.n_ff / ms["sgemm"] / 1e6
    return {
        "products_ms": ms["products"],
        "glue_ms": ms["glue"],
        "forward without cache_ms": ms["forward"],
        "products_GFLOPs": gflops,
        "sgemm_GFLOPs": sgemm,
        "products_to_sgemm": gflops / sgemm,
        "error": check_products(model, n, n_threads),
    }


def bench_context(model: LlamaModel, n_ctx: int, n_runs: int) -> dict[str, float]:
    """Time the reading of `n_ctx` tokens through a cache, and tokens after them."""
    tokens = np.random.default_rng(0).integers(0, model.n_vocab, n_ctx + n_runs).astype(np.int32)
    with UnifiedCache(model.config(n_ctx=n_ctx + n_runs + 64)) as cache:
        _read(model, cache, tokens[:64], 0)  # whatever is compiled or touched first
        _read(model, cache, tokens[:1], 64)
        cache.clear()
        start = time.perf_counter()
        for first in range(0, n_ctx, cache.config.n_ubatch):
            _read(
                model, cache, tokens[first : first + cache.config.n_ubatch][: n_ctx - first], first
            )
        prefill = time.perf_counter() - start
        times = [
            best_ms(lambda i=i: _read(model, cache, tokens[i : i + 1], i), 1)
            for i in range(n_ctx, n_ctx + n_runs)
        ]
    return {
        "prefill_tokens_per_s": n_ctx / prefill,
        "decode_ms_min": min(times),
        "decode_ms_median": float(np.median(times)),
    }


def _read(model: LlamaModel, cache: UnifiedCache, tokens: np.ndarray, first: int) -> np.ndarray:
    pos = np.arange(first, first + len(tokens), dtype=np.int32)
    (step,) = cache.prepare(Batch(tokens, pos, 0), n_ubatch=len(tokens))
    with step:
        return model.forward(tokens, pos, step)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of the runner's forward pass.")
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2)")
    parser.add_argument("--runs", type=int, default=10, help="repetitions, the best counts")
    parser.add_argument("--batch", type=int, nargs="*", default=[8, 32, 128, 512])
    parser.add_argument("--context", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = LlamaModel(GGUFFile(args.model or default_model_path()))
    wall, own, ticks = time.perf_counter(), time.process_time(), cpu_ticks()
    result: dict[str, Any] = {"threads": numba.get_num_threads()}
    result["decode"] = bench_decode(model, args.runs)
    for n in args.batch:
        result[f"batch of {n}"] = bench_prefill(model, n, max(2, args.runs // 3))
    for n in args.context:
        result[f"context {n}"] = bench_context(model, n, max(8, args.runs))
    wall, own = time.perf_counter() - wall, time.process_time() - own
    result["cores taken by others"] = ((cpu_ticks() - ticks) / 100 - own) / wall
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, values in result.items():
        print(name if isinstance(values, dict) else f"{name}: {values:.2f}")
        for key, value in values.items() if isinstance(values, dict) else ():
            print(f"  {key:26s} {value:10.3g}" if key == "error" else f"  {key:26s} {value:10.2f}")


if __name__ == "__main__":
    main()
