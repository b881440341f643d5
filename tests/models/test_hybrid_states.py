"""Recurrent state under chunks, drafts, padding and idle rows: what is left behind is what the committed rows say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.export import FORMS, export_decoder
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from graph_runner import GraphRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from module_runner import ModuleRunner

CACHE, TOKENS = 224, 300
Runner = ModuleRunner | GraphRunner
Make = Callable[..., Runner]
FAMILIES = {
    "qwen3_5": toys.make_qwen3_5,
    "qwen3_next": toys.make_qwen3_next,
    "qwen4_exp": functools.partial(toys.make_qwen4_exp, ple_layer_ids=[1, 3]),
}
GRAPHS = {
    "qwen3_5-onnx": toys.make_qwen3_5,
    "qwen4_exp-onnx": functools.partial(toys.make_qwen4_exp, ple_layer_ids=[1]),
}
BY_POSITION = ("key", "value", "index")  # caches: what lies past a sequence's length means nothing


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / max(float(np.linalg.norm(expected)), 1e-30))


def module_maker(family: str, directory: Path) -> Make:
    FAMILIES[family](directory, layers=4, interval=2)
    decoder = load_decoder(open_checkpoint(directory), cache_tokens=CACHE)
    return lambda batch=1: ModuleRunner(decoder, batch)


def graph_maker(family: str, directory: Path) -> Make:
    GRAPHS[family](directory, layers=2, interval=2)
    checkpoint = open_checkpoint(directory)
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config), checkpoint, directory, cache_tokens=CACHE, token_limit=TOKENS,
        precision="float32", forms=FORMS["onnxruntime"],
    )  # fmt: skip
    return lambda batch=1: GraphRunner(graph.path, batch)


@pytest.fixture(scope="module", params=[*FAMILIES, *GRAPHS])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A function that gives a fresh runner, on the torch module or on the exported graph."""
    directory = tmp_path_factory.mktemp("hybrid")
    maker = graph_maker if request.param in GRAPHS else module_maker
    return maker(request.param, directory)


