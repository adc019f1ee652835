"""How fast the selective scan of a mamba layer is, beside NumPy and a plain compiled loop.

    python bench/bench_scan.py [--rounds N] [--json]

All three take turns in one process; a ratio is the median over the turns. The results are compared
after timing. The size is that of mamba-130m: 1536 channels of 16 values, 512 tokens, one layer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from kvnumba.kernels.jit import njit
from kvnumba.runner.kernels.scan import BLOCK, scan_kernel


@njit()
def plain_kernel(out, s, dt, x, z, b, c, a, skip, bias):
    """The same recurrence as a plain loop, one value at a time."""
    for t in range(x.shape[0]):
        for d in range(x.shape[1]):
            raw = dt[t, d] + bias[d]
            step = raw if raw > 20 else math.log1p(math.exp(raw))
            total = np.float32(0)
            for i in range(a.shape[1]):
                s[d, i] = s[d, i] * math.exp(step * a[d, i]) + step * x[t, d] * b[t, i]
                total += s[d, i] * c[t, i]
            gate = z[t, d]
            out[t, d] = (total + skip[d] * x[t, d]) * gate / (1 + math.exp(-gate))


def with_numpy(out, s, dt, x, z, b, c, a, skip, bias):
    """The same recurrence in NumPy, one token at a time."""
    steps = np.logaddexp(np.float32(0), dt + bias)
    for t in range(len(x)):
        s *= np.exp(steps[t, :, None] * a)
        s += (steps[t] * x[t])[:, None] * b[t]
        out[t] = s @ c[t]
    out += skip * x
    out *= z / (1 + np.exp(-z))


class Case:
    """Random inputs of one layer."""

    def __init__(self, n: int, d_inner: int, d_state: int):
        rng = np.random.default_rng(0)
        self.rows = [rng.standard_normal((n, d_inner)).astype(np.float32) for _ in range(3)]
        self.states = [rng.standard_normal((n, d_state)).astype(np.float32) for _ in range(2)]
        self.a = -np.exp(rng.standard_normal((d_inner, d_state))).astype(np.float32)
        self.skip, self.bias = rng.standard_normal((2, d_inner)).astype(np.float32)
        self.s = np.zeros((d_inner, d_state), np.float32)
        self.outs = {name: np.empty((n, d_inner), np.float32) for name in ("ours", "numpy", "loop")}
        self.n_parts = numba.get_num_threads()
        self.work = np.empty((self.n_parts, 2, BLOCK), np.float32)
        self.new = np.empty((1, 1, self.s.size), np.float32)

    def ours(self) -> None:
        """Run the kernel that the runner uses."""
        scan_kernel(
            self.outs["ours"], self.new, self.work, np.zeros((1, self.s.size), np.float32),
            *self.rows, *self.states, self.a, self.skip, self.bias, self.n_parts,
        )  # fmt: skip

    def rival(self, run: Callable[..., None], name: str) -> None:
        """Run another implementation from the same start."""
        self.s[:] = 0
        run(self.outs[name], self.s, *self.rows, *self.states, self.a, self.skip, self.bias)


def measure(rounds: int) -> dict[str, Any]:
    """Time all three in turn; return milliseconds and ratios, results checked."""
    case = Case(512, 1536, 16)
    runs = {
        "ours": case.ours,
        "numpy": lambda: case.rival(with_numpy, "numpy"),
        "loop": lambda: case.rival(plain_kernel, "loop"),
    }
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    for name in ("numpy", "loop"):
        np.testing.assert_allclose(case.outs["ours"], case.outs[name], rtol=2e-3, atol=2e-3)
    ours = np.array(times["ours"])
    return {
        "threads": case.n_parts,
        **{f"{name}_ms": round(float(np.median(t)), 2) for name, t in times.items()},
        "times_faster_than_numpy": round(float(np.median(np.array(times["numpy"]) / ours)), 2),
        "times_faster_than_loop": round(float(np.median(np.array(times["loop"]) / ours)), 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.rounds)
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
