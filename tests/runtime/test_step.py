"""Plans become arrays, outputs become tokens; states move only along Waiting → Prefilling → Decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from edgert.backends.base import StepOutputs
from edgert.cells import Cell
from edgert.errors import BackendError
from edgert.requests import Decoding, Prefilling, Request, Waiting
from edgert.sampling import SamplingParams, uniform
from edgert.scheduler import DecodePlan, Pace, PrefillPlan, can_decode, drafts_allowed
from edgert.step import cut, decode_inputs, prefill_inputs, read_row


def request(length: int = 20, **params: Any) -> Request:
    asked = SamplingParams(**{"max_tokens": 10, **params})
    return Request(1, tuple(range(length)), asked, asked.seed or 0, frozenset({99}), None, 0.0)


def decoding(**fields: Any) -> Decoding:
    return Decoding(**{"request": request(), "slot": 2, "length": 20, "last_launch": 1, **fields})


def test_a_chunk_carries_its_part_of_the_prompt_and_padding_is_zero() -> None:
    cell = Cell("prefill", 1, 8, 64)
    state = Prefilling(request(), 2, launched=16)
    step = prefill_inputs(PrefillPlan(cell, 2, 16, 4, Pace()), state)
    assert step.tokens.tolist() == [[16, 17, 18, 19, 0, 0, 0, 0]]
    assert (step.first_slot, step.length[0], step.valid[0], step.forced[0]) == (2, 16, 4, 4)
    assert (step.temperature[0], step.top_k[0], step.top_p[0]) == (0, 0, 1)


def test_a_decode_step_has_drafts_idle_rows_and_numbers_by_output_position() -> None:
    cell = Cell("decode", 4, 3, 64)
    asked = request(temperature=0.5, top_k=7, top_p=0.9, seed=11)
    states = {
        0: decoding(slot=0, request=asked, outputs=4, length=23, token=40),
        2: decoding(slot=2).launch(0, 2),
    }
    plan = DecodePlan(cell, 0, (0, 2), {0: (41, 42)}, Pace())
    step = decode_inputs(plan, states, written=lambda slot: {1: 0, 3: 17}[slot])
    assert step.tokens.tolist() == [[40, 41, 42], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert step.length.tolist() == [23, 0, 21, 17]
    assert step.valid.tolist() == [3, 0, 1, 0]
    assert step.forced.tolist() == [1, 0, 1, 0]
    assert step.from_device.tolist() == [False, False, True, False]
    assert step.uniform[0].tolist() == [uniform(11, 4 + column) for column in range(3)]
    assert step.top_k.tolist() == [7, 0, 0, 0]


def test_parameters_too_small_or_large_for_float32_stay_what_they_are() -> None:
    """top_p 0 keeps no token at all: the graph failed on it, and with it every request of the engine."""
    cell, limits = Cell("prefill", 1, 8, 64), np.finfo(np.float32)
    for temperature in (1e-320, 1e300, 10**300):
        state = Prefilling(request(temperature=temperature, top_p=1e-300), 2)
        step = prefill_inputs(PrefillPlan(cell, 2, 0, 8, Pace()), state)
        assert step.temperature[0] in (limits.tiny, limits.max)
        assert step.top_p[0] == limits.tiny


def test_a_sequence_without_a_known_token_cannot_be_launched_from_the_host() -> None:
    plan = DecodePlan(Cell("decode", 1, 1, 64), 2, (2,), {}, Pace())
    with pytest.raises(ValueError, match="without a token"):
        decode_inputs(plan, {2: decoding()}, written=lambda _slot: 0)


def test_only_the_last_chunk_leads_to_decoding() -> None:
    state = Waiting(request()).admit(3).passed().passed()
    assert (state.slot, state.passed_over, state.remaining) == (3, 2, 20)
    half = state.chunk(12, 1)
    assert isinstance(half, Prefilling)
    assert (half.launched, half.passed_over) == (12, 0)
    whole = half.chunk(8, 2)
    assert isinstance(whole, Decoding)
    assert (whole.length, whole.launched_length, whole.outputs, whole.launched_outputs) == (20, 20, 0, 1)
    with pytest.raises(ValueError, match="a chunk of 9 tokens, 8 remain"):
        half.chunk(9, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        half.slot = 1  # type: ignore[misc]


def test_lengths_and_outputs_count_what_was_launched_and_what_was_collected() -> None:
    state = decoding(outputs=1, token=5).launch(3, 7)
    assert (state.launched_length, state.launched_outputs, state.certain) == (21, 2, False)
    state = state.collect(2, 8)
    assert (state.length, state.outputs, state.token, state.certain, state.last_launch) == (23, 4, 8, True, 7)
    with pytest.raises(ValueError, match="2 drafts accepted of 1"):
        decoding().launch(1, 1).collect(2, 3)


def test_nothing_is_launched_past_max_tokens_or_the_context() -> None:
    state = decoding(outputs=9, token=5)
    assert can_decode(state, 64)
    assert not can_decode(state.launch(0, 2), 64)
    assert not can_decode(decoding(length=64, token=5), 64)
    assert drafts_allowed(decoding(outputs=7, token=5), 64) == 2
    assert drafts_allowed(decoding(length=63, token=5), 64) == 0
    assert drafts_allowed(decoding(length=61, token=5), 64) == 2


def outputs(sampled: list[int], accepted: int, following: int) -> StepOutputs:
    return StepOutputs(np.array([sampled]), np.array([accepted]), np.array([following]), None)


def test_a_row_gives_the_accepted_drafts_and_the_bonus_token() -> None:
    plan = DecodePlan(Cell("decode", 1, 4, 64), 2, (2,), {2: (41, 42)}, Pace())
    step = decode_inputs(plan, {2: decoding(token=40)}, written=lambda _slot: 0)
    assert read_row(step, outputs([41, 50, 0, 0], 1, 50), 0, 100).tokens == (41, 50)
    for wrong, message in (
        (outputs([41, 42, 43, 44], 3, 44), "accepted 3 drafts of 2"),
        (outputs([41, 50, 0, 0], 1, 51), "next token 51 is not the last sampled, 50"),
        (outputs([41, 100, 0, 0], 1, 100), "token 100 is outside the vocabulary of 100"),
        (outputs([-1, 0, 0, 0], 0, -1), "token -1 is outside"),
    ):
        with pytest.raises(BackendError, match=message):
            read_row(step, wrong, 0, 100)


def test_a_block_is_cut_at_a_stop_token_and_at_max_tokens() -> None:
    assert cut(request(), 0, (1, 99, 2)) == ((1, 99), True)
    assert cut(request(), 8, (1, 2, 99)) == ((1, 2), False)
    assert cut(request(), 0, (1, 2)) == ((1, 2), False)
