"""The chosen settings as a scheduler.yaml that the runtime reads, and the artifact's own file left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from edgebuild.errors import OutputError
from edgebuild.tune.candidates import current_settings
from edgebuild.tune.config_file import rest_sha256, tuned_text, write_atomically
from edgebuild.tune.session import write_config
from edgert.config import parse_config
from edgert.errors import ConfigError
from toy_artifact import SCHEDULER, make_artifact, toy_manifest
from toy_tuning import FakeDevice, make_setup, run

CHOSEN = {
    "enable_chunked_prefill": False,
    "max_prefill_chunk_size": 16,
    "kv_tiers": (256,),
    "prefill_decode_ratio": "1:8",
    "adaptive": False,
}


def test_changed_keys_say_who_changed_them_and_the_rest_stays() -> None:
    text = tuned_text(SCHEDULER, toy_manifest(), CHOSEN, {"kv_tiers": "tokens/s 1 → 2"})
    config = parse_config(text, toy_manifest())
    assert {key: current_settings(config)[key] for key in CHOSEN} == CHOSEN
    assert "  # tuned: tokens/s 1 → 2; before: [128, 256]\n  kv_tiers: [256]\n" in text
    kept = [line for line in SCHEDULER.splitlines() if line.split(":")[0].strip() not in CHOSEN]
    assert all(line in text.splitlines() for line in kept)
    assert rest_sha256(text) == rest_sha256(SCHEDULER)


def test_a_comment_above_a_changed_key_is_replaced() -> None:
    commented = SCHEDULER.replace("  kv_tiers:", "  # by dynamic programming\n  # over the traffic\n  kv_tiers:")
    text = tuned_text(commented, toy_manifest(), {"kv_tiers": (256,)}, {})
    assert "dynamic programming" not in text
    assert text.count("#") == SCHEDULER.count("#") + 1
    assert tuned_text(commented, toy_manifest(), {"kv_tiers": (128, 256)}, {}) == commented


def test_what_the_artifact_cannot_do_is_not_written() -> None:
    with pytest.raises(ConfigError, match="kv_tiers"):
        tuned_text(SCHEDULER, toy_manifest(), {"kv_tiers": (64, 256)}, {})


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "scheduler.yaml"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [each.name for each in path.parent.iterdir()] == ["scheduler.yaml"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "scheduler.yaml", "x")


def test_the_artifact_is_left_alone(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "toy")
    before = {path.name: path.read_bytes() for path in artifact.iterdir()}
    setup = make_setup(artifact, tmp_path, gpu=False, drafts=0)
    result, trials = run(setup, tmp_path / "tuning.jsonl", FakeDevice())
    write_config(setup, result, trials, tmp_path / "toy.scheduler.yaml")
    assert {path.name: path.read_bytes() for path in artifact.iterdir()} == before
    config = parse_config((tmp_path / "toy.scheduler.yaml").read_text(), setup.manifest)
    assert current_settings(config) == result.settings


def test_a_mechanism_that_stays_off_says_what_was_measured(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "toy")
    setup = make_setup(artifact, tmp_path, gpu=False, drafts=0)
    device = FakeDevice()

    def speed(settings: Mapping[str, Any]) -> dict[str, float]:
        return {"output_tokens_per_s": 100.0, "longest_gap_ms": 150.0 if settings["enable_chunked_prefill"] else 100.0}

    device.speed = speed
    result, trials = run(setup, tmp_path / "tuning.jsonl", device)
    write_config(setup, result, trials, tmp_path / "out.yaml")
    lines = (tmp_path / "out.yaml").read_text().splitlines()
    at = lines.index("  enable_chunked_prefill: false")
    assert "on: loses: longest gap" in lines[at - 1]
    assert lines[at - 1].endswith("before: true")
