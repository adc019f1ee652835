"""The forward pass of mamba-architecture models. Of the cache it knows the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np

from kvnumba.errors import ShapeError
from kvnumba.recurrent_config import RecurrentConfig
from kvnumba.runner.gguf_file import GGUFFile
from kvnumba.runner.inputs import checked_rows
from kvnumba.runner.kernels.conv import convolve_kernel
from kvnumba.runner.kernels.scan import BLOCK, scan_kernel
from kvnumba.runner.linear import Group, Multiplier
from kvnumba.runner.mamba_params import MambaParams, read_params
from kvnumba.runner.ops import n_parts, rms_norm
from kvnumba.runner.quants import pick
from kvnumba.runner.tensors import Tensors

_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"


class RecurrentStepLike(Protocol):
    """What the forward pass asks of a recurrent cache's step."""

    @property
    def n_seqs(self) -> int:
        """Sequences in the ubatch."""

    @property
    def n_seq_tokens(self) -> int:
        """Tokens of each."""

    @property
    def n_states(self) -> int:
        """How many states are kept: those after each of the last `n_states` tokens."""

    def read(self, il: int) -> tuple[np.ndarray, np.ndarray]:
        """Return r and s of every sequence, float32 ``[n_seqs, n_embd_r]``, ``[.., n_embd_s]``."""

    def write(self, il: int, r: np.ndarray, s: np.ndarray) -> None:
        """Store the states, float32 ``[n_seqs, n_states, width]``, in token order."""


class _Layer(NamedTuple):
    attn_norm: np.ndarray
    ssm_in: Group
    """Input and gate."""
    conv: np.ndarray
    """``[d_conv, d_inner]``: the file's, turned round."""
    conv_bias: np.ndarray
    ssm_x: Group
    """Time step (low rank), B and C."""
    ssm_dt: Group
    dt_bias: np.ndarray
    a: np.ndarray
    skip: np.ndarray
    ssm_out: Group


class _Activations(NamedTuple):
    """Working memory of a batch: one row per token."""

    x: np.ndarray
    h: np.ndarray
    inner: np.ndarray
    gate: np.ndarray
    mixed: np.ndarray
    rank: np.ndarray
    b: np.ndarray
    c: np.ndarray
    dt: np.ndarray
    y: np.ndarray
    out: np.ndarray

    @classmethod
    def of(cls, memory: dict[str, np.ndarray], n: int, p: MambaParams) -> _Activations:
        """Take rows out of `memory`, which grows when it has too few."""
        widths = dict.fromkeys(cls._fields, p.d_inner)
        widths |= dict.fromkeys(("x", "h", "out"), p.n_embd) | {"rank": p.dt_rank}
        widths |= dict.fromkeys(("b", "c"), p.d_state)
        for name, width in widths.items():
            if name not in memory or len(memory[name]) < n:
                memory[name] = np.empty((n, width), np.float32)
        return cls(**{name: memory[name][:n] for name in widths})


