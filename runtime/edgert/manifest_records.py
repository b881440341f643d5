"""The records of manifest.json, and the bounds that its numbers must keep. Plain frozen data: no reading, no checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edgert.cells import Cell

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
MAX_TOKENS = 1 << 24  # no model of today has a context of 16 million tokens
MAX_WIDTH = 1 << 20
MAX_BYTES = 1 << 46  # 64 TiB
MAX_CELLS = 256
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}
DTYPES = tuple(DTYPE_BYTES)
SYMBOLS = ("batch", "rows", "tier", "logit_rows")
STEP_INPUTS = ("tokens", "length", "valid", "forced", "kv_positions", "uniform", "temperature", "top_k", "top_p")
STEP_OUTPUTS = ("sampled", "accepted", "next_token", "new_length", "logits")
# what a decoder with a drafter takes and gives beyond that, and the drafter's own graph
DRAFTING_INPUTS, DRAFTING_OUTPUTS = ("following",), ("hidden", "next_embedding")
MTP_INPUTS = ("embedding", "hidden", "length", "new_length", "kv_positions")
MTP_OUTPUTS = ("draft", "draft_embedding", "draft_hidden", "next_length")


@dataclass(frozen=True)
class ModelInfo:
    """What was compiled.

    identity     SHA-256 over the checkpoint's config and weights
    token_limit  V': ids the tokenizer knows; rows of the vocabulary past it are never sampled
    context_tokens  positions the model was trained for
    """

    family: str
    name: str
    identity: str
    hidden_size: int
    layers: int
    vocabulary_size: int
    token_limit: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    context_tokens: int


@dataclass(frozen=True)
class SourceEntry:
    """A checkpoint file the artifact was made from."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class BackendInfo:
    """compute_capabilities: "8.7" and so on; empty = any device (onnxruntime)."""

    name: str
    version: str
    compute_capabilities: tuple[str, ...]
    precision: str


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output. A dimension is a number or one of SYMBOLS."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class StateSpec:
    """A tensor that lives on the device between steps; `shape` is per slot, `input` and `output` share memory."""

    input: str
    output: str
    dtype: str
    kind: str
    shape: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class LedgerLine:
    label: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class TrafficInfo:
    name: str
    source_sha256: str
    requests: int
    attribution: str


@dataclass(frozen=True)
class FileEntry:
    """A file of the artifact: relative POSIX path."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime knows of an artifact before opening its engine.

    context_tokens  usable positions per slot (prompt + output)
    cache_tokens    allocated positions per slot: context + the largest chunk, because a padded tail may be written
    draft_length    tokens drafted after a step at most; 0 = no drafter. draft_vocabulary: ids that may be drafted;
                    draft_states: of the drafter's own graph
    """

    format_version: int
    name: str
    edgebuild_version: str
    tools: Mapping[str, str]
    state: Literal["complete", "onnx"]
    model: ModelInfo
    source: tuple[SourceEntry, ...]
    backend: BackendInfo
    context_tokens: int
    cache_tokens: int
    slots: int
    cells: tuple[Cell, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[StateSpec, ...]
    ledger: tuple[LedgerLine, ...]
    budget_bytes: int
    draft_length: int
    traffic: TrafficInfo
    files: tuple[FileEntry, ...]
    draft_vocabulary: int = 0
    draft_states: tuple[StateSpec, ...] = ()

    @property
    def prefill_cells(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.kind == "prefill")

    @property
    def decode_cells(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.kind == "decode")

    @property
    def planned_bytes(self) -> int:
        """What the plan expects to be in use: the ledger without what is left to the system."""
        return sum(line.bytes for line in self.ledger if line.label != "margin")

    @property
    def decoder_file(self) -> str:
        """The file the backend opens."""
        return decoder_file(self.backend.name, self.state)

    def file(self, path: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.path == path), None)

    def to_json(self) -> dict[str, Any]:
        """The JSON document; `parse_manifest` reads it back to an equal Manifest."""
        document = asdict(self)
        document["tools"] = dict(self.tools)
        document["tensors"] = {"inputs": document.pop("inputs"), "outputs": document.pop("outputs")}
        document["memory"] = {"ledger": document.pop("ledger"), "budget_bytes": document.pop("budget_bytes")}
        document["draft"] = {name: document.pop(f"draft_{name}") for name in ("length", "vocabulary", "states")}
        return document


def drafter_file(backend: str, state: str) -> str:
    """The drafter's own file, as `decoder_file`."""
    return "mtp.onnx" if backend == "onnxruntime" or state == "onnx" else "mtp.plan"


def decoder_file(backend: str, state: str) -> str:
    return "decoder.onnx" if backend == "onnxruntime" or state == "onnx" else "decoder.plan"
