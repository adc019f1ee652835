"""Run by test_recurrent_kill.py in a process of its own, which is killed while it works.

``python recurrent_killed.py FOLDER DEPTH SEED``: a cache in mapped files goes on for ever. Now and
then it writes a picture of its metadata beside them, as a durable commit would, and pins the rows
that the picture names.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np

from kvnumba.batch import Batch
from kvnumba.kernels.recurrent import name_rows_kernel
from kvnumba.recurrent import RecurrentCache
from kvnumba.recurrent_config import RecurrentConfig

N_SEQ, WIDTHS = 3, (5, 700)


def config_of(depth):
    return RecurrentConfig(2, WIDTHS[0], WIDTHS[1], n_seq_max=N_SEQ, n_rewind=depth)


def state_of(tokens, il, width):
    """The state that a token list leaves in a layer: every value depends on every token."""
    out = np.zeros(width, np.float32)
    for t in tokens:
        out = (out * np.float32(0.5) + np.arange(width) % 7 + t + il).astype(np.float32)
    return out


def states_after(tokens, n_states, il, width):
    n = len(tokens)
    return np.stack([state_of(tokens[: n - k], il, width) for k in range(n_states)][::-1])


def decode(cache, histories, rng):
    """One batch; now and then it is rolled back when half of it is written."""
    s, new = rng.randrange(N_SEQ), [rng.randrange(1, 9) for _ in range(rng.randint(1, 4))]
    (step,) = cache.prepare(Batch(new, seq_ids=s))
    step.apply()
    after = histories[s] + new
    for il in range(2):
        for_rows = [states_after(after, step.n_states, il, w)[None] for w in WIDTHS]
        step.write(il, *for_rows)
        if il == 0 and rng.random() < 0.2:
            step.rollback()
            return
    step.commit()
    histories[s] = after


def change(cache, histories, rng):
    s, other = rng.sample(range(N_SEQ), 2)
    if rng.random() < 0.5:
        cache.seq_cp(s, other)
        histories[other] = list(histories[s])
    elif histories[s]:
        p0 = max(0, len(histories[s]) - rng.randint(1, 3))
        if cache.seq_rm(s, p0, -1):
            histories[s] = histories[s][:p0]


def take_picture(cache, histories, path):
    fields = {"table": cache.cells.table, "tail": cache.cells.tail}
    fields |= {f"history{s}": np.array(h, np.int32) for s, h in enumerate(histories)}
    with open(path.with_suffix(".new"), "wb") as file:
        np.savez(file, **fields)
    os.replace(path.with_suffix(".new"), path)
    cache.rows.pinned[:] = 0
    name_rows_kernel(cache.cells.table, cache.rows.pinned)


def main():
    folder, depth, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    cache = RecurrentCache(config_of(depth), folder / "rows")
    histories = [[] for _ in range(N_SEQ)]
    n = 0
    while True:
        decode(cache, histories, rng)
        if rng.random() < 0.3:
            change(cache, histories, rng)
        if rng.random() < 0.1:
            histories_before = [h[-40:] for h in histories]
            if histories_before != histories:  # short histories keep the judge quick
                cache.clear()
                histories = [[] for _ in range(N_SEQ)]
        if n % 5 == 4 and any(histories):  # an empty picture would show nothing
            take_picture(cache, histories, folder / "picture.npz")
        n += 1
        if n == 10:
            print("working", flush=True)


if __name__ == "__main__":
    main()
