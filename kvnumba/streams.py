"""`StreamsCache`: several streams, each with cells of its own; a sequence lives in one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.cells import Cells, is_whole
from kvnumba.composite import CompositeCache, CompositeStep
from kvnumba.config import CacheConfig
from kvnumba.config_fields import expect
from kvnumba.errors import ConfigError, DamagedError, NoSlotError, PositionError, SequenceError
from kvnumba.splitting import Ubatch, split_equal, split_simple
from kvnumba.status import Extent
from kvnumba.steps import Step, Steps
from kvnumba.unified import UnifiedCache
from kvnumba.window import part_paths


class StreamStep(CompositeStep):
    """One ubatch, whose tokens go to the streams of their sequences.

    Attributes
    ----------
    rows : list of ndarray
        For each stream, which tokens of the ubatch are its own.
    """

    def __init__(self, steps: Steps[Any], ubatch: Ubatch, plan: Any):
        self.rows = [rows for rows, _ in plan]
        super().__init__(steps, ubatch, tuple(step for _, step in plan))

    def _each(self) -> Iterator[tuple[np.ndarray, Any]]:
        return (
            (rows, step)
            for rows, step in zip(self.rows, self.plan, strict=True)
            if step is not None
        )

    @property
    def row_index(self) -> np.ndarray:
        """Row of each token in a tensor of all streams: ``stream * n_cells + cell``, int64."""
        out = np.empty(self.n_tokens, np.int64)
        n_cells = self._steps.cache.config.n_cells
        for stream, (rows, step) in enumerate(zip(self.rows, self.plan, strict=True)):
            if step is not None:
                out[rows] = stream * n_cells + step.cells  # type: ignore[attr-defined]
        return out

    def write(self, il: int, *rows: Any) -> None:
        """Store K and V of layer `il`; see `UnifiedStep.write`."""
        self._expect("applied", "write")
        for mine, step in self._each():
            step.write(il, *(None if r is None else np.ascontiguousarray(r[mine]) for r in rows))

    def attend(
        self, il: int, q: np.ndarray, out: np.ndarray | None = None, **options: Any
    ) -> np.ndarray:
        """Attend from each token to its sequence; see `UnifiedStep.attend`."""
        self._expect("applied", "attend")
        for mine, step in self._each():
            part = step.attend(il, np.ascontiguousarray(q[mine]), **options)
            if out is None:
                out = np.empty((self.n_tokens, *part.shape[1:]), np.float32)
            out[mine] = part
        assert out is not None
        return out


class StreamsCache(CompositeCache):
    """One pool of cells per stream.

    Parameters
    ----------
    config : CacheConfig
        Of each stream; ``n_ctx`` cells each. Sequence ids are common to all.
    stream_of : int or sequence of int
        The stream of each sequence id; a number n means ``seq_id % n``.
        ``stream_of=config.n_seq_max`` gives every sequence a stream of its own.
    path : path-like, optional
        A new or empty folder for mapped files. Default: anonymous memory.

    Attributes
    ----------
    streams : tuple of UnifiedCache
        Change them through this object only.
    stream_of : tuple of int
    """

    def __init__(
        self,
        config: CacheConfig,
        stream_of: int | Sequence[int],
        path: str | os.PathLike[str] | None = None,
    ):
        expect(config, CacheConfig)
        self.stream_of = _stream_map(stream_of, config.n_seq_max)
        n = max(self.stream_of) + 1
        self.part_names = tuple(f"stream{i}" for i in range(n))  # type: ignore[misc]
        paths = part_paths(path, self.part_names)
        self.streams = tuple(UnifiedCache(config, p) for p in paths)
        self._set_up(config, self.streams, [(0, il) for il in range(config.n_model_layer)])

    def stream(self, seq_id: int) -> UnifiedCache:
        """Return the stream of a sequence."""
        return self.streams[self.stream_of[self._check_seq_id(seq_id)]]

    # -- placing ------------------------------------------------------------------------------

    def _splits(self, batch: Batch, n_ubatch: int) -> Iterator[list[Ubatch]]:
        self._check_streams(batch)
        if batch.is_coupled or len(self.streams) == 1:
            yield split_simple(batch, n_ubatch)
        else:
            yield split_equal(batch, n_ubatch)

    def _check_streams(self, batch: Batch) -> None:
        of_id = np.asarray(self.stream_of)[batch.ids]
        of_token = np.repeat(of_id[batch.id_start[:-1]], np.diff(batch.id_start))
        wrong = np.flatnonzero(of_id != of_token)
        if len(wrong):
            token = int(np.searchsorted(batch.id_start, wrong[0], side="right")) - 1
            raise SequenceError(
                f"token {token} belongs to sequences of several streams; a cell lies in one"
            )

    def prepare_ubatches(self, batch: Batch, ubatches: list[Ubatch]) -> Steps[Any]:
        """Find cells for a batch that was split by someone else; see `prepare`."""
        streams = np.asarray(self.stream_of)
        with self.guard:
            self._check_none_pending()
            self._check_streams(batch)
            owners = [streams[u.batch.first_ids()] for u in ubatches]
            columns = []
            for n, part in enumerate(self.streams):
                rows = [np.flatnonzero(owner == n) for owner in owners]
                subs = [_sub(u, r) for u, r in zip(ubatches, rows, strict=True) if len(r)]
                steps = iter(part.prepare_ubatches(batch, subs))
                columns.append([(r, next(steps) if len(r) else None) for r in rows])
            plans = list(zip(*columns, strict=True))
            return Steps(self, batch, ubatches, plans, self._version, StreamStep)

    def init_full(self) -> Extent:
        """Return the greatest extent of a step: all cells of a stream."""
        return self.streams[0].init_full()

    # -- the verbs ----------------------------------------------------------------------------

    def _parts_of(self, seq_id: int) -> tuple[UnifiedCache, ...]:
        return self.streams if seq_id < 0 else (self.stream(seq_id),)

    def refusal(self, seq_id: int, p0: int = -1, p1: int = -1) -> str | None:
        """Return why `seq_rm` would refuse, None when it would not."""
        s = self._check_seq_id(seq_id, allow_all=True)
        reasons = (part.refusal(s, p0, p1) for part in self._parts_of(s))
        return next(filter(None, reasons), None)

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens ``[p0, p1)`` of a sequence (-1: of all); see `UnifiedCache.seq_rm`."""
        s = self._check_seq_id(seq_id, allow_all=True)
        with self.guard:
            self._check_none_pending()
            if self.refusal(s, p0, p1) is not None:
                return False
            self._version += 1
            return all(part.seq_rm(s, p0, p1) for part in self._parts_of(s))

    def seq_keep(self, seq_id: int) -> None:
        """Remove everything but one sequence, in all streams."""
        s = self._check_seq_id(seq_id)
        with self.guard:
            self._check_none_pending()
            self._version += 1
            for part in self.streams:
                if part is self.stream(s):
                    part.seq_keep(s)
                else:
                    part.seq_rm(-1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the cells of `src`; in another stream, give it copies.

        Across streams the copy is whole, and what `dst` held is dropped. K and V are copied at
        once.

        Raises
        ------
        SequenceError
            If an id is impossible.
        PositionError
            If a copy across streams does not cover the sequence.
        NoSlotError, DiskFullError
            If the other stream has no room for it; nothing is changed.
        """
        src, dst = self._check_seq_id(src), self._check_seq_id(dst)
        p0, p1 = Cells.check_range(p0, p1)
        if src == dst:
            return
        with self.guard:
            self._check_none_pending()
            here, there = self.stream(src), self.stream(dst)
            if here is there:
                here.seq_cp(src, dst, p0, p1)
            else:
                low, high = here.cells.pos_bounds(src)
                if low >= 0 and not p0 <= low <= high < p1:
                    raise PositionError(
                        f"[{p0}, {p1}) does not cover sequence {src}, [{low}, {high}]; across "
                        "streams sequences are copied whole"
                    )
                _copy_across(here, there, src, dst)
            self._version += 1

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to positions of a sequence; see `UnifiedCache.seq_add`."""
        with self.guard:
            self._check_none_pending()
            self.stream(seq_id).seq_add(seq_id, p0, p1, delta)
            self._version += 1

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions of a sequence by `d`; see `UnifiedCache.seq_div`."""
        with self.guard:
            self._check_none_pending()
            self.stream(seq_id).seq_div(seq_id, p0, p1, d)
            self._version += 1

    def seq_pos_min(self, seq_id: int) -> int:
        """Return the least position the sequence can be cut back to, -1 when it is empty."""
        return self.stream(seq_id).seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """Return the position of the last token, -1 when the sequence is empty."""
        return self.stream(seq_id).seq_pos_max(seq_id)

    @property
    def used(self) -> int:
        """Cells in use, all streams."""
        return sum(part.used for part in self.streams)

    def check(self) -> None:
        """Test every invariant of the streams, and that each sequence is where it belongs.

        Raises
        ------
        DamagedError
            Names the first broken one.
        """
        for n, part in enumerate(self.streams):
            part.check()
            for s, stream in enumerate(self.stream_of):
                if stream != n and part.cells.seq[s].any():
                    raise DamagedError(f"stream {n} holds sequence {s} of stream {stream}")

    def __repr__(self) -> str:
        return f"StreamsCache({len(self.streams)} streams, {self.used} cells used)"


def _stream_map(stream_of: Any, n_seq_max: int) -> tuple[int, ...]:
    if is_whole(stream_of):
        if not 1 <= stream_of <= n_seq_max:
            raise ConfigError(f"{stream_of} streams for {n_seq_max} sequences; 1 to that many")
        return tuple(s % int(stream_of) for s in range(n_seq_max))
    if isinstance(stream_of, (str, bytes)) or not isinstance(stream_of, Sequence):
        raise ConfigError(f"stream_of {stream_of!r} must be a count, or a stream per sequence")
    if len(stream_of) != n_seq_max or not all(is_whole(n) for n in stream_of):
        raise ConfigError(f"stream_of must name a stream for each of {n_seq_max} sequences")
    if set(stream_of) != set(range(max(stream_of) + 1)):
        raise ConfigError(f"streams must be numbered from 0 without gaps, got {list(stream_of)}")
    return tuple(int(n) for n in stream_of)


def _sub(ubatch: Ubatch, rows: np.ndarray) -> Ubatch:
    """Return some tokens of a ubatch as one of their own."""
    return Ubatch(ubatch.batch.take(rows), ubatch.index[rows], len(rows), 1, False, ())


def _copy_across(here: UnifiedCache, there: UnifiedCache, src: int, dst: int) -> None:
    cells = here.cells.members(src)
    c = there.cells
    own = c.seq[dst] & ~c.shared
    room = c.listed((~c.used | own) & ~c.pinned)
    room = room[room < c.n_cells]
    limit = min(len(room), there.config.n_ctx - c.n_used + len(c.listed(own)))
    if len(cells) > limit:
        raise NoSlotError(
            f"sequence {src} has {len(cells)} cells, the stream of {dst} has room for {limit}; "
            "remove sequences from it first",
            len(cells),
            limit,
        )
    there.layers.reserve(int(room[: len(cells)].max(initial=-1)) + 1)
    there.seq_rm(dst)
    new = there.find_slot(len(cells), contiguous=False)
    for il in range(here.config.n_layer):
        there.layers.k[il][new] = here.layers.k[il][cells]
        if here.config.v_trans:
            there.layers.v[il][:, new] = here.layers.v[il][:, cells]
        else:
            there.layers.v[il][new] = here.layers.v[il][cells]
    pos, token = here.cells.pos[cells], here.cells.token[cells]
    id_start = np.arange(len(cells) + 1)
    ids = np.full(len(cells), dst, np.int32)
    c.place(new, pos, token, id_start, ids, here.cells.sections(cells))
    c.shift[new] = here.cells.shift[cells]
    there.sliding.lost[dst] = here.sliding.lost[src]
    there.has_shift = there.has_shift or bool(c.shift[new].any())


__all__ = ["Step", "StreamStep", "StreamsCache"]
