"""The Python door of the runtime on a built artifact: threads, cancel, await, errors that hit one request alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from edgert import AsyncEngine, Engine
from edgert.errors import RequestError
from greedy_reference import random_prompts
from tokenizers import Tokenizer

TOKENS = 300


@pytest.fixture(scope="module")
def engine(qwen3_artifact: Path) -> Iterator[Engine]:
    with Engine.load(qwen3_artifact, threads=1) as running:
        yield running


def test_many_threads_at_once_get_what_each_would_get_alone(engine: Engine) -> None:
    prompts = random_prompts(range(1, 25), TOKENS)
    alone = [engine.complete(prompt, max_tokens=10, ignore_eos=True).token_ids for prompt in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def ask(number: int) -> None:
        found[number] = engine.complete(prompts[number], max_tokens=10, ignore_eos=True).token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(prompts))] == alone


def test_a_seed_gives_the_same_tokens_whatever_else_runs(engine: Engine) -> None:
    (prompt,) = random_prompts([40], TOKENS)
    alone = engine.complete(prompt, max_tokens=30, temperature=1.2, seed=7, ignore_eos=True).token_ids
    others = [engine.submit([9, 9], max_tokens=40, temperature=2.0, ignore_eos=True) for _ in range(3)]
    again = engine.complete(prompt, max_tokens=30, temperature=1.2, seed=7, ignore_eos=True).token_ids
    for handle in others:
        handle.cancel()
    assert again == alone


def test_a_cancelled_request_frees_its_slot_for_the_next(engine: Engine) -> None:
    handles = [engine.submit([5, 6], max_tokens=200, ignore_eos=True) for _ in range(4)]
    waiting = engine.submit([7, 8], max_tokens=3, ignore_eos=True)
    for handle in handles:
        handle.cancel()
    assert waiting.result(60).finish_reason == "length"
    assert {handle.result(60).finish_reason for handle in handles} <= {"cancelled", "length"}
    assert engine.metrics().free_slots == 4


def test_an_empty_prompt_fails_alone_while_another_streams(engine: Engine) -> None:
    (prompt,) = random_prompts([30], TOKENS)
    expected = engine.complete(prompt, max_tokens=40, ignore_eos=True).token_ids
    stream = engine.submit(prompt, max_tokens=40, ignore_eos=True)
    for nothing in ("", [], [""]):
        with pytest.raises(RequestError):
            engine.submit(nothing)  # type: ignore[arg-type]
    assert stream.result(60).token_ids == expected


def test_streamed_text_joins_to_the_full_decode(engine: Engine, qwen3_artifact: Path) -> None:
    """Random weights write broken UTF-8 all the time."""
    tokenizer = Tokenizer.from_file(str(qwen3_artifact / "tokenizer.json"))
    for seed in range(12):
        handle = engine.submit([70, 80], max_tokens=60, temperature=3.0, seed=seed, ignore_eos=True)
        deltas = list(handle)
        completion = handle.result()
        assert "".join(delta.text for delta in deltas) == completion.text
        assert completion.text == tokenizer.decode(list(completion.token_ids))
        assert [token for delta in deltas for token in delta.token_ids] == list(completion.token_ids)


def test_leaving_the_loop_early_cancels(engine: Engine) -> None:
    for delta in engine.generate([5], max_tokens=200, ignore_eos=True):
        assert delta.token_ids
        break
    assert engine.complete([6], max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_awaiting_several_requests(qwen3_artifact: Path, engine: Engine) -> None:
    prompts = random_prompts((3, 20, 66), TOKENS)
    expected = [engine.complete(prompt, max_tokens=8, ignore_eos=True).token_ids for prompt in prompts]

    async def ask() -> list[tuple[int, ...]]:
        async with await AsyncEngine.load(qwen3_artifact, threads=1) as running:
            asked = (running.complete(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts)
            return [completion.token_ids for completion in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == expected
