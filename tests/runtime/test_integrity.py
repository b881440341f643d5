"""Files against the manifest: refused with both values, before a backend."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from edgebuild.artifact import ArtifactWriter
from edgert.engine import Engine
from edgert.errors import ArtifactError
from edgert.integrity import check_files, require_complete
from edgert.manifest import BackendInfo, load_manifest
from edgert.onnx_external import check_external_data
from toy_artifact import make_artifact, toy_manifest, toy_onnx, write_files


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("integrity") / "toy")


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "toy"))


def test_an_untouched_artifact_passes(artifact: Path) -> None:
    checks = check_files(artifact, load_manifest(artifact))
    assert {check.status for check in checks} == {"ok"}
    assert "decoder.weights" in {check.path for check in checks}


def test_an_edited_schedule_is_noted_and_not_refused(artifact: Path) -> None:
    with (artifact / "scheduler.yaml").open("a") as file:
        file.write("# a note\n")
    checks = check_files(artifact, load_manifest(artifact))
    assert [check.path for check in checks if check.status == "edited"] == ["scheduler.yaml"]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _outside(path: Path) -> None:
    target = path.parent.parent / "outside"
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (_cut, r"decoder\.weights: 2048 bytes, the manifest says 4096"),
        (_flip, r"decoder\.weights: SHA-256 is [0-9a-f]{16}\.\.\., the manifest says"),
        (Path.unlink, r"decoder\.weights: listed in manifest\.json, but not there"),
        (_outside, r"decoder\.weights: is a link to .*outside, outside the artifact"),
        (_fifo, r"decoder\.weights: not a regular file"),
        (lambda path: (path.parent / "more").touch(), "more: in the artifact, but not listed"),
        (lambda path: (path.parent / "folder").mkdir(), "folder: a directory that"),
    ],
)
def test_damage_is_refused(artifact: Path, damage: Callable[[Path], object], pattern: str) -> None:
    damage(artifact / "decoder.weights")
    with pytest.raises(ArtifactError, match=pattern):
        check_files(artifact, load_manifest(artifact))


def test_a_plan_cut_in_half_never_reaches_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ArtifactWriter(tmp_path / "plan") as writer:
        write_files(writer.directory)
        for name in ("decoder.onnx", "decoder.weights"):
            (writer.directory / name).unlink()
        writer.write("decoder.plan", b"ftrt" + bytes(1000))
        writer.commit(toy_manifest(backend=BackendInfo("tensorrt-rtx", "1.6.1.120", ("8.9",), "float16")))
    monkeypatch.setattr("edgert.loading.resolve", lambda name: pytest.fail(f"backend {name} was opened"))
    os.truncate(tmp_path / "plan" / "decoder.plan", 502)
    with pytest.raises(ArtifactError, match=r"decoder\.plan: 502 bytes, the manifest says 1004"):
        Engine.load(tmp_path / "plan")


def test_dot_files_of_the_desktop_are_ignored(artifact: Path) -> None:
    (artifact / ".DS_Store").touch()
    check_files(artifact, load_manifest(artifact))


def test_sizes_alone_do_not_read_the_files(artifact: Path) -> None:
    _flip(artifact / "decoder.weights")
    check_files(artifact, load_manifest(artifact), "sizes")


def test_a_repacked_graph_that_reads_past_its_weights_is_refused(artifact: Path) -> None:
    short = (artifact / "decoder.weights").read_bytes()[:2500]
    (artifact / "decoder.weights").write_bytes(short)
    document = json.loads((artifact / "manifest.json").read_text())
    for entry in document["files"]:
        if entry["path"] == "decoder.weights":
            entry.update(bytes=len(short), sha256=hashlib.sha256(short).hexdigest())
    (artifact / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=r"ends at byte 3072, decoder\.weights has 2500"):
        check_files(artifact, load_manifest(artifact))


def test_external_tensors_are_found_also_inside_subgraphs(tmp_path: Path) -> None:
    toy_onnx(tmp_path)
    # weight once, and inner in each of the two branches
    assert check_external_data(tmp_path / "decoder.onnx", {"decoder.weights": 4096}) == 3


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x3a\xff\xff\xff\xff\x0f", b"\x80" * 20, b"\x0b\x0c", b"plain text"])
def test_what_is_no_onnx_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "decoder.onnx").write_bytes(data)
    with pytest.raises(ArtifactError, match="not an ONNX model"):
        check_external_data(tmp_path / "decoder.onnx", {})


def test_a_resumable_artifact_names_the_command_that_finishes_it() -> None:
    with pytest.raises(ArtifactError, match="edgebuild resume there"):
        require_complete(replace(toy_manifest(), state="onnx"), Path("there"))
