"""Drafts on real ONNX Runtime sessions: never another answer, and the drafts that the module's formulas give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import toys
from drafting_toy import (
    CELLS,
    CHUNK,
    CONTEXT,
    LONGEST,
    PATTERNS,
    TOKENS,
    Forger,
    Toy,
    export_toy,
    make_engine,
    prompt_of,
)
from edgert.backends import resolve
from edgert.backends.onnxruntime import OnnxRuntimeBackend
from edgert.requests import Prefilling, Request
from edgert.sampling import SamplingParams
from edgert.scheduler import Pace, PrefillPlan
from edgert.step import empty_step, prefill_inputs
from toy_mtp import NaiveMtp, random_mtp
from transformers import AutoModelForCausalLM

FAMILIES = {
    "llama": (toys.make_llama, {}),
    "qwen2": (toys.make_qwen2, {}),
    "qwen3-untied": (toys.make_qwen3, {"tied": False}),
}


@dataclass(frozen=True)
class Compared:
    """A toy and what its answers are compared with."""

    toy: Toy
    model: Any
    naive: NaiveMtp


@pytest.fixture(scope="module", params=FAMILIES)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    make, options = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp("drafting")
    source = make(directory / "model", **options)
    tensors = random_mtp(source)
    toy = export_toy(source, directory, tensors)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return Compared(toy, model, NaiveMtp(source, tensors))


@pytest.fixture(scope="module")
def toy(compared: Compared) -> Toy:
    return compared.toy


def hidden_rows(model: Any, ids: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        rows: np.ndarray = model.model(torch.tensor([list(ids)])).last_hidden_state[0].double().numpy()
    return rows


def greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :TOKENS].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def backend(toy: Toy) -> Iterator[OnnxRuntimeBackend]:
    opened = resolve("onnxruntime")(toy.setup)
    assert isinstance(opened, OnnxRuntimeBackend)
    yield opened
    opened.close()


def prefill(backend: OnnxRuntimeBackend, prompt: Sequence[int], chunks: Sequence[int], drafts: int) -> Any:
    """Feed a prompt in these chunks, as the worker would; the last step's outputs."""
    request = Request(0, tuple(prompt), SamplingParams(max_tokens=8), 0, frozenset(), None, 0.0)
    start = 0
    for tokens in chunks:
        rows = min(size for size in (8, CHUNK) if size >= tokens)
        tier = min(t for t in (64, CONTEXT) if t >= start + tokens)
        cell = next(c for c in CELLS if c.kind == "prefill" and c.query_rows == rows and c.kv_tier == tier)
        plan = PrefillPlan(cell, 0, start, tokens, Pace())
        last = start + tokens == len(prompt)
        step = prefill_inputs(plan, Prefilling(request, 0, start), prime=True, draft_length=drafts if last else 0)
        outputs = backend.launch(step).result()
        start += tokens
    assert start == len(prompt)
    return outputs


@pytest.mark.parametrize("chunks", [(1,), (5,), (8,), (32, 1), (8, 8, 3), (32, 8, 5), (32, 32, 17)])
def test_drafts_after_a_prompt_equal_the_naive_module_however_it_is_cut(
    compared: Compared, backend: OnnxRuntimeBackend, chunks: tuple[int, ...]
) -> None:
    """The next prompt token, not a sampled one, follows a chunk; every chunk primes the drafter."""
    prompt = prompt_of(sum(chunks))
    outputs = prefill(backend, prompt, chunks, LONGEST)
    token = int(outputs.next_token[0])
    expected = compared.naive.drafts([*prompt, token], hidden_rows(compared.model, prompt), LONGEST, TOKENS)
    assert outputs.drafts[0].tolist() == expected


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_after_verification_equal_the_naive_module_whatever_was_accepted(
    compared: Compared, backend: OnnxRuntimeBackend, right: int
) -> None:
    """Rows that a chain had written for rejected or accepted drafts are replaced by the model's own."""
    prompt = prompt_of(11)
    first = prefill(backend, prompt, (8, 3), LONGEST)
    true = greedy(compared.model, prompt, 12)
    assert int(first.next_token[0]) == true[0]
    length, ids = len(prompt), [*prompt, true[0]]
    for _ in range(3):
        known = len(ids) - len(prompt)
        proposed = true[known : known + 3]
        if right < 3:
            proposed[right] = (proposed[right] + 1) % TOKENS
        cell = next(c for c in CELLS if c.kind == "decode" and (c.batch, c.query_rows, c.kv_tier) == (1, 4, 64))
        step = empty_step(cell, 0)
        step.tokens[0] = [ids[-1], *proposed]
        step.length[0], step.valid[0], step.forced[0] = length, 4, 1
        outputs = backend.launch(dataclasses.replace(step, prime=True, draft_length=LONGEST)).result()
        assert outputs.accepted[0] == right
        ids += proposed[:right]
        length += 1 + right
        hidden = hidden_rows(compared.model, ids)
        ids.append(int(outputs.next_token[0]))
        assert outputs.drafts[0].tolist() == compared.naive.drafts(ids, hidden, LONGEST, TOKENS)
        if len(ids) - len(prompt) + 4 > len(true):
            break


