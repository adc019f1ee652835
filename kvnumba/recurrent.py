"""`RecurrentCache`: one state per sequence and layer, with the way back to the last few."""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np

from kvnumba.cells import is_whole
from kvnumba.config import MAX_SEQ
from kvnumba.config_fields import expect
from kvnumba.errors import ConfigError, SequenceError
from kvnumba.guard import Guard
from kvnumba.recurrent_cells import RecurrentCells
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.recurrent_placing import RecurrentPlacing
from kvnumba.recurrent_rows import StateRows
from kvnumba.view import CacheView

RULES = ("today", "seed")


class RecurrentCache(RecurrentPlacing):
    """Cache of a recurrent model (mamba, rwkv) or of a hybrid model's recurrent layers.

    Parameters
    ----------
    config : RecurrentConfig
        Sizes, types, how far a sequence can be taken back.
    path : path-like, optional
        A new or empty folder for the mapped files. Default: anonymous memory.
    rules : {"today", "seed"}
        ``"seed"``: where the search for a cell begins, in which order the sequences of a batch are
        placed, what can be removed and that positions may go below 0, as the reference did it in
        spring 2025 (for comparing traces).

    Attributes
    ----------
    config : RecurrentConfig
    cells : RecurrentCells
        Metadata; change it through the verbs only.
    rows : StateRows
        ``rows.r[il]`` and ``rows.s[il]`` are plain arrays over the mapping. A row is written once
        and stays as it is until nothing names it: not a kept state, not a step under way, not the
        last batch, which can be rolled back, not a durable commit.
    guard : Guard
        Entered by every change: one thread, one process.

    Notes
    -----
    Cells are numbered as in the reference, where the states move with them. Here a cell names the
    rows of its states, so that gathering, sharing, splitting and rewinding move no state.
    """

    def __init__(
        self,
        config: RecurrentConfig,
        path: str | os.PathLike[str] | None = None,
        rules: str = "today",
    ):
        expect(config, RecurrentConfig)
        if rules not in RULES:
            raise ConfigError(f"rules {rules!r} is not one of {RULES}")
        self.config, self.rules, self.is_seed = config, rules, rules == "seed"
        self.rows = StateRows(config, path)
        self.cells = RecurrentCells(config)
        self.guard = Guard()
        self._applied = []
        self._version = 0

    def clear(self, data: bool = False) -> None:
        """Empty every cell, pending ones too.

        Parameters
        ----------
        data : bool
            Also give the rows' memory and disk space back. (Rows that a session's last commit
            names are kept.)
        """
        with self.guard:
            if data:
                self.rows.layers.check_writable()
            self._changed()
            self.cells.clear()
            if data:
                self.rows.clear()

    def update(self) -> bool:
        """Do deferred work: there never is any."""
        with self.guard:
            self._check_none_pending()
        return False

    def state(self, il: int, seq_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of a sequence's states r and s in layer `il`, float32; zeros when empty."""
        i = int(self.cells.tail[self.cells.check_seq_id(seq_id)])
        row = self.cells.row[i, :1] if i >= 0 else np.full(1, -1, np.int32)
        r, s = self.rows.read(il, row)
        return r[0], s[0]

    @property
    def used(self) -> int:
        """Cells with a sequence."""
        return self.cells.n_used

    @property
    def n_free(self) -> int:
        """Cells without one."""
        return self.cells.n_cells - self.used

    @property
    def n_tokens(self) -> int:
        """Sum over the cells of their sequences."""
        return self.cells.n_tokens

    @property
    def search_start(self) -> int:
        """Where the search for an empty cell begins (the reference's ``head``)."""
        return self.cells.search_start

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows; they cost memory or disk space only once they are written."""
        return self.rows.layers.size_bytes

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """Return a copy of the cells' state, listing at most `n_seq_max` sequences per cell."""
        n = self.config.n_seq_max if n_seq_max is None else n_seq_max
        if not is_whole(n) or not 0 <= n <= MAX_SEQ:
            raise SequenceError(
                f"n_seq_max {n_seq_max!r} must be a whole number from 0 to {MAX_SEQ}"
            )
        return self.cells.view(int(n))

    def check(self) -> None:
        """Test every invariant.

        Raises
        ------
        DamagedError
            Names the first broken one.
        """
        self.cells.check(self.config.n_rows, self.is_seed)

    def close(self) -> None:
        """Release the mapping. Arrays that were handed out then read zeros."""
        with self.guard:
            self.rows.layers.close()

    def __enter__(self) -> RecurrentCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return (
            f"RecurrentCache({c.n_layer} layers, {self.used}/{c.n_cells} cells used, "
            f"r {c.type_r}, s {c.type_s}, {c.n_rewind} states back)"
        )
