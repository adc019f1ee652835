"""`KVLayers`: the K and V rows of all layers, in anonymous memory or in mapped files."""

from __future__ import annotations

import logging
import os
import uuid

import numpy as np

from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError, InUseError, SessionError, ShapeError
from kvnumba.files import folder_of
from kvnumba.kernels import rows
from kvnumba.kernels.rope import shift_rows
from kvnumba.mapping import memory, up_to_page
from kvnumba.packs import MappedRows, new_files

log = logging.getLogger(__name__)


class MemoryRows:
    """K and V rows in anonymous memory, which costs RAM only where it was written.

    Attributes
    ----------
    k, v : list of ndarray
        As `KVLayers`.
    n_reserved : int
        All cells: there is nothing to reserve.
    is_open : bool
        False after `close`.
    """

    def __init__(self, config: CacheConfig):
        shapes = []
        for il in range(config.n_layer):
            shapes.append((config.n_cells, config.k_type.row_items(config.n_embd_k(il))))
            if config.v_trans:
                shapes.append((config.n_embd_v(il), config.n_cells))
            else:
                shapes.append((config.n_cells, config.v_type.row_items(config.n_embd_v(il))))
        dtypes = [config.k_type.storage, config.v_type.storage] * config.n_layer
        starts, end = [], 0
        for (n, m), dtype in zip(shapes, dtypes, strict=True):
            starts.append(end)
            end += up_to_page(n * m * dtype.itemsize)
        self.n_reserved, self._n_bytes = config.n_cells, end
        self._memory = memory(end)
        arrays = [
            self._memory.array(start, shape, dtype)
            for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
        ]
        self.k, self.v = arrays[0::2], arrays[1::2]
        self.is_open = True

    def reserve(self, n_cells: int) -> None:
        """Do nothing: memory is taken when it is first written."""

    def clear(self) -> None:
        """Give the memory back; the rows read as zeros."""
        self._memory.drop(0, self._n_bytes)

    def residency(self) -> tuple[int, int]:
        """Return (bytes in RAM, bytes in all)."""
        return self._memory.n_resident(0, self._n_bytes), self._n_bytes

    def close(self) -> None:
        """Let go of the memory; arrays that are still around read zeros."""
        self.is_open = False
        self._memory.close()


