"""How fast attention over the cells is, beside what the machine can do in the same run.

    python bench/bench_attend.py [--rounds N] [--quick] [--json]

Decode is compared with a plain read of the same bytes on as many threads, prefill with numpy's
sgemm; kernel and probe take turns, and the ratio is the median over the turns, because neighbours
on the machine slow both. Results are checked after timing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np

from kvnumba.kernels.attend import Scratch, attend_rows
from kvnumba.kernels.half import f32_to_f16_kernel
from kvnumba.kernels.jit import njit

SHAPES = ((9, 3, 64), (32, 8, 128))
"""Query heads, KV heads, values per head: SmolLM2-135M, and an 8B model."""


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


class Layers:
    """Rows of K and V of some layers, and one query to attend with."""

    def __init__(self, shape: tuple[int, int, int], kind: str, n: int, n_q: int, n_layer: int):
        n_head, self.n_head_kv, dim = shape
        rng = np.random.default_rng(0)
        self.kind, self.n_layer, self.scratch = kind, n_layer, Scratch()
        self.values = rng.standard_normal((n, self.n_head_kv * dim)).astype(np.float32)
        self.kv = np.empty((n_layer, 2, *self.values.shape), np.uint16 if kind == "f16" else "f4")
        for rows in self.kv.reshape(-1, *self.values.shape):
            if kind == "f16":
                f32_to_f16_kernel(self.values.reshape(-1), rows.reshape(-1))
            else:
                rows[:] = self.values
        self.q = rng.standard_normal((n_q, n_head, dim)).astype(np.float32)
        self.out = np.empty_like(self.q)
        self.cells = np.arange(n, dtype=np.int32)
        self.q_pos = np.full(n_q, n, np.int32)

    def attend(self) -> None:
        """Attend in every layer, as one forward pass does."""
        for k, v in self.kv:
            attend_rows(
                self.kind, self.kind, self.q, k, v, self.n_head_kv, self.cells, self.cells,
                self.q_pos, self.out, scale=self.q.shape[2] ** -0.5, scratch=self.scratch,
            )  # fmt: skip

    def check(self) -> None:
        """Compare the first and last query's result with float64 NumPy."""
        values = self.values.astype(np.float16) if self.kind == "f16" else self.values
        heads = values.reshape(len(values), self.n_head_kv, -1).astype(np.float64)
        n_group = self.q.shape[1] // self.n_head_kv
        for t in (0, -1):
            for head in range(self.q.shape[1]):
                rows = heads[:, head // n_group]
                s = rows @ self.q[t, head].astype(np.float64) * self.q.shape[2] ** -0.5
                p = np.exp(s - s.max())
                error = np.abs(p @ rows / p.sum() - self.out[t, head]).max()
                if not error < 1e-5:
                    raise SystemExit(f"wrong result: off by {error} at query {t}, head {head}")


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def take_turns(call: Callable, probe: Callable, rounds: int) -> tuple[float, float, float]:
    """Return the shortest times of both in seconds, and the median of probe time / call time."""
    call()
    probe()
    times = np.array([(seconds(call), seconds(probe)) for _ in range(rounds)])
    return times[:, 0].min(), times[:, 1].min(), float(np.median(times[:, 1] / times[:, 0]))


def bench_decode(shape: tuple, kind: str, n: int, rounds: int) -> dict[str, Any]:
    """Time one query over `n` cells of 30 layers (fewer where that is beyond 1 GiB)."""
    row_bytes = shape[1] * shape[2] * (2 if kind == "f16" else 4)
    layers = Layers(shape, kind, n, 1, max(1, min(30, (1 << 30) // (2 * n * row_bytes))))
    words, sums = layers.kv.reshape(-1).view(np.uint64), np.empty(numba.get_num_threads(), "u8")
    mine, read, ratio = take_turns(layers.attend, lambda: read_kernel(words, sums), rounds)
    layers.check()
    return {
        "case": f"decode {'/'.join(map(str, shape))} {kind} {n} cells x {layers.n_layer} layers",
        "ms": mine * 1e3,
        "rate": f"{layers.kv.nbytes / mine / 1e9:.1f} GB/s",
        "limit": f"read {layers.kv.nbytes / read / 1e9:.1f} GB/s",
        "ratio": ratio,
    }


def bench_prefill(shape: tuple, kind: str, n_q: int, n: int, rounds: int) -> dict[str, Any]:
    """Time `n_q` queries over `n` cells, all visible, against a product of square matrices."""
    layers = Layers(shape, kind, n, n_q, 1)
    a = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
    mine, gemm, ratio = take_turns(layers.attend, lambda: a @ a, rounds)
    layers.check()
    flops, gemm_flops = 4 * n_q * n * shape[0] * shape[2], 2 * 1024**3
    return {
        "case": f"prefill {'/'.join(map(str, shape))} {kind} {n_q} queries x {n} cells",
        "ms": mine * 1e3,
        "rate": f"{flops / mine / 1e9:.0f} GFLOP/s",
        "limit": f"sgemm {gemm_flops / gemm / 1e9:.0f} GFLOP/s",
        "ratio": ratio * flops / gemm_flops,
    }


def run(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the result of each case."""
    for shape in SHAPES[:1] if quick else SHAPES:
        for kind in ("f16", "f32"):
            for n in (512, 4096) if quick else (512, 4096, 32768):
                yield bench_decode(shape, kind, n, rounds)
            for n_q, n in ((512, 4096),) if quick else ((512, 4096), (64, 4096)):
                yield bench_prefill(shape, kind, n_q, n, min(rounds, 7))


def main() -> None:
    """Print a table, or one JSON list."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21, help="turns per case")
    parser.add_argument("--quick", action="store_true", help="SmolLM2's shape, up to 4096 cells")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    results = []
    for result in run(given.rounds, given.quick):
        results.append(result)
        if not given.json:
            print(
                f"{result['case']:48} {result['ms']:9.2f} ms  {result['rate']:>12}  "
                f"{result['limit']:>18}  ratio {result['ratio']:.2f}",
                flush=True,
            )
    if given.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
