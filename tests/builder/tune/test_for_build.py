"""A later build reads what was tuned: draft length, chunk size, draft vocabulary, throughput; and only what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toys
from click.testing import CliRunner
from edgebuild.cli import cli
from edgebuild.errors import TuningError
from edgebuild.plan.tuned import Tuned, TunedDraft
from edgebuild.profile import load_profile
from edgebuild.tune.device import this_device
from edgebuild.tune.for_build import apply_vocabulary, found_tuning, given_tuning, tuned_from
from edgebuild.tune.logbook import LogbookWriter
from edgebuild.tune.records import Result
from edgebuild.tune.session import last_result, remember
from toy_artifact import make_artifact
from toy_tuning import FakeDevice, make_setup, plain_speed, run


def speed(overrides: Any) -> dict[str, float]:
    """As `plain_speed`, but a chunk of 16 costs nothing."""
    found = plain_speed({**overrides, "max_prefill_chunk_size": 64})
    return {**found, "longest_gap_ms": found["longest_gap_ms"] * overrides["max_prefill_chunk_size"] / 64}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run on this machine, of a model called `llama`."""
    folder = tmp_path_factory.mktemp("tuned")
    setup = make_setup(make_artifact(folder / "toy"), folder)
    found, _ = run(setup, folder / "tuning.jsonl", FakeDevice(speed=speed))
    artifact = found.artifact.model_copy(update={"model": "llama", "backend": "onnxruntime", "precision": "float32"})
    return found.model_copy(update={"artifact": artifact, "device": this_device("onnxruntime")})


@pytest.fixture
def logbook(result: Result, tmp_path: Path) -> Path:
    with LogbookWriter(tmp_path / "tuning.jsonl") as book:
        book.append(result)
    return tmp_path / "tuning.jsonl"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text("extends: cpu\nname: own\ndescription: a toy\nlimits: {context_tokens: 256, max_chunk: 64}\n")
    return path


def planned(toy_llama: Path, profile: Path, *options: str | Path) -> dict[str, Any]:
    trace = profile.parent / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,100,20\n" * 20)
    # the model's folder is called llama, as in the result
    arguments = ["plan", "--profile", profile, "--model", toy_llama, "--traffic", trace, "--json", *options]
    ran = CliRunner().invoke(cli, [str(each) for each in arguments], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_a_named_logbook_gives_the_plan_its_numbers(
    toy_llama: Path, profile: Path, logbook: Path, result: Result
) -> None:
    assert toy_llama.name == "llama"
    plain, tuned = planned(toy_llama, profile), planned(toy_llama, profile, "--tuning", logbook)
    assert plain["prefill"]["max_chunk_size"] == 64
    assert tuned["prefill"]["max_chunk_size"] == 16
    notes = "\n".join(tuned["notes"])
    assert f"trial {result.trial}" in notes
    assert f"{result.figures.output_tokens_per_s:,.1f} output tokens/s with 4 requests at a time; 20% of it" in notes
    assert "chunks of at most 16 rows: measured" in notes
    assert not any("measured (tuning" in note for note in plain["notes"])


def test_what_was_tuned_on_this_device_is_found_by_itself(
    toy_llama: Path, profile: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(result, tmp_path / "kept")
    monkeypatch.setenv("EDGEBUILD_TUNING", str(tmp_path / "kept"))
    found = planned(toy_llama, profile)
    assert found["prefill"]["max_chunk_size"] == 16
    assert "what was measured here goes over what is estimated" in found["notes"][0]
    assert planned(toy_llama, profile, "--no-tuning")["prefill"]["max_chunk_size"] == 64


def test_another_device_model_or_backend_is_not_found(result: Result, tmp_path: Path) -> None:
    said: list[str] = []
    cpu = load_profile("cpu")
    device = result.device.model_copy(update={"identity": "e" * 64})
    remember(result.model_copy(update={"device": device}), tmp_path)
    assert found_tuning(cpu, "llama", said.append, folder=tmp_path) is None
    remember(result, tmp_path)
    assert found_tuning(cpu, "llama", said.append, folder=tmp_path) == result
    assert found_tuning(cpu, "qwen3", said.append, folder=tmp_path) is None
    assert found_tuning(load_profile("orin-agx"), "llama", said.append, folder=tmp_path) is None


def test_a_damaged_file_is_said_and_left(result: Result, tmp_path: Path) -> None:
    said: list[str] = []
    path = remember(result, tmp_path)
    path.write_text("{}\n")
    assert found_tuning(load_profile("cpu"), "llama", said.append, folder=tmp_path) is None
    assert "not used" in said[0]


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("orin-agx", "llama", "onnxruntime, the profile says tensorrt"),
        ("cpu", "other", "the model llama, this is other"),
    ],
)
def test_a_named_logbook_must_fit(logbook: Path, name: str, model: str, words: str) -> None:
    with pytest.raises(TuningError, match=words):
        given_tuning(logbook, load_profile(name), model)


def test_the_draft_length_and_vocabulary_are_those_that_were_measured(result: Result, tmp_path: Path) -> None:
    from edgebuild.plan import DrafterShape, ModelShape, make_plan
    from edgebuild.traffic import Histogram

    said: list[str] = []
    profile = load_profile("cpu").with_drafter(tmp_path / "head", length=3)
    tuned = tuned_from(result)
    assert result.draft_vocabulary is not None
    assert result.curve is not None
    profile = apply_vocabulary(profile, tuned, said.append)
    assert profile.draft.vocabulary == result.draft_vocabulary.pick
    assert apply_vocabulary(load_profile("cpu"), tuned, said.append).draft.vocabulary is None  # it drafts nothing
    histogram = Histogram.from_lengths([100] * 20, [20] * 20)
    from edgebuild.models.config import ModelConfig

    config = ModelConfig.from_hf(json.loads((toys.make_llama(tmp_path / "llama") / "config.json").read_text()))
    drafter = DrafterShape(1000, 10, (0.9, 0.9, 0.9))
    plan = make_plan(profile, histogram, ModelShape.from_config(config), None, drafter, tuned)
    assert plan.draft.length == result.curve.pick == 3
    assert plan.draft.acceptance == result.curve.acceptance
    assert any("draft length 3 measured (tuning on" in note for note in plan.notes)


def test_a_profile_that_allows_fewer_drafts_gets_the_best_of_those() -> None:
    from edgebuild.plan.tuned import _draft

    points = tuple(TunedDraft(k, rate, 10.0) for k, rate in enumerate((0.1, 0.14, 0.13, 0.2)))
    tuned = Tuned("a run", points, (0.8, 0.5, 0.9), pick=3)
    choice = _draft(2, tuned)
    assert choice is not None
    assert (choice.length, choice.expected_tokens) == (1, pytest.approx(1.8))
    assert _draft(0, tuned) is None
    assert _draft(3, Tuned("a run without drafts")) is None


def test_the_result_is_the_last_of_the_logbook(logbook: Path, result: Result) -> None:
    later = result.model_copy(update={"at": "2026-12-01T00:00:00Z"})
    with LogbookWriter(logbook) as book:
        book.append(later)
    assert last_result(logbook) == later
