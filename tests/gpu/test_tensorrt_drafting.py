"""Drafts on a real GPU: the drafts of the reference module, never another answer, the same captured as eager."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="the rtx extra is not installed")
pytest.importorskip("polygraphy", reason="the rtx extra is not installed")

import gpu_toy
import torch
from edgebuild import golden
from edgebuild.models.loading import Sequence1, reference_logits
from edgert.backends import trt_cache
from edgert.backends.base import StepOutputs
from edgert.backends.tensorrt import TensorRTBackend
from edgert.cells import Cell
from edgert.errors import GoldenMismatch
from edgert.golden import DRAFT_TIE, check_golden, load_golden
from edgert.step import empty_step
from gpu_toy import CONTEXT, DRAFT_CELLS, LARGE, LONGEST, SLOTS, SMALL, VOCABULARY, DraftingToy

pytestmark = pytest.mark.gpu
TOLERANCE = golden.TOLERANCE["float16"]
ONE, TWO = (Cell("decode", batch, 1 + LONGEST, 256) for batch in (1, 2))
PLAIN = Cell("decode", 1, 1, 256)
PROMPT, COUNT = 100, 40

Forge = Callable[[int, list[int], list[int]], list[int]]
FORGES: dict[str, Forge] = {
    "the module's": lambda _step, drafts, _true: drafts,
    "right": lambda _step, drafts, true: true[: len(drafts)],
    "alternating": lambda step, drafts, true: [
        token if (step + place) % 3 else (token + 1) % VOCABULARY for place, token in enumerate(true[: len(drafts)])
    ],
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DraftingToy:
    return gpu_toy.make_drafting_toy(tmp_path_factory.mktemp("drafting"), request.param)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(5).integers(3, VOCABULARY, PROMPT)]


class Reference:
    """The float32 modules over one sequence: after a position, its logits and the chain that is drafted."""

    def __init__(self, toy: DraftingToy, ids: Sequence[int], first: int) -> None:
        sequence, hidden = Sequence1(tuple(ids), first), list[torch.Tensor]()
        self.first = first
        self.logits = reference_logits(toy.checkpoint, [sequence], hidden=hidden)[0].numpy()
        self.chains = toy.drafter().drafts([sequence], hidden, LONGEST)[0]

    def check_drafts(self, position: int, drafts: Sequence[int]) -> None:
        """Those after `position`, when the sequence's own token follows; a near tie may go either way."""
        chain = self.chains[position - self.first]
        for token, expected, margin in zip(drafts, chain.tokens, chain.margins, strict=False):
            if token != expected:
                assert margin <= DRAFT_TIE * TOLERANCE, (position, drafts, chain)
                return

    def check_ids(self, found: Sequence[int], expected: Sequence[int], start: int) -> None:
        """Equal from `start` on, up to a near tie of the two best tokens, which is printed."""
        for place, (token, other) in enumerate(zip(found, expected, strict=True)):
            if token != other:
                row = np.sort(self.logits[start + place - 1 - self.first])
                gap = float(row[-1] - row[-2])
                print(f"near tie at {start + place}: {token} or {other}, the best two {gap:.4f} apart")
                assert gap <= 2 * TOLERANCE * abs(float(row[-1]))
                return


def prefill(
    backend: TensorRTBackend, ids: Sequence[int], drafts: int, *, slot: int = 0, cell: Cell = SMALL
) -> StepOutputs:
    """A prompt in chunks that prime; the last one drafts."""
    for start in range(0, len(ids), cell.query_rows):
        part = ids[start : start + cell.query_rows]
        step = empty_step(cell, slot)
        step.tokens[0, : len(part)] = part
        step.length[0], step.valid[0], step.forced[0] = start, len(part), len(part)
        last = start + len(part) == len(ids)
        following = np.array([-1 if last else ids[start + len(part)]], np.int64)
        step = replace(step, prime=True, draft_length=drafts if last else 0, following=following)
        outputs = backend.launch(step).result()
    return outputs


def plain(backend: TensorRTBackend, ids: Sequence[int], count: int) -> list[int]:
    backend.reset_slot(0)
    return gpu_toy.generate(backend, ids, count, cell=PLAIN)


def drafted(
    backend: TensorRTBackend, ids: Sequence[int], true: Sequence[int], lengths: Sequence[int], forge: Forge,
    *, slot: int = 0,
) -> tuple[list[int], list[tuple[int, list[int]]], int]:  # fmt: skip
    """Greedy, with `lengths` drafts in turn → (tokens, (position, drafts after it) of each step, accepted)."""
    backend.reset_slot(slot)
    outputs = prefill(backend, ids, lengths[0], slot=slot)
    tokens, made, accepted, number = [int(outputs.next_token[0])], [], 0, 0
    while True:
        length = len(ids) + len(tokens) - 1  # committed positions
        drafts = outputs.drafts[0].tolist() if outputs.drafts is not None else []
        made.append((length - 1, drafts))
        if len(tokens) >= len(true):
            return tokens[: len(true)], made, accepted
        proposal = forge(number, drafts, list(true[len(tokens) :]) + [5] * LONGEST)
        number += 1
        step = empty_step(ONE, slot)
        step.tokens[0, : 1 + len(proposal)] = [tokens[-1], *proposal]
        step.length[0], step.valid[0], step.forced[0] = length, 1 + len(proposal), 1
        outputs = backend.launch(replace(step, prime=True, draft_length=lengths[number % len(lengths)])).result()
        accepted += int(outputs.accepted[0])
        tokens += outputs.sampled[0, : 1 + int(outputs.accepted[0])].tolist()


