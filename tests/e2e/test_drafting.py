"""A build with a drafter, from a sidecar and from the checkpoint itself, run through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toys
from command_line import TOY_LIMITS, run
from edgert.manifest import load_manifest
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
