"""`SessionLog`: makes commits durable. Rows first, then one record; now and then a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvnumba.cells import Cells
from kvnumba.errors import KVCacheError, SessionError
from kvnumba.files import File, names_in, remove, sync_folder
from kvnumba.packs import MappedRows
from kvnumba.store import recovery
from kvnumba.store.checkpoint import Checkpoint, write_checkpoint
from kvnumba.store.committed import Blocks, Committed
from kvnumba.store.journal import Journal
from kvnumba.store.recovery import Loaded

log = logging.getLogger(__name__)
MAX_RECORDS = 16384
MIN_JOURNAL = 65536


class SessionLog:
    """Checkpoint, journal and mark of one folder.

    Parameters
    ----------
    folder : Path
    rows : MappedRows
    committed : Committed
        The state of the last commit; kept up to date here.
    meta : dict
        What checkpoints say about the session.
    sync : bool
        Bring every commit to the disk before it returns (``durability="power"``).

    Attributes
    ----------
    journal : Journal
    """

    journal: Journal

    def __init__(
        self,
        folder: Path,
        rows: MappedRows,
        committed: Committed,
        meta: dict[str, Any],
        sync: bool,
    ):
        self._folder, self._rows, self._committed = folder, rows, committed
        self._meta, self._sync = meta, sync
        self._mark = File(folder / recovery.MARK)
        self._previous: int | None = None
        self._base_bytes = self._retry_at = 0
        self._is_committing = False

    def begin(self) -> None:
        """Write the first checkpoint of a new session."""
        self._committed.packs = self._pack_ids()
        self._start_generation(0, 0)
        if self._sync:
            sync_folder(self._folder.parent)

    def resume(self, loaded: Loaded, is_changed: bool) -> None:
        """Go on where `loaded` ended; with a new checkpoint if the configuration changed."""
        generation = loaded.point.generation
        self._base_bytes = loaded.point.n_bytes
        if is_changed or not loaded.is_plain:
            self._previous = generation
            self._start_generation(loaded.top_generation + 1, loaded.seq)
            return
        if f"journal.{generation}" in loaded.names:
            self.journal = Journal.resume(
                self._folder, generation, loaded.seq, loaded.end, loaded.n_records
            )
        else:
            self.journal = Journal.create(self._folder, generation, loaded.seq)
        self._previous = loaded.previous
        self._remove_others()

    # -- commits ------------------------------------------------------------------------------

    def commit(self, cells: Cells, user: Mapping[str, bytes], search_start: int) -> None:
        """Write what changed since the last commit, then let go of the cells it freed.

        Raises
        ------
        ConfigError
            If `user` holds something else than bytes.
        DiskFullError, SessionError
            If it cannot be written: the last commit is still the one before. After an interrupt
            in the middle nothing can be written any more.
        """
        if self._is_committing:
            raise SessionError(
                f"a commit to {self._folder} was interrupted; open the session again, it is there "
                "as of that commit or the one before"
            )
        changes = self._committed.changes(cells, user, search_start, self._pack_ids())
        if not changes:
            return
        before = cells.pinned.copy()
        # Until it is known whether the record got through, both states are named.
        np.bitwise_or(before, cells.used, out=cells.pinned)
        # Still set if an interrupt comes before the record and our copy of the state agree again.
        self._is_committing = True
        try:
            self._append(changes)
        except KVCacheError:
            if not self.journal.broken:
                cells.pinned[:] = before
            self._is_committing = False
            raise
        self._committed.apply(changes)
        self._is_committing = False
        self._free_old(cells)
        self._checkpoint_if_due()

    def _append(self, changes: Blocks) -> None:
        if self._sync and not self.journal.broken:
            try:
                self._rows.sync()
                if self._pack_ids() != self._committed.packs:
                    sync_folder(self._folder)
            except KVCacheError:
                self.journal.broken = (
                    f"syncing the rows in {self._folder} failed: what reached the disk is "
                    "unknown; open the session again"
                )
                raise
        self.journal.append(changes, self._sync)

    def _free_old(self, cells: Cells) -> None:
        """Let cells be given out again that the last commit no longer names."""
        if np.any(cells.pinned & ~cells.used):
            try:
                self._mark.write(recovery.mark_bytes(self.journal.seq), 0)
            except KVCacheError as error:
                log.warning("freed cells stay unused until the next commit: %s", error)
                return
        cells.pinned[:] = cells.used

    def _pack_ids(self) -> list[bytes]:
        return [pack.pack_id for pack in self._rows.packs]

    # -- checkpoints --------------------------------------------------------------------------

    def _checkpoint_if_due(self) -> None:
        journal = self.journal
        is_long = journal.end > max(MIN_JOURNAL, self._base_bytes // 4)
        if (is_long or journal.n_records > MAX_RECORDS) and journal.end > self._retry_at:
            self.try_checkpoint()

    def try_checkpoint(self) -> None:
        """Write a checkpoint. A failure loses nothing, since all is in the journal, and is logged.

        Nothing is done when the journal is empty.
        """
        if not self.journal.n_records or self.journal.broken or self._is_committing:
            return
        before, self._previous = self._previous, self.journal.generation
        try:
            self._start_generation(self.journal.generation + 1, self.journal.seq)
        except KVCacheError as error:
            if self.journal.generation == self._previous:
                self._previous = before
            self._retry_at = 2 * self.journal.end
            log.warning("no checkpoint of %s: %s", self._folder, error)

    def _start_generation(self, generation: int, seq: int) -> None:
        """Write ``base.G`` with an empty ``journal.G``; on failure the old ones go on."""
        path = Journal.path_of(self._folder, generation)
        remove(path)
        journal = Journal.create(self._folder, generation, seq)
        try:
            if self._sync:
                self._rows.sync()
                journal.file.sync()
            point = Checkpoint(generation, seq, self._meta, self._committed.everything())
            n_bytes = write_checkpoint(self._folder, point, self._sync)
        except BaseException:
            # An interrupt may come right after the renaming: then the new one counts already.
            if generation in recovery.generations(names_in(self._folder), "base"):
                self._switch_to(journal, self._base_bytes)
            else:
                journal.close()
                with contextlib.suppress(KVCacheError):
                    remove(path)
            raise
        self._switch_to(journal, n_bytes)
        if self._sync:
            self._sync_names()
        self._remove_others()

    def _switch_to(self, journal: Journal, base_bytes: int) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
        self.journal, self._base_bytes, self._retry_at = journal, base_bytes, 0

    def _sync_names(self) -> None:
        try:
            sync_folder(self._folder)
        except KVCacheError:
            self.journal.broken = f"syncing {self._folder} failed; open the session again"
            raise

    def _remove_others(self) -> None:
        keep = {self.journal.generation}
        if self._previous is not None:
            keep.add(self._previous)
        try:
            recovery.remove_others(self._folder, keep, self._pack_ids())
        except KVCacheError as error:
            log.warning("old files of %s stay: %s", self._folder, error)

    def close(self) -> None:
        """Close the files."""
        if hasattr(self, "journal"):
            self.journal.close()
        self._mark.close()
