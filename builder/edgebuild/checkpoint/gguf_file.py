"""The container of a GGUF file: metadata and where each tensor lies, bounds-checked. Knows nothing of models.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf`
package supplies the quantisation types; its own reader makes a NumPy array of every token (4.1 s for 49,152 tokens and
48,900 merges, here 0.4 s) and takes lengths past the end of the file without complaint, so the header is parsed here.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgebuild.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAXIMUM_DIMENSIONS = 4  # GGML_MAX_DIMS
_HINT = "the file is damaged or its download was cut short: fetch it again"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored. `shape` is row-major, as NumPy has it (GGUF lists it the other way round)."""

    name: str
    type_name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    bytes: int
    row_bytes: int  # bytes of one row, the last dimension


@dataclass(frozen=True)
class GgufFile:
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self.position = data, name, 0

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need(size)
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += size
        return value

    def text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        """`count` strings; a vocabulary has hundreds of thousands, so the loop does nothing twice."""
        self._need(count * 8)  # a string takes at least its length field
        data, position, end = self._data, self.position, len(self._data)
        raw = []
        for _ in range(count):
            start = position + 8
            length = _LENGTH.unpack_from(data, position)[0] if start <= end else 8
            if length > end - start:
                self.position = start
                self._need(length)
            position = start + length
            raw.append(data[start:position])
        self.position = position
        try:
            return [text.decode("utf-8") for text in raw]
        except UnicodeDecodeError as error:
            raise self.damaged(f"a string before byte {position} is not UTF-8: {error.reason}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.damaged(f"value type {kind} at byte {self.position} is unknown")
        element, count = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            code = _SCALARS[element]
            self._need(count * struct.calcsize("<" + code))
            values = struct.unpack_from(f"<{count}{code}", self._data, self.position)
            self.position += count * struct.calcsize("<" + code)
            return list(values)
        if element != _STRING:  # no published key nests arrays
            raise self.damaged(f"array type {element} at byte {self.position} is unknown")
        return self._texts(count)

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._name}: {what}", hint=_HINT)

    def _need(self, count: int) -> None:
        if count > len(self._data) - self.position:
            raise self.damaged(f"{count} bytes are announced at byte {self.position}, the file has {len(self._data)}")


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table of one file. Raises CheckpointError for anything that does not add up."""
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path.name}: {path.stat().st_size} bytes are too few for a GGUF file", hint=_HINT)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(_Cursor(data, path.name), len(data))


def _parse(cursor: _Cursor, file_bytes: int) -> GgufFile:
    if cursor.scalar("4s") != b"GGUF":
        raise cursor.damaged("the file does not start with GGUF")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise cursor.damaged(f"GGUF version {version} is unknown; 2 and 3 (little-endian) are supported")
    tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise cursor.damaged(f"the key {key!r} stands there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment {alignment!r} is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end, previous = start, "the header"
    for name, shape, type_id, offset in sorted(table, key=lambda entry: entry[3]):
        if name in tensors:
            raise cursor.damaged(f"the tensor {name!r} stands there twice")
        tensor = _tensor(cursor, name, shape, type_id, start + offset)
        if offset % alignment or tensor.offset < end:
            raise cursor.damaged(f"{name!r} at byte {tensor.offset} overlaps {previous}, which ends at {end}")
        end, previous = tensor.offset + tensor.bytes, repr(name)
        if end > file_bytes:
            raise cursor.damaged(f"{name!r} ends at byte {end}, the file has {file_bytes}")
        tensors[name] = tensor
    return GgufFile(metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, row-major shape, type and offset of one entry of the tensor table."""
    name, dimensions = cursor.text(), cursor.scalar("I")
    if not 1 <= dimensions <= _MAXIMUM_DIMENSIONS:
        raise cursor.damaged(f"{name!r} has {dimensions} dimensions")
    sizes = [cursor.scalar("Q") for _ in range(dimensions)]
    return name, tuple(reversed(sizes)), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise cursor.damaged(f"{name!r} has the unknown quantisation type {type_id}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if not math.prod(shape) or shape[-1] % block_elements:
        raise cursor.damaged(
            f"{name!r} of shape {list(shape)} does not divide into {kind.name} blocks of {block_elements}"
        )
    row_bytes = shape[-1] // block_elements * block_bytes
    return GgufTensor(name, kind.name, type_id, shape, offset, math.prod(shape[:-1]) * row_bytes, row_bytes)
