"""The real demo model, built once by the command line: tokens equal Transformers', memory bounded, Paris."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import peak_bytes, run
from edgebuild.checkpoint import Checkpoint, open_checkpoint
from edgebuild.profile.loader import bundled_traffic
from edgert.engine import Engine
from edgert.manifest import load_manifest
from greedy_reference import around, random_prompts

CONTEXT, NEW, PROMPTS = 384, 64, 20
PROFILE = """
extends: cpu
name: small-cpu
description: the cpu profile with a context that keeps this test short
limits: {context_tokens: 384, min_chunk: 64, max_chunk: 128, max_prefill_cells: 4, max_decode_cells: 6}
"""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Demo:
    """The artifact, and the peak memory of the process that built it."""

    artifact: Path
    build_peak_bytes: int


@pytest.fixture(scope="module")
def demo(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "small-cpu.yaml").write_text(PROFILE)
    options = ["--profile", "small-cpu.yaml", "--model", demo_gguf, "--traffic", bundled_traffic(), "--output", "demo"]
    return Demo(folder / "demo", peak_bytes(["edgebuild", *options, "--quiet"], folder))


@pytest.fixture(scope="module")
def checkpoint(demo_gguf: Path) -> Checkpoint:
    return open_checkpoint(demo_gguf)


@pytest.fixture(scope="module")
def engine(demo: Demo) -> Iterator[Engine]:
    # one thread: two wait for each other at every operator, 4 x slower in all where other processes want the cores
    with Engine.load(demo.artifact, threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Any:
    """Transformers' own Llama with the checkpoint's tensors, so that only the arithmetic is compared."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).to(torch.float32).eval()
    weights = {name: checkpoint.read(name).to(torch.float32) for name in checkpoint.names()}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    model.tie_weights()
    return model


def lengths(sizes: list[int]) -> list[int]:
    """Around every chunk boundary that a prompt can meet here, and others between up to PROMPTS of them."""
    most = CONTEXT - NEW
    chosen = set(around(sizes, most))
    others = (length for length in range(16, most, 19) if length not in chosen)
    while len(chosen) < PROMPTS:
        chosen.add(next(others))
    return sorted(chosen)


def generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Transformers' own `generate`, greedy, all prompts in one batch padded on the left."""
    most = max(map(len, prompts))
    ids = torch.tensor([[0] * (most - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [row[most:].tolist() for row in out]


def test_twenty_greedy_runs_equal_transformers_alone_and_four_interleaved(
    demo: Demo, engine: Engine, checkpoint: Checkpoint, reference: Any
) -> None:
    sizes = sorted({cell.query_rows for cell in load_manifest(demo.artifact).cells if cell.kind == "prefill"})
    limit = checkpoint.tokenizer.token_limit
    prompts = random_prompts(lengths(sizes), limit, first=20)
    assert len(prompts) >= PROMPTS
    expected = generated(reference, prompts)
    handles = [engine.submit(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts]
    assert [list(handle.result(500).token_ids) for handle in handles] == expected
    assert any(label.startswith("decode-4x") for label in engine.metrics().launches)
    assert [list(engine.complete(prompt, max_tokens=NEW, ignore_eos=True).token_ids) for prompt in prompts] == expected


def test_the_capital_of_france(demo: Demo) -> None:
    ran = run(["edgert", "chat", demo.artifact, "--once", "What is the capital of France?"])
    assert ran.code == 0, ran.err
    assert "Paris" in ran.out
    for text in ("TTFT", "TPOT", "tokens/s", "report.html"):
        assert text in ran.out


def test_peak_memory_of_the_build_stays_near_the_weights(demo: Demo, tmp_path: Path) -> None:
    """Above an interpreter that has imported torch: at most 1.5 x the weights written + 200 MB."""
    baseline = peak_bytes([sys.executable, "-c", "import torch"], tmp_path)
    weights = (demo.artifact / "decoder.weights").stat().st_size
    above = demo.build_peak_bytes - baseline
    assert above <= 1.5 * weights + 200e6, f"{above / 1e6:,.0f} MB above torch, weights {weights / 1e6:,.0f} MB"
