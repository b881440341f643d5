"""Profiles of machines that this one is not: an engine built ahead of time, a build that stops after ONNX, resume."""

from __future__ import annotations

import json
import shlex
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from command_line import Ran, run, write_profile
from edgebuild.commands.artifact import GOLDEN_NOT_RUN
from edgebuild.engine.targets import BuildPlace, device_capability, sdk_available
from edgert.backends import trt_module
from edgert.backends.trt_plan import PackedPlan
from edgert.cuda import DeviceInfo
from edgert.engine import Engine
from edgert.errors import ArtifactError
from edgert.golden import load_golden
from edgert.manifest import load_manifest
from toy_mtp import random_mtp, write_sidecar

needs_rtx = pytest.mark.skipif(
    not sdk_available("tensorrt-rtx"), reason="the rtx extra (tensorrt-rtx) is not installed"
)
without_gpu = pytest.mark.skipif(device_capability() is not None, reason="this machine has a GPU that may run it")
without_classic = pytest.mark.skipif(sdk_available("tensorrt"), reason="classic TensorRT is installed here")


@pytest.fixture(scope="session")
def toy_rtx(workshop: Path, toy_llama: Path) -> Path:
    """With a random head that drafts two of the 120 tokens it knows."""
    order = torch.arange(299, -1, -1, dtype=torch.int32)
    write_sidecar(workshop / "toy-rtx.mtp.safetensors", random_mtp(toy_llama), draft_tokens=order)
    return write_profile(
        workshop,
        "toy-rtx",
        "rtx",
        'device: {aot_targets: ["8.9"]}',
        f"model: {toy_llama}",
        "traffic: trace.csv",
        "drafter: toy-rtx.mtp.safetensors",
        "mechanisms: {enable_mtp: true}",
        "draft: {length: 2, vocabulary: 120}",
    )


def check_both_plans(artifact: Path) -> None:
    """Decoder and drafter as engines, nothing left of their ONNX files, golden drafts of the reference."""
    names = {path.name for path in artifact.iterdir()}
    assert {"decoder.plan", "mtp.plan"} <= names
    assert not names & {"decoder.onnx", "decoder.weights", "mtp.onnx", "mtp.weights"}
    manifest = load_manifest(artifact)
    for name in ("decoder.plan", "mtp.plan"):
        with closing(PackedPlan(artifact / name)) as plan:
            assert plan.read(1, 3) == b"trt"
            least = plan.size  # the kernels' text, once a cell
        assert (artifact / name).stat().st_size < min(least / 5, 3e6 * len(manifest.cells))
    assert (manifest.draft_length, manifest.draft_vocabulary) == (2, 120)
    assert {"decoder.plan", "mtp.plan"} <= {entry.path for entry in manifest.files}
    for case in load_golden(artifact, manifest.model).cases:
        assert all(step.drafts is not None and len(step.drafts.tokens) == 2 for step in case.steps[:-1])


@pytest.fixture(scope="session")
def rtx_build(toy_rtx: Path, elsewhere: Path) -> tuple[Path, Ran]:
    return elsewhere / "rtx artifact", run(
        ["edgebuild", "--profile", toy_rtx, "--output", "rtx artifact"], cwd=elsewhere
    )


@pytest.fixture(scope="session")
def rtx_artifact(rtx_build: tuple[Path, Ran]) -> Path:
    artifact, ran = rtx_build
    assert ran.code == 0, ran.err
    return artifact


@needs_rtx
def test_an_rtx_engine_with_several_profiles_is_built_on_this_machine(rtx_build: tuple[Path, Ran]) -> None:
    artifact, ran = rtx_build
    assert ran.code == 0, ran.err
    manifest = load_manifest(artifact)
    assert manifest.state == "complete"
    assert manifest.backend.name == "tensorrt-rtx"
    assert manifest.backend.version == trt_module.version("tensorrt-rtx")
    assert manifest.backend.compute_capabilities == ("8.9",)
    assert manifest.backend.precision == "float16"
    assert len(manifest.cells) >= 4
    assert f"{len(manifest.cells)} optimization profiles" in ran.err
    assert "engine of the drafter" in ran.err
    check_both_plans(artifact)


@needs_rtx
@without_gpu
def test_a_machine_that_cannot_run_the_engine_says_so_when_it_is_built_and_verified(
    rtx_build: tuple[Path, Ran],
) -> None:
    artifact, ran = rtx_build
    assert "golden    not run: built for compute capability 8.9; this machine has no NVIDIA GPU" in ran.out
    verified = run(["edgebuild", "verify", artifact])
    assert verified.code == GOLDEN_NOT_RUN
    assert "ok      decoder.plan" in verified.out
    assert "not run golden vectors: " in verified.out


@needs_rtx
@without_gpu
def test_generating_without_the_device_is_one_clear_line(rtx_artifact: Path) -> None:
    ran = run(["edgert", "generate", rtx_artifact, "--prompt", "a"])
    assert ran.code == 6
    assert ran.out == ""
    assert "GPU" in ran.error_line or "CUDA" in ran.error_line


