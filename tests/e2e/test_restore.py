"""A build left for the device, copied without its weights: a small file travels, the checkpoint gives the rest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import toys
from command_line import run, write_profile
from edgebuild.engine.targets import sdk_available
from edgert.integrity import sha256_file
from edgert.manifest import load_manifest


@pytest.fixture(scope="session")
def left(workshop: Path, toy_llama: Path) -> Path:
    """`build --no-engine`."""
    profile = write_profile(workshop, "left", "rtx", f"model: {toy_llama}", "traffic: trace.csv")
    ran = run(["edgebuild", "build", "--profile", profile, "--no-engine", "--output", workshop / "left"])
    assert ran.code == 0, ran.err
    assert "edgebuild resume" in ran.out
    return workshop / "left"


@pytest.fixture
def light(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left, tmp_path / "light", ignore=shutil.ignore_patterns("decoder.weights")))


def test_no_engine_stops_after_onnx(left: Path) -> None:
    assert load_manifest(left).state == "onnx"
    assert {"decoder.onnx", "decoder.weights"} <= {path.name for path in left.iterdir()}


def test_onnxruntime_has_no_engine_to_leave(toy_cpu: Path, toy_llama: Path, workshop: Path, tmp_path: Path) -> None:
    options = ["--model", toy_llama, "--traffic", workshop / "trace.csv", "--output", tmp_path / "out"]
    ran = run(["edgebuild", "build", "--profile", toy_cpu, *options, "--no-engine"])
    assert ran.code == 8
    assert "no engine to leave" in ran.error_line
    assert not (tmp_path / "out").exists()


def test_weights_come_back_byte_for_byte(left: Path, light: Path, toy_llama: Path) -> None:
    from edgebuild.restore import restore_weights

    restore_weights(light, load_manifest(light), toy_llama)
    assert sha256_file(light / "decoder.weights") == sha256_file(left / "decoder.weights")
    assert {path.name for path in light.iterdir()} == {path.name for path in left.iterdir()}


@pytest.mark.skipif(not sdk_available("tensorrt-rtx"), reason="the rtx extra (tensorrt-rtx) is not installed")
def test_resume_with_the_checkpoint_finishes_what_came_without_weights(light: Path, toy_llama: Path) -> None:
    without = run(["edgebuild", "resume", light])
    assert without.code == 8
    assert "--model CHECKPOINT" in without.error_line
    ran = run(["edgebuild", "resume", light, "--model", toy_llama, "--json"])
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["state"] == "complete"
    assert (light / "decoder.plan").stat().st_size > 0


def test_another_checkpoint_is_refused_and_leaves_nothing(light: Path, tmp_path: Path) -> None:
    other = toys.make_llama(tmp_path / "other", seed=1)
    before = sorted(os.listdir(light))
    ran = run(["edgebuild", "resume", light, "--model", other])
    assert ran.code in (5, 8)  # 8: the shapes already do not fit
    assert "give the checkpoint of the build" in ran.error_line
    assert sorted(os.listdir(light)) == before
