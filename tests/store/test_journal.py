"""The journal: whole records or none, whatever is done to the file."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from kvnumba.errors import DamagedError, DiskFullError, SessionError, StateFormatError
from kvnumba.store import journal as module
from kvnumba.store.blocks import CELLS, USER
from kvnumba.store.journal import (
    AHEAD,
    Journal,
    later_seq,
    parse_blocks,
    read_records,
    record_bytes,
)

RECORDS = [[(USER, b"one")], [(CELLS, b""), (USER, b"12345678")], [], [(USER, bytes(100))]]
GENERATION, FIRST = 3, 17


@pytest.fixture
def journal(tmp_path):
    journal = Journal.create(tmp_path, GENERATION, FIRST)
    yield journal
    journal.close()


def read(data, generation=GENERATION, seq=FIRST):
    return list(read_records(data, generation, seq))


def content(records):
    return [[(k, bytes(d)) for k, d in parse_blocks(r.payload, "x")] for r in records]


def contents_of(journal):
    return content(read(journal.file.path.read_bytes()))


def test_records_come_back_in_order(journal):
    for n, changes in enumerate(RECORDS):
        journal.append(changes)
        assert contents_of(journal) == RECORDS[: n + 1]
    assert (journal.seq, journal.n_records) == (FIRST + 4, 4)
    records = read(journal.file.path.read_bytes())
    assert [r.seq for r in records] == [18, 19, 20, 21]
    assert records[-1].end == journal.end
    assert all(r.end % 8 == 0 for r in records)


def test_one_commit_is_one_write(journal, monkeypatch):
    calls = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *a: calls.append(a) or real(*a))
    monkeypatch.setattr(os, "posix_fallocate", None)  # there is space ahead
    journal.append(RECORDS[1])
    assert len(calls) == 1


def test_other_generations_and_numbers_end_the_reading():
    data = record_bytes(GENERATION, FIRST + 1, RECORDS[0])
    assert len(read(data)) == 1
    assert read(data, generation=GENERATION + 1) == []
    assert read(data, seq=FIRST + 1) == []
    assert read(data, seq=FIRST - 1) == []
    assert len(read(data * 2)) == 1


def test_every_flipped_byte_ends_the_reading_before_its_record():
    parts = [record_bytes(GENERATION, FIRST + 1 + n, c) for n, c in enumerate(RECORDS)]
    ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
    data = b"".join(parts)
    for i in range(len(data)):
        for bit in (0, 7):
            bad = bytearray(data)
            bad[i] ^= 1 << bit
            n_good = sum(end <= i for end in ends)
            assert content(read(bytes(bad))) == RECORDS[:n_good], (i, bit)


def test_every_truncation_ends_the_reading_before_its_record():
    parts = [record_bytes(GENERATION, FIRST + 1 + n, c) for n, c in enumerate(RECORDS)]
    data = b"".join(parts)
    ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
    for n in range(len(data)):
        for tail in (b"", bytes(5000), b"KVJ1", os.urandom(50)):
            n_good = sum(end <= n for end in ends)
            assert content(read(data[:n] + tail)) == RECORDS[:n_good], n


def test_resuming_cuts_what_is_not_whole(journal, tmp_path):
    journal.append(RECORDS[0])
    end = journal.end
    journal.append(RECORDS[1])
    journal.close()
    again = Journal.resume(tmp_path, GENERATION, FIRST + 1, end, 1)
    assert again.file.size == end
    again.append(RECORDS[3])
    assert contents_of(again) == [RECORDS[0], RECORDS[3]]
    assert any(again.file.path.read_bytes()[again.end :]) is False
    again.close()


def test_space_is_reserved_ahead(journal):
    assert journal.file.size >= AHEAD
    journal.append([(USER, bytes(3 * AHEAD))])
    assert journal.file.size >= journal.end
    assert contents_of(journal) == [[(USER, bytes(3 * AHEAD))]]


def test_a_full_disk_changes_nothing_and_passes(journal, monkeypatch):
    journal.append(RECORDS[0])
    size, blocks = journal.file.size, os.fstat(journal.file.fd).st_blocks
    real, tries = os.posix_fallocate, []

    def full(fd, offset, length):
        tries.append(length)
        real(fd, offset, length)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as m:
        m.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFullError, match="no room"):
            journal.append([(USER, bytes(size))])
    assert len(tries) == 2
    assert (journal.file.size, os.fstat(journal.file.fd).st_blocks) == (size, blocks)
    journal.append(RECORDS[1])
    assert contents_of(journal) == RECORDS[:2]


def test_the_least_space_is_tried_when_there_is_none_ahead(journal, monkeypatch):
    real = os.posix_fallocate

    def nearly_full(fd, offset, length):
        if length > 10_000:
            raise OSError(errno.ENOSPC, "full")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    big = [(USER, bytes(AHEAD + 100))]
    journal.append(big)
    assert contents_of(journal) == [big]


def test_a_short_write_is_undone(journal, monkeypatch):
    journal.append(RECORDS[0])
    real = os.pwrite
    with monkeypatch.context() as m:
        m.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: len(data) // 2], at))
        with pytest.raises(DiskFullError):
            journal.append(RECORDS[3])
    assert journal.file.size == journal.end
    journal.append(RECORDS[1])
    assert contents_of(journal) == RECORDS[:2]


def test_what_cannot_be_undone_ends_the_journal(journal, monkeypatch):
    journal.append(RECORDS[0])

    def failing(*args):
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as m:
        m.setattr(os, "pwrite", failing)
        m.setattr(os, "ftruncate", failing)
        with pytest.raises(SessionError, match="I/O error"):
            journal.append(RECORDS[1])
    with pytest.raises(SessionError, match="open the session again"):
        journal.append(RECORDS[1])
    assert contents_of(journal) == RECORDS[:1]


def test_after_a_failed_sync_nothing_is_appended(journal, monkeypatch):
    journal.append(RECORDS[0], sync=True)

    def failing(fd):
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as m:
        m.setattr(os, "fdatasync", failing)
        with pytest.raises(SessionError):
            journal.append(RECORDS[1], sync=True)
    with pytest.raises(SessionError, match="what reached the disk is unknown"):
        journal.append(RECORDS[1], sync=True)


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line that is run of some functions."""

    def __init__(self, functions, n):
        self.codes, self.n = {f.__code__ for f in functions}, n

    def __enter__(self):
        sys.settrace(self.trace)

    def trace(self, frame, event, arg):
        if frame.f_code not in self.codes:
            return None
        if event == "line":
            self.n -= 1
            if self.n == 0:
                raise KeyboardInterrupt
        return self.trace

    def __exit__(self, *error):
        sys.settrace(None)