@pytest.fixture(scope="module", params=FAMILIES)
def make_module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return module_maker(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    drawn = np.random.default_rng(3).integers(0, TOKENS, 200)
    drawn[[4, 30, 31, 66]] = toys.IM_END  # n-grams end there
    return drawn


def prefill(runner: Runner, prompt: np.ndarray, chunks: Sequence[int], row: int = 0) -> dict[str, np.ndarray]:
    """The prompt in chunks of the given sizes (the last one as often as needed), padded, in one batch row."""
    position, place, outputs = 0, 0, {}
    while position < len(prompt):
        rows = chunks[min(place, len(chunks) - 1)]
        real = min(rows, len(prompt) - position)
        tokens = np.zeros((runner.batch, rows), np.int64)
        tokens[row, :real] = prompt[position : position + real]
        valid = np.zeros(runner.batch, np.int64)
        valid[row] = real
        outputs = runner.step(tokens, valid=valid, tier=CACHE)
        position, place = position + real, place + 1
    return outputs


def same_state(actual: Runner, expected: Runner, row: int = 0, tolerance: float = 2e-5) -> None:
    """Recurrent state of a row, and the cache up to its length."""
    length = int(expected.length[0])
    for name, state in expected.states.items():
        other = actual.states[name][row]
        kept = (slice(None), slice(0, length)) if name.startswith(BY_POSITION) else ()
        assert relative(other[kept], state[0][kept]) <= tolerance, name


@pytest.mark.parametrize("chunks", [[32], [1], [2], [3, 1, 2], [64], [65, 7], [128], [33, 32]])
def test_prefill_in_chunks_equals_one_shot_state_included(make: Make, ids: np.ndarray, chunks: list[int]) -> None:
    """With 1 and 2 every boundary lies within the convolution's window."""
    prompt = ids[:97]
    whole, parts = make(), make()
    expected = whole.step(prompt, tier=CACHE)
    outputs = prefill(parts, prompt, chunks)
    assert relative(outputs["logits"], expected["logits"]) <= 2e-5
    same_state(parts, whole)


@settings(max_examples=20, deadline=None)
@given(chunks=st.lists(st.integers(1, 80), min_size=1, max_size=6), length=st.integers(1, 120))
def test_any_chunks_leave_the_same_state(make_module: Make, ids: np.ndarray, chunks: list[int], length: int) -> None:
    whole, parts = make_module(), make_module()
    whole.step(ids[:length], tier=CACHE)
    prefill(parts, ids[:length], chunks)
    same_state(parts, whole)


def greedy(runner: Runner, prompt: np.ndarray, count: int) -> list[int]:
    tokens = [int(runner.step(prompt, tier=CACHE)["next_token"][0])]
    while len(tokens) < count:
        tokens.append(int(runner.step([tokens[-1]], tier=CACHE)["next_token"][0]))
    return tokens


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["wrong", "alternating", "right"])
def test_drafts_change_no_token(make: Make, ids: np.ndarray, kind: str, k: int) -> None:
    """Alternating drafts are right in every other step, and half right in the rest."""
    prompt, count = ids[:23], 24
    plain = make()
    expected = greedy(plain, prompt, count + k + 1)
    runner = make()
    tokens = [int(runner.step(prompt, tier=CACHE)["next_token"][0])]
    accepted, turn = [], 0
    while len(tokens) < count:
        drafts = list(expected[len(tokens) : len(tokens) + k])
        wrong_from = {"wrong": 0, "right": k, "alternating": k if turn % 2 else k // 2}[kind]
        drafts[wrong_from:] = [(token + 1) % TOKENS for token in drafts[wrong_from:]]
        outputs = runner.step([tokens[-1], *drafts], forced=[1], logit_rows=1 + k, tier=CACHE)
        accepted.append(int(outputs["accepted"][0]))
        assert accepted[-1] == wrong_from
        tokens += [*drafts[: accepted[-1]], int(outputs["next_token"][0])]
        turn += 1
    assert tokens[:count] == expected[:count]
    alone = make()
    alone.step(np.concatenate([prompt, tokens[:-1]]), tier=CACHE)
    same_state(runner, alone, tolerance=1e-4)


def test_a_step_without_drafts_after_one_that_accepted_two_reads_the_right_state(make: Make, ids: np.ndarray) -> None:
    expected = greedy(make(), ids[:9], 8)
    runner = make()
    runner.step(ids[:9], tier=CACHE)
    wrong = (expected[3] + 1) % TOKENS
    outputs = runner.step([expected[0], expected[1], expected[2], wrong], forced=[1], logit_rows=4, tier=CACHE)
    assert outputs["accepted"][0] == 2
    assert outputs["next_token"][0] == expected[3]
    for place in (3, 4, 5):
        assert runner.step([expected[place]], tier=CACHE)["next_token"][0] == expected[place + 1]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_prompt_of_one_and_k_tokens_is_prefill(make: Make, ids: np.ndarray, k: int) -> None:
    """Its rows count whatever the model would have said."""
    whole, steps = make(), make()
    outputs = whole.step(ids[: 1 + k], tier=CACHE)
    assert outputs["new_length"][0] == 1 + k
    assert outputs["accepted"][0] == 0
    for token in ids[: 1 + k]:
        single = steps.step([token], tier=CACHE)
    assert relative(outputs["logits"], single["logits"]) <= 1e-5
    same_state(steps, whole)


def test_rejected_drafts_leave_no_trace_in_recurrent_state(make: Make, ids: np.ndarray) -> None:
    plain, drafted = make(), make()
    first = int(plain.step(ids[:9], tier=CACHE)["next_token"][0])
    drafted.step(ids[:9], tier=CACHE)
    following = int(plain.step([first], tier=CACHE)["next_token"][0])
    wrong = [(following + each) % TOKENS for each in (1, 2, 3)]
    drafted.step([first, *wrong], forced=[1], logit_rows=4, tier=CACHE)
    assert drafted.length[0] == plain.length[0]
    same_state(drafted, plain)


def test_two_sequences_share_a_padded_cell_with_an_idle_row(make: Make, ids: np.ndarray) -> None:
    """Rows of different length and progress beside one that is idle: each as if alone, the idle one untouched."""
    together = make(3)
    alone = {row: make() for row in (0, 2)}
    prompts = {0: ids[:40], 2: ids[50:67]}
    for row, prompt in prompts.items():
        prefill(together, prompt, [16], row)
        prefill(alone[row], prompt, [16])
    idle = {name: state[1].copy() for name, state in together.states.items() if not name.startswith(BY_POSITION)}
    for step in range(4):
        tokens = np.zeros((3, 2), np.int64)
        valid = np.zeros(3, np.int64)
        for row in prompts:
            tokens[row, 0] = ids[100 + 10 * row + step]
            valid[row] = 1
        outputs = together.step(tokens, valid=valid, forced=valid, logit_rows=2, tier=CACHE)
        for row, runner in alone.items():
            single = runner.step(tokens[row, :1], tier=CACHE)
            assert relative(outputs["logits"][row, 0], single["logits"][0, 0]) <= 2e-5
    for row, runner in alone.items():
        assert together.length[row] == runner.length[0]
        same_state(together, runner, row)
    assert together.length[1] == 0
    for name, state in idle.items():
        assert np.array_equal(together.states[name][1], state)


def test_a_long_context_under_chunks_holds_its_numbers(make_module: Make, ids: np.ndarray) -> None:
    """Decay summed over many rows must not lose the digits of the last ones."""
    prompt = ids[:192]
    whole, parts = make_module(), make_module()
    whole.step(prompt, tier=CACHE)
    for token in prompt:
        parts.step([token], tier=CACHE)
    same_state(whole, parts)
