"""`MappedRows`: the packs of one cache, side by side in memory, one plain array a layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, DiskFullError
from kvnumba.files import make_folder, need_linux
from kvnumba.mapping import PAGE, Region
from kvnumba.pack import KIND_K, SLOTS, Pack, planes_of

MIN_STEP = 256
MAX_STEP_BYTES = 64 << 20


class MappedRows:
    """K and V rows in pack files of a folder.

    Cell ``i`` is slot ``i % SLOTS`` of pack ``i // SLOTS``. Addresses for all cells are reserved
    at once; packs are made, and disk space reserved and mapped, when `reserve` asks for it.

    Parameters
    ----------
    config : CacheConfig
    folder : Path
    owner : bytes
        16-byte id of the session; written into new packs.
    pack_ids : sequence of bytes
        Packs that are there already, in the order of their cells.

    Attributes
    ----------
    k, v : list of ndarray, shape (n_cells, row_items), storage dtype
        One array per layer; of width 0 where a layer stores K alone.
    n_reserved : int
        Cells ``[0, n_reserved)`` are safe to write.
    packs : list of Pack
    is_open : bool
        False after `close`; the files and their numbers are not ours any more then.
    """

    def __init__(
        self, config: CacheConfig, folder: Path, owner: bytes, pack_ids: Sequence[bytes] = ()
    ):
        self.n_cells, self.folder, self._owner = config.n_cells, folder, owner
        self._planes = planes_of(config)
        self._row_bytes = sum(p.row_bytes for p in self._planes)
        self.n_reserved = 0
        self.packs: list[Pack] = []
        try:
            for pack_id in pack_ids:
                self.packs.append(Pack.open(folder, pack_id, self._planes))
            if not self.packs:
                self._add_pack()
            n_packs = -(-self.n_cells // SLOTS)
            # Planes follow each other in memory, each with room for its slots of all packs.
            self._starts, end = [], 0
            for plane in self._planes:
                self._starts.append(end)
                end += n_packs * plane.n_bytes
            self._region = Region(end)
        except BaseException:
            for pack in self.packs:
                pack.close()
            raise
        self.k, self.v = self._arrays(config)
        self.is_open = True

    def _arrays(self, config: CacheConfig) -> tuple[list[np.ndarray], list[np.ndarray]]:
        v_type = config.v_type.storage
        k = [np.empty((self.n_cells, 0), config.k_type.storage)] * config.n_layer
        v = [np.empty((self.n_cells, 0), v_type)] * config.n_layer
        for plane, start in zip(self._planes, self._starts, strict=True):
            out, dtype = (k, config.k_type.storage) if plane.kind == KIND_K else (v, v_type)
            shape = (self.n_cells, plane.row_bytes // dtype.itemsize)
            out[plane.layer] = self._region.array(start, shape, dtype)
        return k, v

    def _add_pack(self) -> None:
        self.packs.append(Pack.create(self.folder, self._owner, self._planes))

    def reserve(self, n_cells: int, exactly: bool = False) -> None:
        """Make the cells ``[0, n_cells)`` safe to write, and some more unless `exactly`.

        Raises
        ------
        DiskFullError
            If the disk has no room for that; nothing is lost.
        """
        if n_cells <= self.n_reserved:
            return
        if exactly:
            self._grow(n_cells)
            return
        before = self.n_reserved
        try:
            self._grow(self._with_step(n_cells))
        except DiskFullError:
            self._grow(n_cells)  # the least that will do
        self._populate(before, self.n_reserved)

    def _with_step(self, n_cells: int) -> int:
        """Return how many cells to have, so that steps are few and little is left over."""
        step = max(MIN_STEP, self.n_reserved // 4)
        step = min(step, max(1, MAX_STEP_BYTES // self._row_bytes))
        return min(self.n_cells, max(n_cells, self.n_reserved + step))

    def _grow(self, n_cells: int) -> None:
        while self.n_reserved < n_cells:
            j, first = divmod(self.n_reserved, SLOTS)
            last = min(SLOTS, n_cells - j * SLOTS)
            if j == len(self.packs):
                self._add_pack()
            self.packs[j].reserve(first, last)
            self._map(j, first, last)
            self.n_reserved = j * SLOTS + last

    def _map(self, j: int, first: int, last: int) -> None:
        pack = self.packs[j]
        for plane, at in zip(self._planes, self._starts, strict=True):
            start, n_bytes = pack.plane_range(plane, first, last)
            if n_bytes:
                # Adjacent pieces of one open file become one mapping in the kernel.
                at += j * plane.n_bytes + start
                self._region.map_file(at, pack.file.fd, plane.offset + start, n_bytes)

    def _populate(self, first: int, last: int) -> None:
        """Bring the pages of new cells in at once, so that stores cost no page fault each."""
        for plane, at in zip(self._planes, self._starts, strict=True):
            begin = first * plane.row_bytes // PAGE * PAGE
            self._region.populate(at + begin, last * plane.row_bytes - begin)

    def clear(self) -> None:
        """Give all memory and disk space of the rows back; they read as zeros."""
        self._region.map_nothing(0, self._region.n_bytes)
        self.n_reserved = 0
        for pack in self.packs:
            pack.punch(0, SLOTS)

    def sync(self) -> None:
        """Bring the rows to the disk."""
        for pack in self.packs:
            pack.file.sync()

    def residency(self) -> tuple[int, int]:
        """Return (bytes in RAM, bytes in all) of the cells that are safe to write."""
        n = 0
        for plane, at in zip(self._planes, self._starts, strict=True):
            n_bytes = self.n_reserved * plane.row_bytes
            n += min(n_bytes, self._region.n_resident(at, n_bytes))
        return n, self.n_reserved * self._row_bytes

    def close(self) -> None:
        """Let go of the files; arrays that are still around read zeros."""
        self.is_open = False
        self._region.close()
        for pack in self.packs:
            pack.close()


def new_files(config: CacheConfig, folder: Path, owner: bytes, make: bool) -> MappedRows:
    """Make the first pack of a new folder, and with `make` the folder.

    Raises
    ------
    ConfigError
        Transposed V.
    SessionError, DiskFullError
        If the folder is not empty or the files cannot be made; not on Linux.
    """
    need_linux()
    if config.v_trans:
        raise ConfigError("rows in files are stored by cell: v_trans needs path=None")
    if make:
        make_folder(folder)
    return MappedRows(config, folder, owner)