@pytest.mark.parametrize("forge", FORGES)
def test_greedy_ids_equal_those_without_drafts_and_drafts_equal_the_reference(
    toy: DraftingToy, ids: list[int], forge: str
) -> None:
    with toy.backend() as backend:
        true = plain(backend, ids, COUNT)
        reference = Reference(toy, [*ids, *true], len(ids) - 1)
        for lengths in ([1], [2], [3], [4], [4, 1, 3, 2]):
            tokens, made, accepted = drafted(backend, ids, true, lengths, FORGES[forge])
            reference.check_ids(tokens, true, len(ids))
            if tokens == true:
                for position, drafts in made:
                    if position < len(ids) + len(true) - 1:
                        reference.check_drafts(position, drafts)
            if forge == "right" and tokens == true:
                assert accepted >= (COUNT - 1) * lengths[0] // (lengths[0] + 1) - LONGEST or len(lengths) > 1
        assert backend.describe()["eager_launches"] == 0
        assert backend.describe()["fallbacks"] == []


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64, 65, 100])
def test_chunks_prime_the_drafter_however_the_prompt_is_cut(toy: DraftingToy, ids: list[int], length: int) -> None:
    with toy.backend() as backend:
        for slot, cell in enumerate((SMALL, LARGE)):
            outputs = prefill(backend, ids[:length], LONGEST, slot=slot, cell=cell)
            reference = Reference(toy, [*ids[:length], int(outputs.next_token[0])], length - 1)
            assert outputs.drafts is not None
            reference.check_drafts(length - 1, outputs.drafts[0].tolist())


def test_a_captured_step_equals_the_eager_one_bit_for_bit(toy: DraftingToy, ids: list[int]) -> None:
    found = {}
    for graphs in (True, False):
        with toy.backend(enable_cuda_graph=graphs) as backend:
            true = plain(backend, ids[:40], 20)
            found[graphs] = [drafted(backend, ids[:40], true, [4, 1, 3, 2], forge, slot=2) for forge in FORGES.values()]
            assert (backend.describe()["eager_launches"] == 0) is graphs
    assert found[True] == found[False]


def test_two_sequences_in_a_batch_draft_as_they_do_alone(toy: DraftingToy, ids: list[int]) -> None:
    prompts = [ids[:30], ids[40:93]]
    with toy.backend() as backend:
        references = []
        for prompt in prompts:
            references.append(Reference(toy, [*prompt, *plain(backend, prompt, 24)], len(prompt) - 1))
        for slot in (0, 1):
            backend.reset_slot(slot)
        outputs = [prefill(backend, prompt, LONGEST, slot=slot) for slot, prompt in enumerate(prompts)]
        tokens = [[int(each.next_token[0])] for each in outputs]
        drafts = [each.drafts[0].tolist() for each in outputs if each.drafts is not None]
        for number in range(8):
            step = empty_step(TWO, 0)
            for slot in (0, 1):
                step.tokens[slot] = [tokens[slot][-1], *drafts[slot]]
                step.length[slot] = len(prompts[slot]) + len(tokens[slot]) - 1
                idle = number == 3 and slot == 1
                step.valid[slot], step.forced[slot] = (0, 0) if idle else (1 + len(drafts[slot]), 1)
            got = backend.launch(replace(step, prime=True, draft_length=LONGEST)).result()
            assert got.drafts is not None
            for slot in (0, 1):
                if step.valid[slot]:
                    tokens[slot] += got.sampled[slot, : 1 + int(got.accepted[slot])].tolist()
                    drafts[slot] = got.drafts[slot].tolist()
                    position = len(prompts[slot]) + len(tokens[slot]) - 2
                    if position < len(prompts[slot]) + 22:
                        references[slot].check_drafts(position, drafts[slot])


def check(toy: DraftingToy, backend: TensorRTBackend) -> Any:
    (toy.artifact / "golden.json").write_text(json.dumps(toy.golden()))

    class Model:
        vocabulary_size = token_limit = VOCABULARY

    recorded = load_golden(toy.artifact, Model())  # type: ignore[arg-type]
    return check_golden(backend, recorded, cells=DRAFT_CELLS, slots=SLOTS, context_tokens=CONTEXT, draft_length=LONGEST)


def test_golden_drafts_hold_and_the_plan_of_another_drafter_is_refused(
    toy: DraftingToy, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with toy.backend() as backend:
        assert check(toy, backend).drafts > 20
    other = gpu_toy.make_drafting_toy(
        tmp_path_factory.mktemp("other"), "qwen3" if "q_norm" in str(toy.checkpoint.names()) else "llama", seed=1
    )
    shutil.copytree(toy.artifact, tmp_path / "mixed")
    shutil.copy(other.artifact / "mtp.plan", tmp_path / "mixed" / "mtp.plan")
    mixed = replace(toy, artifact=tmp_path / "mixed")
    with mixed.backend() as backend, pytest.raises(GoldenMismatch, match="draft"):
        check(mixed, backend)


def test_both_plans_start_from_the_jit_cache(toy: DraftingToy) -> None:
    with toy.backend():
        pass
    caches = [path for folder in trt_cache.places(toy.artifact) for path in folder.glob("*.jit")]
    assert len(caches) == 2
    with toy.backend() as backend:
        assert backend.describe()["jit_cache"] == "warm"
        memory = backend.memory()
        per_slot = sum(int(np.prod(s.shape)) * 2 for s in (*toy.states, *toy.draft_states))
        assert memory["kv_cache"] == SLOTS * per_slot
