"""inspect and verify on a toy artifact, through the command line's own entry."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command_line import run
from edgebuild.commands import artifact as commands
from edgebuild.commands.artifact import GOLDEN_NOT_RUN
from edgert.errors import ArtifactError, BackendError, ConfigError
from edgert.manifest import BackendInfo, load_manifest
from toy_artifact import make_artifact


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("commands") / "toy")


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "toy"))


def invoke(command: Any, *arguments: str) -> Any:
    return CliRunner().invoke(command, arguments)


def edit_schedule(artifact: Path, *changes: tuple[str, str]) -> None:
    path = artifact / "scheduler.yaml"
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_inspect_json_is_the_manifest_and_the_sizes(artifact: Path) -> None:
    result = invoke(commands.inspect, str(artifact), "--json")
    document = json.loads(result.output)
    sizes = document.pop("sizes")
    assert document == json.loads((artifact / "manifest.json").read_text())
    assert sizes["files"]["decoder.weights"] == 4096
    assert sizes["total_bytes"] == sum(entry.bytes for entry in load_manifest(artifact).files)


def test_inspect_shows_model_cells_memory_and_files(artifact: Path) -> None:
    (artifact / "golden.json").unlink()
    output = invoke(commands.inspect, str(artifact)).output
    for text in ("toy (llama), 2 layers", "256 tokens in each of 4 slots", "KV tier", "weights", "missing", "CC0"):
        assert text in output


@pytest.mark.parametrize(
    ("slots", "context", "shown"),
    [
        (4, 256, "256 tokens in each of 4 slots"),
        (1, 128, "256 tokens in each of 4 slots; scheduler.yaml uses 1 slot, 128 tokens"),
        (4, 100, "256 tokens in each of 4 slots; scheduler.yaml uses 4 slots, 100 tokens"),
        (2, 256, "256 tokens in each of 4 slots; scheduler.yaml uses 2 slots, 256 tokens"),
    ],
)
def test_inspect_shows_what_an_edited_schedule_uses(artifact: Path, slots: int, context: int, shown: str) -> None:
    edit_schedule(artifact, ("slots: 4", f"slots: {slots}"), ("context_tokens: 256", f"context_tokens: {context}"))
    assert f"context     {shown}\n" in invoke(commands.inspect, str(artifact)).output


def test_inspect_of_an_impossible_schedule_says_so_and_shows_the_rest(artifact: Path) -> None:
    edit_schedule(artifact, ("slots: 4", "slots: 400"))
    result = invoke(commands.inspect, str(artifact))
    assert result.exit_code == 0
    assert "256 tokens in each of 4 slots; not usable as it is: scheduler.yaml:" in result.output
    assert "decoder.weights" in result.output


def test_inspect_refuses_what_is_no_artifact(tmp_path: Path) -> None:
    assert isinstance(invoke(commands.inspect, str(tmp_path)).exception, ArtifactError)


def test_verify_prints_a_line_for_each_file(artifact: Path) -> None:
    result = invoke(commands.verify, str(artifact), "--no-golden")
    assert result.exit_code == 0
    for entry in load_manifest(artifact).files:
        assert f"ok      {entry.path}" in result.output
    assert "skipped golden vectors" in result.output


def test_verify_says_when_the_schedule_was_edited(artifact: Path) -> None:
    with (artifact / "scheduler.yaml").open("a") as file:
        file.write("# note\n")
    assert "edited since the build" in invoke(commands.verify, str(artifact), "--no-golden").output


def test_verify_fails_on_a_flipped_byte(artifact: Path) -> None:
    data = bytearray((artifact / "decoder.weights").read_bytes())
    data[0] ^= 1
    (artifact / "decoder.weights").write_bytes(data)
    ran = run(["edgebuild", "verify", artifact, "--no-golden"])
    assert ran.code == ArtifactError.exit_code
    assert "edgebuild: decoder.weights: SHA-256 is" in ran.error_line
    assert (ran.out + ran.err).count("SHA-256 is") == 1  # said once


def test_verify_fails_on_an_impossible_schedule(artifact: Path) -> None:
    edit_schedule(artifact, ("slots: 4", "slots: 400"))
    assert isinstance(invoke(commands.verify, str(artifact), "--no-golden").exception, ConfigError)


def test_a_host_that_cannot_run_the_engine_says_so_with_its_own_exit_code(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(loading: object) -> None:  # noqa: ARG001
        raise BackendError("no NVIDIA GPU on this machine")

    monkeypatch.setattr("edgert.loading.open_runtime", no_device)
    result = invoke(commands.verify, str(artifact))
    assert result.exit_code == GOLDEN_NOT_RUN
    assert "not run golden vectors: no NVIDIA GPU" in result.output


def test_a_resumable_artifact_names_the_command_that_finishes_it(tmp_path: Path) -> None:
    target = make_artifact(tmp_path / "toy", state="onnx", backend=BackendInfo("tensorrt", "", (), "float16"))
    result = invoke(commands.verify, str(target))
    assert result.exit_code == GOLDEN_NOT_RUN
    assert "edgebuild resume" in result.output