class MambaModel:
    """A model: its weights as the file's bytes, and the forward pass.

    One object must not be used by two Python threads at once: it keeps its working memory.

    Parameters
    ----------
    file : GGUFFile
        Its mapping is used as long as the model lives.

    Attributes
    ----------
    params : MambaParams
    n_vocab, n_layer, n_ctx_train : int
    n_rows_computed : int
        Tokens that have been computed since the model was made.

    Raises
    ------
    ModelFileError
        If the architecture is another one, a tensor is missing or has the wrong shape, or the
        file holds tensors or keys that this pass would have to ignore. The message names it.

    Notes
    -----
    Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"
    (arXiv 2312.00752).

    A token's result depends on the tokens before it, and on the number of tokens of its ubatch
    (products of few and of many vectors add up in different orders); never on the tokens after
    it, on how many states are kept, or on the number of threads. So the state kept on the way
    through a ubatch is, bit for bit, the one that any ubatch of that size leaves that begins with
    the same tokens.
    """

    def __init__(self, file: GGUFFile):
        self.params = p = read_params(file)
        take = Tensors(file)
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

    def recurrent_config(
        self, n_seq_max: int = 1, n_rewind: int = 0, **options: Any
    ) -> RecurrentConfig:
        """Return the configuration of a cache for this model; see `MambaParams`."""
        return self.params.recurrent_config(n_seq_max, n_rewind, **options)

    def forward(
        self,
        tokens: np.ndarray,
        pos: np.ndarray,
        step: RecurrentStepLike,
        rows: Sequence[int] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Compute tokens, taking the states before them from `step` and giving it those after.

        Parameters
        ----------
        tokens, pos : ndarray, shape (n_seqs * n_seq_tokens,), int32
            Sequence by sequence, in the order of the step's. Positions do not matter to this
            architecture.
        step : RecurrentStepLike
            An applied step of these tokens.
        rows : sequence of int, optional
            Tokens whose logits are wanted, by index; default: the last.

        Returns
        -------
        logits : ndarray, shape (len(rows), n_vocab), float32

        Raises
        ------
        ConfigError, ShapeError
            If a token or row is impossible, or the step is of other tokens; nothing is written.
        """
        rows = checked_rows(tokens, pos, rows, self.n_vocab)
        if len(tokens) != step.n_seqs * step.n_seq_tokens:
            raise ShapeError(
                f"{len(tokens)} tokens; the step has {step.n_seqs} sequences of {step.n_seq_tokens}"
            )
        self._multiply.n_threads = n_threads = numba.get_num_threads()
        a = _Activations.of(self._memory, len(tokens), self.params)
        pick(self._embedding.rows, np.ascontiguousarray(tokens, np.int32), a.x)
        self.n_rows_computed += len(tokens)
        more = None
        for il, layer in enumerate(self._layers):
            rms_norm(a.x, layer.attn_norm, self.params.eps, a.h, n_threads, more)
            self._mix(il, layer, a, step)
            more = a.out
        return self._logits(a, rows)

    def _mix(self, il: int, layer: _Layer, a: _Activations, step: RecurrentStepLike) -> None:
        """Set ``a.out`` from ``a.h``: what a layer adds."""
        p, multiply = self.params, self._multiply
        r, s = (np.require(state, np.float32, ("C", "W")) for state in step.read(il))
        n_seqs, n_states = step.n_seqs, step.n_states
        new_r = np.empty((n_seqs, n_states, p.n_embd_r), np.float32)
        new_s = np.empty((n_seqs, n_states, p.n_embd_s), np.float32)
        history = np.empty((n_seqs, p.d_conv - 1, p.d_inner), np.float32)
        parts = n_parts(a.y.size * p.d_state, multiply.n_threads)
        work = np.empty((parts, 2, BLOCK), np.float32)
        multiply(a.h, layer.ssm_in, (a.inner, a.gate))
        convolve_kernel(
            a.mixed, new_r, history, r, a.inner, layer.conv, layer.conv_bias,
            n_parts(a.y.size * p.d_conv, multiply.n_threads),
        )  # fmt: skip
        multiply(a.mixed, layer.ssm_x, (a.rank, a.b, a.c))
        multiply(a.rank, layer.ssm_dt, (a.dt,))
        scan_kernel(
            a.y, new_s, work, s, a.dt, a.mixed, a.gate, a.b, a.c, layer.a, layer.skip,
            layer.dt_bias, parts,
        )  # fmt: skip
        step.write(il, new_r, new_s)
        multiply(a.y, layer.ssm_out, (a.out,))

    def _logits(self, a: _Activations, rows: np.ndarray) -> np.ndarray:
        logits = np.empty((len(rows), self.n_vocab), np.float32)
        if len(rows):
            last = a.x[rows] + a.out[rows]
            normed = np.empty_like(last)
            rms_norm(last, self._output_norm, self.params.eps, normed)
            self._multiply(normed, self._head, (logits,))
        return logits


def _read_layer(take: Tensors, prefix: str, p: MambaParams) -> _Layer:
    def values(name: str, *shape: int) -> np.ndarray:
        return take.values(prefix + name, shape)

    def matrices(name: str, n_in: int, *n_outs: int) -> Group:
        return Group(*take.matrices(f"{prefix}{name}.weight", n_outs, n_in))

    return _Layer(
        attn_norm=values("attn_norm.weight", p.n_embd),
        ssm_in=matrices("ssm_in", p.n_embd, p.d_inner, p.d_inner),
        conv=np.ascontiguousarray(values("ssm_conv1d.weight", p.d_inner, p.d_conv).T),
        conv_bias=values("ssm_conv1d.bias", p.d_inner),
        ssm_x=matrices("ssm_x", p.d_inner, p.dt_rank, p.d_state, p.d_state),
        ssm_dt=matrices("ssm_dt", p.dt_rank, p.d_inner),
        dt_bias=values("ssm_dt.bias", p.d_inner),
        a=values("ssm_a", p.d_inner, p.d_state),
        skip=values("ssm_d", p.d_inner),
        ssm_out=matrices("ssm_out", p.d_inner, p.n_embd),
    )
