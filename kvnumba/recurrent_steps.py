"""`RecurrentStep`: reading and writing the states of a ubatch; and how one is placed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvnumba.errors import NoSlotError, SequenceError, ShapeError
from kvnumba.kernels.recurrent import place_states_kernel
from kvnumba.recurrent_cells import RecurrentCells
from kvnumba.recurrent_rows import NamesRows, StateRows
from kvnumba.status import Extent
from kvnumba.steps import Step

if TYPE_CHECKING:
    from kvnumba.splitting import Ubatch


class StatePlan(NamedTuple):
    """Where a ubatch's sequences and states go.

    Attributes
    ----------
    head, n_kv : int
        First cell of the range in which the sequences lie side by side, and its length.
    zero_cell : int
        The reference's ``rs_z``: the first cell of the range that no cell goes on from, -1: none.
    copy_sources : ndarray, shape (n_kv,), int32
        The reference's ``src0``: the cell whose state each cell of the range goes on from.
    source_rows : ndarray, shape (n_seqs,), int32
        The row of each sequence's state, -1: new, zeros.
    target_rows : ndarray, shape (n_seqs, n_states), int32
        The rows for the states after each sequence's last tokens, oldest first.
    """

    head: int
    n_kv: int
    zero_cell: int
    copy_sources: np.ndarray
    source_rows: np.ndarray
    target_rows: np.ndarray


class RecurrentStep(Step):
    """One ubatch: `apply`; `read` and `write` for each layer; `commit` or `rollback`.

    The tokens lie set by set: token ``t`` of set ``q`` of ``ubatch.seq_sets`` is row
    ``q * n_seq_tokens + t``.
    """

    plan: StatePlan

    @property
    def n_seqs(self) -> int:
        """Sequences, or sets of sequences that have the same tokens."""
        return self.ubatch.n_seqs

    @property
    def n_seq_tokens(self) -> int:
        """Tokens of each of them."""
        return self.ubatch.n_seq_tokens

    @property
    def n_states(self) -> int:
        """States to write of each of them: those after its last tokens."""
        return int(self.plan.target_rows.shape[1])

    @property
    def head(self) -> int:
        """First cell of the range in which the sequences lie side by side."""
        return self.plan.head

    @property
    def n_kv(self) -> int:
        """Cells of that range."""
        return self.plan.n_kv

    @property
    def zero_cell(self) -> int:
        """The reference's ``rs_z``; see `StatePlan`."""
        return self.plan.zero_cell

    @property
    def copy_sources(self) -> np.ndarray:
        """The reference's ``src0``; see `StatePlan`."""
        return self.plan.copy_sources

    @property
    def source_rows(self) -> np.ndarray:
        """The row each state is read from, for those who read ``cache.rows`` themselves."""
        return self.plan.source_rows

    @property
    def target_rows(self) -> np.ndarray:
        """The rows the new states go to, for those who write ``cache.rows`` themselves.

        Known for good only after `apply`.
        """
        return self.plan.target_rows

    @property
    def extent(self) -> Extent:
        """The cells that a compute graph over this step looks at."""
        return Extent(self.plan.head, self.plan.n_kv, self._steps.cache.cells.n_cells)

    def read(self, il: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the states that the tokens of layer `il` go on from.

        Returns
        -------
        r, s : ndarray, shapes (n_seqs, n_embd_r), (n_seqs, n_embd_s), float32
            Zeros for a new sequence.
        """
        self._expect("applied", "read")
        self._steps.cache._check_pending(self)
        states: tuple[np.ndarray, np.ndarray] = self._steps.cache.rows.read(il, self.source_rows)
        return states

    def write(self, il: int, r: np.ndarray, s: np.ndarray | None = None) -> None:
        """Store the states after the last `n_states` tokens of each sequence in layer `il`.

        Parameters
        ----------
        il : int
        r, s : ndarray, shapes (n_seqs, n_states, n_embd_r), (n_seqs, n_states, n_embd_s), float32
            In the order of the tokens, the newest last. The middle axis may be missing when
            `n_states` is 1.
        """
        self._expect("applied", "write")
        self._steps.cache._check_pending(self)
        self._steps.cache.rows.write(il, self.target_rows, r, s)


def place_ubatch(
    cells: RecurrentCells,
    rows: StateRows,
    ubatch: Ubatch,
    holders: Iterable[NamesRows],
    is_seed: bool,
) -> StatePlan:
    """Put the sequences of a ubatch into cells and name the rows of their new states.

    Parameters
    ----------
    cells : RecurrentCells
        Modified in place, also on failure: give a copy.
    rows : StateRows
    ubatch : Ubatch
    holders : iterable
        What names the rows that must not be written.
    is_seed : bool
        The reference's old rule of where the search begins.

    Raises
    ------
    NoSlotError
        If there are not enough cells or rows.
    """
    n_seqs, n_seq_tokens = ubatch.n_seqs, ubatch.n_seq_tokens
    set_start, set_ids = _packed_sets(cells, ubatch)
    n_states = min(n_seq_tokens, cells.depth)
    if n_seqs > cells.n_cells:
        raise NoSlotError(
            f"{n_seqs} cells wanted, there are {cells.n_cells}", n_seqs, cells.n_cells
        )
    copy_sources = np.empty(cells.n_cells, np.int32)
    source_rows = np.empty(n_seqs, np.int32)
    target_rows = np.empty((n_seqs, n_states), np.int32)
    head, n_kv, zero_cell = place_states_kernel(
        *cells.state,
        set_start,
        set_ids,
        ubatch.batch.pos,
        rows.find_free(n_seqs * n_states, holders),
        n_seq_tokens,
        cells.search_start,
        2 * (ubatch.n_tokens if is_seed else n_seqs),
        cells.scratch(),
        copy_sources,
        source_rows,
        target_rows,
    )
    if head < 0:
        raise NoSlotError(
            f"a cell for each of {n_seqs} sequences wanted, {cells.n_cells - cells.n_used} are "
            "free; remove sequences first",
            n_seqs,
            cells.n_cells - cells.n_used,
        )
    cells.search_start = int(head)
    return StatePlan(
        int(head), int(n_kv), int(zero_cell), copy_sources[:n_kv], source_rows, target_rows
    )


def _packed_sets(cells: RecurrentCells, ubatch: Ubatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence sets of a ubatch as ``(set_start, set_ids)``."""
    if not ubatch.is_equal or len(ubatch.seq_sets) != ubatch.n_seqs:
        raise ShapeError(
            "states are computed for sequences of equally many tokens: split the batch with "
            "split_equal or split_seq"
        )
    ids = [s for seq_set in ubatch.seq_sets for s in seq_set]
    for s in ids:
        cells.check_seq_id(s)
    if len(set(ids)) != len(ids):
        raise SequenceError(
            f"a sequence is in two sets of one ubatch: {ubatch.seq_sets}; split the batch with "
            "split_equal"
        )
    set_start = np.zeros(ubatch.n_seqs + 1, np.int64)
    np.cumsum([len(seq_set) for seq_set in ubatch.seq_sets], out=set_start[1:])
    return set_start, np.array(ids, np.int32)