class KVLayers:
    """Rows of K and V of all layers.

    Parameters
    ----------
    config : CacheConfig
    path : path-like, optional
        A new or empty folder for pack files. Default: anonymous memory.
    rows : MappedRows, optional
        Files that are open already (sessions); `path` is then ignored.

    Attributes
    ----------
    k : list of ndarray, shape (n_cells, row_items), storage dtype
        K of each layer: plain arrays over the mapping.
    v : list of ndarray
        V of each layer, laid out as `k`, or ``[n_embd_v, n_cells]`` with ``config.v_trans``. Of
        width 0 where the layer stores K alone.
    rows : MemoryRows or MappedRows
        What holds them.

    Raises
    ------
    ConfigError
        Transposed V in files; a path that is none.
    SessionError, DiskFullError
        If the folder is not empty or its files cannot be made; not on Linux.
    """

    def __init__(
        self,
        config: CacheConfig,
        path: str | os.PathLike[str] | None = None,
        rows: MappedRows | None = None,
    ):
        self.config = config
        self._thetas = [
            None if (r := config.rope_of(il)) is None else r.theta() for il in range(config.n_layer)
        ]
        self.rows: MemoryRows | MappedRows
        if rows is not None:
            self.rows = rows
        elif path is None:
            self.rows = MemoryRows(config)
        else:
            self.rows = new_files(config, folder_of(path), uuid.uuid4().bytes, make=True)
        self.k, self.v = self.rows.k, self.rows.v
        # In a forked child all rows are read-only: a store there would kill it.
        self._pid = os.getpid()
        mib = 1 / 2**20
        log.info(
            "K (%s) %.1f MiB, V (%s) %.1f MiB, total %.1f MiB in %s: %d layers, %d cells",
            *(config.type_k, config.bytes_per_cell_k * config.n_cells * mib),
            *(config.type_v, config.bytes_per_cell_v * config.n_cells * mib),
            self.size_bytes * mib,
            *(
                "memory" if isinstance(self.rows, MemoryRows) else "files",
                config.n_layer,
                config.n_cells,
            ),
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of K and V of all cells, spare ones included."""
        c = self.config
        return (c.bytes_per_cell_k + c.bytes_per_cell_v) * c.n_cells

    def reserve(self, n_cells: int) -> None:
        """Make the cells ``[0, n_cells)`` safe to write; call it once per ubatch, before writing.

        Raises
        ------
        DiskFullError
            If the files cannot grow by that much; nothing is changed.
        SessionError, InUseError
            As `check_writable`; so do all that change rows.
        """
        self.check_writable()
        if n_cells > self.config.n_cells:
            raise ShapeError(f"{n_cells} cells wanted, there are {self.config.n_cells}")
        if n_cells > self.rows.n_reserved:
            self.rows.reserve(n_cells)

    def write(self, il: int, cells: np.ndarray, k: np.ndarray, v: np.ndarray | None = None) -> None:
        """Convert rows to the storage types and put them into cells.

        Parameters
        ----------
        il : int
            Layer.
        cells : ndarray, shape (n,), int32
            Cells that `reserve` made safe.
        k, v : ndarray, shapes (n, n_embd_k) and (n, n_embd_v), float32
            Only a layer that stores K alone does without `v`.

        Raises
        ------
        ShapeError, ConfigError
            If an argument is impossible; nothing is written.
        """
        self.check_writable()
        c = self.config
        self._check_layer(il)
        self._check_cells(cells)
        self._check_rows("k", k, len(cells), c.n_embd_k(il))
        if v is not None:
            self._check_rows("v", v, len(cells), c.n_embd_v(il))
        elif c.has_v(il):
            raise ShapeError(f"layer {il} has V: float32 {(len(cells), c.n_embd_v(il))} wanted")
        rows.write_rows(c.type_k, self.k[il], cells, np.ascontiguousarray(k))
        if v is not None and c.has_v(il):
            put = rows.write_cols if c.v_trans else rows.write_rows
            put(c.type_v, self.v[il], cells, np.ascontiguousarray(v))

    def read_k(self, il: int, cells: np.ndarray) -> np.ndarray:
        """Return the K rows of some cells, shape (n, n_embd_k), float32."""
        c = self.config
        self._check_layer(il)
        self._check_cells(cells)
        out = np.empty((len(cells), c.n_embd_k(il)), np.float32)
        rows.read_rows(c.type_k, self.k[il], cells, out)
        return out

    def read_v(self, il: int, cells: np.ndarray) -> np.ndarray:
        """Return the V rows of some cells, shape (n, n_embd_v), float32."""
        c = self.config
        self._check_layer(il)
        self._check_cells(cells)
        out = np.empty((len(cells), c.n_embd_v(il)), np.float32)
        if c.has_v(il):
            (rows.read_cols if c.v_trans else rows.read_rows)(c.type_v, self.v[il], cells, out)
        return out

    def copy_cells(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copy K and V of all layers from the cells `src` to the cells `dst`, in list order.

        Raises
        ------
        ShapeError
            If a cell does not exist or is not reserved, or the lists differ in length.
        """
        self._check_pair(src, dst)
        for il in range(self.config.n_layer):
            rows.copy_rows(self.k[il], dst, src)
            self._copy_v(il, src, dst)

    def shift_cells(self, src: np.ndarray, dst: np.ndarray, delta: np.ndarray) -> None:
        """Rotate K rows by a change of position; row ``dst[j]`` becomes the turned ``src[j]``.

        K of layers without rope, and V of all layers, are copied where the cells differ.

        Parameters
        ----------
        src, dst : ndarray, shape (n,), int32
        delta : ndarray, shape (n,), int32
            Positions to turn each row by.

        Raises
        ------
        ShapeError
            As `copy_cells`.
        """
        self._check_pair(src, dst)
        if delta.shape != src.shape or delta.dtype != np.int32:
            raise ShapeError(f"delta is {delta.dtype} {delta.shape}, int32 {src.shape} wanted")
        moved = src != dst
        src_moved, dst_moved = src[moved], dst[moved]
        for il in range(self.config.n_layer):
            if self._thetas[il] is None:
                rows.copy_rows(self.k[il], dst_moved, src_moved)
            else:
                self._turn(il, src, dst, delta)
            if len(src_moved):
                self._copy_v(il, src_moved, dst_moved)

    def _turn(self, il: int, src: np.ndarray, dst: np.ndarray, delta: np.ndarray) -> None:
        c, rope = self.config, self.config.rope_of(il)
        assert rope is not None
        shape = (c.n_kv_heads(il), c.k_head_dim(il), rope.n_rot)
        turn = (rope.pairing == "neox", self._thetas[il], rope.first)
        shift_rows(c.type_k, self.k[il], src, dst, delta, *shape, *turn)

    def _copy_v(self, il: int, src: np.ndarray, dst: np.ndarray) -> None:
        if self.config.has_v(il):
            (rows.copy_cols if self.config.v_trans else rows.copy_rows)(self.v[il], dst, src)

    def clear(self) -> None:
        """Give the rows' memory and disk space back; they read as zeros. No page is touched."""
        self.check_writable()
        self.rows.clear()

    def residency(self) -> tuple[int, int]:
        """Return (bytes in RAM, bytes in all) of the rows; what is in the page cache counts."""
        return self.rows.residency()

    def close(self) -> None:
        """Let go of memory and files; arrays that are still around read zeros."""
        self.rows.close()

    def check_writable(self) -> None:
        """Test that rows may be changed; without it a store could kill the process.

        Raises
        ------
        SessionError
            After `close`.
        InUseError
            In a forked child.
        """
        if not self.rows.is_open:
            raise SessionError(
                "the cache is closed, nothing can be written to it; build a new one, or open its "
                "session again"
            )
        if self._pid != os.getpid():
            raise InUseError(
                f"these rows belong to process {self._pid}; a forked child ({os.getpid()}) may "
                "read but not change them: build a cache, or open a session, of its own there"
            )

    def _check_layer(self, il: int) -> None:
        if not 0 <= il < self.config.n_layer:
            raise ConfigError(f"layer {il} is outside [0, {self.config.n_layer})")

    def _check_cells(self, cells: np.ndarray) -> None:
        if not isinstance(cells, np.ndarray) or cells.dtype != np.int32 or cells.ndim != 1:
            raise ShapeError("cells must be a one-dimensional int32 array")
        # as unsigned, a negative cell is far too large
        if len(cells) and cells.view(np.uint32).max() >= self.rows.n_reserved:
            raise ShapeError(
                f"cells {cells.min()} to {cells.max()} are outside the "
                f"{self.rows.n_reserved} that are reserved; call reserve first"
            )

    def _check_pair(self, src: np.ndarray, dst: np.ndarray) -> None:
        self.check_writable()
        self._check_cells(src)
        self._check_cells(dst)
        if len(src) != len(dst):
            raise ShapeError(f"{len(src)} cells to move to {len(dst)}")

    @staticmethod
    def _check_rows(name: str, array: np.ndarray, n: int, width: int) -> None:
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            raise ShapeError(f"{name} is {getattr(array, 'dtype', type(array))}, float32 wanted")
        if array.shape != (n, width):
            raise ShapeError(f"{name} has shape {array.shape}, {(n, width)} wanted")
