"""The simulator against the real worker on the fake backend: the same requests at the same moments, to the token."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from edgebuild.simulate.engine import simulate
from edgebuild.simulate.records import Arrival, Run
from edgebuild.simulate.setting import Setting, draft_control
from edgert.backends.base import StepInputs, StepOutputs
from edgert.costs import StepCosts
from edgert.errors import ConfigError
from edgert.handles import Handle
from edgert.output import Output
from edgert.requests import Request
from edgert.sampling import SamplingParams
from edgert.slots import SlotTable, slots_to_allocate
from edgert.tempo import Targets
from edgert.worker import Worker
from fakes import FakeBackend, make_cells, make_runtime
from hypothesis import given, settings
from hypothesis import strategies as st

CONTEXT = 192
NO_TARGETS = Targets()


def costs_of(
    cells: Any, *, reads: str = "tier", run_ahead: int = 0, host_ms: float = 0.0, drafts: int = 0
) -> StepCosts:
    """Made-up milliseconds that depend on everything a cell has."""

    def ms(cell: Any) -> tuple[float, ...]:
        plain = 2.0 + 0.31 * cell.batch * cell.query_rows + 0.007 * cell.batch * cell.kv_tier
        return tuple(plain + 0.4 * k for k in range(drafts + 1))

    return StepCosts(
        "measured",
        "made up",
        "fake",
        "1",
        "",
        reads,
        run_ahead,
        host_ms,
        {cell: ms(cell) for cell in cells},  # type: ignore[arg-type]
    )


class Timed(FakeBackend):
    """The fake backend on the table's time. A step is ready when the device has done it; only reading it waits."""

    costs: StepCosts
    device_s = 0.0
    host_s = 0.0
    right: bool | None = None  # what its drafter guesses; None: it has none

    def launch(self, step: StepInputs) -> Any:
        ticket = super().launch(replace(step, prime=False))
        written = int(((step.length + step.valid) * (step.valid > 0)).max())
        self.now_s = self.launches[-1].start_s  # what FakeBackend added is not the time of this one
        made = step.draft_length if step.cell.kind == "decode" else int(step.prime)
        self.device_s = (
            max(self.device_s, self.now_s + self.host_s) + self.costs.step_ms(step.cell, written, made) / 1e3
        )
        outputs = ticket.outputs
        if step.draft_length:
            outputs = dataclasses.replace(outputs, drafts=self._guess(step, outputs))
        return _Later(self, self.device_s, outputs)

    def _guess(self, step: StepInputs, outputs: StepOutputs) -> np.ndarray[Any, Any]:
        from fakes import VOCABULARY, toy_logits

        drafts = np.zeros((step.cell.batch, step.draft_length), np.int64)
        for row in range(step.cell.batch):
            if step.valid[row]:
                slot = step.first_slot + row
                so_far = [*self.cache[slot, : self.device_length[slot]].tolist(), int(outputs.next_token[row])]
                for place in range(step.draft_length):
                    token = int(np.argmax(toy_logits(np.array(so_far))))
                    drafts[row, place] = token if self.right else (token + 1) % VOCABULARY
                    so_far.append(token)
                self.device_drafts[slot] = drafts[row].tolist()
        return drafts


@dataclasses.dataclass(frozen=True)
class _Later:
    backend: Timed
    end_s: float
    outputs: StepOutputs

    def result(self) -> StepOutputs:
        self.backend.now_s = max(self.backend.now_s, self.end_s)
        return self.outputs


def served(setting: Setting, arrivals: Sequence[Arrival], right: bool | None) -> dict[int, list[float]]:
    """Token times of every request through the real worker."""
    limits, costs = setting.limits, setting.costs
    backend = Timed(limits.cells, limits.slots, CONTEXT + limits.rules.chunks[-1], run_ahead=costs.run_ahead)
    backend.costs, backend.right, backend.host_s = costs, right, costs.host_ms / 1e3
    backend.cost_s = lambda _cell: 0.0
    table = SlotTable(setting.slots, allocated=limits.slots, context_tokens=CONTEXT, cache_tokens=backend.cache_tokens)
    worker = Worker(
        backend, limits, table, token_limit=48, clock=lambda: backend.now_s,
        draft_control=draft_control(setting) if right is not None else None,
    )  # fmt: skip
    handles, pending = {}, list(enumerate(sorted(arrivals, key=lambda each: each.at_s)))
    while pending or worker.busy:
        if not worker.busy:
            backend.now_s = max(backend.now_s, pending[0][1].at_s)
        while pending and pending[0][1].at_s <= backend.now_s:
            number, arrival = pending.pop(0)
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            request = Request(number, (1,) * arrival.prompt_tokens, params, 0, frozenset(), None, arrival.at_s)
            handles[number] = Handle(number, worker.cancel)
            worker.add(Output(request, handles[number], None, None))
        worker.step()
    return {number: list(handle.result(0).metrics.token_s) for number, handle in handles.items()}


