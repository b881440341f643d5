"""The onnxruntime backend on a real exported toy, against Hugging Face Transformers and against itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgebuild.checkpoint import open_checkpoint
from edgebuild.export import FORMS, export_decoder
from edgebuild.models.config import ModelConfig
from edgert.backends import resolve
from edgert.backends.base import Setup
from edgert.backends.onnxruntime import OnnxRuntimeBackend
from edgert.engine import Engine
from edgert.errors import ArtifactError, BackendError, ConfigError, GoldenMismatch
from edgert.golden import Golden, GoldenCase, GoldenStep, check_golden
from edgert.loading import Runtime
from edgert.manifest_records import StateSpec
from edgert.requests import Request
from edgert.sampling import SamplingParams
from edgert.scheduler import Limits
from edgert.step import empty_step
from fakes import make_cells, sample
from transformers import AutoModelForCausalLM

CONTEXT, CHUNK, SLOTS, TOKENS = 192, 64, 4, 300
CELLS = make_cells(CONTEXT, chunks=(16, CHUNK), rows=(1, 4))


@pytest.fixture(scope="module")
def setup(toy_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    directory = tmp_path_factory.mktemp("onnxruntime")
    checkpoint = open_checkpoint(toy_llama)
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config),
        checkpoint,
        directory,
        cache_tokens=CONTEXT + CHUNK,
        token_limit=TOKENS,
        precision="float32",
        forms=FORMS["onnxruntime"],
    )
    states = tuple(
        StateSpec(state.name, f"{state.name}.out", "float32", state.kind, tuple(state.shape)) for state in graph.states
    )
    return Setup(directory, CELLS, SLOTS, CONTEXT + CHUNK, TOKENS, states, {"threads": 1})


@pytest.fixture
def backend(setup: Setup) -> Iterator[OnnxRuntimeBackend]:
    opened = resolve("onnxruntime")(setup)
    assert isinstance(opened, OnnxRuntimeBackend)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def hugging_face(toy_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(toy_llama, dtype=torch.float32).eval()


def reference_logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([list(ids)])).logits[0, :, :TOKENS].numpy()
    return logits


def reference_ids(model: Any, prompt: Sequence[int], tokens: int, params: SamplingParams | None = None) -> list[int]:
    """Greedy, or sampled with the contract's arithmetic on Transformers' logits."""
    from edgert.sampling import uniform

    ids, out = list(prompt), []
    for place in range(tokens):
        logits = reference_logits(model, ids)[-1]
        if params is None:
            token = int(logits.argmax())
        else:
            number = float(uniform(params.seed or 0, place))
            token = sample(logits, number, params.temperature, params.top_k, params.top_p)
        out.append(token)
        ids.append(token)
    return out


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, TOKENS, length)]


def make_engine(setup: Setup, drafter: Any = None) -> Engine:
    def open_() -> Runtime:
        backend = resolve("onnxruntime")(setup)
        return Runtime(
            backend=backend,
            limits=Limits(CELLS, SLOTS, CONTEXT),
            slots=SLOTS,
            cache_tokens=setup.cache_tokens,
            vocabulary_size=320,
            token_limit=TOKENS,
            eos_token_ids=(),
            queue_limit=64,
            text=None,
            description=backend.describe(),
            memory_bytes=backend.memory(),
            drafter=drafter,
        )

    return Engine(open_)


def test_greedy_ids_equal_transformers_around_every_chunk_boundary_alone_and_interleaved(
    setup: Setup, hugging_face: Any
) -> None:
    prompts = [prompt_of(length, length) for length in (1, 15, 16, 17, 63, 64, 65, 128, 129)]
    expected = [reference_ids(hugging_face, prompt, 8) for prompt in prompts]
    with make_engine(setup) as engine:
        alone = [list(engine.complete(prompt, max_tokens=8).token_ids) for prompt in prompts]
        handles = [engine.submit(prompt, max_tokens=8) for prompt in prompts]
        together = [list(handle.result(60).token_ids) for handle in handles]
        assert max(engine.metrics().launches) >= "decode-4x1"
    assert alone == expected
    assert together == expected


def test_a_context_filled_to_the_end_equals_transformers(setup: Setup, hugging_face: Any) -> None:
    with make_engine(setup) as engine:
        for length, tokens in ((CONTEXT, 1), (CONTEXT - 1, 2)):
            done = engine.complete(prompt_of(length), max_tokens=50)
            assert list(done.token_ids) == reference_ids(hugging_face, prompt_of(length), tokens)
            assert done.finish_reason == "length"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=1.0, seed=5),
        SamplingParams(max_tokens=12, temperature=0.7, top_k=9, seed=6),
        SamplingParams(max_tokens=12, temperature=1.4, top_p=0.6, seed=7),
        SamplingParams(max_tokens=12, temperature=1.0, top_k=40, top_p=0.9, seed=8),
    ],
)
def test_sampled_ids_equal_the_same_arithmetic_on_transformers_logits(
    setup: Setup, hugging_face: Any, params: SamplingParams
) -> None:
    prompt = prompt_of(20, 3)
    with make_engine(setup) as engine:
        others = [engine.submit(prompt_of(30, seed), max_tokens=20) for seed in range(2)]
        got = list(engine.complete(prompt, params=params).token_ids)
        for other in others:
            other.result(60)
    assert got == reference_ids(hugging_face, prompt, 12, params)


class Script:
    """Proposes what a greedy run is known to give, wrong at every third position."""

    def __init__(self, tokens: Sequence[int], *, wrong: bool) -> None:
        self.tokens, self.wrong = list(tokens), wrong

    def propose(self, _request: Request, outputs: Sequence[int], limit: int) -> Sequence[int]:
        place = len(outputs)
        drafts = self.tokens[place : place + min(limit, 3)]
        if self.wrong and place % 3 == 0:
            drafts = [*drafts[:1], *((token + 1) % TOKENS for token in drafts[1:])]
        return drafts


@pytest.mark.parametrize("wrong", [False, True])
def test_drafts_change_the_number_of_steps_and_not_the_tokens(setup: Setup, wrong: bool) -> None:
    prompt = prompt_of(20, 3)
    with make_engine(setup) as plain:
        expected = plain.complete(prompt, max_tokens=24)
    with make_engine(setup, Script(expected.token_ids, wrong=wrong)) as engine:
        done = engine.complete(prompt, max_tokens=24)
        launches = sum(count for label, count in engine.metrics().launches.items() if label.startswith("decode"))
    assert done.token_ids == expected.token_ids
    assert 0 < done.usage.draft_accepted <= done.usage.draft_proposed
    assert (done.usage.draft_accepted == done.usage.draft_proposed) is not wrong
    assert launches == 23 - done.usage.draft_accepted


def golden_for(model: Any, prompt: Sequence[int], tokens: int, tolerance: float = 1e-4) -> Golden:
    forced = reference_ids(model, prompt, tokens)
    steps = []
    for place in range(tokens):
        row = reference_logits(model, [*prompt, *forced[:place]])[-1]
        top = np.argsort(-row, kind="stable")[:5]
        steps.append(
            GoldenStep(
                token=forced[place - 1] if place else prompt[-1],
                position=len(prompt) + place - 1,
                top_ids=tuple(int(token) for token in top),
                indices=tuple(range(0, TOKENS, 3)),
                values=tuple(float(value) for value in row[::3]),
                norm=float(np.linalg.norm(row)),
            )
        )
    return Golden(tolerance, (GoldenCase(tuple(prompt), tuple(steps)),))


def test_golden_vectors_of_transformers_hold_and_a_changed_engine_is_noticed(
    setup: Setup, backend: OnnxRuntimeBackend, hugging_face: Any, tmp_path: Path
) -> None:
    golden = golden_for(hugging_face, prompt_of(70, 4), 5)
    kept: dict[str, Any] = {"cells": CELLS, "slots": SLOTS, "context_tokens": CONTEXT}
    report = check_golden(backend, golden, **kept)
    assert report.steps == 5
    assert report.worst_error < 1e-5
    weights = bytearray((setup.artifact / "decoder.weights").read_bytes())
    values = np.frombuffer(weights, np.float32)
    values[: len(values) // 2] *= np.float32(1.01)
    (tmp_path / "decoder.weights").write_bytes(weights)
    (tmp_path / "decoder.onnx").write_bytes((setup.artifact / "decoder.onnx").read_bytes())
    changed = OnnxRuntimeBackend(dataclasses.replace(setup, artifact=tmp_path))
    with pytest.raises(GoldenMismatch, match=r"relative error|norm"):
        check_golden(changed, golden, **kept)
    with pytest.raises(ArtifactError, match="no case fits a context of 10"):
        check_golden(backend, golden, cells=CELLS, slots=SLOTS, context_tokens=10)


def test_an_idle_row_leaves_the_committed_cache_alone(backend: OnnxRuntimeBackend) -> None:
    cell = next(cell for cell in CELLS if cell.kind == "prefill" and cell.query_rows == 16)
    fill = empty_step(cell, 1)
    fill.tokens[0, :10] = prompt_of(10)
    fill.valid[0] = fill.forced[0] = 10
    backend.launch(fill)
    before = {name: array[1, :, :10].copy() for name, array in backend._states.items()}
    untouched = {name: array[3].copy() for name, array in backend._states.items()}
    decode = empty_step(next(cell for cell in CELLS if cell.kind == "decode" and cell.batch == 2), 0)
    decode.tokens[0, 0] = 5
    decode.valid[0] = decode.forced[0] = 1
    decode.length[1] = 10
    backend.launch(decode)
    for name, array in backend._states.items():
        assert (array[1, :, :10] == before[name]).all()
        assert (array[3] == untouched[name]).all()
        assert array[1, :, :10].any()


def test_a_step_may_start_from_what_the_device_holds(backend: OnnxRuntimeBackend) -> None:
    chunk = next(cell for cell in CELLS if cell.kind == "prefill" and cell.query_rows == 16)
    one = next(cell for cell in CELLS if cell.kind == "decode" and cell.batch == 1 and cell.query_rows == 1)
    results = []
    for slot, from_device in ((0, False), (2, True)):
        fill = empty_step(chunk, slot)
        fill.tokens[0, :10] = prompt_of(10)
        fill.valid[0] = fill.forced[0] = 10
        first = backend.launch(fill).result()
        step = empty_step(one, slot)
        step.valid[0] = step.forced[0] = 1
        if from_device:
            step.from_device[0] = True
        else:
            step.tokens[0, 0], step.length[0] = first.next_token[0], 10
        results.append(int(backend.launch(step).result().next_token[0]))
    assert results[0] == results[1]


def test_warm_up_runs_every_shape_and_memory_has_a_line_for_each_part(backend: OnnxRuntimeBackend) -> None:
    backend.warm_up()
    memory = backend.memory()
    assert memory["kv_cache"] == sum(array.nbytes for array in backend._states.values())
    assert memory["weights"] > 0
    assert memory["state"] == 0
    assert {"version", "threads", "prepack"} <= backend.describe().keys()


@pytest.mark.parametrize("prepack", [True, False])
def test_prepacking_does_not_change_the_tokens(setup: Setup, prepack: bool) -> None:
    with make_engine(dataclasses.replace(setup, options={"threads": 1, "prepack": prepack})) as engine:
        assert engine.describe()["prepack"] is prepack
        with make_engine(setup) as other:
            assert (
                engine.complete([7, 8, 9], max_tokens=5).token_ids == other.complete([7, 8, 9], max_tokens=5).token_ids
            )


def test_wrong_options_and_files_are_refused(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no option 'thread'"):
        OnnxRuntimeBackend(dataclasses.replace(setup, options={"thread": 1}))
    for threads in (0, True, "2"):
        with pytest.raises(ConfigError, match="threads is"):
            OnnxRuntimeBackend(dataclasses.replace(setup, options={"threads": threads}))
    (tmp_path / "decoder.onnx").write_bytes(b"not a model")
    with pytest.raises(BackendError, match="cannot be opened"):
        OnnxRuntimeBackend(dataclasses.replace(setup, artifact=tmp_path))
    with pytest.raises(ArtifactError, match="other inputs than the manifest"):
        OnnxRuntimeBackend(dataclasses.replace(setup, states=setup.states[:-1]))
    narrow = dataclasses.replace(setup.states[0], shape=(1, 2, 3))
    with pytest.raises(ArtifactError, match=r"the manifest says \[1, 2, 3\]"):
        OnnxRuntimeBackend(dataclasses.replace(setup, states=(narrow, *setup.states[1:])))
    with pytest.raises(BackendError, match="unknown backend 'tensorflow'"):
        resolve("tensorflow")


def test_a_closed_backend_refuses_to_launch(setup: Setup) -> None:
    backend = OnnxRuntimeBackend(setup)
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.launch(empty_step(CELLS[0], 0))
