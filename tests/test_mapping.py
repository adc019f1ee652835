"""Reserved addresses over memory and files: plain arrays, lifetimes, forks, residency."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kvnumba import mapping
from kvnumba.errors import SessionError
from kvnumba.mapping import PAGE, MemoryBlock, Region, memory, up_to_page

pytestmark = pytest.mark.skipif(not mapping.IS_LINUX, reason="mapped files need Linux")
U8, F32 = np.dtype(np.uint8), np.dtype(np.float32)
ROOT = Path(__file__).parents[1]


def child(code, *args):
    """Run code in a fresh process; return its exit code (negative: killed by that signal)."""
    code = textwrap.dedent(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], env=env).returncode


def mapped_ranges():
    return Path("/proc/self/maps").read_text()


@pytest.fixture
def file(tmp_path):
    with open(tmp_path / "f", "w+b") as f:
        f.write(bytes(range(256)) * (8 * PAGE // 256))
        f.flush()
        yield f


def test_up_to_page():
    assert [up_to_page(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def test_nothing_reads_as_zeros_and_costs_nothing():
    region = Region(1 << 40)
    a = region.array(0, (1 << 40,), U8)
    assert type(a) is np.ndarray
    assert a[123] == a[(1 << 40) - 1] == 0


def test_a_stray_store_is_a_signal_not_silent_damage():
    code = """
        import numpy as np
        from kvnumba.mapping import Region
        Region(4096).array(0, (8,), np.dtype(np.uint8))[3] = 1
    """
    assert child(code) == -signal.SIGSEGV


def test_memory_is_writable_zeroed_and_can_be_dropped():
    region = memory(3 * PAGE)
    a = region.array(PAGE, (2 * PAGE,), U8)
    assert not a.any()
    assert region.n_resident(0, 3 * PAGE) == 0 or a[0] == 0
    a[:] = 7
    assert region.n_resident(PAGE, 2 * PAGE) == 2 * PAGE
    region.drop(0, 3 * PAGE)
    assert not a.any()


def test_ranges_of_a_file_side_by_side(file):
    region = Region(4 * PAGE)
    region.map_file(0, file.fileno(), 4 * PAGE, PAGE)
    region.map_file(PAGE, file.fileno(), 0, PAGE)
    a = region.array(0, (3 * PAGE,), U8)
    a[0], a[PAGE + 1] = 99, 98
    file.seek(4 * PAGE)
    assert file.read(1) == b"\x63"
    file.seek(0)
    assert file.read(2) == b"\x00\x62"
    assert not a[2 * PAGE :].any()


def test_arrays_have_the_asked_shape_and_stay_inside():
    region = memory(PAGE)
    a = region.array(64, (4, 8), F32)
    assert (a.shape, a.dtype, a.flags.c_contiguous, a.flags.writeable) == ((4, 8), F32, True, True)
    assert a.flags.aligned
    for offset, n in ((-1, 1), (0, PAGE + 1), (PAGE, 1)):
        with pytest.raises(SessionError, match="outside"):
            region.array(offset, (n,), U8)


def test_the_last_view_unmaps():
    region = memory(PAGE)
    name = f"{region.address:x}-"
    view = region.array(0, (PAGE,), U8)[8:16]
    view[:] = 5
    del region
    gc.collect()
    assert name in mapped_ranges()
    assert (view == 5).all()
    address = view.ctypes.data
    del view
    gc.collect()
    lines = [line.split()[0].split("-") for line in mapped_ranges().splitlines()]
    assert not any(int(a, 16) <= address < int(b, 16) for a, b in lines)


def test_close_leaves_zeros_under_old_views(file):
    region = Region(2 * PAGE)
    region.map_file(0, file.fileno(), 0, PAGE)
    a = region.array(0, (2 * PAGE,), U8)
    assert a[5] == 5
    region.close()
    region.close()
    assert not a.any()


def test_too_many_addresses():
    with pytest.raises(SessionError, match="cannot map"):
        Region(1 << 62)


def test_a_forked_child_reads_but_cannot_store(file, tmp_path):
    code = """
        import os, sys, numpy as np
        from kvnumba.mapping import PAGE, Region
        with open(sys.argv[1], "r+b") as f:
            region = Region(PAGE)
            region.map_file(0, f.fileno(), 0, PAGE)
        a = region.array(0, (PAGE,), np.dtype(np.uint8))
        a[1] = 42
        def status(use):
            pid = os.fork()
            if pid == 0:
                use()
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        def store():
            a[1] = 43
        def read():
            os._exit(int(a[1]))
        assert (status(store), status(read), a[1]) == (-11, 42, 42)
        a[1] = 44
    """
    assert child(code, tmp_path / "f") == 0
    assert (tmp_path / "f").read_bytes()[1] == 44


def test_the_portable_block_does_the_same_as_far_as_it_goes():
    block = MemoryBlock(100)
    a = block.array(8, (2, 4), F32)
    assert (a.shape, a.any()) == ((2, 4), False)
    a[:] = 3
    block.drop(8, a.nbytes)
    assert not a.any()
    assert block.n_resident(0, 64) == 64
    block.close()
    assert a.shape == (2, 4)


def test_elsewhere_memory_is_portable(monkeypatch):
    monkeypatch.setattr(mapping, "IS_LINUX", False)
    assert isinstance(memory(10), MemoryBlock)
