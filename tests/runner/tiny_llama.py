"""Small llama-architecture files with random weights, and files that differ from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf_bytes import gguf_bytes

from kvnumba.runner.gguf_file import GGUFFile

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_VOCAB, N_LAYER = 64, 96, 4, 2, 40, 2
F32, F16, Q4_0, Q4_1, Q5_1, Q8_0, BF16 = 0, 1, 2, 3, 7, 8, 30


def keys(**changes: Any) -> dict[str, Any]:
    """The metadata; a change to None takes a key out, dots are written as two underscores."""
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": N_LAYER,
        "llama.context_length": 512,
        "llama.embedding_length": N_EMBD,
        "llama.feed_forward_length": N_FF,
        "llama.attention.head_count": N_HEAD,
        "llama.attention.head_count_kv": N_HEAD_KV,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    for name, value in changes.items():
        name = name.replace("__", ".")
        values[name if name.startswith("general.") else f"llama.{name}"] = value
    return {k: v for k, v in values.items() if v is not None}


def weights(head_dim: int = N_EMBD // N_HEAD, tied: bool = False) -> dict[str, np.ndarray]:
    """Random float32 weights by tensor name."""
    rng = np.random.default_rng(11)
    n_q, n_k = N_HEAD * head_dim, N_HEAD_KV * head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (N_VOCAB, N_EMBD)}
    for il in range(N_LAYER):
        layer = {
            "attn_norm": (N_EMBD,),
            "attn_q": (n_q, N_EMBD),
            "attn_k": (n_k, N_EMBD),
            "attn_v": (n_k, N_EMBD),
            "attn_output": (N_EMBD, n_q),
            "ffn_norm": (N_EMBD,),
            "ffn_gate": (N_FF, N_EMBD),
            "ffn_up": (N_FF, N_EMBD),
            "ffn_down": (N_EMBD, N_FF),
        }
        shapes |= {f"blk.{il}.{name}": shape for name, shape in layer.items()}
    shapes["output_norm"] = (N_EMBD,)
    if not tied:
        shapes["output"] = (N_VOCAB, N_EMBD)
    return {
        f"{name}.weight": (rng.standard_normal(shape) * 0.2).astype(np.float32)
        + (1 if "norm" in name else 0)
        for name, shape in shapes.items()
    }


def encode(values: np.ndarray, kind: int) -> bytes:
    """Matrices in the given kind; what the gguf package cannot write is not needed here."""
    return quants.quantize(values.astype(np.float32), GGMLQuantizationType(kind)).tobytes()


def decoded(values: np.ndarray, kind: int) -> np.ndarray:
    """What is left of the values after storing them in the given kind."""
    q = GGMLQuantizationType(kind)
    return quants.dequantize(quants.quantize(values, q), q).reshape(values.shape)


def open_tiny(
    folder: Path,
    values: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    kind: int = F32,
) -> GGUFFile:
    """Write a file and open it; matrices are stored as `kind`, vectors as float32."""
    rows = []
    for name, array in (weights() if tensors is None else tensors).items():
        k = kind if array.ndim == 2 else F32
        rows.append((name, list(reversed(array.shape)), k, encode(array, k)))
    path = folder / "tiny.gguf"
    path.write_bytes(gguf_bytes(keys() if values is None else values, rows))
    return GGUFFile(path)
