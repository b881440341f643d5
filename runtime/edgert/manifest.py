"""manifest.json: what an artifact is, read strictly and cross-checked before anything else of it is opened.

Knows the manifest's own numbers only: no hashing of files (integrity.py), no device, no backend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from edgert import __version__
from edgert.cells import Cell, Kind
from edgert.errors import ArtifactError
from edgert.manifest_records import (
    BACKENDS,
    DTYPES,
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_BYTES,
    MAX_CELLS,
    MAX_MANIFEST_BYTES,
    MAX_TOKENS,
    MAX_WIDTH,
    SYMBOLS,
    BackendInfo,
    FileEntry,
    LedgerLine,
    Manifest,
    ModelInfo,
    SourceEntry,
    StateSpec,
    TensorSpec,
    TrafficInfo,
    decoder_file,
)
from edgert.manifest_rules import check_consistency
from edgert.strictjson import REBUILD, Node, parse_json, read_bounded

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "BackendInfo",
    "FileEntry",
    "LedgerLine",
    "Manifest",
    "ModelInfo",
    "SourceEntry",
    "StateSpec",
    "TensorSpec",
    "TrafficInfo",
    "decoder_file",
    "load_manifest",
    "parse_manifest",
]
TOP_KEYS = (
    *("format_version", "name", "edgebuild_version", "tools", "state", "model", "source", "backend"),
    *("context_tokens", "cache_tokens", "slots", "cells", "tensors", "states", "memory", "draft", "traffic", "files"),
)
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}")


def load_manifest(directory: Path) -> Manifest:
    """Read and check `directory/manifest.json`. Raises ArtifactError."""
    directory = Path(directory)
    if not directory.is_dir():
        kind = "not a directory" if directory.exists() else "no such directory"
        raise ArtifactError(f"{directory}: {kind}", hint="give the artifact directory that edgebuild wrote")
    path = directory / MANIFEST_NAME
    if not path.exists():
        raise ArtifactError(
            f"{directory}: not an artifact, it has no {MANIFEST_NAME}", hint="give the directory that edgebuild wrote"
        )
    return parse_manifest(parse_json(read_bounded(path, MAX_MANIFEST_BYTES), MANIFEST_NAME))


def parse_manifest(document: Any) -> Manifest:
    """A Manifest from parsed JSON: types and ranges first, then the numbers against each other."""
    root = Node(document, MANIFEST_NAME)
    if isinstance(document, dict) and "format_version" in document:
        _check_format(Node(document["format_version"], f"{MANIFEST_NAME}: format_version"), document)
    top = root.fields(TOP_KEYS)
    tensors = top["tensors"].fields(["inputs", "outputs"])
    memory = top["memory"].fields(["ledger", "budget_bytes"])
    draft = top["draft"].fields(["length", "vocabulary", "states"])
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=top["name"].text(least=1, most=200),
        edgebuild_version=top["edgebuild_version"].text(least=1, most=100),
        tools={key: value.text(most=200) for key, value in top["tools"].mapping(100).items()},
        state=cast(Literal["complete", "onnx"], top["state"].choice(("complete", "onnx"))),
        model=_model(top["model"]),
        source=tuple(_source(node) for node in top["source"].items(0, 4096)),
        backend=_backend(top["backend"]),
        context_tokens=top["context_tokens"].integer(1, MAX_TOKENS),
        cache_tokens=top["cache_tokens"].integer(1, MAX_TOKENS),
        slots=top["slots"].integer(1, 4096),
        cells=tuple(_cell(node) for node in top["cells"].items(1, MAX_CELLS)),
        inputs=tuple(_tensor(node) for node in tensors["inputs"].items(1, 4096)),
        outputs=tuple(_tensor(node) for node in tensors["outputs"].items(1, 4096)),
        states=tuple(_state(node) for node in top["states"].items(0, 4096)),
        ledger=tuple(_ledger_line(node) for node in memory["ledger"].items(0, 1000)),
        budget_bytes=memory["budget_bytes"].integer(0, MAX_BYTES),
        draft_length=draft["length"].integer(0, 64),
        draft_vocabulary=draft["vocabulary"].integer(0, MAX_TOKENS),
        draft_states=tuple(_state(node) for node in draft["states"].items(0, 64)),
        traffic=_traffic(top["traffic"]),
        files=tuple(_file(node) for node in top["files"].items(1, 4096)),
    )
    check_consistency(manifest)
    return manifest


def _check_format(version: Node, document: Mapping[str, Any]) -> None:
    found = version.integer(0, 1 << 31)
    if found > FORMAT_VERSION:
        maker = document.get("edgebuild_version")
        maker = maker if isinstance(maker, str) and len(maker) < 40 and maker.isprintable() else "of a newer version"
        raise ArtifactError(
            f"{version.where}: {found} was written by edgebuild {maker}; "
            f"edgert {__version__} reads up to {FORMAT_VERSION}",
            hint="install the edgert of the same version as that edgebuild, or rebuild with this one",
        )
    if found < FORMAT_VERSION:
        raise version.fail(f"format {FORMAT_VERSION}", hint="rebuild the artifact with this version of edgebuild")


def _model(node: Node) -> ModelInfo:
    part = node.fields(
        [
            "family",
            "name",
            "identity",
            "hidden_size",
            "layers",
            "vocabulary_size",
            "token_limit",
            "eos_token_ids",
            "bos_token_id",
            "context_tokens",
        ]
    )
    vocabulary = part["vocabulary_size"].integer(1, MAX_TOKENS)
    bos = part["bos_token_id"]
    return ModelInfo(
        family=part["family"].text(least=1, most=100),
        name=part["name"].text(least=1, most=200),
        identity=part["identity"].sha256(),
        hidden_size=part["hidden_size"].integer(1, MAX_WIDTH),
        layers=part["layers"].integer(1, 1024),
        vocabulary_size=vocabulary,
        token_limit=part["token_limit"].integer(1, vocabulary),
        eos_token_ids=tuple(entry.integer(0, vocabulary - 1) for entry in part["eos_token_ids"].items(0, 64)),
        bos_token_id=None if bos.value is None else bos.integer(0, vocabulary - 1),
        context_tokens=part["context_tokens"].integer(1, MAX_TOKENS),
    )


def _source(node: Node) -> SourceEntry:
    part = node.fields(["file", "bytes", "sha256"])
    name = part["file"].text(least=1, most=255)
    if "/" in name or "\\" in name or name in (".", ".."):
        raise part["file"].fail("a file name without directories")
    return SourceEntry(name, part["bytes"].integer(0, MAX_BYTES), part["sha256"].sha256())


def _backend(node: Node) -> BackendInfo:
    part = node.fields(["name", "version", "compute_capabilities", "precision"])
    capabilities = []
    for entry in part["compute_capabilities"].items(0, 64):
        if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", entry.text()):
            raise entry.fail('a compute capability such as "8.7"')
        capabilities.append(cast(str, entry.value))
    return BackendInfo(
        name=part["name"].choice(BACKENDS),
        version=part["version"].text(most=100),
        compute_capabilities=tuple(capabilities),
        precision=part["precision"].choice(("float32", "float16", "bfloat16")),
    )


def _cell(node: Node) -> Cell:
    part = node.fields(["kind", "batch", "query_rows", "kv_tier"])
    try:
        return Cell(
            kind=cast(Kind, part["kind"].choice(("prefill", "decode"))),
            batch=part["batch"].integer(1, 4096),
            query_rows=part["query_rows"].integer(1, MAX_TOKENS),
            kv_tier=part["kv_tier"].integer(1, MAX_TOKENS),
        )
    except ValueError as error:
        raise ArtifactError(f"{node.where}: {error}", hint=REBUILD) from None


def _tensor(node: Node) -> TensorSpec:
    part = node.fields(["name", "dtype", "shape"])
    shape = [
        entry.choice(SYMBOLS) if isinstance(entry.value, str) else entry.integer(1, MAX_TOKENS)
        for entry in part["shape"].items(0, 8)
    ]
    return TensorSpec(part["name"].text(least=1, most=200), part["dtype"].choice(DTYPES), tuple(shape))


def _state(node: Node) -> StateSpec:
    part = node.fields(["input", "output", "dtype", "kind", "shape"])
    return StateSpec(
        input=part["input"].text(least=1, most=200),
        output=part["output"].text(least=1, most=200),
        dtype=part["dtype"].choice(DTYPES),
        kind=part["kind"].text(least=1, most=40),
        shape=tuple(entry.integer(1, MAX_TOKENS) for entry in part["shape"].items(1, 8)),
    )


def _ledger_line(node: Node) -> LedgerLine:
    part = node.fields(["label", "bytes", "formula"])
    return LedgerLine(part["label"].text(least=1), part["bytes"].integer(0, MAX_BYTES), part["formula"].text())


def _traffic(node: Node) -> TrafficInfo:
    part = node.fields(["name", "source_sha256", "requests", "attribution"])
    return TrafficInfo(
        part["name"].text(),
        part["source_sha256"].sha256(),
        part["requests"].integer(0, 1 << 50),
        part["attribution"].text(multiline=True),
    )


def _file(node: Node) -> FileEntry:
    part = node.fields(["path", "bytes", "sha256"])
    path = part["path"].value
    if not isinstance(path, str) or len(path) > 255 or not all(_SEGMENT.fullmatch(s) for s in path.split("/")):
        raise part["path"].fail("a relative path of plain names ([A-Za-z0-9._-], no leading dot)")
    return FileEntry(path, part["bytes"].integer(0, MAX_BYTES), part["sha256"].sha256())
