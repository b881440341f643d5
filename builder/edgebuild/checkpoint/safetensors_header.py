"""The header of a safetensors file, read and checked without torch: what is stored where, and that it can be.

Format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors back to back
(https://github.com/huggingface/safetensors#format). Knows nothing of models.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from edgebuild.errors import CheckpointError

MAXIMUM_HEADER_BYTES = 100_000_000  # the reference implementation's limit
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_HINT = "the file is damaged or its download was cut short: fetch it again"


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. `offset` and `bytes` count from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    path: Path


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file by its stored name. Raises CheckpointError for anything that does not add up."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _damaged(path, f"{file_bytes} bytes are too few for a safetensors file")
        header_bytes = int.from_bytes(prefix, "little")
        if not 2 <= header_bytes <= min(file_bytes - 8, MAXIMUM_HEADER_BYTES):
            raise _damaged(path, f"header length {header_bytes} in a file of {file_bytes} bytes")
        text = file.read(header_bytes)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is not readable JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    tensors = [_entry(path, name, entry, start) for name, entry in header.items()]
    _check_layout(path, tensors, start, file_bytes)
    return {tensor.name: tensor for tensor in tensors}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands there twice")
    return content


def _entry(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _damaged(path, f"the entry of {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(
            f"{path.name}: {name!r} has the unknown dtype {dtype!r}", hint=f"known: {', '.join(_BITS)}"
        )
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _damaged(path, f"{name!r} has shape {shape!r} and offsets {offsets!r}")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if end < begin or (end - begin) * 8 != bits:
        raise _damaged(
            path, f"{name!r} of dtype {dtype} and shape {shape} takes {end - begin} bytes, expected {bits / 8:g}"
        )
    return StoredTensor(name, dtype, tuple(shape), start + begin, end - begin, path)


def _whole_numbers(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(path: Path, tensors: list[StoredTensor], start: int, file_bytes: int) -> None:
    """Tensors fill the file from `start` to its end: no hole, no overlap, nothing cut off."""
    position, previous = start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != position:
            what = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise _damaged(path, f"{tensor.name!r} at byte {tensor.offset} {what} {previous}, which ends at {position}")
        position, previous = tensor.offset + tensor.bytes, repr(tensor.name)
    if position > file_bytes:
        raise _damaged(path, f"{previous} ends at byte {position}, the file has {file_bytes}")
    if position < file_bytes:
        raise _damaged(path, f"{file_bytes - position} bytes after {previous} belong to no tensor")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.name}: {what}", hint=_HINT)
