"""The artifact that GPU tests of a whole engine run on: one made elsewhere, or SmolLM2 built here with few cells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GIVEN = "EDGERT_TEST_ARTIFACT"  # a complete SmolLM2 artifact for this device, for a machine that cannot export


def smollm2_artifact(gguf: Path, directory: Path) -> Path:
    """Its directory. Builds for TensorRT-RTX with five cells where none was given: two minutes."""
    if given := os.environ.get(GIVEN):
        return Path(given)
    if not _exports():
        pytest.skip(f"this torch cannot export; set {GIVEN} to a complete artifact")
    from edgebuild.build import build
    from edgebuild.profile import load_profile
    from edgebuild.progress import Stages
    from edgebuild.traffic import read_traffic

    profile = load_profile("h200")
    if profile.traffic is None:
        raise ValueError("the h200 profile names no traffic")
    traffic = read_traffic(profile.traffic)
    return build(profile, gguf, traffic, directory / "smollm2", Stages(quiet=True), max_cells=5).path


def _exports() -> bool:
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 13)