def agree(run: Run, times: dict[int, list[float]]) -> None:
    for number, outcome in enumerate(run.outcomes):
        tokens = times[number]
        assert outcome.tokens == len(tokens)
        assert outcome.first_s == pytest.approx(tokens[0], rel=1e-9)
        assert outcome.last_s == pytest.approx(tokens[-1], rel=1e-9)
        gaps = [after - before for before, after in pairwise(tokens)]
        assert outcome.longest_gap_s == pytest.approx(max(gaps, default=0.0), rel=1e-9, abs=1e-12)


def make_setting(
    *, slots: int, run_ahead: int = 0, reads: str = "tier", host_ms: float = 0.0, adaptive: bool = True,
    targets: Targets = NO_TARGETS, rows: tuple[int, ...] = (1,), drafts: int = 0, acceptance: tuple[float, ...] = (),
) -> Setting:  # fmt: skip
    cells = make_cells(CONTEXT, chunks=(8, 16, 64), rows=rows, tiers=(64, 128, CONTEXT))
    costs = costs_of(cells, reads=reads, run_ahead=run_ahead, host_ms=host_ms, drafts=drafts)
    limits = replace(
        make_runtime(context=CONTEXT, slots=slots, cells=cells).limits,
        slots=slots_to_allocate(slots, (1, 2, 4)),
        adaptive=adaptive,
        costs=costs,
        targets=targets,
        draft_length=drafts,
    )
    return Setting(limits, costs, slots, acceptance)


arrivals_strategy = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=12
).map(lambda rows: [Arrival(at, prompt, output) for at, prompt, output in rows])


@settings(max_examples=60, deadline=None)
@given(
    arrivals=arrivals_strategy,
    slots=st.integers(1, 4),
    run_ahead=st.integers(0, 1),
    reads=st.sampled_from(["tier", "written"]),
    adaptive=st.booleans(),
    targets=st.sampled_from([Targets(), Targets(60.0, 22.0), Targets(10.0, None)]),
)
def test_the_simulator_and_the_worker_agree(
    arrivals: list[Arrival], slots: int, run_ahead: int, reads: str, adaptive: bool, targets: Targets
) -> None:
    host_ms = 0.0 if run_ahead else 0.3
    setting = make_setting(
        slots=slots, run_ahead=run_ahead, reads=reads, host_ms=host_ms, adaptive=adaptive, targets=targets
    )
    agree(simulate(setting, arrivals), served(setting, arrivals, None))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_they_agree_with_drafts(right: bool, adaptive: bool, run_ahead: int) -> None:
    rng = random.Random(3)
    arrivals = [Arrival(rng.uniform(0, 1.5), rng.randrange(1, 140), rng.randrange(1, 50)) for _ in range(25)]
    rate = 1.0 if right else 0.0
    setting = make_setting(
        slots=3, rows=(1, 2, 3, 4), drafts=3, acceptance=(rate,) * 3, adaptive=adaptive, targets=Targets(50.0, 30.0),
        run_ahead=run_ahead,
    )  # fmt: skip
    run = simulate(setting, arrivals)
    assert run.draft_proposed > 0
    assert run.draft_accepted == (run.draft_proposed if right else 0)
    agree(run, served(setting, arrivals, right))


@settings(max_examples=40, deadline=None)
@given(arrivals=arrivals_strategy, slots=st.integers(1, 4), run_ahead=st.integers(0, 1))
def test_turns_in_bulk_are_turns(arrivals: list[Arrival], slots: int, run_ahead: int) -> None:
    setting = make_setting(slots=slots, run_ahead=run_ahead, reads="written")
    fast, slow = simulate(setting, arrivals), simulate(setting, arrivals, bulk=False)
    assert fast.launches == slow.launches
    assert fast.outcomes == [
        replace(
            each,
            longest_gap_s=pytest.approx(each.longest_gap_s),
            first_s=pytest.approx(each.first_s),
            last_s=pytest.approx(each.last_s),
        )
        for each in slow.outcomes
    ]
    assert sum(fast.gaps.counts) == sum(slow.gaps.counts)


def test_a_guard_that_holds_slots_back_is_obeyed() -> None:
    arrivals = [Arrival(0.0, 20, 30) for _ in range(8)]
    setting = make_setting(slots=4)
    free = simulate(setting, arrivals)
    held = simulate(replace(setting, active=lambda now_s: 0 if now_s < 3.0 else 1), arrivals)
    assert min(each.first_s for each in held.outcomes) >= 3.0
    assert held.end_s > free.end_s
    assert not any(label.startswith(("decode-2", "decode-4")) for label in held.launches)


def test_a_cell_without_a_cost_is_refused() -> None:
    setting = make_setting(slots=2)
    few = dict(list(setting.costs.cells.items())[1:])
    with pytest.raises(ConfigError, match=r"no cost is known of 1 of .*prefill-8.*--measure"):
        simulate(replace(setting, costs=replace(setting.costs, cells=few)), [Arrival(0.0, 5, 5)])
