"""Small mamba-architecture files with random weights, and a recurrent cache in plain NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf_bytes import gguf_bytes
from tiny_llama import F32, encode

from kvnumba.runner.gguf_file import GGUFFile

N_EMBD, D_INNER, D_STATE, D_CONV, DT_RANK, N_VOCAB, N_LAYER = 32, 64, 8, 4, 32, 40, 2


def keys(**changes: Any) -> dict[str, Any]:
    """The metadata; a change to None takes a key out, dots are written as two underscores."""
    values: dict[str, Any] = {
        "general.architecture": "mamba",
        "mamba.block_count": N_LAYER,
        "mamba.context_length": 512,
        "mamba.embedding_length": N_EMBD,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
        "mamba.vocab_size": N_VOCAB,
        "mamba.ssm.conv_kernel": D_CONV,
        "mamba.ssm.inner_size": D_INNER,
        "mamba.ssm.state_size": D_STATE,
        "mamba.ssm.time_step_rank": DT_RANK,
    }
    for name, value in changes.items():
        name = name.replace("__", ".")
        values[name if name.startswith("general.") else f"mamba.{name}"] = value
    return {k: v for k, v in values.items() if v is not None}


def weights() -> dict[str, np.ndarray]:
    """Random float32 weights by tensor name."""
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for il in range(N_LAYER):
        layer = {
            "attn_norm.weight": (N_EMBD,),
            "ssm_in.weight": (2 * D_INNER, N_EMBD),
            "ssm_conv1d.weight": (D_INNER, D_CONV),
            "ssm_conv1d.bias": (D_INNER,),
            "ssm_x.weight": (DT_RANK + 2 * D_STATE, D_INNER),
            "ssm_dt.weight": (D_INNER, DT_RANK),
            "ssm_dt.bias": (D_INNER,),
            "ssm_a": (D_INNER, D_STATE),
            "ssm_d": (D_INNER,),
            "ssm_out.weight": (N_EMBD, D_INNER),
        }
        shapes |= {f"blk.{il}.{name}": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (N_EMBD,)
    tensors = {n: (rng.standard_normal(s) * 0.2).astype(np.float32) for n, s in shapes.items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1
        elif name.endswith("ssm_a"):
            tensors[name] = -np.exp(5 * tensors[name])
        elif name.endswith("conv1d.weight"):
            tensors[name] *= 3
    return tensors


def open_tiny(
    folder: Path,
    values: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    kind: int = F32,
) -> GGUFFile:
    """Write a file and open it; the projections are stored as `kind`, the rest as float32."""
    rows = []
    for name, array in (weights() if tensors is None else tensors).items():
        is_projection = name.endswith(".weight") and array.ndim == 2 and "conv1d" not in name
        k = kind if is_projection else F32
        rows.append((name, list(reversed(array.shape)), k, encode(array, k)))
    path = folder / "tiny.gguf"
    path.write_bytes(gguf_bytes(keys() if values is None else values, rows))
    return GGUFFile(path)


class FakeStates:
    """The states of each sequence, and those kept before them: what the pass is tried on.

    Parameters
    ----------
    params : MambaParams
    n_rewind : int
    """

    def __init__(self, params: Any, n_rewind: int = 0):
        self.params, self.n_rewind = params, n_rewind
        self.r: dict[tuple[int, int], np.ndarray] = {}
        self.s: dict[tuple[int, int], np.ndarray] = {}

    def step(self, seq_ids: list[int], n_seq_tokens: int) -> FakeStep:
        """Return a step of `n_seq_tokens` tokens of each sequence."""
        return FakeStep(self, seq_ids, n_seq_tokens)

    def seq_cp(self, src: int, dst: int) -> None:
        for states in (self.r, self.s):
            for il in range(self.params.n_layer):
                states[il, dst] = states[il, src].copy()


class FakeStep:
    """What `MambaModel.forward` reads from and writes to; `kept` is what it wrote."""

    def __init__(self, states: FakeStates, seq_ids: list[int], n_seq_tokens: int):
        self.states, self.seq_ids = states, seq_ids
        self.n_seqs, self.n_seq_tokens = len(seq_ids), n_seq_tokens
        self.n_states = min(n_seq_tokens, states.n_rewind + 1)
        self.kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, il: int) -> tuple[np.ndarray, np.ndarray]:
        p = self.states.params

        def gather(states: dict[tuple[int, int], np.ndarray], width: int) -> np.ndarray:
            zero = np.zeros(width, np.float32)
            return np.stack([states.get((il, q), zero) for q in self.seq_ids])

        return gather(self.states.r, p.n_embd_r), gather(self.states.s, p.n_embd_s)

    def write(self, il: int, r: np.ndarray, s: np.ndarray) -> None:
        self.kept[il] = r.copy(), s.copy()
        for row, q in enumerate(self.seq_ids):
            self.states.r[il, q], self.states.s[il, q] = r[row, -1].copy(), s[row, -1].copy()
