"""The order of llama.cpp's sorted batch of 2025."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvnumba.batch import Batch
from kvnumba.errors import ConfigError
from kvnumba.splitting.splitters import split_simple
from kvnumba.splitting.ubatch import Ubatch, check_sizes


def split_seed(batch: Batch, n_ubatch: int, kind: str = "equal") -> list[Ubatch]:
    """Split as llama.cpp did in 2025, which sorted the batch first.

    Tokens with the same list of ids form a group, in the order of their positions. Groups with
    more ids come first (shared prompts), then shorter ones, then those with greater ids. A shared
    prompt is split alone. Since shared prompts come first wherever they stand in the batch, a
    sequence keeps its order only if they stand first there, too.

    Parameters
    ----------
    batch : Batch
    n_ubatch : int
    kind : {"equal", "simple", "seq"}
        Several groups a ubatch, as they are, or one group a ubatch.

    Raises
    ------
    ConfigError
        If `n_ubatch` or `kind` is impossible.
    """
    if kind == "simple":
        return split_simple(batch, n_ubatch)
    if kind not in ("equal", "seq"):
        raise ConfigError(f'kind {kind!r} is not known; "equal", "simple" or "seq" wanted')
    check_sizes(n_ubatch, 0)
    groups = _seed_groups(batch)
    out = []
    while groups:
        most = min(n_ubatch, sum(len(tokens) for _, tokens in groups))
        length = min(len(groups[0][1]), most)
        n_seqs = 1
        if kind == "equal" and len(groups[0][0]) == 1:
            n_seqs = min(most // length, len(groups))
        taken = groups[:n_seqs]
        index = np.concatenate([tokens[:length] for _, tokens in taken])
        sets = tuple(tuple(sorted(ids)) for ids, _ in taken)
        out.append(Ubatch(batch.take(index), index, n_seqs, length, True, sets))
        groups[:n_seqs] = [(ids, rest[length:]) for ids, rest in taken if len(rest) > length]
    return out


def _seed_groups(batch: Batch) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return (ids, tokens) of each group, in the order in which they are used up."""
    groups = _shared_groups(batch) if batch.is_coupled else _plain_groups(batch)
    if batch.pos is not None:
        pos = batch.pos
        groups = [(ids, index[np.argsort(pos[index], kind="stable")]) for ids, index in groups]
    groups.sort(key=lambda group: group[0], reverse=True)
    groups.sort(key=lambda group: (-len(group[0]), len(group[1])))
    return groups


def _plain_groups(batch: Batch) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return (ids, tokens) where each token has one id."""
    order = np.argsort(batch.ids, kind="stable")
    seqs, start = np.unique(batch.ids[order], return_index=True)
    tokens = np.split(order, start[1:]) if len(seqs) else []
    return [((s,), index) for s, index in zip(seqs.tolist(), tokens, strict=True)]


def _shared_groups(batch: Batch) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return (ids, tokens) where tokens may have several ids."""
    found: dict[tuple[int, ...], list[int]] = {}
    ids = batch.ids.tolist()
    for t, (a, b) in enumerate(pairwise(batch.id_start.tolist())):
        found.setdefault(tuple(ids[a:b]), []).append(t)
    return [(group, np.array(tokens, np.int64)) for group, tokens in found.items()]
