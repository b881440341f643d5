"""Where an ONNX file's external tensors lie, read from its bytes without the onnx package.

A walk over the protobuf wire format that visits only graphs, nodes, attributes, functions and tensors. It checks that
every external tensor stays inside a file that the caller knows. Knows nothing of operators.
Field numbers: onnx.proto, https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from edgert.errors import ArtifactError
from edgert.strictjson import REBUILD

MAX_GRAPH_BYTES = 1 << 31  # protobuf's own limit
MAX_DEPTH = 32

_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR, _FUNCTION, _SPARSE = range(7)
# message kind -> {field number: kind of the message in it}
_CHILDREN: dict[int, dict[int, int]] = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _FUNCTION: {7: _NODE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
}


class _Malformed(Exception):
    pass


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _Malformed(f"a broken number at byte {at}")


def _fields(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, start, end) of each field; for a varint, start is its value."""
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at, end)
            yield number, wire, value, at
            continue
        if wire == 2:
            size, at = _varint(data, at, end)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise _Malformed(f"wire type {wire} at byte {at}")
        if number == 0 or size > end - at:
            raise _Malformed(f"a field that runs past its message at byte {at}")
        yield number, wire, at, at + size
        at += size


def _walk(data: memoryview, kind: int, at: int, end: int, depth: int) -> Iterator[dict[str, str]]:
    """external_data entries of every tensor below."""
    if depth > MAX_DEPTH:
        raise _Malformed(f"nested deeper than {MAX_DEPTH} levels")
    if kind == _TENSOR:
        yield from _tensor(data, at, end)
        return
    children = _CHILDREN[kind]
    for number, wire, start, stop in _fields(data, at, end):
        child = children.get(number)
        if child is not None and wire == 2:
            yield from _walk(data, child, start, stop, depth + 1)


def _tensor(data: memoryview, at: int, end: int) -> Iterator[dict[str, str]]:
    entry: dict[str, str] = {}
    external = False
    for number, wire, start, stop in _fields(data, at, end):
        if number == 14 and wire == 0:
            external = start == 1
        elif number == 13 and wire == 2:
            pair = {n: bytes(data[s:e]) for n, w, s, e in _fields(data, start, stop) if w == 2}
            try:
                entry[pair.get(1, b"").decode("utf-8")] = pair.get(2, b"").decode("utf-8")
            except UnicodeDecodeError:
                raise _Malformed(f"external data that is not text at byte {start}") from None
    if external or entry:
        yield entry


def check_external_data(path: Path, known: Mapping[str, int]) -> int:
    """Every external tensor of the ONNX file lies inside one of the `known` files (name -> bytes).

    Returns how many external tensors there are. Raises ArtifactError.
    """
    size = path.stat().st_size
    if size > MAX_GRAPH_BYTES:
        raise ArtifactError(f"{path.name}: {size} bytes, an ONNX graph has at most {MAX_GRAPH_BYTES}", hint=REBUILD)
    data = memoryview(path.read_bytes())
    count = 0
    try:
        present = {number for number, wire, _, _ in _fields(data, 0, size) if wire == 2}
        for number, what in ((7, "graph"), (8, "operator set")):
            if number not in present:
                raise _Malformed(f"it has no {what}")
        for entry in _walk(data, _MODEL, 0, size, 0):
            count += 1
            _check_entry(entry, path.name, known)
    except _Malformed as error:
        raise ArtifactError(f"{path.name}: not an ONNX model: {error}", hint=REBUILD) from None
    return count


def _check_entry(entry: Mapping[str, str], name: str, known: Mapping[str, int]) -> None:
    location = entry.get("location", "")
    if location not in known:
        raise ArtifactError(
            f"{name}: a tensor's data lies in {location[:80]!r}, which the manifest does not list", hint=REBUILD
        )
    numbers = []
    for key in ("offset", "length"):
        text = entry.get(key, "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 16):
            raise ArtifactError(f"{name}: external data {key} {text[:40]!r} is not a size in bytes", hint=REBUILD)
        numbers.append(int(text))
    offset, length = numbers
    if offset + length > known[location]:
        raise ArtifactError(
            f"{name}: a tensor's data ends at byte {offset + length}, {location} has {known[location]}", hint=REBUILD
        )
