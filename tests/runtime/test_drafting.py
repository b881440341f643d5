"""Drafting without a model: what the worker asks of a backend that drafts, and how draft lengths are decided."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import fakes
import numpy as np
import pytest
import toys
from edgert import bench
from edgert.backends.base import StepInputs
from edgert.chat import figures
from edgert.costs import StepCosts
from edgert.drafting import ON_DEVICE, Acceptance, DraftBook, DraftControl, merged
from edgert.engine import Engine
from edgert.loading import Runtime
from edgert.policy import choose_drafts
from edgert.sampling import SamplingParams, uniform
from edgert.stepcosts import measure_step_costs, step_costs_of
from edgert.text import TextCodec
from fakes import VOCABULARY, FakeBackend, make_cells, make_runtime, reference
from hypothesis import given, settings
from hypothesis import strategies as st

Guess = Callable[[Sequence[int], int], Sequence[int]]


class Drafting(FakeBackend):
    """The fake backend with a drafter: `guess(tokens so far, count)`. Keeps what it was told of each slot."""

    guess: Guess

    def launch(self, step: StepInputs) -> Any:
        ticket = super().launch(step)
        for row in range(step.cell.batch):
            self.device_drafts[step.first_slot + row] = []
        if not step.draft_length:
            return ticket
        assert step.prime
        drafts = np.zeros((step.cell.batch, step.draft_length), np.int64)
        for row in range(step.cell.batch):
            if step.valid[row]:
                slot = step.first_slot + row
                so_far = [*self.cache[slot, : self.device_length[slot]].tolist(), int(ticket.outputs.next_token[row])]
                drafts[row] = self.guess(so_far, step.draft_length)
                self.device_drafts[slot] = drafts[row].tolist()
        return dataclasses.replace(ticket, outputs=dataclasses.replace(ticket.outputs, drafts=drafts))


def make_drafting(guess: Guess, length: int, *, control: DraftControl | None = None, **options: Any) -> Runtime:
    context = options.setdefault("context", 256)
    options.setdefault("cells", make_cells(context, rows=tuple(range(1, length + 2))))
    runtime = make_runtime(**options)
    fake = runtime.backend
    assert isinstance(fake, FakeBackend)
    backend = Drafting(fake.cells, fake.slots, fake.cache_tokens, run_ahead=fake.run_ahead)
    backend.guess = guess
    return dataclasses.replace(runtime, backend=backend, draft_control=lambda: control or DraftControl(length))


def truth() -> Guess:
    """Guesses what the fake model will sample."""

    def guess(so_far: Sequence[int], count: int) -> list[int]:
        tokens = list(so_far)
        for _ in range(count):
            tokens.append(fakes.sample(fakes.toy_logits(np.array(tokens)), 0.0, 0.0, 0, 1.0))
        return tokens[len(so_far) :]

    return guess


def noise(so_far: Sequence[int], count: int) -> list[int]:
    """Right about half the time, by a hash of what came before."""
    found = truth()(so_far, count)
    return [token if (sum(so_far) + place) % 2 else (token + 1) % VOCABULARY for place, token in enumerate(found)]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("guess", [truth(), noise, lambda _so_far, count: [0] * count], ids=["right", "half", "zeros"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_many_requests_with_drafts_answer_as_each_would_alone(guess: Guess, length: int, run_ahead: int) -> None:
    rng = random.Random(length)
    asked = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1 + length, 15, 16, 17, 70]))] for _ in range(14)]
    params = [SamplingParams(max_tokens=rng.randrange(1, 40), seed=n, temperature=n % 2 * 0.9) for n in range(14)]
    with Engine(lambda: make_drafting(guess, length, run_ahead=run_ahead, context=96)) as engine:
        handles = [engine.submit(ids, params=each) for ids, each in zip(asked, params, strict=True)]
        for ids, each, handle in zip(asked, params, handles, strict=True):
            assert list(handle.result(60).token_ids) == reference(ids, each, each.seed or 0, 96)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 4),
    guess=st.sampled_from([truth(), noise, lambda _so_far, count: [0] * count]),
    context=st.sampled_from([40, 64, 96]),
    slots=st.integers(1, 4),
    batches=st.sampled_from([(1, 2, 4), (1,), (1, 2)]),
    any_first_slot=st.booleans(),
    controlled=st.booleans(),
    eos=st.sampled_from([(), (3,), (3, 17, 40)]),
    rng=st.randoms(use_true_random=False),
)
def test_any_traffic_with_a_drafter_that_runs_ahead_gives_each_request_what_it_gets_alone(
    length: int,
    guess: Guess,
    context: int,
    slots: int,
    batches: tuple[int, ...],
    any_first_slot: bool,
    controlled: bool,
    eos: tuple[int, ...],
    rng: random.Random,
) -> None:
    """Tight contexts, few cells, greedy and drawn requests side by side, draft lengths that change."""
    rows = rng.choice([tuple(range(1, length + 2)), (1, length + 1), (length + 1,)])
    costs = {batch: [10 + rng.choice([0.2, 3.0]) * drafts for drafts in range(length + 1)] for batch in (1, 2, 4)}
    options: dict[str, Any] = {
        "control": DraftControl(length, costs_ms=costs) if controlled else None,
        "cells": make_cells(context, chunks=(8, 16), batches=batches, rows=rows, tiers=(32, context)),
        "context": context, "slots": slots, "any_first_slot": any_first_slot, "eos": eos, "run_ahead": 1,
    }  # fmt: skip
    asked = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1 + length, 7, 8, 9, 30]))] for _ in range(10)]
    params = [SamplingParams(max_tokens=rng.randrange(1, 40), seed=n, temperature=n % 3 // 2 * 0.9) for n in range(10)]
    with Engine(lambda: make_drafting(guess, length, **options)) as engine:
        handles = [
            engine.submit(ids, params=each, task="ab"[n % 2])
            for n, (ids, each) in enumerate(zip(asked, params, strict=True))
        ]
        for ids, each, handle in zip(asked, params, handles, strict=True):
            assert list(handle.result(60).token_ids) == reference(ids, each, each.seed or 0, context, eos)


@pytest.mark.parametrize("guess", [truth(), noise], ids=["right", "half"])
def test_steps_with_drafts_run_ahead_of_the_host_unless_something_is_drawn(guess: Guess) -> None:
    """The device's own token, length and drafts go into the next step, before the host has read any of them."""
    for temperature in (0.0, 0.8):
        runtime = make_drafting(guess, 3, run_ahead=1, slots=1, context=96)
        backend = runtime.backend
        assert isinstance(backend, FakeBackend)
        with Engine(lambda runtime=runtime: runtime) as engine:
            result = engine.submit([1, 5, 9], max_tokens=60, temperature=temperature, seed=4).result(60)
        params = SamplingParams(max_tokens=60, temperature=temperature, seed=4)
        assert list(result.token_ids) == reference([1, 5, 9], params, 4, 96)
        decode = [launch.step for launch in backend.launches if launch.step.cell.kind == "decode"]
        ahead = [step for step in decode if step.from_device[0]]
        if temperature == 0:
            assert len(ahead) >= len(decode) - 2
            assert all(step.valid[0] == 4 for step in ahead[:5])
        else:  # only the step after the prompt's last chunk: where it stands is known
            assert len(ahead) == 1