@pytest.fixture(scope="module")
def answers(compared: Compared) -> dict[tuple[int, ...], list[int]]:
    """Prompts around chunk and context ends, and what Transformers answers (up to the context's end)."""
    prompts = [prompt_of(n, 3) for n in (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 40, 41, 64, 65, 88, 91, 92, 93, 94, 95)]
    return {prompt: greedy(compared.model, prompt, min(CONTEXT + 1 - len(prompt), 14)) for prompt in prompts}


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("drafter", ["the module", *PATTERNS])
def test_greedy_ids_with_drafts_equal_those_without(
    toy: Toy, answers: dict[tuple[int, ...], list[int]], length: int, drafter: str
) -> None:
    """Prompts of exactly 1 + k tokens, of a chunk and one more, and up to the context's last position."""
    forge = Forger(answers, PATTERNS[drafter]) if drafter in PATTERNS else None
    with make_engine(toy, length, forge=forge) as engine:
        handles = {p: engine.submit(list(p), max_tokens=14, task="toy") for p in answers}
        for prompt, handle in handles.items():
            result = handle.result()
            assert list(result.token_ids) == answers[prompt], len(prompt)
            assert result.finish_reason == "length"
        found = engine.metrics().acceptance["toy"]
    if drafter == "right":
        assert found["acceptance"] == 1.0
        assert found["mean_accepted_length"] > 1 + 0.7 * length  # steps near an end verify fewer
    elif drafter == "wrong":
        assert found["acceptance"] == 0.0
        assert found["mean_accepted_length"] == 1.0
    assert len(found["by_position"]) == length


def test_sampled_ids_with_drafts_equal_those_without(toy: Toy) -> None:
    params = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 11, "max_tokens": 24}
    found = []
    for length in (0, 3):
        with make_engine(toy, length) as engine:
            found.append([engine.submit(list(prompt_of(n)), **params).result().token_ids for n in (3, 20, 45)])
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6])
def test_end_of_sequence_inside_an_accepted_block_cuts_there(
    toy: Toy, answers: dict[tuple[int, ...], list[int]], place: int
) -> None:
    prompt = prompt_of(9, 3)
    token = answers[prompt][place]
    expected = answers[prompt][: answers[prompt].index(token) + 1]
    forge = Forger(answers, PATTERNS["right"])
    with make_engine(toy, 4, forge=forge, eos=[token]) as engine:
        cut = engine.submit(list(prompt), max_tokens=14).result()
        going_on = engine.submit(list(prompt), max_tokens=14, ignore_eos=True).result()
        after = engine.submit(list(prompt_of(33, 3)), max_tokens=14, ignore_eos=True).result()
    assert (list(cut.token_ids), cut.finish_reason) == (expected, "stop")
    assert cut.usage.completion_tokens == len(expected)
    assert list(going_on.token_ids) == answers[prompt]
    assert list(after.token_ids) == answers[prompt_of(33, 3)]  # the slot's next owner sees nothing of the cut


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7])
def test_max_tokens_inside_a_block(toy: Toy, answers: dict[tuple[int, ...], list[int]], tokens: int) -> None:
    prompt = prompt_of(8, 3)
    with make_engine(toy, 4, forge=Forger(answers, PATTERNS["right"])) as engine:
        result = engine.submit(list(prompt), max_tokens=tokens).result()
    assert list(result.token_ids) == answers[prompt][:tokens]
    assert result.usage.draft_accepted == result.usage.draft_proposed  # nothing is proposed that could not be kept


def test_a_drafter_that_loses_is_switched_off_and_the_answer_stays(
    toy: Toy, answers: dict[tuple[int, ...], list[int]]
) -> None:
    costs = {batch: [10.0, 12.0, 13.0, 14.0, 15.0] for batch in (1, 2)}
    prompt = prompt_of(2, 3)
    with make_engine(toy, 4, forge=Forger(answers, PATTERNS["wrong"]), costs_ms=costs) as engine:
        for _ in range(16):
            assert list(engine.submit(list(prompt), max_tokens=14, task="toy").result().token_ids) == answers[prompt]
        snapshot = engine.metrics()
    assert snapshot.draft_switched_off >= 1
    assert snapshot.draft_lengths["toy"][1] == 0
    assert snapshot.acceptance["toy"]["acceptance"] == 0.0
