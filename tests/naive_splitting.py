"""A plain model of batches: which are refused, how they are split, told by lists and sets.

A batch is a list of id lists, one a token; a ubatch is `(tokens, n_seqs, n_seq_tokens, is_equal)`.
Rules of llama.cpp that kvnumba does not follow are kept here by name, so that tests can show what
came of them:

- ``"one set too many"``: `split_equal` takes up to ``n_ubatch + 1`` sequences;
- ``"overtake"``: a token may go before an earlier one of the same sequence, if the two do not have
  the same ids.
"""

from __future__ import annotations


def accepts(ids, pos, held, n_seq_max, several=False, embeddings=False):
    """Whether a batch with positions may follow on `held`: {sequence: (first, last position)}."""
    if not ids or any(not 0 <= s < n_seq_max for token in ids for s in token):
        return False
    for token in ids:
        if any(held.get(s) != held.get(token[0]) for s in token[1:]):
            return False
    for s in {s for token in ids for s in token}:
        mine = [p for token, p in zip(ids, pos, strict=True) if s in token]
        if mine != sorted(mine):
            return False
        if several:
            if s in held and min(mine) < held[s][1] + (not embeddings):
                return False
        elif (s in held and min(mine) != held[s][1] + 1) or (
            max(mine) - min(mine) + 1 > len(set(mine))
        ):
            return False
    return True


def fill(ids, last, by_first_id):
    """Positions of tokens that come without; `last`: {sequence: last position}."""
    following = {s: p + 1 for s, p in last.items()}
    pos = []
    for token in ids:
        candidates = [following.get(s, 0) for s in token]
        pos.append(candidates[0] if by_first_id else max(candidates))
        for s in token:
            following[s] = pos[-1] + 1
    return pos


def split_simple(ids, n_ubatch):
    """`n_ubatch` tokens after the other."""
    out = []
    for start in range(0, len(ids), n_ubatch):
        tokens = list(range(start, min(start + n_ubatch, len(ids))))
        out.append((tokens, len(tokens), 1, False))
    return out


def _is_overtaking(ids, t, unused):
    """Whether an earlier token, with other ids, waits in one of a token's sequences."""
    return any(u < t and set(ids[u]) != set(ids[t]) and set(ids[u]) & set(ids[t]) for u in unused)


def _collect(ids, unused, n_ubatch, sequential, old):
    """Return the waiting tokens of each set that may come into an equal ubatch."""
    accepted, last = [], None
    for t in unused:
        if len(accepted) >= n_ubatch + ("one set too many" in old):
            break
        mine = set(ids[t])
        if any(mine & other for other in accepted):
            continue
        if sequential and accepted and ids[t][0] != last + 1:
            continue
        if "overtake" not in old and _is_overtaking(ids, t, unused):
            continue
        accepted.append(mine)
        last = ids[t][0]
    tokens = [[u for u in unused if set(ids[u]) == mine] for mine in accepted]
    if "overtake" not in old:
        tokens = [[u for u in own if not _is_overtaking(ids, u, unused)] for own in tokens]
    return tokens


def _take_in_turn(waiting, n_ubatch):
    """Return the tokens taken, one of each set at a time; `waiting` loses them."""
    taken = [[] for _ in waiting]
    while all(waiting):
        for own, rest in zip(taken, waiting, strict=True):
            own.append(rest.pop(0))
        if (len(taken[0]) + 1) * len(taken) > n_ubatch:
            break
    return taken


def _keep_tails(taken, waiting, n_ubatch, keep_tail):
    """Return what stays of the tokens taken, so that no tail is cut."""
    n_kept = 0
    for rest in waiting:
        if rest and len(rest) < keep_tail:
            break
        n_kept += 1
    if n_kept:
        return taken[:n_kept]
    own, rest = taken[0], waiting[0]
    if len(own) + len(rest) <= n_ubatch:
        return [own + rest]
    while len(rest) < keep_tail:
        rest.insert(0, own.pop())
    return [own]


def split_equal(ids, n_ubatch, sequential=False, keep_tail=0, old=()):
    """The same number of tokens of each of several sets."""
    unused = list(range(len(ids)))
    out = []
    while unused:
        waiting = _collect(ids, unused, n_ubatch, sequential, old)
        taken = _take_in_turn(waiting, n_ubatch)
        if keep_tail:
            taken = _keep_tails(taken, waiting, n_ubatch, keep_tail)
        tokens = [t for own in taken for t in own]
        unused = [t for t in unused if t not in tokens]
        out.append((tokens, len(taken), len(taken[0]), True))
    return out


def split_seq(ids, n_ubatch, same_ids=False, old=()):
    """Tokens each of whose ids are among those of the token before."""
    unused = list(range(len(ids)))
    out = []
    while unused:
        current, tokens = set(ids[unused[0]]), []
        for t in list(unused):
            mine = set(ids[t])
            if len(tokens) == n_ubatch:
                break
            if not mine <= current or (same_ids and mine != current):
                continue
            if "overtake" not in old and any(u < t and set(ids[u]) & mine for u in unused):
                continue
            tokens.append(t)
            unused.remove(t)
            current = mine
        is_equal = set(ids[tokens[0]]) == set(ids[tokens[-1]]) or "overtake" in old
        out.append((tokens, 1, len(tokens), is_equal))
    return out


def split_seed(ids, pos, n_ubatch, kind):
    """The sorted batch of 2025, used up from its end."""
    if kind == "simple":
        return split_simple(ids, n_ubatch)
    groups = []
    for t in sorted(range(len(ids)), key=lambda t: (-len(ids[t]), ids[t], pos[t], t)):
        if groups and ids[groups[-1][0]] == ids[t]:
            groups[-1].append(t)
        else:
            groups.append([t])
    groups.sort(key=lambda own: (len(ids[own[0]]), -len(own)))
    out = []
    while groups:
        most = min(n_ubatch, sum(map(len, groups)))
        tokens, length, n_seqs = [], 0, 0
        for own in reversed(groups):
            length = length or min(len(own), most)
            is_shared = len(ids[own[0]]) > 1
            tokens += own[:length]
            del own[:length]
            n_seqs += 1
            if is_shared or kind == "seq" or len(tokens) + length > most:
                break
        groups = [own for own in groups if own]
        out.append((tokens, n_seqs, length, True))
    return out
