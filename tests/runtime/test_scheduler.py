"""Scheduling by property: any traffic gives every request what it would get alone, within the promised gaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from edgert.cells import Cell
from edgert.costs import StepCosts
from edgert.errors import ConfigError
from edgert.guards.guard import Guard, GuardLimits
from edgert.guards.readings import NoSensors
from edgert.handles import Completion, Handle
from edgert.loading import Runtime
from edgert.output import Output
from edgert.policy import PATIENCE, Ratio
from edgert.requests import Request
from edgert.sampling import SamplingParams
from edgert.scheduler import Limits
from edgert.tempo import Targets
from edgert.worker import Worker
from fakes import VOCABULARY, FakeBackend, make_cells, make_runtime, reference
from hypothesis import given, settings
from hypothesis import strategies as st

CONTEXT = 96


@dataclass
class Trace:
    """Drives a Worker turn by turn on virtual time: arrivals and cancels happen at given launch numbers."""

    runtime: Runtime
    handles: dict[int, Handle] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        backend = self.runtime.backend
        assert isinstance(backend, FakeBackend)
        self.backend = backend
        self.worker: Worker = self.runtime.worker(lambda: self.backend.now_s)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        number = len(self.requests)
        stops = frozenset((*(() if params.ignore_eos else self.runtime.eos_token_ids), *params.stop_token_ids))
        request = Request(number, tuple(prompt), params, params.seed or 0, stops, None, self.backend.now_s)
        self.requests[number] = request
        self.handles[number] = Handle(number, self.worker.cancel)
        self.worker.add(Output(request, self.handles[number], None, None))
        return number

    def run(self, events: Sequence[tuple[int, Any]] = (), limit: int = 20_000) -> None:
        """events: (turn, callable) in order of turn."""
        pending = sorted(events, key=lambda event: event[0])
        turn = 0
        while pending or self.worker.busy:
            while pending and (pending[0][0] <= turn or not self.worker.busy):
                pending.pop(0)[1]()
            if self.worker.busy:
                self.worker.step()
            turn += 1
            assert turn < limit, "the scheduler makes no progress"

    def done(self, number: int) -> Completion:
        return self.handles[number].result(0)

    def expected(self, number: int) -> list[int]:
        request = self.requests[number]
        return reference(
            request.prompt_ids,
            request.params,
            request.seed,
            self.runtime.limits.context_tokens,
            self.runtime.eos_token_ids,
        )

    def launch_gaps(self) -> list[list[str]]:
        """For each pair of consecutive decode steps of one sequence: the kinds of the launches between them."""
        gaps: list[list[str]] = []
        previous: dict[int, tuple[int, int]] = {}  # slot → (index of the last step that gave it a token, its end)
        launches = self.backend.launches
        for index, launch in enumerate(launches):
            step = launch.step
            for row in range(step.cell.batch):
                slot, valid = step.first_slot + row, int(step.valid[row])
                if not valid:
                    continue
                if step.cell.kind == "decode" and slot in previous:
                    between = launches[previous[slot][0] + 1 : index]
                    gaps.append([each.step.cell.kind for each in between])
                previous[slot] = (index, int(step.length[row]) + valid)
        return gaps


class Lookup:
    """A drafter for tests: sometimes right, sometimes wrong, by a fixed pattern of output length."""

    def __init__(self, context: int, eos: Sequence[int], length: int, always: bool | None) -> None:
        self.context, self.eos, self.length, self.always = context, eos, length, always

    def propose(self, request: Request, outputs: Sequence[int], limit: int) -> Sequence[int]:
        full = reference(
            request.prompt_ids,
            SamplingParams(**{**vars(request.params), "ignore_eos": True, "stop_token_ids": ()}),
            request.seed,
            self.context,
        )
        drafts = full[len(outputs) : len(outputs) + min(limit, self.length)]
        right = (len(outputs) % 3 != 1) if self.always is None else self.always
        return drafts if right else [(token + 1) % VOCABULARY for token in drafts]


def under(policy: str, limits: Limits) -> Limits:
    """The limits with what the tempo goes by. "tight gap": a target that only the smallest chunk keeps."""
    if policy in ("fixed", "by rows"):
        return dataclasses.replace(limits, adaptive=policy != "fixed")
    cells = {cell: (1.0 * cell.query_rows + cell.batch,) for cell in limits.cells}
    costs = StepCosts("measured", "made up", "fake", "1", "", "tier", 0, 0.0, cells)
    return dataclasses.replace(limits, costs=costs, targets=Targets(50.0, 8.0 if policy == "tight gap" else None))


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 3, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
)
arrivals_strategy = st.lists(
    st.tuples(
        st.integers(0, 60),  # turn
        st.integers(1, CONTEXT),  # prompt tokens
        st.integers(0, VOCABULARY - 1),  # first token
        params_strategy,
        st.one_of(st.none(), st.none(), st.integers(0, 40)),  # cancelled so many turns later
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=120, deadline=None)
@given(
    arrivals=arrivals_strategy,
    slots=st.integers(1, 4),
    batches=st.sampled_from([(1, 2, 4), (1,), (1, 2), (4, 1)]),
    run_ahead=st.integers(0, 1),
    any_first_slot=st.booleans(),
    chunked=st.booleans(),
    drafting=st.sampled_from(["none", "right", "wrong", "mixed"]),
    eos=st.sampled_from([(), (3,), (3, 17, 40)]),
    policy=st.sampled_from(["fixed", "by rows", "by costs", "tight gap"]),
)
def test_any_traffic_gives_each_request_what_it_gets_alone(
    arrivals: list[Any],
    slots: int,
    batches: tuple[int, ...],
    run_ahead: int,
    any_first_slot: bool,
    chunked: bool,
    drafting: str,
    eos: tuple[int, ...],
    policy: str,
) -> None:
    drafter = None
    if drafting != "none":
        drafter = Lookup(CONTEXT, eos, 3, {"right": True, "wrong": False, "mixed": None}[drafting])
    runtime = make_runtime(
        context=CONTEXT,
        slots=slots,
        cells=make_cells(CONTEXT, chunks=(4, 16), batches=batches, rows=(1, 4), tiers=(32, CONTEXT)),
        run_ahead=run_ahead,
        any_first_slot=any_first_slot,
        chunked_prefill=chunked,
        eos=eos,
        drafter=drafter,
    )
    trace = Trace(dataclasses.replace(runtime, limits=under(policy, runtime.limits)))
    events: list[tuple[int, Any]] = []
    cancelled: set[int] = set()

    for turn, length, first, params, cancel_after in arrivals:

        def arrive(
            turn: int = turn, length: int = length, first: int = first, params: Any = params, cut: Any = cancel_after
        ) -> None:
            number = trace.submit([(first + 5 * index) % VOCABULARY for index in range(length)], params)
            if cut is not None:
                cancelled.add(number)
                stops.append((turn + cut, number))

        events.append((turn, arrive))
    stops: list[tuple[int, int]] = []

    def cancel_due(turn: int) -> None:
        for due, number in stops:
            if due == turn:
                trace.worker.cancel(number)

    events += [(turn, lambda turn=turn: cancel_due(turn)) for turn in range(1, 101)]
    trace.run(events)

    for number in trace.requests:
        done, expected = trace.done(number), trace.expected(number)
        got = list(done.token_ids)
        if done.finish_reason == "cancelled":
            assert number in cancelled
            assert got == expected[: len(got)]
        else:
            assert got == expected
            ended_by_token = got[-1] in trace.requests[number].stop_token_ids
            assert done.finish_reason == ("stop" if ended_by_token else "length")
        assert done.usage.completion_tokens == len(got)
    waiting, prefilling, decoding, free = trace.worker.queues
    assert (waiting, prefilling, decoding, free) == (0, 0, 0, slots)
    if run_ahead == 0:
        assert trace.worker.counters.discarded_rows == 0
    if drafting == "right":
        assert trace.worker.counters.draft_accepted == trace.worker.counters.draft_proposed
    if drafting == "wrong":
        assert trace.worker.counters.draft_accepted == 0
    covering = max(batches) >= slots
    if chunked and covering:
        for gap in trace.launch_gaps():
            assert gap.count("prefill") <= 1
            assert len(gap) <= 1


@pytest.mark.parametrize("always", [True, False, None])
def test_rejected_drafts_leave_no_trace_in_recurrent_state(always: bool | None) -> None:
    from fakes import folded_state

    cells = make_cells(CONTEXT, chunks=(16,), rows=(1, 4))
    runtime = make_runtime(context=CONTEXT, slots=1, cells=cells, drafter=Lookup(CONTEXT, (), 3, always))
    trace = Trace(runtime)
    number = trace.submit([5] * 20, SamplingParams(max_tokens=30))
    trace.run()
    # The last token is sampled and never fed back.
    assert trace.backend.state[0] == folded_state([5] * 20 + trace.expected(number)[:-1])
    assert list(trace.done(number).token_ids) == trace.expected(number)


def test_a_stop_token_inside_an_accepted_block_cuts_there() -> None:
    free = reference([5] * 20, SamplingParams(max_tokens=30), 0, CONTEXT)
    eos = next(token for index, token in enumerate(free) if index > 4 and token not in free[:index])
    cut = free[: free.index(eos) + 1]
    for ignore, expected in ((False, cut), (True, free)):
        cells = make_cells(CONTEXT, chunks=(16,), rows=(5,))
        drafter = Lookup(CONTEXT, (eos,), 4, True)
        trace = Trace(make_runtime(context=CONTEXT, cells=cells, eos=(eos,), drafter=drafter))
        number = trace.submit([5] * 20, SamplingParams(max_tokens=30, ignore_eos=ignore))
        trace.run()
        done = trace.done(number)
        assert list(done.token_ids) == expected
        assert done.usage.completion_tokens == len(expected)
        assert done.usage.draft_accepted == done.usage.draft_proposed > 0


def test_a_long_prompt_holds_nobody_up() -> None:
    """Case S1: A streams, B sends 16,000 tokens, C sends 20."""
    context, chunk = 16_384, 512
    cells = make_cells(context, chunks=(32, chunk), tiers=(1024, context))
    trace = Trace(make_runtime(context=context, cells=cells))
    times: dict[str, float] = {}
    rng = np.random.default_rng(0)
    a = trace.submit([1] * 16, SamplingParams(max_tokens=400))
    numbers: dict[str, int] = {}

    def send(name: str, length: int, tokens: int) -> None:
        numbers[name] = trace.submit(rng.integers(0, VOCABULARY, length).tolist(), SamplingParams(max_tokens=tokens))
        times[name] = trace.backend.now_s

    trace.run([(20, lambda: send("B", 16_000, 5)), (60, lambda: send("C", 20, 5))])
    chunk_s, step_s = trace.backend.cost_s(Cell("prefill", 1, chunk, context)), 0.001
    gaps = np.array(trace.done(a).metrics.itl_ms) / 1e3
    assert gaps.max() <= chunk_s + step_s + 1e-9
    c = trace.done(numbers["C"]).metrics
    # At worst: decode steps of the current round, one chunk of B, a round, then C's own chunk.
    assert c.ttft_ms is not None
    assert c.ttft_ms / 1e3 <= 2 * (chunk_s + 8 * step_s) + 0.032
    assert list(trace.done(numbers["B"]).token_ids) == trace.expected(numbers["B"])
    assert list(trace.done(a).token_ids) == trace.expected(a)


def test_a_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    trace = Trace(make_runtime(context=512, slots=2, cells=make_cells(512, chunks=(16,))))
    long = trace.submit([1] * 320, SamplingParams(max_tokens=1))
    flood = [(turn, lambda: trace.submit([2] * 4, SamplingParams(max_tokens=1))) for turn in range(400)]
    trace.run(flood)
    owners = [int(launch.step.first_slot) for launch in trace.backend.launches if launch.step.cell.kind == "prefill"]
    turns = [-1, *(index for index, slot in enumerate(owners) if slot == 0)]
    assert max(after - before for before, after in pairwise(turns)) <= PATIENCE + 1
    assert trace.done(long).finish_reason == "length"


@pytest.mark.parametrize(("chunked", "chunks_in_a_row"), [(True, 1), (False, 13)])
def test_without_chunked_prefill_nothing_decodes_between_the_chunks_of_a_prompt(
    chunked: bool, chunks_in_a_row: int
) -> None:
    trace = Trace(make_runtime(context=512, cells=make_cells(512, chunks=(16,)), chunked_prefill=chunked))
    trace.submit([1] * 8, SamplingParams(max_tokens=60))
    trace.run([(10, lambda: trace.submit([2] * 200, SamplingParams(max_tokens=2)))])
    assert max(gap.count("prefill") for gap in trace.launch_gaps()) == chunks_in_a_row


@pytest.mark.parametrize(("length", "steps"), [(40, 7), (16 * 40, 4)])
def test_decode_steps_between_chunks_follow_the_backlog(length: int, steps: int) -> None:
    trace = Trace(make_runtime(context=1024, cells=make_cells(1024, chunks=(16,))))
    trace.submit([1] * 8, SamplingParams(max_tokens=800))
    trace.run([(10, lambda: trace.submit([2] * length, SamplingParams(max_tokens=2)))])
    kinds = [launch.step.cell.kind for launch in trace.backend.launches]
    chunks = [index for index, kind in enumerate(kinds) if kind == "prefill"][1:]
    between = [after - before - 1 for before, after in pairwise(chunks)]
    assert between[0] == steps if length > 100 else steps - 1 <= between[-1] <= steps + 1
    assert all(4 <= count <= 8 for count in between)


def test_the_pace_of_the_moment_can_be_seen() -> None:
    trace = Trace(make_runtime(context=1024, cells=make_cells(1024, chunks=(16, 64))))
    at_rest = trace.worker.tempo
    assert (at_rest.chunk_rows, at_rest.steps, at_rest.pressed) == (64, 6, False)
    trace.submit([1] * 8, SamplingParams(max_tokens=200))
    seen = []
    send = [lambda: trace.submit([2] * 700, SamplingParams(max_tokens=2)) for _ in range(5)]
    looks = [(turn, lambda: seen.append(trace.worker.tempo)) for turn in range(12, 40)]
    trace.run([*((10, each) for each in send), *looks])
    assert any(tempo.pressed and tempo.steps == 4 for tempo in seen)
    assert trace.worker.tempo == at_rest


def test_a_device_that_may_be_hot_gets_smaller_chunks() -> None:
    """No temperature to be read, though limits exist: half of the slots, and chunks of half the size at most."""
    limits = GuardLimits(4, 85.0, 95.0)
    for guard, largest in ((None, 64), (lambda now_s: Guard(NoSensors(None), limits, now_s), 16)):
        trace = Trace(make_runtime(cells=make_cells(256, chunks=(16, 64)), guard=guard))
        number = trace.submit([1] * 200, SamplingParams(max_tokens=2))
        trace.run()
        chunks = {each.step.cell.query_rows for each in trace.backend.launches if each.step.cell.kind == "prefill"}
        assert max(chunks) == largest
        assert list(trace.done(number).token_ids) == trace.expected(number)


def test_running_ahead_wastes_one_row_for_each_sequence_that_ends_by_a_token() -> None:
    free = reference([9] * 6, SamplingParams(max_tokens=30), 0, 256)
    trace = Trace(make_runtime(run_ahead=1, eos=(free[10],)))
    trace.submit([9] * 6, SamplingParams(max_tokens=30))
    trace.submit([9] * 7, SamplingParams(max_tokens=9, ignore_eos=True))
    trace.run()
    assert trace.worker.counters.discarded_rows == 1
    from_device = [bool(launch.step.from_device.any()) for launch in trace.backend.launches]
    assert sum(from_device) > len(from_device) / 2


def test_a_result_that_comes_after_its_request_ended_is_not_the_next_ones() -> None:
    free = reference([9] * 6, SamplingParams(max_tokens=30), 0, 256)
    trace = Trace(make_runtime(run_ahead=1, slots=1, eos=(free[10],)))
    numbers = [trace.submit([9] * 6, SamplingParams(max_tokens=30)) for _ in range(3)]
    numbers.append(trace.submit([4] * 5, SamplingParams(max_tokens=7, ignore_eos=True)))
    trace.run()
    for number in numbers:
        assert list(trace.done(number).token_ids) == trace.expected(number)
    assert trace.worker.counters.discarded_rows == 3


def test_without_batches_streams_take_turns() -> None:
    trace = Trace(make_runtime(slots=3, cells=make_cells(256, batches=(1,))))
    for start in range(3):
        trace.submit([start + 1] * 4, SamplingParams(max_tokens=30))
    trace.run()
    slots = [launch.step.first_slot for launch in trace.backend.launches if launch.step.cell.kind == "decode"]
    all_three_stream = range(20, 50)
    assert all(len(set(slots[index : index + 3])) == 3 for index in all_three_stream)


def test_limits_refuse_cells_that_leave_a_length_unserved() -> None:
    for kind in ("prefill", "decode"):
        cells = tuple(cell for cell in make_cells(256) if cell.kind != kind or cell.kv_tier < 256)
        with pytest.raises(ConfigError, match=f"no {kind} cell .* serves 256 positions; the largest tier is 128"):
            Limits(cells, 4, 256)


def test_a_ratio_that_is_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold"):
        Ratio(4, 9, 8)
