"""`edgebuild plan` refuses the heads that `edgebuild build` would refuse, before anything is planned around them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from edgebuild.drafter import mean_acceptance, planned_drafter
from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig
from edgebuild.models.mtp_config import expected_mtp_tensors
from edgebuild.profile import Profile, load_profile
from safetensors.numpy import save_file


@pytest.fixture
def config(toy_llama: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((toy_llama / "config.json").read_text()))


def profile_with(head: Path, folder: Path) -> Profile:
    path = folder / "mine.yaml"
    path.write_text(
        f"extends: cpu\nname: mine\ndrafter: {head}\nmechanisms:\n  enable_mtp: true\ndraft:\n  length: 2\n"
    )
    return load_profile(path)


def write_head(path: Path, config: ModelConfig, *, cut: int = 0) -> Path:
    shapes = expected_mtp_tensors(config)
    tensors = {name: np.zeros((shape[0] - cut, *shape[1:]), np.float16) for name, shape in shapes.items()}
    save_file(tensors, path)
    return path


def test_a_head_that_fits_is_planned_with(config: ModelConfig, tmp_path: Path) -> None:
    shape = planned_drafter(profile_with(write_head(tmp_path / "head.safetensors", config), tmp_path), config)
    assert shape is not None
    assert shape.acceptance == ()


def test_a_head_of_another_model_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head.safetensors", config, cut=1)
    with pytest.raises(CheckpointError, match="of another shape"):
        planned_drafter(profile_with(head, tmp_path), config)


def test_a_file_that_is_no_head_is_refused_by_name(config: ModelConfig, tmp_path: Path) -> None:
    table = tmp_path / "trace.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(CheckpointError, match=r"trace\.csv"):
        planned_drafter(profile_with(table, tmp_path), config)


def test_a_card_without_acceptance_says_nothing() -> None:
    assert mean_acceptance({"acceptance": {"held_out": {"chat": {"steps": 3}}}}) == ()
    tasks = {"chat": {"acceptance": [0.5, 0.25]}, "code": {"acceptance": [0.75, 0.75]}, "json": {}}
    assert mean_acceptance({"acceptance": {"held_out": tasks}}) == (0.625, 0.5)
