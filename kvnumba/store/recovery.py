"""Reading a session's folder: the newest good checkpoint, and the commits after it."""

from __future__ import annotations

import logging
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from kvnumba import pack
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, DamagedError, SessionNotFoundError
from kvnumba.files import File, names_in, remove, write_new
from kvnumba.pack import SLOTS, SUFFIX
from kvnumba.store import checkpoint, journal
from kvnumba.store.checkpoint import TEMPORARY, Checkpoint, read_checkpoint
from kvnumba.store.committed import Committed
from kvnumba.store.fingerprint import Fingerprint
from kvnumba.store.journal import Journal, Record, later_seq, parse_blocks, read_records

log = logging.getLogger(__name__)
MARK = "reused"
_MARK = struct.Struct("<QQ")
_TRIES = 20


def generations(names: list[str], stem: str) -> list[int]:
    """Return the numbers ``G`` of the files ``stem.G``, ascending."""
    out = []
    for name in names:
        head, _, number = name.partition(".")
        if head == stem and number.isdecimal() and number == str(int(number)):
            out.append(int(number))
    return sorted(out)


# -- slots used again -----------------------------------------------------------------------------
# Slots that a commit frees may be overwritten after it, so that an older commit's rows are gone.
# The file `reused` says up to which commit that is so; a state from before it must not be opened,
# however good the checksums of what is left of base and journal.


def create_mark(folder: Path) -> None:
    """Make the mark of a new session."""
    write_new(folder / MARK, mark_bytes(0), sync=True)


def mark_bytes(seq: int) -> bytes:
    """Return the mark: the number and its complement."""
    return _MARK.pack(seq, ~seq & (1 << 64) - 1)


def read_mark(folder: Path) -> int:
    """Return the commit before which nothing may be opened.

    Raises
    ------
    DamagedError
        If the file is missing or was cut.
    """
    try:
        data = _read_file(folder / MARK)
    except SessionNotFoundError:
        raise DamagedError(f"{folder / MARK} is missing") from None
    if len(data) != _MARK.size:
        raise DamagedError(f"{folder / MARK} was cut")
    seq, complement = _MARK.unpack(data)
    return int(max(seq, ~complement & (1 << 64) - 1))


# -- the whole state ------------------------------------------------------------------------------


@dataclass
class Loaded:
    """A session as it is on disk.

    Attributes
    ----------
    committed : Committed
        The state of the last commit.
    config : CacheConfig
    fingerprint : Fingerprint
    point : Checkpoint
        What it started from.
    seq : int
        The last commit.
    end, n_records : int
        Where the good records of the checkpoint's own journal end, and how many there are.
    is_plain : bool
        Whether the checkpoint and its own journal make up the state: false when a damaged one was
        passed over whose journal goes on.
    names : list of str
        The files of the folder.
    """

    committed: Committed
    config: CacheConfig
    fingerprint: Fingerprint
    point: Checkpoint
    seq: int
    end: int
    n_records: int
    is_plain: bool
    names: list[str]

    @property
    def top_generation(self) -> int:
        """The highest number of a checkpoint or journal, good or not."""
        return max(generations(self.names, "base") + generations(self.names, "journal"))

    @property
    def previous(self) -> int | None:
        """The number of the checkpoint before `point`, if it is still there."""
        before = [g for g in generations(self.names, "base") if g < self.point.generation]
        return before[-1] if before else None


def load(folder: Path) -> Loaded:
    """Read and verify everything but the rows; nothing is changed.

    It may run beside a writer: when that replaces the files just listed, they are listed again.

    Raises
    ------
    SessionNotFoundError
        If the folder holds no session.
    DamagedError, StateFormatError
        If no state can be opened that is surely whole.
    """
    for _ in range(_TRIES):
        if not generations(names_in(folder), "base"):
            break
        # The mark comes before the list of files that are read: what a writer commits from here
        # on can only make their state newer.
        mark = read_mark(folder)
        names = names_in(folder)
        bases = generations(names, "base")
        try:
            return _load(folder, names, bases, mark)
        except SessionNotFoundError:
            continue
    for g in generations(names_in(folder), "journal"):
        if g == 0 and not _read_file(Journal.path_of(folder, g)).strip(b"\0"):
            continue  # a session whose making was interrupted
        raise DamagedError(f"{folder} has lost its checkpoint")
    raise SessionNotFoundError(f"{folder} holds no session")


