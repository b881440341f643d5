"""A hybrid checkpoint with its own MTP module through the whole build and the runtime, drafts on: Transformers' tokens,
requests interleaved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
import transformers
from edgebuild.build import build
from edgebuild.errors import CheckpointError
from edgebuild.profile import load_profile
from edgebuild.progress import Stages
from edgebuild.traffic import read_traffic
from edgert import Engine
from hybrid_mtp import add_to_checkpoint, random_mtp

TOKENS = 300
MAKERS = {
    "qwen3_5": (toys.make_qwen3_5, {"nested": True}),
    "qwen3_next": (toys.make_qwen3_next, {"tied": False}),
    "qwen4_exp": (toys.make_qwen4_exp, {"layers": 2, "interval": 2, "ple_layer_ids": [1]}),
}
PROFILE = """
name: toy-cpu
description: The bundled cpu profile with chunks of at most 32 tokens
backend: onnxruntime
precision: float32
device: {memory_bytes: 8 GB, unified_memory: true, bandwidth_gb_per_s: 25.6, compute_capability: null}
limits: {slots: 4, context_tokens: 256, min_chunk: 16, max_chunk: 32, graph_memory_bytes: 0}
mechanisms: {enable_cuda_graph: false, enable_mtp: true}
draft: {length: 2}
"""


@pytest.fixture(scope="module", params=MAKERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, options = MAKERS[request.param]
    made: Path = make(tmp_path_factory.mktemp("checkpoint") / request.param, **options)
    add_to_checkpoint(made, random_mtp(made))
    return made


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    (folder / "toy.yaml").write_text(PROFILE)
    rows = [f"2023-11-16 18:15:46.6805900,{prompt},{1 + prompt % 50}" for prompt in range(1, 201)]
    (folder / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    built = build(
        load_profile(str(folder / "toy.yaml")), checkpoint, read_traffic(folder / "trace.csv"), folder / "artifact",
        Stages(quiet=True),
    )  # fmt: skip
    assert built.golden is not None
    assert built.golden.worst_error < 1e-4
    assert built.golden.drafts > 0
    return built.path


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    with Engine.load(artifact, threads=1) as opened:
        yield opened


def greedy(checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    """Transformers, the whole sequence anew for every token: no cache of theirs in between."""
    architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(checkpoint, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :TOKENS].argmax()))
    return ids[len(prompt) :]


def test_97_tokens_in_chunks_of_32_while_another_request_decodes(checkpoint: Path, engine: Engine) -> None:
    """The slots of both requests keep their own state, and the second one's prefill never stops the first."""
    random = np.random.default_rng(5)
    first, second = random.integers(0, TOKENS, 11).tolist(), random.integers(0, TOKENS, 97).tolist()
    handle = engine.submit(first, max_tokens=40, ignore_eos=True)
    running = iter(handle)
    next(running)
    other = engine.submit(second, max_tokens=12, ignore_eos=True)
    assert list(other.result().token_ids) == greedy(checkpoint, second, 12)
    assert list(handle.result().token_ids) == greedy(checkpoint, first, 40)


def test_a_slot_that_is_used_again_starts_from_nothing(checkpoint: Path, engine: Engine) -> None:
    prompt = np.random.default_rng(6).integers(0, TOKENS, 45).tolist()
    expected = greedy(checkpoint, prompt, 8)
    for _ in range(5):
        assert list(engine.complete(prompt, max_tokens=8, ignore_eos=True).token_ids) == expected


def test_four_requests_at_once_are_each_as_if_alone(engine: Engine) -> None:
    random = np.random.default_rng(8)
    prompts = [random.integers(0, TOKENS, length).tolist() for length in (1, 33, 64, 97)]
    alone = [list(engine.complete(prompt, max_tokens=16, ignore_eos=True).token_ids) for prompt in prompts]
    handles = [engine.submit(prompt, max_tokens=16, ignore_eos=True) for prompt in prompts]
    assert [list(handle.result().token_ids) for handle in handles] == alone


def test_a_family_that_a_backend_cannot_run_is_refused_before_anything_is_exported(tmp_path: Path) -> None:
    toys.make_qwen4_exp(tmp_path / "toy", layers=2, interval=2, ple_layer_ids=[1])
    profile = load_profile("rtx")
    assert profile.traffic is not None
    with pytest.raises(CheckpointError, match="qwen4_exp does not run on tensorrt-rtx") as refused:
        build(profile, tmp_path / "toy", read_traffic(profile.traffic), tmp_path / "out", Stages(quiet=True))
    assert "onnxruntime" in str(refused.value.hint)
    assert not (tmp_path / "out").exists()


def test_manifest_describes_every_state_and_the_ledger_counts_them(artifact: Path) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    kinds = {state["kind"] for state in manifest["states"]}
    assert kinds == {"kv", "conv", "recurrent"}
    assert all(state["dtype"] == "float32" for state in manifest["states"] if state["kind"] == "recurrent")
    sizes = [4 * int(np.prod(state["shape"])) for state in manifest["states"] if state["kind"] != "kv"]
    (line,) = [line for line in manifest["memory"]["ledger"] if line["label"] == "recurrent state"]
    assert line["bytes"] == manifest["slots"] * sum(sizes)
