"""Whatever a kill interrupts: rows of states that a commit names are as they were."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from recurrent_killed import N_SEQ, WIDTHS, config_of, state_of

from kvnumba.kernels.recurrent import KEPT, RING
from kvnumba.packs import MappedRows

DRIVER = Path(__file__).with_name("recurrent_killed.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mapped files need Linux")


def work_and_kill(folder, depth, seed):
    work = subprocess.Popen(
        [sys.executable, str(DRIVER), str(folder), str(depth), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert work.stdout.readline() == "working\n"
    time.sleep(random.Random(seed).random() * 0.3)
    work.send_signal(signal.SIGKILL)
    work.wait()
    work.stdout.close()


def open_rows(folder, depth):
    config = config_of(depth).rows_config
    (pack,) = (folder / "rows").iterdir()
    from kvnumba.files import File
    from kvnumba.pack import read_header

    file = File(pack)
    n_rows = config.n_ctx
    pack_id, _ = read_header(file)
    file.close()
    rows = MappedRows(config, folder / "rows", b"\0" * 16, [pack_id])
    rows.reserve(n_rows, exactly=True)
    return rows


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_kill_leaves_every_state_of_the_last_picture(tmp_path, depth, seed):
    work_and_kill(tmp_path, depth, seed)
    rows = open_rows(tmp_path, depth)
    n_judged = 0
    with np.load(tmp_path / "picture.npz") as picture:
        for s in range(N_SEQ):
            tokens, i = picture[f"history{s}"].tolist(), picture["tail"][s]
            assert (i < 0) == (not tokens)
            for k in range(picture["table"][i, KEPT] if tokens else 0):
                row = picture["table"][i, RING + k]
                kept = tokens[: len(tokens) - k]
                for il in range(2):
                    assert np.array_equal(rows.k[il][row], state_of(kept, il, WIDTHS[0]))
                    assert np.array_equal(rows.v[il][row], state_of(kept, il, WIDTHS[1]))
                n_judged += 1
    assert n_judged
    rows.close()
