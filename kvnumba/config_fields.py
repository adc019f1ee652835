"""Checks of the fields of configurations: one value each, refused by name, kept as plain Python."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvnumba.dtypes import ElementType, kv_type
from kvnumba.errors import ConfigError

MAX_NUMBER = float(np.finfo(np.float64).max)


def expect(config: Any, kind: type) -> None:
    """Raise ConfigError unless `config` is of the class that a cache is made from."""
    if not isinstance(config, kind):
        raise ConfigError(f"a {kind.__name__} is wanted, not {type(config).__name__}")


def count(value: Any, name: str, least: int) -> int:
    """Return `value` as int, or raise ConfigError unless it is a whole number from `least` on."""
    if is_bool(value) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}, got {reprlib.repr(value)}"
        )
    return int(value)


def number(value: Any, name: str, above_0: bool = False) -> float:
    """Return `value` as float, or raise ConfigError unless it is finite (and `above_0`)."""
    good = isinstance(value, (int, float, np.integer, np.floating)) and not is_bool(value)
    if good and isinstance(value, np.generic):
        value = value.item()  # a numpy scalar would be compared in its own width
    # Compared before float(), which has no room for the largest whole numbers; false for nan.
    if not good or not abs(value) <= MAX_NUMBER or (above_0 and not value > 0):
        wanted = "a number above 0" if above_0 else "a finite number"
        raise ConfigError(f"{name} must be {wanted}, got {reprlib.repr(value)}")
    return float(value)


def is_bool(value: Any) -> bool:
    """Return whether a value is True or False, which are no numbers here."""
    return isinstance(value, (bool, np.bool_))


def entries(values: Any, name: str) -> tuple[Any, ...]:
    """Return the entries of a list, tuple or array, or raise ConfigError."""
    if isinstance(values, np.ndarray) and values.ndim:
        return tuple(values)
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} must be a list of numbers, got {reprlib.repr(values)}")
    return tuple(values)


def put_count(config: Any, name: str, least: int) -> None:
    """Check a field of a frozen dataclass as `count` does, and keep it as int."""
    object.__setattr__(config, name, count(getattr(config, name), name, least))


def put_number(config: Any, name: str, above_0: bool = False) -> None:
    """Check a field as `number` does, and keep it as float."""
    object.__setattr__(config, name, number(getattr(config, name), name, above_0))


def put_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Check that a field is one of some words."""
    value = getattr(config, name)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} {reprlib.repr(value)} is not one of {allowed}")
    object.__setattr__(config, name, str(value))


def put_flag(config: Any, name: str) -> None:
    """Check that a field is true or false."""
    value = getattr(config, name)
    if not is_bool(value):
        raise ConfigError(f"{name} must be true or false, got {reprlib.repr(value)}")
    object.__setattr__(config, name, bool(value))


def put_type(config: Any, name: str) -> None:
    """Check that a field names an element type, and keep the name."""
    value = getattr(config, name)
    if is_bool(value) or not isinstance(value, (str, int, np.integer, ElementType)):
        raise ConfigError(f"{name} must be the name of an element type, got {reprlib.repr(value)}")
    value = int(value) if isinstance(value, np.integer) else value
    object.__setattr__(config, name, kv_type(value).name)


def per_layer(value: Any, n_layer: int, name: str, least: int = 1) -> tuple[int, ...]:
    """Return one count per layer: `value` for all of them, or its entries."""
    if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str):
        values = tuple(count(v, name, least) for v in entries(value, name))
    else:
        values = (count(value, name, least),) * n_layer
    if len(values) != n_layer:
        raise ConfigError(f"{name} has {len(values)} entries, n_layer is {n_layer}")
    return values


def checked_layer_map(value: Any, n_layer: int) -> tuple[int, ...] | None:
    """Return which of `n_layer` layers each layer of the model reads; -1 for none of them.

    Raises
    ------
    ConfigError
        If an entry is no such layer, or a layer is named by nobody.
    """
    if value is None:
        return None
    least = f"layer_map: each entry must be one of {n_layer} layers, or -1 for none"
    named: list[int] = []
    for il, v in enumerate(entries(value, "layer_map")):
        v = -1 if v is None else v
        if is_bool(v) or not isinstance(v, (int, np.integer)) or not -1 <= v < n_layer:
            raise ConfigError(f"{least}; that of layer {il} is {reprlib.repr(v)}")
        named.append(int(v))
    missing = sorted(set(range(n_layer)) - set(named))
    if missing:
        raise ConfigError(
            f"layer_map names {n_layer - len(missing)} of {n_layer} layers, {missing[0]} not; "
            "every layer that is stored must be read by one of the model"
        )
    return tuple(named)
