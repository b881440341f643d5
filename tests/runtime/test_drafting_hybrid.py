"""Drafts on a hybrid model, whose recurrent states must be rolled back: the ids are those without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys
from drafting_toy import CONTEXT, PATTERNS, Forger, Toy, export_toy, make_engine, prompt_of

LENGTHS = (1, 3, 4, 5, 8, 9, 31, 33, 41, 64, 88, 92, 93, 94, 95)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    directory: Path = tmp_path_factory.mktemp("hybrid")
    return export_toy(toys.make_qwen3_5(directory / "model"), directory)


@pytest.fixture(scope="module")
def answers(toy: Toy) -> dict[tuple[int, ...], list[int]]:
    with make_engine(toy, 0) as engine:
        handles = {prompt_of(n): engine.submit(list(prompt_of(n)), max_tokens=14) for n in LENGTHS}
        return {prompt: list(handle.result().token_ids) for prompt, handle in handles.items()}


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("drafter", ["the module", *PATTERNS])
def test_ids_with_drafts_equal_those_without(
    toy: Toy, answers: dict[tuple[int, ...], list[int]], length: int, drafter: str
) -> None:
    """Also a step with zero drafts after one that accepted several: max_tokens and the context end blocks early."""
    forge = Forger(answers, PATTERNS[drafter]) if drafter in PATTERNS else None
    with make_engine(toy, length, forge=forge) as engine:
        handles = {prompt: engine.submit(list(prompt), max_tokens=14) for prompt in answers}
        for prompt, handle in handles.items():
            assert list(handle.result().token_ids) == answers[prompt], len(prompt)
        found = engine.metrics().acceptance[""]
    assert max(len(p) + len(a) for p, a in answers.items()) == CONTEXT + 1
    if drafter == "right":
        assert found["acceptance"] == 1.0
    elif drafter == "wrong":
        assert found["acceptance"] == 0.0
