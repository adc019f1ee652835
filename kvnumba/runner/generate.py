"""`Generator`: read a prompt through a cache, continue it, and keep the session."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.cells import Cells
from kvnumba.errors import CacheFullError, ConfigError
from kvnumba.prefix import n_reusable
from kvnumba.runner.sampling import Sampler

if TYPE_CHECKING:
    from kvnumba.store.session import Session

SEQ = 0
_TAIL = "tail"  # tokens that were generated but have no cell yet
_COST = "prefill_cost"  # tokens read so far, and the milliseconds they took


def held_tokens(cells: Cells, user: Mapping[str, bytes]) -> np.ndarray:
    """Return the tokens that a session holds, a last one without a cell included, int32."""
    return np.concatenate([cells.tokens_of(SEQ), np.frombuffer(user.get(_TAIL, b""), np.int32)])


def check_prompt(prompt: np.ndarray, n_ctx: int) -> None:
    """Test that a prompt is one, and fits.

    Raises
    ------
    ConfigError, CacheFullError
        If it is empty, or longer than ``n_ctx``.
    """
    if not len(prompt):
        raise ConfigError("the prompt is empty; give at least one token")
    if len(prompt) > n_ctx:
        raise CacheFullError(
            f"the prompt has {len(prompt)} tokens, n_ctx is {n_ctx}; raise --n-ctx",
            len(prompt),
            n_ctx,
        )


@dataclass
class Result:
    """What a run did.

    Attributes
    ----------
    prompt_tokens, tokens : list of int
        The whole prompt, and what was generated (the end token included).
    n_reused, n_prefilled : int
        Tokens of the prompt found in the session, and computed now.
    n_dropped : int
        Stored tokens that the prompt contradicted or left out.
    prefill_ms, decode_ms_per_token : float
        Time spent.
    reread_ms : float
        What computing the reused tokens took when they were read.
    stop : str
        ``"eos"``, ``"length"``, ``"context"`` or ``"interrupted"``.
    """

    prompt_tokens: list[int]
    n_reused: int
    n_prefilled: int
    n_dropped: int
    tokens: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    decode_ms_per_token: float = 0.0
    reread_ms: float = 0.0
    stop: str = "length"


class Generator:
    """One token stream of a model over a cache, with or without a session.

    Parameters
    ----------
    model : LlamaModel or MambaModel
    cache : UnifiedCache or RecurrentCache
    session : Session, optional
        Its cache must be `cache`; every ubatch and every token is then committed.
    n_ctx : int, optional
        Most tokens of the stream; default: those of the cache. (A recurrent one has no limit.)
    """

    def __init__(
        self, model: Any, cache: Any, session: Session | None = None, n_ctx: int | None = None
    ):
        self.model, self.cache, self.session = model, cache, session
        self.n_ctx = int(cache.config.n_ctx if n_ctx is None else n_ctx)
        self._stream: list[int] = []  # the prompt, and what was sampled

    def cached_tokens(self) -> np.ndarray:
        """Return the tokens that the cache has seen, in order, int32."""
        if isinstance(self.cache.cells, Cells):
            return self.cache.cells.tokens_of(SEQ)
        # A state does not tell its tokens: those are known that went through this object.
        return np.array(self._stream[: self.cache.seq_pos_max(SEQ) + 1], np.int32)

    def held_tokens(self) -> np.ndarray:
        """Return all tokens of the conversation: the cached ones and a last one without a cell."""
        if self.session is None:
            return self.cached_tokens()
        return held_tokens(self.cache.cells, self.session.user)

    def run(
        self,
        prompt: np.ndarray,
        n_predict: int,
        sampler: Sampler,
        end_ids: frozenset[int] | set[int],
        on_prefill: Callable[[int, int], None] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Result:
        """Read `prompt`, reusing what the cache holds, then generate up to `n_predict` tokens.

        Parameters
        ----------
        prompt : ndarray, int32
            The whole token list.
        n_predict : int
        sampler : Sampler
        end_ids : set of int
            Tokens that end the answer.
        on_prefill : callable(n_done, n_total), optional
        on_token : callable(token), optional

        Raises
        ------
        ConfigError, CacheFullError
            If the prompt is empty or longer than the cache; nothing is changed.
        DiskFullError
            If the session cannot grow; what was committed before stays.
        """
        check_prompt(prompt, self.n_ctx)
        n_reused = n_reusable(self.cached_tokens(), prompt)
        if self.cache.refusal(SEQ, n_reused, -1) is not None:
            n_reused = 0  # the state of just these tokens is gone
        result = Result(
            prompt.tolist(), n_reused, len(prompt) - n_reused, len(self.held_tokens()) - n_reused
        )
        result.n_dropped = self._n_dropped(prompt, n_reused)
        result.reread_ms = self._reread_ms(n_reused)
        self._stream = prompt.tolist()
        self.cache.seq_rm(SEQ, n_reused, -1)
        self._keep_tail(len(prompt))
        try:
            start = time.perf_counter()
            logits = self._prefill(prompt, n_reused, on_prefill)
            result.prefill_ms = (time.perf_counter() - start) * 1e3
            # A draw depends on seed and position only, so a resumed run draws as an unbroken one.
            sampler.n_drawn = len(prompt)
            start = time.perf_counter()
            for token in self._decode(logits, n_predict, sampler, end_ids, result):
                result.tokens.append(token)
                if on_token is not None:
                    on_token(token)
            result.decode_ms_per_token = (
                (time.perf_counter() - start) * 1e3 / max(1, len(result.tokens) - 1)
            )
        except KeyboardInterrupt:
            self._stop_here(result)
        return result

    def _stop_here(self, result: Result) -> None:
        """Keep what was done before an interruption, wherever it came."""
        n_prompt = len(result.prompt_tokens)
        result.stop, result.tokens = "interrupted", self._stream[n_prompt:]
        self.cache.rollback()
        self._keep_tail(n_prompt)
        self._commit()

    def _n_dropped(self, prompt: np.ndarray, n_reused: int) -> int:
        held = self.held_tokens()
        agrees = len(held) <= len(prompt) and np.array_equal(held, prompt[: len(held)])
        return 0 if agrees else len(held) - n_reused

    def _prefill(
        self, prompt: np.ndarray, n_done: int, on_prefill: Callable[[int, int], None] | None
    ) -> np.ndarray:
        n_ubatch = self.cache.config.n_ubatch
        logits = np.empty(0, np.float32)
        while n_done < len(prompt):
            part = prompt[n_done : n_done + n_ubatch]
            start = time.perf_counter()
            logits = self._forward(part, n_done, wanted=n_done + len(part) == len(prompt))
            self._note_cost(len(part), (time.perf_counter() - start) * 1e3)
            n_done += len(part)
            self._commit()
            if on_prefill is not None:
                on_prefill(n_done, len(prompt))
        return logits

    def _forward(self, tokens: np.ndarray, first_pos: int, wanted: bool = True) -> np.ndarray:
        """Compute tokens of the stream; return the logits of the last one if `wanted`."""
        pos = np.arange(first_pos, first_pos + len(tokens), dtype=np.int32)
        rows = np.array([len(tokens) - 1] if wanted else [], np.int64)
        (step,) = self.cache.prepare(Batch(tokens, pos, SEQ), n_ubatch=len(tokens))
        with step:
            return self.model.forward(tokens, pos, step, rows)

    def _decode(
        self,
        logits: np.ndarray,
        n_predict: int,
        sampler: Sampler,
        end_ids: frozenset[int] | set[int],
        result: Result,
    ) -> Iterator[int]:
        n_held = len(result.prompt_tokens)
        for n in range(n_predict):
            token = int(sampler.sample(logits[-1]))
            self._stream.append(token)
            if token in end_ids or n_held == self.n_ctx or n + 1 == n_predict:
                self._keep_tail(len(result.prompt_tokens))
                self._commit()
                if token in end_ids:
                    result.stop = "eos"
                elif n_held == self.n_ctx:
                    result.stop = "context"
                yield token
                return
            yield token
            logits = self._forward(np.array([token], np.int32), n_held)
            n_held += 1
            self._commit()

    def _keep_tail(self, n_prompt: int) -> None:
        """Note the sampled tokens that have no cell; the cells say which those are."""
        if self.session is not None:
            n_cells = max(n_prompt, self.cache.seq_pos_max(SEQ) + 1)
            self.session.user[_TAIL] = np.array(self._stream[n_cells:], np.int32).tobytes()

    def _commit(self) -> None:
        if self.session is not None:
            self.session.commit()

    def _cost(self) -> tuple[int, float]:
        if self.session is None or _COST not in self.session.user:
            return 0, 0.0
        cost = json.loads(self.session.user[_COST])
        return int(cost["n"]), float(cost["ms"])

    def _note_cost(self, n: int, ms: float) -> None:
        if self.session is not None and n > 1:
            n_before, ms_before = self._cost()
            cost = {"n": n_before + n, "ms": round(ms_before + ms, 3)}
            self.session.user[_COST] = json.dumps(cost).encode()

    def _reread_ms(self, n_reused: int) -> float:
        n, ms = self._cost()
        return n_reused * ms / n if n else 0.0