def _load(folder: Path, names: list[str], bases: list[int], mark: int) -> Loaded:
    problems = []
    for generation in reversed(bases):
        try:
            point = read_checkpoint(folder, generation)
        except DamagedError as error:
            problems.append(str(error))
            log.warning("%s; trying the checkpoint before it", error)
            continue
        loaded = _replay(folder, names, point)
        if loaded.seq < mark:
            problems.append(
                f"commit {loaded.seq} is the last that can be read, but its rows may have been "
                f"replaced after commit {mark}"
            )
            break
        return loaded
    raise DamagedError(f"{folder} cannot be opened: " + "; ".join(problems))


def _replay(folder: Path, names: list[str], point: Checkpoint) -> Loaded:
    try:
        config = CacheConfig.from_dict(point.meta["config"])
    except ConfigError as error:
        raise DamagedError(f"the configuration in {folder} is impossible: {error}") from None
    committed = Committed(config.n_cells, config.n_seq_max)
    committed.apply(point.sections)
    seq, ends = point.seq, (0, 0)
    for generation in generations(names, "journal"):
        if generation < point.generation:
            continue
        path, end, n_records = Journal.path_of(folder, generation), 0, 0
        for record in _read_journal(path, generation, seq):
            committed.apply(parse_blocks(record.payload, path))
            seq, end, n_records = record.seq, record.end, n_records + 1
        if generation == point.generation:
            ends = end, n_records
    committed.settle()
    committed.check_packs(SLOTS)
    return Loaded(
        committed=committed,
        config=config,
        fingerprint=Fingerprint.from_dict(point.meta["fingerprint"]),
        point=point,
        seq=seq,
        end=ends[0],
        n_records=ends[1],
        is_plain=seq == point.seq + ends[1],
        names=names,
    )


def _read_journal(path: Path, generation: int, seq: int) -> list[Record]:
    """Return the records of a journal that follow commit `seq`.

    Raises
    ------
    DamagedError
        If one is damaged or missing though whole ones come after it: to end before it would lose
        those.
    """
    data, before = _read_file(path), None
    while True:
        records = list(read_records(data, generation, seq))
        last, end = (records[-1].seq, records[-1].end) if records else (seq, 0)
        if not data[end:].strip(b"\0"):
            return records
        later = later_seq(data, end, generation, last)
        if later is None:
            log.warning("%s: what follows commit %d is not whole and is dropped", path, last)
            return records
        # Beside a writer, a read may have passed the place of a record just before it came.
        if data == before:
            raise DamagedError(
                f"{path}: commit {last + 1} is damaged, but the whole commit {later} follows it; "
                "nothing was changed: go back to a copy of the folder"
            )
        data, before = _read_file(path), data


def _read_file(path: Path) -> bytes:
    file = File(path, write=False)
    try:
        return file.read(file.size)
    finally:
        file.close()


# -- files that may be removed --------------------------------------------------------------------

_NUMBER = "(0|[1-9][0-9]*)"
_MAGICS = (
    (re.compile(f"base[.]{_NUMBER}({re.escape(TEMPORARY)})?"), checkpoint.MAGIC),
    (re.compile(f"journal[.]{_NUMBER}"), journal.MAGIC),
    (re.compile(f"[0-9a-f]{{32}}{re.escape(SUFFIX)}"), pack.MAGIC),
    (re.compile(re.escape(MARK)), mark_bytes(0)),
)


def is_ours(folder: Path, name: str) -> bool:
    """Return whether a session made a file: by its whole name, and by how its bytes begin.

    One that was killed while it wrote leaves less than that, or zeros.
    """
    for pattern, magic in _MAGICS:
        if pattern.fullmatch(name):
            file = File(folder / name, write=False)
            try:
                data = file.read(pack.HEADER_BYTES)
            finally:
                file.close()
            return data[: len(magic)] == magic[: len(data)] or not data.strip(b"\0")
    return False


def remove_others(folder: Path, keep: set[int], packs: list[bytes]) -> None:
    """Remove what a killed writer left: unfinished files, and what nothing names any more.

    Parameters
    ----------
    folder : Path
    keep : set of int
        Generations to keep.
    packs : list of bytes
        Packs to keep.
    """
    named = {MARK, *(pack_id.hex() + SUFFIX for pack_id in packs)}
    named.update(f"{stem}.{g}" for stem in ("base", "journal") for g in keep)
    for name in names_in(folder):
        if name not in named and is_ours(folder, name):
            log.info("removing %s, left over in %s", name, folder)
            remove(folder / name)
