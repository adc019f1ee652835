"""Logits chains (``.json``): a list of decodes and verbs, run on a model."""

from __future__ import annotations

import json
import reprlib
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from kvnumba.batch import Batch
from kvnumba.dtypes import kv_type
from kvnumba.errors import ConfigError, KVCacheError, StateFormatError
from kvnumba.recurrent import RecurrentCache
from kvnumba.replay.report import Report
from kvnumba.splitting import in_batch_order
from kvnumba.unified import UnifiedCache

# The reference rounds K, V and its attention inside when they are not f32.
NMSE_F32 = 1e-9
NMSE_ROUNDED = 1e-5
MAX_LABEL = 200
_MALFORMED = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)
# What numpy and zipfile raise on a foreign or cut ``.npz``.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zlib.error,
    zipfile.BadZipFile,
)


def replay_chain(
    path: str | Path,
    model: str | Path | None = None,
    type_k: str | None = None,
    type_v: str | None = None,
    logits_out: str | Path | None = None,
) -> Report:
    """Run a chain, write its logits, and compare them with recorded ones beside it.

    Parameters
    ----------
    path : path-like
        The chain; ``NAME.npz`` beside it holds the recorded logits, if there are any.
    model : path-like, optional
        GGUF file; default: the one that the chain names, looked for beside the chain and in a
        folder ``models`` beside its folder.
    type_k, type_v : str, optional
        Element types; default: the chain's.
    logits_out : path-like, optional
        Where the logits are written as ``.npz``, one array ``[n_tokens, n_vocab]`` per decode.

    Raises
    ------
    StateFormatError, ModelFileError
        If the chain, the recorded logits or the model cannot be read.
    ConfigError
        If `logits_out` cannot be written, or is the file of the recorded logits.
    """
    path = Path(path)
    recorded = path.with_suffix(".npz")
    if logits_out is not None and _npz_path(logits_out).resolve() == recorded.resolve():
        raise ConfigError(f"--logits {logits_out} holds the recorded logits; name another file")
    chain = _read_chain(path)
    logits = run_chain(chain, _model_path(path, chain, model), type_k, type_v)
    if logits_out is not None:
        _write_npz(_npz_path(logits_out), logits)
    report = Report(n_traces=1, n_ops=len(chain["steps"]))
    exact = all(kv_type(t).name == "f32" for t in _types(chain, type_k, type_v))
    if recorded.exists():
        _compare(logits, recorded, NMSE_F32 if exact else NMSE_ROUNDED, report)
        for step in chain["steps"]:
            label = step.get("logits")
            if label is not None and label not in report.details["nmse"]:
                report.differ(f"logits of {label}", "computed", "not recorded")
    return report


