"""``kvnumba plan``: what a cache of a given size costs, before it is made."""

from __future__ import annotations

import argparse
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvnumba.cli.output import human_bytes, print_json
from kvnumba.config import CacheConfig
from kvnumba.errors import ConfigError
from kvnumba.recurrent_config import RecurrentConfig

DESCRIPTION = (
    "Bytes per token, memory, disk, and bytes read per decoded token of a cache. --config takes a "
    "JSON file with CacheConfig's fields, or a transformers config.json."
)
# A session reserves rows ahead of use in steps of up to a quarter of what is live.
RESERVED_AHEAD = 0.25
METADATA_BYTES_PER_CELL = 12
ROW_BITS_PER_SEQ = 1 / 8


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    p = commands.add_parser("plan", help="what a cache would cost", description=DESCRIPTION)
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="GGUF", help="take the sizes from a model file")
    which.add_argument("--config", metavar="JSON", help="take the sizes from a JSON file")
    p.add_argument("--n-ctx", type=int, metavar="N", help="cells (default: the file's)")
    p.add_argument("--n-seq-max", type=int, metavar="N", help="sequences (default: 1)")
    p.add_argument("--type-k", metavar="T", help="element type of K (default: f16)")
    p.add_argument("--type-v", metavar="T", help="element type of V (default: f16)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do the command; return its exit code."""
    names = ("n_ctx", "n_seq_max", "type_k", "type_v")
    given = {k: v for k in names if (v := getattr(args, k)) is not None}
    config = _of_model(args.model, given) if args.model else _of_json(args.config, given)
    if isinstance(config, RecurrentConfig):
        figures = plan_states(config)
        title = f"{config.n_layer} layers, {config.n_seq_max} states, r and s {config.type_r}"
    else:
        figures = plan(config)
        title = f"{config.n_layer} layers, {config.n_ctx} cells, "
        title += f"K {config.type_k}, V {config.type_v}"
    if args.json:
        print_json(figures)
        return 0
    print(title)
    for name, n in figures.items():
        if name.endswith("_bytes"):
            print(f"{name[:-6].replace('_', ' '):28} {human_bytes(n)}")
    return 0


def plan(config: CacheConfig) -> dict[str, Any]:
    """Return the figures of a cache, in bytes where the name says so."""
    per_cell = config.bytes_per_cell_k + config.bytes_per_cell_v
    metadata = config.n_ctx * (METADATA_BYTES_PER_CELL + ROW_BITS_PER_SEQ * (config.n_seq_max + 3))
    total = per_cell * config.n_ctx
    return {
        "n_layer": config.n_layer,
        "n_ctx": config.n_ctx,
        "n_seq_max": config.n_seq_max,
        "type_k": config.type_k,
        "type_v": config.type_v,
        "per_token_bytes": per_cell,
        "k_bytes": config.size_k_bytes,
        "v_bytes": config.size_v_bytes,
        "total_bytes": total,
        "metadata_bytes": int(metadata),
        "ram_bytes": total + int(metadata),
        "disk_bytes": int(total * (1 + RESERVED_AHEAD)),
        "read_per_decoded_token_bytes": total,
    }


def plan_states(config: RecurrentConfig) -> dict[str, Any]:
    """Return the figures of a cache of states; they do not grow with the tokens."""
    total = config.bytes_per_state * config.n_seq_max
    return {
        "n_layer": config.n_layer,
        "n_seq_max": config.n_seq_max,
        "n_rewind": config.n_rewind,
        "per_token_bytes": 0,
        "per_sequence_bytes": config.bytes_per_state,
        "total_bytes": total * config.depth,
        # A step is written beside the states before it, which are there until the next.
        "ram_bytes": config.bytes_per_state * config.n_rows,
        "read_per_decoded_token_bytes": config.bytes_per_state,
    }


def _of_model(path: str, given: dict[str, Any]) -> CacheConfig | RecurrentConfig:
    from kvnumba.runner import mamba_params
    from kvnumba.runner.gguf_file import GGUFFile
    from kvnumba.runner.llama import cache_config_of

    with GGUFFile(path) as file:
        if file.architecture != mamba_params.ARCHITECTURE:
            return cache_config_of(file, **given)
        for name in ("n_ctx", "type_k", "type_v"):
            if name in given:
                raise ConfigError(
                    f"--{name.replace('_', '-')} does not go with this model: it is recurrent, and "
                    "has no K and V that grow with the context"
                )
        return mamba_params.read_params(file).recurrent_config(**given)


def _of_json(path: str, given: dict[str, Any]) -> CacheConfig:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} cannot be read as JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"--config {path} holds no JSON object")
    if "num_hidden_layers" in values:
        values = _of_transformers(values)
    return CacheConfig.from_dict({**values, **given})


def _of_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the names of a transformers ``config.json``."""
    n_head = _size(values, "num_attention_heads")
    sizes: dict[str, Any] = {
        "n_layer": _size(values, "num_hidden_layers"),
        "n_head_kv": n_head,
        "n_ctx": values.get("max_position_embeddings", 0),
    }
    # Both keys may be there with null, which means the default.
    if values.get("num_key_value_heads") is not None:
        sizes["n_head_kv"] = _size(values, "num_key_value_heads")
    if values.get("head_dim") is not None:
        sizes["head_dim"] = _size(values, "head_dim")
    else:
        sizes["head_dim"] = _size(values, "hidden_size") // n_head
    return sizes


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name} of config.json must be a whole number of at least 1, got {reprlib.repr(value)}"
        )
    return value