def test_a_drafter_that_is_switched_off_costs_nothing() -> None:
    control = DraftControl(2, costs_ms={batch: [10.0, 13.0, 16.0] for batch in (1, 2, 4)})
    runtime = make_drafting(lambda _so_far, count: [0] * count, 2, control=control, run_ahead=1, slots=1)
    backend = runtime.backend
    assert isinstance(backend, FakeBackend)
    ahead = []
    with Engine(lambda: runtime) as engine:
        for number in range(7):
            backend.launches.clear()
            result = engine.submit([number, 5], max_tokens=20).result(60)
            assert list(result.token_ids) == reference([number, 5], SamplingParams(max_tokens=20), 0, 256)
            ahead.append(
                sum(bool(launch.step.from_device.any()) for launch in backend.launches if not launch.step.prime)
            )
    assert ahead[-1] > 10


def test_every_chunk_primes_the_drafter_with_the_next_prompt_token_and_only_the_last_one_drafts() -> None:
    """D7; and D6: a prompt of exactly 1 + k tokens is prefill."""
    for tokens in (4, 16, 17, 64, 65, 130):
        prompt = [n % VOCABULARY for n in range(tokens)]
        runtime = make_drafting(truth(), 3)
        with Engine(lambda runtime=runtime: runtime) as engine:
            engine.submit(prompt, max_tokens=6).result(60)
        launches = [launch.step for launch in runtime.backend.launches]
        chunks = [step for step in launches if step.cell.kind == "prefill"]
        place = 0
        for step in chunks:
            place += int(step.valid[0])
            assert step.prime
            assert step.following is not None
            assert step.following[0] == (prompt[place] if place < tokens else -1)
            assert step.draft_length == (0 if place < tokens else 3)
        assert place == tokens
        decode = [step for step in launches if step.cell.kind == "decode"]
        assert all(step.following is None for step in decode)
        assert decode[0].valid[0] == 4