@pytest.mark.parametrize("sync", [False, True])
def test_after_an_interrupt_every_later_record_is_read_or_refused(tmp_path, sync):
    n = n_refused = 0
    while True:
        n += 1
        (tmp_path / str(n)).mkdir()
        journal = Journal.create(tmp_path / str(n), GENERATION, FIRST)
        journal.append(RECORDS[0])
        try:
            with Interrupt([Journal.append], n):
                journal.append(RECORDS[3], sync)
        except KeyboardInterrupt:
            pass
        else:
            break
        if journal.broken:
            with pytest.raises(SessionError, match="interrupted"):
                journal.append(RECORDS[1], sync)
            n_refused += 1
            assert contents_of(journal) in ([RECORDS[0]], [RECORDS[0], RECORDS[3]])
        else:
            journal.append(RECORDS[1], sync)
            assert contents_of(journal)[-1] == RECORDS[1]
        journal.close()
    assert n > 8
    assert n_refused > 3


def test_later_records_are_found_behind_a_bad_one():
    parts = [record_bytes(GENERATION, FIRST + 1 + n, c) for n, c in enumerate(RECORDS)]
    data = b"".join(parts)
    assert later_seq(data, len(parts[0]), GENERATION, FIRST + 1) == FIRST + 2
    assert later_seq(data, len(parts[0]) + 8, GENERATION, FIRST + 1) == FIRST + 3
    last = len(data) - len(parts[-1])
    assert later_seq(data, last, GENERATION, FIRST + 4) is None, "not later"
    assert later_seq(data, last, GENERATION + 1, FIRST) is None, "of another journal"
    assert later_seq(data[:-1], last, GENERATION, FIRST) is None, "not whole"
    assert later_seq(data[:-9] + b"x" + data[-8:], last, GENERATION, FIRST) is None, "damaged"
    assert later_seq(b"KVJ1", 0, GENERATION, FIRST) is None


def test_a_failed_creation_leaves_nothing_open(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError):
        Journal.create(tmp_path, 0, 0)


def test_payloads_that_are_not_made_of_blocks():
    block = module._BLOCK
    for payload in (b"x", block.pack(USER, 0, 9) + b"8 bytes.", block.pack(USER, 0, 1 << 63)):
        with pytest.raises(DamagedError, match="cut short"):
            list(parse_blocks(payload, "x"))
    with pytest.raises(StateFormatError, match="newer"):
        list(parse_blocks(block.pack(77, 0, 0), "x"))
