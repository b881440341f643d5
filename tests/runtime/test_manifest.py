"""A manifest reads back as written, and every kind of damage is refused with the place and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from edgebuild.artifact import canonical_json
from edgert.errors import ArtifactError
from edgert.manifest import Manifest, load_manifest, parse_manifest
from edgert.manifest_records import FileEntry
from toy_artifact import toy_manifest

FILES = tuple(
    FileEntry(name, 10, "d" * 64) for name in ("decoder.onnx", "scheduler.yaml", "golden.json", "tokenizer.json")
)


def document(**changes: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(canonical_json(toy_manifest(files=FILES).to_json()))
    return {**loaded, **changes}


def write(directory: Path, text: str | bytes) -> Path:
    (directory / "manifest.json").write_bytes(text.encode() if isinstance(text, str) else text)
    return directory


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    manifest = toy_manifest(files=FILES)
    assert load_manifest(write(tmp_path, canonical_json(manifest.to_json()).decode())) == manifest


def test_the_document_has_the_documented_keys_and_no_others() -> None:
    assert set(document()) == {
        *("format_version", "name", "edgebuild_version", "tools", "state", "model", "source", "backend"),
        *(
            "context_tokens",
            "cache_tokens",
            "slots",
            "cells",
            "tensors",
            "states",
            "memory",
            "draft",
            "traffic",
            "files",
        ),
    }


def test_a_newer_format_says_which_version_reads_it() -> None:
    with pytest.raises(
        ArtifactError, match=r"format_version: 7 was written by edgebuild 9\.1.* reads up to 1.*install"
    ):
        parse_manifest({"format_version": 7, "edgebuild_version": "9.1", "keys": "of another age"})


def refused(changed: Any, pattern: str) -> None:
    with pytest.raises(ArtifactError, match=pattern):
        parse_manifest(changed)


@pytest.mark.parametrize(
    ("path", "value", "pattern"),
    [
        (("slots",), 0, r"slots: expected a whole number from 1 to 4096, found 0"),
        (("slots",), True, r"slots: expected a whole number"),
        (("slots",), 4.0, r"slots: expected a whole number"),
        (("context_tokens",), 2**70, r"context_tokens: expected"),
        (("name",), "a\x1b[31m", r"name: expected a string without control"),
        (("name",), "\ud800", r"name: expected a string without control"),
        (("model", "identity"), "A" * 64, r"model\.identity: expected a SHA-256"),
        (("model", "eos_token_ids"), [999], r"eos_token_ids\[0\]: expected a whole number from 0 to 319"),
        (("backend", "name"), "pickle", r"backend\.name: expected one of onnxruntime"),
        (("cells", 0, "query_rows"), 0, r"cells\[0\]\.query_rows"),
        (("cells", 0, "batch"), 2, r"cells\[0\]: a prefill cell has batch 1"),
        (("tensors", "inputs", 0, "shape"), ["batch", "width"], r"tensors\.inputs\[0\]\.shape\[1\]: expected one of"),
        (("files", 0, "path"), "../x", r"files\[0\]\.path: expected a relative path"),
        (("files", 0, "path"), "/x", r"files\[0\]\.path: expected a relative path"),
        (("files", 0, "path"), "a\\b", r"files\[0\]\.path: expected a relative path"),
        (("files", 0, "path"), "GOLDEN.json", "are the same on some disks"),
        (("state",), "half", r"state: expected one of complete, onnx"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path: tuple[Any, ...], value: Any, pattern: str) -> None:
    changed = document()
    target: Any = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    refused(changed, pattern)


def test_unknown_and_missing_keys_are_named() -> None:
    changed = document()
    changed["slotz"] = changed.pop("slots")
    refused(changed, r"unknown key \"slotz\"; did you mean 'slots'")
    changed.pop("slotz")
    refused(changed, r"key 'slots' is missing")


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"slots": 2}, r"cells\[\d+\]\.batch: 4 is more than the 2 slots"),
        ({"cache_tokens": 300}, "below context_tokens 256 \\+ largest chunk 64"),
        ({"cache_tokens": 100}, "cache_tokens: 100 is below context_tokens 256"),
        ({"context_tokens": 300, "cache_tokens": 400}, "tiers end at 256, context_tokens is 300"),
    ],
)
def test_numbers_that_disagree_are_refused(changes: dict[str, Any], pattern: str) -> None:
    refused(document(**changes), pattern)


def test_states_and_tensors_must_agree() -> None:
    changed = document()
    changed["states"][0]["shape"] = [2, 8, 16]
    refused(changed, r"states\[0\]\.shape: \[2, 8, 16\] is not \[kv_heads, cache_tokens, head_dim\]")
    changed = document()
    changed["states"][1]["input"] = "key.9"
    refused(changed, r"'key\.9' is not among tensors\.inputs")
    changed = document()
    changed["states"].pop()
    refused(changed, "is neither a step input nor a state")


def test_a_resumable_artifact_needs_no_plan_but_a_finished_one_does() -> None:
    changed = document(state="onnx")
    changed["backend"]["name"] = "tensorrt"
    assert parse_manifest(changed).state == "onnx"
    refused({**changed, "state": "complete"}, r"decoder\.plan is not listed")


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("", "not valid JSON"),
        ("[1]", "expected an object"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": 1e999}', "beyond a 64-bit float"),
        ('{"a": ' + "1" * 5000 + "}", "a number of 5000 digits"),
        ("[" * 100_000, "nested deeper than 32"),
        ('{"a":' * 100_000, "nested deeper than 32"),
        (b"\xff", "byte 0 is not UTF-8"),
        ('{"a": }', r"manifest\.json:1:7: not valid JSON"),
    ],
)
def test_hostile_json_is_refused(tmp_path: Path, text: str | bytes, pattern: str) -> None:
    with pytest.raises(ArtifactError, match=pattern):
        load_manifest(write(tmp_path, text))


def test_a_manifest_over_its_bound_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ArtifactError, match="16777217 bytes, at most 16777216"):
        load_manifest(tmp_path)


def test_what_is_no_artifact_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"it has no manifest\.json"):
        load_manifest(tmp_path)
    with pytest.raises(ArtifactError, match="no such directory"):
        load_manifest(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="not a directory"):
        load_manifest(tmp_path / "file")


def test_cells_are_sorted_out_by_kind() -> None:
    manifest: Manifest = toy_manifest()
    assert {cell.kind for cell in manifest.prefill_cells} == {"prefill"}
    assert len(manifest.prefill_cells) + len(manifest.decode_cells) == len(manifest.cells)