def test_no_more_is_drafted_than_the_request_or_the_context_could_still_take() -> None:
    for prompt, tokens in ((8, 3), (8, 4), (8, 9), (88, 30), (92, 30), (94, 30), (95, 30)):
        runtime = make_drafting(truth(), 4, context=96)
        with Engine(lambda runtime=runtime: runtime) as engine:
            done = engine.submit([n % VOCABULARY for n in range(prompt)], max_tokens=tokens).result(60)
        assert done.usage.completion_tokens == min(tokens, 96 - prompt + 1)
        assert done.usage.draft_accepted == done.usage.draft_proposed
        for launch in runtime.backend.launches:
            step = launch.step
            assert step.length[0] + step.valid[0] <= 96


def test_a_stop_string_inside_an_accepted_block_cuts_text_and_tokens_there() -> None:
    codec = TextCodec(toys.byte_level_tokenizer())
    prompt = [5, 6, 7]
    results = []
    for length in (0, 4):
        with Engine(lambda length=length: make_drafting(truth(), length, text=codec)) as engine:
            free = engine.submit(prompt, max_tokens=60).result(60)
            stop = free.text[len(free.text) // 2 :][:2]
            cut = engine.submit(prompt, max_tokens=60, stop=[stop]).result(60)
            assert cut.finish_reason == "stop"
            assert cut.text == free.text[: free.text.index(stop)]
            results.append((free.text, free.token_ids, cut.text, cut.token_ids))
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 0.9)])
def test_sampled_tokens_follow_the_distribution_with_drafts_on(
    top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tokens with fixed logits, 100,000 draws."""
    from scipy import stats

    logits = np.full(VOCABULARY, -1e9, np.float32)
    logits[:8] = [2.0, 1.4, 1.0, 0.7, 0.2, 0.0, -0.5, -1.0]
    monkeypatch.setattr(fakes, "toy_logits", lambda _tokens: logits)
    temperature, per_request, requests = 0.8, 1000, 100
    control = DraftControl(3)
    runtime = make_drafting(lambda so_far, count: [(so_far[-1] * 3 + place) % 4 for place in range(count)], 3,
                            context=1024, control=control)  # fmt: skip
    counts = np.zeros(8, np.int64)
    pairs = np.zeros((8, 8), np.int64)
    with Engine(lambda: runtime) as engine:
        handles = [
            engine.submit([1], max_tokens=per_request, temperature=temperature, top_k=top_k, top_p=top_p, seed=n)
            for n in range(60)
        ]
        for number in range(requests):
            ids = np.array(handles[number].result(300).token_ids)
            counts += np.bincount(ids, minlength=8)
            np.add.at(pairs, (ids[:-1], ids[1:]), 1)
            if len(handles) < requests:
                handles.append(
                    engine.submit(
                        [1],
                        max_tokens=per_request,
                        temperature=temperature,
                        top_k=top_k,
                        top_p=top_p,
                        seed=len(handles),
                    )
                )
        accepted = engine.metrics().acceptance[""]
    chances = np.exp(logits[:8].astype(np.float64) / temperature)
    chances /= chances.sum()
    kept = np.arange(8) < (top_k or 8)
    chances = np.where(kept, chances, 0) / chances[kept].sum()
    kept &= (np.cumsum(chances) - chances) < top_p
    chances = np.where(kept, chances, 0) / chances[kept].sum()
    assert counts.sum() == 100_000
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], chances[kept] * counts.sum()).pvalue > 1e-4
    # a token does not depend on the one before it, whether it was drafted or not
    assert stats.chi2_contingency(pairs[np.ix_(kept, kept)]).pvalue > 1e-4
    assert 0.05 < accepted["acceptance"] < 0.9


def test_acceptance_counts_by_position_and_with_the_bonus_token() -> None:
    record = Acceptance()
    for proposed, accepted in ((3, 3), (3, 1), (3, 0), (1, 1)):
        record.record(proposed, accepted)
    assert (record.proposed, record.reached, record.accepted) == ([4, 3, 3], [4, 2, 1], [3, 1, 1])
    assert record.rate == 0.5
    assert record.mean_length == (4 + 2 + 1 + 2) / 4
    assert record.to_json()["by_position"] == [0.75, 0.5, 1.0]
    assert Acceptance().rate is None
    assert merged([record, record]).to_json() == {**record.to_json(), "steps": 8}


rates = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@given(rates, st.data())
def test_the_chosen_length_is_never_worse_than_the_current_one_and_stays_within_the_margin(
    acceptance: list[float], data: st.DataObject
) -> None:
    size = len(acceptance) + 1
    costs = data.draw(st.lists(st.floats(0.1, 10), min_size=size, max_size=size))
    current = data.draw(st.integers(0, size - 1))

    def rate(length: int) -> float:
        tokens = 1 + sum(float(np.prod(acceptance[: k + 1])) for k in range(length))
        return tokens / costs[length]

    chosen = choose_drafts(acceptance, costs, current)
    assert rate(chosen) >= rate(current)
    assert chosen == current or rate(chosen) > rate(current) * 1.05
    assert max(map(rate, range(size))) <= rate(chosen) * 1.05 * (1 + 1e-9)
    assert choose_drafts(acceptance, costs, chosen) == chosen  # settled


def test_positions_below_the_threshold_are_not_drafted() -> None:
    cheap = [10.0, 10.1, 10.2, 10.3]
    assert choose_drafts([0.9, 0.5, 0.9], cheap, 3) == 3
    assert choose_drafts([0.9, 0.5, 0.9], cheap, 3, threshold=0.6) == 1
    assert choose_drafts([0.5, 0.9, 0.9], cheap, 3, threshold=0.6) == 0


def test_a_losing_task_is_switched_off_alone_probed_and_switched_on_again() -> None:
    control = DraftControl(2, costs_ms={1: [10.0, 13.0, 16.0]})
    book = DraftBook(control)

    def request(task: str, accepted: int) -> bool:
        """One request of 20 steps; whether it was drafted for."""
        book.admit(0, task)
        drafted = False
        for _ in range(20):
            wanted = book.wanted(0, task, 1, 8)
            book.launched(0, primed=wanted > 0, made=wanted)
            book.collected(0, [1] * wanted)
            if wanted:
                drafted = True
                book.verified(task, len(book.proposal(0, 8)), min(accepted, wanted))
        return drafted

    for _ in range(6):
        request("story", 0)
        request("json", 2)
    assert control.lengths()["story"][1] == 0
    assert control.lengths()["json"][1] == 2
    assert control.switched_off == 1
    assert sum(request("story", 0) for _ in range(16)) == 2  # probes
    for _ in range(400):
        if request("story", 2) and control.switched_on:
            break
    assert control.switched_on == 1
    assert control.lengths()["story"][1] > 0


def test_tokens_a_step_follow_what_is_accepted_by_task_and_are_one_where_nothing_is_drafted() -> None:
    book = DraftBook(DraftControl(3))
    for slot, task in enumerate(("json", "story")):
        book.admit(slot, task)
    assert book.tokens_per_step(0, "json") == 1.0
    for _ in range(200):
        book.verified("json", 3, 2)
        book.verified("story", 3, 0)
    assert book.tokens_per_step(0, "json") == pytest.approx(3.0, abs=1e-3)
    assert book.tokens_per_step(1, "story") == 1.0
    for _ in range(16):
        book.verified("json", 3, 0)
    assert 1.5 < book.tokens_per_step(0, "json") < 2.0
    book.launched(0, primed=False, made=0)  # the drafter lost it
    assert book.tokens_per_step(0, "json") == 1.0


def test_acceptance_is_told_with_the_answer_by_chat_and_by_bench() -> None:
    with Engine(lambda: make_drafting(truth(), 3)) as engine:
        done = [engine.submit([3, n], max_tokens=9, task="json" if n else None).result(60) for n in range(2)]
    usage = done[0].usage
    assert usage.acceptance == 1.0
    assert usage.mean_accepted_length == 1 + usage.draft_accepted / usage.draft_steps > 3
    assert "100% of drafts accepted" in figures(done[0])
    requests = [bench.BenchRequest((3, n), 9, False) for n in range(2)]
    report = bench.summarise(done, 1.0, requests, concurrency=1, traffic="made up", seed=0)
    assert report["drafts"]["acceptance"] == 1.0
    assert set(report["drafts"]["by_task"]) == {"", "json"}
    assert "100 %" in bench.render(report)
    with Engine(make_runtime) as engine:
        plain = engine.submit([3, 1], max_tokens=9).result(60)
    assert (plain.usage.acceptance, plain.usage.mean_accepted_length) == (None, None)
    assert bench.summarise([plain], 1.0, requests[:1], concurrency=1, traffic="", seed=0)["drafts"] is None
    assert "drafts" not in figures(plain)


def test_a_slot_that_missed_a_step_is_not_drafted_for_again() -> None:
    book = DraftBook(DraftControl(3))
    book.admit(1, None)
    book.launched(1, primed=True, made=2)
    book.collected(1, [4, 5, 6])
    assert book.proposal(1, 2) == (4, 5)
    book.launched(1, primed=False, made=0)
    book.collected(1, [])
    assert book.proposal(1, 3) == ()
    assert book.wanted(1, None, 1, 5) == 0
    book.admit(1, None)
    book.launched(1, primed=True, made=2)
    book.launched(1, primed=True, made=3)
    assert book.proposal(1, 5) == (ON_DEVICE,) * 3  # of the step that was launched last
    book.collected(1, [4, 5])
    assert book.proposal(1, 2) == (ON_DEVICE,) * 2
    book.collected(1, [7, 8, 9])
    assert book.proposal(1, 5) == (7, 8, 9)
    assert book.wanted(1, None, 1, 5) == 3


def test_step_costs_are_measured_for_each_batch_and_length_and_leave_no_trace() -> None:
    runtime = make_drafting(truth(), 2)
    ticks = iter(range(10_000))
    before = runtime.backend.cache.copy()
    costs = measure_step_costs(runtime.backend, runtime.limits.cells, 4, 2, lambda: float(next(ticks)))
    assert costs == {batch: (1000.0,) * 3 for batch in (1, 2, 4)}
    assert (runtime.backend.device_length == 0).all()
    assert before.shape == runtime.backend.cache.shape
    steps = [launch.step for launch in runtime.backend.launches]
    assert {(s.cell.batch, s.cell.query_rows, s.draft_length) for s in steps} == {
        (batch, 1 + drafts, drafts) for batch in (1, 2, 4) for drafts in (0, 1, 2)
    }
    assert all(not step.valid.any() for step in steps)


def test_step_costs_that_are_known_are_taken_in_the_cells_of_a_short_context_unless_they_lack_drafts() -> None:
    cells = make_drafting(truth(), 2).limits.cells

    def known(drafts: int) -> StepCosts:
        ms = {
            cell: tuple(cell.batch + cell.query_rows + cell.kv_tier + k / 8 for k in range(drafts + 1))
            for cell in cells
        }
        return StepCosts("measured", "here", "tensorrt", "1", "", "tier", 1, 0.0, ms)

    tier = min(cell.kv_tier for cell in cells if cell.kind == "decode")
    assert step_costs_of(known(2), cells, 4, 2) == {
        batch: tuple(batch + (1 + k) + tier + k / 8 for k in range(3)) for batch in (1, 2, 4)
    }
    assert step_costs_of(known(2), cells, 2, 1) == {
        batch: (batch + 1 + tier, batch + 2 + tier + 1 / 8) for batch in (1, 2)
    }
    assert step_costs_of(known(1), cells, 4, 2) is None


def test_a_plain_step_is_timed_as_it_runs_one_ahead_of_the_next() -> None:
    """Else drafts would be credited with a wait that a step without them does not have."""
    runtime = make_drafting(truth(), 2, run_ahead=1)
    ticks = iter(range(10_000))
    costs = measure_step_costs(runtime.backend, runtime.limits.cells, 4, 2, lambda: float(next(ticks)))
    assert costs == {batch: (125.0, 125.0, 125.0) for batch in (1, 2, 4)}  # eight steps in one tick


def test_uniform_numbers_do_not_depend_on_drafting() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.1, seed=5)
    for length in (1, 3):
        runtime = make_drafting(noise, length)
        with Engine(lambda runtime=runtime: runtime) as engine:
            engine.submit([3, 4], params=params).result(60)
        position = 0
        for launch in runtime.backend.launches:
            step = launch.step
            drafts = int(step.valid[0] - step.forced[0])
            for row in range(drafts + 1):
                assert step.uniform[0, row] == uniform(5, position + row)
            position += 1 + drafts
            if drafts:
                break
