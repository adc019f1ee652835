"""GGUF files byte by byte, for tests: also files that no honest writer would make."""

from __future__ import annotations

import struct
from typing import Any

ALIGNMENT = 32
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_FORMATS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and bytes of a value; lists take the type of their first item."""
    if isinstance(item, list):
        kind = _kind(item[0])
        items = b"".join([_payload(kind, x) for x in item])
        return struct.pack("<IIQ", ARRAY, kind, len(item)) + items
    return struct.pack("<I", _kind(item)) + _payload(_kind(item), item)


def _kind(item: Any) -> int:
    kinds = {bool: BOOL, float: F32, str: STRING, bytes: STRING}
    return kinds.get(type(item), U32 if not isinstance(item, int) or item >= 0 else I32)


def _payload(kind: int, item: Any) -> bytes:
    return string(item) if kind == STRING else struct.pack(_FORMATS[kind], item)


def tensor_row(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    head = string(name) + struct.pack("<I", len(sizes))
    return head + struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)


def gguf_bytes(
    values: dict[str, Any] | list[tuple[str, bytes]],
    tensors: list[tuple[str, list[int], int, bytes]] | None = None,
    version: int = 3,
) -> bytes:
    """A whole file. `values`: plain ones, or (key, bytes as `value` gives them).

    `tensors`: name, sizes in the file's order (fastest first), kind, data.
    """
    pairs = values if isinstance(values, list) else [(k, value(v)) for k, v in values.items()]
    tensors = tensors or []
    table, data = b"", b""
    for name, sizes, kind, payload in tensors:
        table += tensor_row(name, sizes, kind, len(data))
        data += payload + bytes(-len(payload) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join([string(key) + raw for key, raw in pairs]) + table
    return head + bytes(-len(head) % ALIGNMENT) + data
