"""Qwen hybrids that draft with their own MTP module, on ONNX Runtime: never another answer, whatever is drafted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from drafting_toy import CELLS, CONTEXT, PATTERNS, SLOTS, TOKENS, Forger, Toy, export_toy, make_engine, prompt_of
from edgebuild.checkpoint import open_checkpoint
from edgebuild.drafter import find_drafter
from edgebuild.golden import make_golden
from edgebuild.golden_drafts import ReferenceDrafter
from edgebuild.models.config import ModelConfig
from edgert.backends import resolve
from edgert.errors import GoldenMismatch
from edgert.golden import GoldenReport, check_golden, load_golden
from greedy_reference import greedy, load_reference
from hybrid_mtp import ReferenceMtp, make_agreeing, random_mtp

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5": (toys.make_qwen3_5, {}),
    "qwen3_5_moe": (toys.make_qwen3_5_moe, {}),
    "qwen3_next": (toys.make_qwen3_next, {"tied": False}),
    "qwen4_exp": (toys.make_qwen4_exp, {"ple_layer_ids": [1], "indexer_budget": 24}),
}
AGREEING = ("qwen3_5", "qwen4_exp")  # one of each kind of module
LENGTHS = (1, 2, 4, 31, 45)  # 2 and 4: of exactly 1 + k tokens


@pytest.fixture(scope="module", params=FAMILIES)
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    make, options = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp("drafts")
    source = make(directory / "model", layers=2, interval=2, **options)
    return export_toy(source, directory, random_mtp(source))


@pytest.fixture(scope="module")
def answers(toy: Toy) -> dict[tuple[int, ...], list[int]]:
    model = load_reference(toy.source)
    return {prompt_of(length): greedy(model, prompt_of(length), 12, TOKENS) for length in LENGTHS}


@pytest.mark.parametrize("drafter", ["none", "the module", "right", "wrong", "alternating steps", "alternating places"])
def test_ids_with_drafts_equal_transformers(toy: Toy, answers: dict[tuple[int, ...], list[int]], drafter: str) -> None:
    """D3, k = 1 .. 4; two requests at a time, so that rows with different acceptance share a batch."""
    for k in (0,) if drafter == "none" else (1, 2, 3, 4):
        forge = Forger(answers, PATTERNS[drafter]) if drafter in PATTERNS else None
        with make_engine(toy, k, forge=forge) as engine:
            handles = {p: engine.submit(list(p), max_tokens=12, task="toy", ignore_eos=True) for p in answers}
            for prompt, handle in handles.items():
                assert list(handle.result().token_ids) == answers[prompt], (k, len(prompt))
            found = engine.metrics().acceptance.get("toy")
        if drafter in ("right", "wrong"):
            assert found is not None
            assert found["acceptance"] == (1.0 if drafter == "right" else 0.0)


def test_drafts_equal_the_reference_module(toy: Toy, answers: dict[tuple[int, ...], list[int]]) -> None:
    """What the engine's drafter proposes after a prompt of two chunks, against Transformers' layer."""
    reference = ReferenceMtp(toy.source, toy.tensors)
    seen: list[Any] = []

    def watch(step: Any, outputs: Any) -> None:
        if step.cell.kind == "prefill" and step.draft_length:
            seen.append(outputs.drafts[0].tolist())

    prompt = prompt_of(45)
    with make_engine(toy, 4, forge=watch) as engine:
        engine.submit(list(prompt), max_tokens=12, ignore_eos=True).result()
    assert seen[-1] == reference.drafts([*prompt, answers[prompt][0]], 4, TOKENS)


@pytest.fixture(scope="module", params=AGREEING)
def agreeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    make, options = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp("agreeing")
    source = make(directory / "model", layers=2, interval=2, **options | {"tied": False})
    return export_toy(source, directory, make_agreeing(source))


def test_a_module_that_always_agrees_is_always_accepted(agreeing: Toy) -> None:
    """Steps near the end verify fewer, so the mean accepted length stays a little below k + 1."""
    for k in (1, 2, 3, 4):
        with make_engine(agreeing, k) as engine:
            for length in (1, 5, 33):
                engine.submit(list(prompt_of(length)), max_tokens=40, task="toy", ignore_eos=True).result()
            found = engine.metrics().acceptance["toy"]
        assert found["acceptance"] == 1.0
        assert found["by_position"] == [1.0] * k
        assert found["mean_accepted_length"] > 0.9 * (k + 1)


def checked(toy: Toy, tensors: dict[str, torch.Tensor], directory: Path) -> GoldenReport:
    """The toy's engine against golden vectors that say what `tensors` would draft."""
    checkpoint = open_checkpoint(toy.source)
    config = ModelConfig.from_hf(checkpoint.config)
    from toy_mtp import write_sidecar

    drafter = find_drafter(checkpoint, config, write_sidecar(directory / "true.safetensors", tensors))
    assert drafter is not None
    golden = make_golden(
        checkpoint, precision="float32", chunk_sizes=(8, 32), context_tokens=CONTEXT,
        drafter=ReferenceDrafter(config, drafter, range(TOKENS)), draft_length=3,
    )  # fmt: skip
    (directory / "golden.json").write_text(json.dumps(golden))

    class Model:
        vocabulary_size, token_limit = 320, TOKENS

    backend = resolve("onnxruntime")(toy.setup)
    try:
        recorded = load_golden(directory, Model())  # type: ignore[arg-type]
        return check_golden(backend, recorded, cells=CELLS, slots=SLOTS, context_tokens=CONTEXT, draft_length=3)
    finally:
        backend.close()


def test_a_dropped_gate_is_caught_by_the_golden_drafts(agreeing: Toy, tmp_path: Path) -> None:
    """The gate of the module's attention is 0 here; one that is always 1 is no gate. Answers stay right."""
    assert checked(agreeing, agreeing.tensors, tmp_path).drafts > 0
    name = "mtp.layers.0.self_attn.q_proj.weight"
    config = ModelConfig.from_hf(open_checkpoint(agreeing.source).config)
    dropped = agreeing.tensors[name].clone()
    gates = dropped.view(config.heads, 2, config.head_dim, config.hidden_size)[:, 1]
    gates.neg_()  # sigmoid 0 → 1
    (tmp_path / "other").mkdir()
    broken = export_toy(agreeing.source, tmp_path / "other", agreeing.tensors | {name: dropped})
    with pytest.raises(GoldenMismatch, match=r"draft 1 is token \d+, the reference's is \d+"):
        checked(broken, agreeing.tensors, tmp_path)
    with make_engine(broken, 3) as engine, make_engine(dataclasses.replace(agreeing), 0) as plain:
        results = [e.submit(list(prompt_of(5)), max_tokens=20, task="toy", ignore_eos=True).result()
                   for e in (engine, plain)]  # fmt: skip
        assert engine.metrics().acceptance["toy"]["acceptance"] < 0.5
    assert results[0].token_ids == results[1].token_ids
