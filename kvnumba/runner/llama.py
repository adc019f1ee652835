"""The forward pass of llama-architecture models. Of the cache it knows the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np

from kvnumba.config import CacheConfig
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.inputs import checked_rows
from kvnumba.runner.linear import Group, Linear, Multiplier
from kvnumba.runner.llama_params import LlamaParams, cache_config_of, read_params
from kvnumba.runner.ops import rms_norm, rope_tables, rotate, swiglu
from kvnumba.runner.quants import pick
from kvnumba.runner.tensors import Tensors

__all__ = ["LlamaModel", "StepLike", "cache_config_of"]

_FREQ_FACTORS = "rope_freqs.weight"
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"


class StepLike(Protocol):
    """What the forward pass asks of a cache's step."""

    def write(self, il: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store K (rotated) and V of the tokens, float32 ``[n, n_head_kv * head_dim]``."""

    def attend(self, il: int, q: np.ndarray, out: np.ndarray) -> Any:
        """Attend from ``q[n, n_head, head_dim]``, writing ``out[n, n_head, head_dim_v]``."""


class _Layer(NamedTuple):
    attn_norm: np.ndarray
    qkv: Group
    attn_output: Group
    ffn_norm: np.ndarray
    gate_up: Group
    ffn_down: Group


class _Activations(NamedTuple):
    """Working memory of a batch: one row per token."""

    x: np.ndarray
    h: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mixed: np.ndarray
    out: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    q_heads: np.ndarray
    mixed_heads: np.ndarray

    @classmethod
    def of(cls, memory: dict[str, np.ndarray], n: int, p: LlamaParams) -> _Activations:
        """Take rows out of `memory`, which grows when it has too few."""
        widths = {
            "x": p.n_embd,
            "h": p.n_embd,
            "q": p.n_head * p.head_dim,
            "k": p.n_head_kv * p.head_dim,
            "v": p.n_head_kv * p.head_dim_v,
            "mixed": p.n_head * p.head_dim_v,
            "out": p.n_embd,
            "gate": p.n_ff,
            "up": p.n_ff,
        }
        for name, width in widths.items():
            if name not in memory or len(memory[name]) < n:
                memory[name] = np.empty((n, width), np.float32)
        arrays = {name: memory[name][:n] for name in widths}
        return cls(
            **arrays,
            q_heads=arrays["q"].reshape(n, p.n_head, p.head_dim),
            mixed_heads=arrays["mixed"].reshape(n, p.n_head, p.head_dim_v),
        )


class LlamaModel:
    """A model: its weights as the file's bytes, and the forward pass.

    One object must not be used by two Python threads at once: it keeps its working memory.

    Parameters
    ----------
    file : GGUFFile
        Its mapping is used as long as the model lives.

    Attributes
    ----------
    params : LlamaParams
    n_vocab, n_layer, n_ctx_train : int
    n_rows_computed : int
        Tokens whose Q, K and V have been computed since the model was made.

    Raises
    ------
    ModelFileError
        If the architecture is another one, a tensor is missing or has the wrong shape, or the
        file holds tensors (biases, experts) or keys that this pass would have to ignore. The
        message names it.
    """

    def __init__(self, file: GGUFFile):
        self.params = p = read_params(file)
        take = Tensors(file, {_FREQ_FACTORS})
        self.n_vocab = take.n_rows(_EMBEDDING)
        self._embedding = take.matrix(_EMBEDDING, self.n_vocab, p.n_embd)
        self._layers = [_read_layer(take, f"blk.{il}.", p) for il in range(p.n_layer)]
        self._output_norm = take.values("output_norm.weight", (p.n_embd,))
        head = self._embedding
        if _HEAD in file.tensors:
            head = take.matrix(_HEAD, self.n_vocab, p.n_embd)
        self._head = Group(head)
        take.expect_all_used()
        self.n_layer, self.n_ctx_train = p.n_layer, p.n_ctx_train
        self.n_rows_computed = 0
        self._multiply = Multiplier(1)
        self._memory: dict[str, np.ndarray] = {}
        self._last: _Activations | None = None

    def config(self, n_ctx: int | None = None, **options: Any) -> CacheConfig:
        """Return the configuration of a cache for this model; see `LlamaParams.cache_config`."""
        return self.params.cache_config(n_ctx, **options)

    def forward(
        self,
        tokens: np.ndarray,
        pos: np.ndarray,
        step: StepLike,
        rows: Sequence[int] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Compute tokens, writing their K and V through `step` and attending through it.

        Parameters
        ----------
        tokens, pos : ndarray, shape (n,), int32
        step : StepLike
            An applied step that has cells for these tokens.
        rows : sequence of int, optional
            Tokens whose logits are wanted, by index; default: the last.

        Returns
        -------
        logits : ndarray, shape (len(rows), n_vocab), float32

        Raises
        ------
        ConfigError, ShapeError
            If a token, position or row is impossible; nothing is written.
        """
        rows = checked_rows(tokens, pos, rows, self.n_vocab)
        self._multiply.n_threads = n_threads = numba.get_num_threads()
        p, a = self.params, self._activations(len(tokens))
        more = None
        pick(self._embedding.rows, np.ascontiguousarray(tokens, np.int32), a.x)
        tables = rope_tables(p.rope, pos)
        self.n_rows_computed += len(tokens)
        for il, layer in enumerate(self._layers):
            rms_norm(a.x, layer.attn_norm, p.eps, a.h, n_threads, more)
            self._attention(il, layer, a, tables, step)
            rms_norm(a.x, layer.ffn_norm, p.eps, a.h, n_threads, a.out)
            self._feed_forward(layer, a)
            more = a.out
        return self._logits(a, rows)

    def _attention(
        self,
        il: int,
        layer: _Layer,
        a: _Activations,
        tables: tuple[np.ndarray, np.ndarray],
        step: StepLike,
    ) -> None:
        p, multiply = self.params, self._multiply
        multiply(a.h, layer.qkv, (a.q, a.k, a.v))
        rotate(a.q, a.k, tables, p.head_dim, p.rope.pairing == "neox", multiply.n_threads)
        step.write(il, a.k, a.v)
        step.attend(il, a.q_heads, a.mixed_heads)
        multiply(a.mixed, layer.attn_output, (a.out,))

    def _feed_forward(self, layer: _Layer, a: _Activations) -> None:
        self._multiply(a.h, layer.gate_up, (a.gate, a.up))
        swiglu(a.gate, a.up, self._multiply.n_threads)
        self._multiply(a.gate, layer.ffn_down, (a.out,))

    def _logits(self, a: _Activations, rows: np.ndarray) -> np.ndarray:
        logits = np.empty((len(rows), self.n_vocab), np.float32)
        if len(rows):
            last = a.x[rows] + a.out[rows]
            normed = np.empty_like(last)
            rms_norm(last, self._output_norm, self.params.eps, normed)
            self._multiply(normed, self._head, (logits,))
        return logits

    def _activations(self, n: int) -> _Activations:
        """Return working memory for `n` tokens; it is kept, because fresh pages are slow."""
        if self._last is None or len(self._last.x) != n:
            self._last = _Activations.of(self._memory, n, self.params)
        return self._last


def _read_layer(take: Tensors, prefix: str, p: LlamaParams) -> _Layer:
    n_q, n_k, n_v = p.n_head * p.head_dim, p.n_head_kv * p.head_dim, p.n_head_kv * p.head_dim_v

    def matrix(name: str, n_out: int, n_in: int) -> Linear:
        return take.matrix(f"{prefix}{name}.weight", n_out, n_in)

    return _Layer(
        attn_norm=take.values(f"{prefix}attn_norm.weight", (p.n_embd,)),
        qkv=Group(
            matrix("attn_q", n_q, p.n_embd),
            matrix("attn_k", n_k, p.n_embd),
            matrix("attn_v", n_v, p.n_embd),
        ),
        attn_output=Group(matrix("attn_output", p.n_embd, p.n_head * p.head_dim_v)),
        ffn_norm=take.values(f"{prefix}ffn_norm.weight", (p.n_embd,)),
        gate_up=Group(matrix("ffn_gate", p.n_ff, p.n_embd), matrix("ffn_up", p.n_ff, p.n_embd)),
        ffn_down=Group(matrix("ffn_down", p.n_embd, p.n_ff)),
    )