@needs_rtx
@pytest.mark.parametrize(
    ("change", "device", "values"),
    [
        ({"version": "1.5.0.1"}, "8.9", ("1.5.0.1", trt_module.version("tensorrt-rtx") or "")),
        ({"compute_capabilities": ("8.6",)}, "8.9", ("8.6", "8.9")),
        ({}, "12.0", ("8.9", "12.0")),
    ],
    ids=["another TensorRT", "built for another capability", "run on another capability"],
)
def test_a_plan_of_another_version_or_device_is_refused_before_tensorrt_sees_it(
    rtx_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    device: str,
    values: tuple[str, str],
) -> None:
    """The device is made up, the artifact and the library are real."""
    artifact = Path(shutil.copytree(rtx_artifact, tmp_path / "changed"))
    manifest = load_manifest(artifact)
    changed = replace(manifest, backend=replace(manifest.backend, **change))
    (artifact / "manifest.json").write_text(json.dumps(changed.to_json()))
    monkeypatch.setattr("edgert.cuda.device_info", lambda: DeviceInfo("a GPU", device, 13_000, 16 << 30))
    monkeypatch.setattr("edgert.cuda.free_bytes", lambda: 8 << 30)
    monkeypatch.setattr("edgert.backends.tensorrt.Engine", lambda *_: pytest.fail("TensorRT was shown the plan"))
    with pytest.raises(ArtifactError) as caught:
        Engine.load(artifact)
    for value in values:
        assert value in str(caught.value)


@needs_rtx
def test_half_a_plan_is_refused_with_both_sizes(rtx_artifact: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(rtx_artifact, tmp_path / "half"))
    whole = (artifact / "decoder.plan").stat().st_size
    with (artifact / "decoder.plan").open("r+b") as file:
        file.truncate(whole // 2)
    ran = run(["edgert", "generate", artifact, "--prompt", "a"])
    assert ran.code == 3
    assert f"{whole // 2} bytes, the manifest says {whole}" in ran.error_line


# --- a device that must build its own engine ---


@pytest.fixture(scope="session")
def orin_build(workshop: Path, elsewhere: Path, toy_llama: Path) -> tuple[Path, Ran]:
    profile = write_profile(workshop, "toy-orin", "orin", f"model: {toy_llama}", "traffic: trace.csv")
    return elsewhere / "orin artifact", run(
        ["edgebuild", "--profile", profile, "--output", "orin artifact"], cwd=elsewhere
    )


@without_classic
def test_an_orin_build_stops_after_onnx_and_prints_the_one_command_that_finishes_it(
    orin_build: tuple[Path, Ran],
) -> None:
    artifact, ran = orin_build
    assert ran.code == 0, ran.err
    manifest = load_manifest(artifact)
    assert manifest.state == "onnx"
    assert manifest.backend.name == "tensorrt"
    assert {"decoder.onnx", "decoder.weights"} <= {path.name for path in artifact.iterdir()}
    commands = [line for line in (ran.out + ran.err).splitlines() if "edgebuild resume" in line]
    assert len(commands) == 1
    assert shlex.split(commands[0]) == ["edgebuild", "resume", str(artifact)]


@without_classic
def test_resume_on_a_machine_without_the_library_says_what_is_missing_and_keeps_the_artifact(
    orin_build: tuple[Path, Ran],
) -> None:
    artifact, _ = orin_build
    before = {path.name: path.stat().st_mtime_ns for path in artifact.iterdir()}
    ran = run(["edgebuild", "resume", artifact])
    assert ran.code == 8
    assert "tensorrt" in ran.error_line
    assert "not installed" in ran.error_line
    assert {path.name: path.stat().st_mtime_ns for path in artifact.iterdir()} == before


@without_classic
def test_an_unfinished_artifact_is_neither_verified_as_whole_nor_run(orin_build: tuple[Path, Ran]) -> None:
    artifact, _ = orin_build
    verified = run(["edgebuild", "verify", artifact])
    assert verified.code == GOLDEN_NOT_RUN
    assert "edgebuild resume" in verified.out
    ran = run(["edgert", "generate", artifact, "--prompt", "a"])
    assert ran.code == 3
    assert "edgebuild resume" in ran.error_line
    assert "stopped after ONNX" in run(["edgebuild", "inspect", artifact]).out


@needs_rtx
def test_resume_finishes_a_build_that_stopped_after_onnx(
    toy_rtx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half believes it is on a machine without the library, the second half is real."""
    from edgebuild.cli import cli

    with monkeypatch.context() as patch:
        nowhere = BuildPlace(False, "the library is somewhere else", "edgebuild resume ARTIFACT, on the device")
        patch.setattr("edgebuild.build.can_build_here", lambda _: nowhere)
        first = CliRunner().invoke(cli, ["build", "--profile", str(toy_rtx), "--output", str(tmp_path / "halved")])
    assert first.exit_code == 0, first.output
    artifact = tmp_path / "halved"
    assert load_manifest(artifact).state == "onnx"
    second = run(["edgebuild", "resume", artifact, "--json"])
    assert second.code == 0, second.err
    result = json.loads(second.out)
    assert (result["state"], result["next_step"]) == ("complete", None)
    manifest = load_manifest(artifact)
    assert manifest.state == "complete"
    check_both_plans(artifact)
    assert [path.name for path in tmp_path.iterdir()] == ["halved"]
    verified = run(["edgebuild", "verify", artifact])
    assert verified.code in (0, GOLDEN_NOT_RUN), verified.err
    assert "ok      decoder.plan" in verified.out
    again = run(["edgebuild", "resume", artifact])
    assert again.code == 8
    assert "complete already" in again.error_line
