"""A build with a drafter, from a sidecar and from the checkpoint itself, run through the command line."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys
from command_line import TOY_LIMITS, command, environment, run
from edgebuild.simulate.artifact import measure
from edgebuild.tune.logbook import read_logbook
from edgert import loading
from edgert.config import parse_config
from edgert.costs import load_costs
from edgert.manifest import load_manifest
from edgert.stepcosts import step_costs_of
from toy_mtp import add_to_checkpoint, random_mtp, write_sidecar


@pytest.fixture(scope="module")
def drafting(workshop: Path, elsewhere: Path, toy_cpu: Path, toy_qwen3: Path) -> Path:
    """The toy with a random head, of which the 120 most used tokens may be drafted."""
    order = torch.arange(299, -1, -1, dtype=torch.int32)
    head = write_sidecar(workshop / "toy.mtp.safetensors", random_mtp(toy_qwen3), draft_tokens=order)
    artifact = elsewhere / "with a drafter"
    ran = run(
        ["edgebuild", "--profile", toy_cpu, "--model", toy_qwen3, "--traffic", workshop / "trace.csv", "--mtp", head,
         "--draft-vocabulary", "120", "--output", artifact],
        cwd=elsewhere,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "✓ export of the drafter" in ran.err
    return artifact


def generate(artifact: Path, *options: str) -> dict:
    ran = run(["edgert", "generate", artifact, "--prompt-ids", "5,6,7,8,9", "--max-tokens", "24", "--ignore-eos",
               "--json", *options], cwd=artifact.parent)  # fmt: skip
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_the_artifact_says_what_drafts(drafting: Path, elsewhere: Path) -> None:
    manifest = load_manifest(drafting)
    assert (manifest.draft_length, manifest.draft_vocabulary) == (3, 120)
    assert [state.input for state in manifest.draft_states] == ["mtp.key.0", "mtp.value.0"]
    assert {"mtp.onnx", "mtp.weights"} <= {entry.path for entry in manifest.files}
    assert "toy.mtp.safetensors" in {entry.file for entry in manifest.source}
    assert {"drafter weights", "drafter KV cache"} <= {line.label for line in manifest.ledger}
    assert {cell.query_rows for cell in manifest.decode_cells} == {1, 4}
    ran = run(["edgebuild", "inspect", drafting], cwd=elsewhere)
    assert "3 tokens a step" in ran.out


def test_draft_length_is_chosen_at_the_command_line_and_the_ids_stay(drafting: Path) -> None:
    plain = generate(drafting, "--draft-length", "0")
    assert (plain["acceptance"], plain["mean_accepted_length"]) == (None, None)
    for length in ("1", "3"):
        found = generate(drafting, "--draft-length", length)
        assert found["token_ids"] == plain["token_ids"]
        if found["usage"]["draft_proposed"]:  # a random head may be switched off at once by what its steps cost
            assert 0 <= found["acceptance"] <= 1
            assert found["mean_accepted_length"] >= 1
    assert generate(drafting)["token_ids"] == plain["token_ids"]


def test_more_drafts_than_the_artifact_has_are_refused_with_both_numbers(drafting: Path) -> None:
    ran = run(["edgert", "generate", drafting, "--prompt", "a", "--draft-length", "4"], cwd=drafting.parent)
    assert ran.code != 0
    assert "0 to 3" in ran.error_line
    assert "4" in ran.error_line


def test_a_checkpoint_with_its_own_module_drafts_as_the_profile_asks(workshop: Path, elsewhere: Path) -> None:
    model = toys.make_llama(workshop / "with mtp", seed=3)
    add_to_checkpoint(model, random_mtp(model))
    profile = workshop / "own-drafter.yaml"
    profile.write_text(
        f"extends: cpu\nname: own-drafter\ndescription: a toy\n{TOY_LIMITS}\nmechanisms: {{enable_mtp: true}}\n"
        "draft: {length: 2}\n"
    )
    artifact = elsewhere / "own"
    arguments = ["edgebuild", "--profile", profile, "--model", model, "--traffic", workshop / "trace.csv"]
    ran = run([*arguments, "--output", artifact], cwd=elsewhere)
    assert ran.code == 0, ran.err
    assert load_manifest(artifact).draft_length == 2
    assert generate(artifact)["token_ids"] == generate(artifact, "--draft-length", "0")["token_ids"]
    damaged = artifact / "mtp.weights"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    ran = run(["edgert", "generate", artifact, "--prompt", "a"], cwd=elsewhere)
    assert ran.code != 0
    assert "mtp.weights" in ran.error_line


# --- edgebuild tune, here because it needs this artifact ---

OWN = [
    {"prompt": "hello there, how are you today?", "max_tokens": 4, "task": "chat"},
    {"prompt": '{"name": "x", "age": 3, "list": [1, 2, 3, 4]}', "max_tokens": 4, "task": "json"},
]


def test_tune_is_cut_twice_continues_and_leaves_the_artifact_alone(drafting: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in drafting.iterdir()}
    traffic, book, config = tmp_path / "own.jsonl", tmp_path / "tuning.jsonl", tmp_path / "scheduler.yaml"
    traffic.write_text("\n".join(map(json.dumps, OWN)))
    calm = tmp_path / "calm.yaml"  # a soak of half a second on a busy machine drifts by luck
    calm.write_text("extends: cpu\nname: calm\ndescription: a toy\nlimits: {max_drift_fraction: 10.0}\n")
    arguments = ["tune", drafting, "--traffic", traffic, "--concurrency", "2", "--repeats", "2", "--soak-minutes",
                 "0.01", "--profile", calm, "--logbook", book, "--output", config]  # fmt: skip
    kept = {"EDGEBUILD_TUNING": str(tmp_path / "kept")}

    def cut(after: int, how: signal.Signals) -> tuple[int, str]:
        """Start it, send a signal when the logbook has more than `after` lines; its status and what it said."""
        with (tmp_path / "said").open("w+") as said:
            process = subprocess.Popen(command("edgebuild", *arguments), stderr=said, env=environment(**kept))
            while process.poll() is None and (not book.exists() or book.read_bytes().count(b"\n") <= after):
                time.sleep(0.05)
            process.send_signal(how)
            status = process.wait()
            said.seek(0)
            return status, said.read()

    status, told = cut(0, signal.SIGINT)
    assert status == 130
    assert "the same command goes on from there" in told
    assert "Traceback" not in told
    lines = book.read_bytes().count(b"\n")
    assert cut(lines, signal.SIGKILL)[0] == -signal.SIGKILL
    with book.open("ab") as file:
        file.write(b'{"format_version":1,"kind":"tri')

    ran = run(["edgebuild", *arguments, "--json"], cwd=tmp_path, **kept)
    assert ran.code == 0, ran.err
    assert "a half-written last line (31 bytes) was cut off" in ran.err
    assert "what they measured is not measured again" in ran.err
    found = json.loads(ran.out)
    trials, result = read_logbook(book).trials, read_logbook(book).results[-1]
    assert found["result"] == json.loads(result.model_dump_json())
    assert [trial.step for trial in trials].count("baseline") == 1
    assert [trial.draft_length for trial in trials if trial.step == "draft_curve"] == [0, 1, 2, 3]
    drafted = next(trial for trial in trials if trial.draft_length == 3)
    assert drafted.acceptance["chat"].steps > 0
    assert drafted.step_ms is not None
    assert result.curve is not None
    assert result.draft_vocabulary is not None
    reasons = {trial.step: trial.reason for trial in trials if trial.verdict == "not applicable"}
    assert "no CUDA graphs" in reasons["cuda_graph"]
    assert not [trial for trial in trials if trial.verdict == "failed"]
    assert len({trial.outputs_sha256 for trial in trials if trial.figures and trial.step != "draft_curve"}) == 1

    assert {path.name: path.read_bytes() for path in drafting.iterdir()} == before
    chosen = parse_config(config.read_text(), load_manifest(drafting))
    costs = load_costs(tmp_path / f"{drafting.name}.costs.json")
    assert found["costs"] == str(tmp_path / f"{drafting.name}.costs.json")
    assert costs.model == load_manifest(drafting).model.identity
    assert costs.missing(chosen.select_cells(load_manifest(drafting))) == ()
    assert len(list((tmp_path / "kept").iterdir())) == 1

    copy = tmp_path / "copy"
    shutil.copytree(drafting, copy)
    again = run(["edgebuild", *arguments[:1], copy, *arguments[2:], "--apply"], cwd=tmp_path, **kept)
    assert "What each step gave" in again.out
    assert f"costs     {copy / 'costs.json'}" in again.out
    assert (copy / "scheduler.yaml").read_text() == config.read_text()
    assert load_costs(copy / "costs.json").missing(chosen.select_cells(load_manifest(copy))) == ()
    assert "Draft curve" in again.out
    assert "✓ baseline" not in again.err  # nothing is measured again


def test_costs_measured_without_drafts_serve_with_them_and_are_not_measured_again(
    drafting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(drafting, copy)
    costs = measure(copy, settings={"enable_mtp": False, "mtp_num_heads": 0})
    assert costs.missing(load_manifest(copy).cells) == ()

    def measured_again(*_: object) -> None:
        raise LookupError("step costs are measured")

    monkeypatch.setattr(loading, "measure_step_costs", measured_again)
    plan = loading.plan_loading(copy, {"verify_files": False})
    runtime = loading.open_runtime(plan)
    assert runtime.draft_control is not None
    known = step_costs_of(load_costs(copy / "costs.json"), plan.cells, runtime.limits.slots, 3)
    assert known
    assert runtime.draft_control()._costs_ms == known
    runtime.backend.close()
    admitted = {}
    for fraction in (0.0, 0.9):
        held = loading.open_runtime(replace(plan, config=replace(plan.config, throughput_headroom_fraction=fraction)))
        held.backend.close()
        admitted[fraction] = held.admitted
        said = held.description.get("warnings", [""])[0]
        held_back = f"headroom 90%: {held.admitted} of {held.slots} slots are admitted"
        assert said.startswith(held_back) == (fraction == 0.9)
    assert admitted[0.0] == runtime.slots
    assert admitted[0.9] < runtime.slots
    (copy / "costs.json").unlink()
    with pytest.raises(LookupError, match="step costs are measured"):
        loading.open_runtime(plan)


def test_a_trial_ends_with_whoever_started_it(drafting: Path) -> None:
    job = {
        "artifact": str(drafting), "overrides": {}, "requests": [
            {"prompt_ids": [5, 6, 7], "output_tokens": 4, "task": None, "ignore_eos": True}
        ], "concurrency": 1, "repeats": 1, "fixed_drafts": False, "slo_ttft_ms": None, "slo_tpot_ms": None,
        "want_tokens": False, "soak_s": 600,
    }  # fmt: skip
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "edgert.trial"], stdin=pipe, stdout=pipe, env=environment(), text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(job), file=process.stdin, flush=True)
        assert "progress" in json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.wait(timeout=60) == 1


def test_a_place_that_cannot_be_written_to_ends_tune_before_anything_runs(drafting: Path, tmp_path: Path) -> None:
    traffic, book = tmp_path / "own.jsonl", tmp_path / "book"
    traffic.write_text("\n".join(map(json.dumps, OWN)))
    ran = run(["edgebuild", "tune", drafting, "--traffic", traffic, "--logbook", book, "--output", traffic / "a.yaml"])
    assert ran.code == 9
    assert "own.jsonl is not a folder" in ran.error_line
    assert not book.exists()


def test_a_traffic_file_that_is_none_ends_tune_before_anything_runs(drafting: Path, tmp_path: Path) -> None:
    ran = run(["edgebuild", "tune", drafting, "--traffic", tmp_path / "none.jsonl", "--logbook", tmp_path / "book"])
    assert ran.code == 4
    assert "none.jsonl" in ran.error_line
    assert not (tmp_path / "book").exists()