def _npz_path(path: str | Path) -> Path:
    return Path(path) if str(path).endswith(".npz") else Path(f"{path}.npz")


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an ``.npz``; any label will do, where `numpy.savez` takes some for its arguments."""
    try:
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--logits {path} cannot be written: {error}") from None


def _read_chain(path: Path) -> dict[str, Any]:
    try:
        chain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StateFormatError(f"{path} cannot be read as a chain: {error}") from None
    steps = chain.get("steps") if isinstance(chain, dict) else None
    if not isinstance(steps, list) or not steps:
        raise StateFormatError(f"{path} is no chain: an object with a list 'steps' is wanted")
    labels = set()
    for n, step in enumerate(steps):
        if not isinstance(step, dict) or "op" not in step:
            raise StateFormatError(f"{path}: step {n} is no object with an 'op'")
        label = step.get("logits", str(n))
        if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL or not label.isprintable():
            raise StateFormatError(
                f"{path}: step {n}: the label {reprlib.repr(label)} is no printable text"
            )
        if label in labels:
            raise StateFormatError(f"{path}: step {n}: the label {label!r} comes a second time")
        labels.add(label)
    return chain


def _model_path(path: Path, chain: dict[str, Any], model: str | Path | None) -> Path:
    if model is not None:
        return Path(model)
    name = Path(str(chain.get("model", ""))).name
    for folder in (path.parent, path.parent.parent / "models"):
        if name and (folder / name).is_file():
            return folder / name
    raise StateFormatError(f"{path}: its model {name!r} is not beside it; name one with --model")


def _types(chain: dict[str, Any], type_k: str | None, type_v: str | None) -> tuple[Any, Any]:
    kv = chain.get("kv", {})
    return type_k or kv.get("type_k", "f16"), type_v or kv.get("type_v", "f16")


def run_chain(
    chain: dict[str, Any], model_path: Path, type_k: str | None, type_v: str | None
) -> dict[str, np.ndarray]:
    """Run the steps of a chain; return the logits of every token of each decode by label."""
    from kvnumba.runner.loading import Model

    model = Model(model_path)
    steps = chain["steps"]
    try:
        out: dict[str, np.ndarray] = {}
        with _cache_of(model, chain, type_k, type_v) as cache:
            for n, step in enumerate(steps):
                logits = _do(cache, model.net, step)
                if logits is not None:
                    out[step.get("logits", str(n))] = logits
    except KVCacheError:
        raise
    except _MALFORMED as error:
        raise StateFormatError(f"a step of the chain is malformed: {error!r}") from error
    return out


def _cache_of(
    model: Any, chain: dict[str, Any], type_k: str | None, type_v: str | None
) -> UnifiedCache | RecurrentCache:
    """Return a cache that has room for everything a chain does."""
    steps = chain["steps"]
    n_tokens = sum(len(s["tokens"]) for s in steps if s["op"] == "decode")
    ids = [s for step in steps for row in step.get("seq_ids", []) for s in row]
    n_seq_max = 2 + max(ids, default=0)
    k, v = (kv_type(t).name for t in _types(chain, type_k, type_v))
    if model.is_recurrent:
        return RecurrentCache(model.net.recurrent_config(n_seq_max, type_r=k, type_s=v))
    return UnifiedCache(
        model.net.config(
            n_ctx=max(1, n_tokens),
            n_seq_max=n_seq_max,
            type_k=k,
            type_v=v,
            v_trans=not chain.get("kv", {}).get("fa", True),
        )
    )


def _do(cache: UnifiedCache | RecurrentCache, net: Any, step: dict[str, Any]) -> np.ndarray | None:
    op = step["op"]
    if op == "decode":
        batch = Batch(step["tokens"], step["pos"], step["seq_ids"], outputs="all")
        if len(batch.tokens) and not 0 <= batch.tokens.min() <= batch.tokens.max() < net.n_vocab:
            raise StateFormatError(f"a token lies outside the model's vocabulary of {net.n_vocab}")
        rows, parts = [], cache.prepare(batch, n_ubatch=batch.n_tokens)
        for part in parts:
            with part:
                tokens = part.batch.tokens
                rows.append(net.forward(tokens, part.pos, part, np.arange(len(tokens))))
        return in_batch_order(np.concatenate(rows), parts.ubatches)
    if op == "seq_rm":
        cache.seq_rm(step["seq_id"], step["p0"], step["p1"])
    elif op == "seq_cp":
        cache.seq_cp(step["seq_id_src"], step["seq_id_dst"], step["p0"], step["p1"])
    elif op == "seq_add":
        cache.seq_add(step["seq_id"], step["p0"], step["p1"], step["delta"])
    elif op == "seq_div":
        cache.seq_div(step["seq_id"], step["p0"], step["p1"], step["d"])
    elif op == "seq_keep":
        cache.seq_keep(step["seq_id"])
    else:
        raise StateFormatError(f"operation {op!r} of the chain is not known")
    return None


def _compare(
    logits: dict[str, np.ndarray], recorded: Path, tolerance: float, report: Report
) -> None:
    try:
        # Opened here, because numpy leaves the file open when it is no zip.
        with recorded.open("rb") as file, np.load(file, allow_pickle=False) as want:
            errors = {name: _nmse(logits.get(name), want[name]) for name in want.files}
            report.n_values = sum(want[name].size for name in want.files)
    except _UNREADABLE as error:
        raise StateFormatError(f"{recorded} cannot be read as logits: {error!r}") from None
    if not report.n_values:
        raise StateFormatError(f"{recorded} holds no logits")
    for n, (name, nmse) in enumerate(errors.items()):
        report.n_ops_here = n
        if not nmse <= tolerance:
            report.differ(f"nmse of {name}", nmse, tolerance)
    report.details["nmse"] = {name: float(f"{e:.3g}") for name, e in errors.items()}
    report.details["tolerance"] = tolerance


def _nmse(got: np.ndarray | None, want: np.ndarray) -> float:
    """Return the normalised mean square error, infinite when the shapes differ."""
    if want.dtype.kind not in "fiu":
        raise ValueError(f"logits have dtype {want.dtype}")
    want = want.astype(np.float64)
    if got is None or got.size != want.size:
        return float("inf")
    error, size = float(((got.reshape(want.shape) - want) ** 2).sum()), float((want**2).sum())
    return error / size if size else (0.0 if error == 0 else float("inf"))
