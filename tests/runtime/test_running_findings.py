"""What the metrics of a running engine say is wrong: each complaint is provoked on an engine, or in its numbers.

Together with test_doctor.py these tests provoke every row of docs/troubleshooting.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from edgert.diagnosis import running_findings
from edgert.engine import Engine
from edgert.errors import BackendError, KvWriteError
from edgert.guards.guard import Guard, GuardLimits
from edgert.metrics import EngineSnapshot
from edgert.requests import Request
from edgert.slots import SlotTable
from fakes import FakeBackend, make_cells, make_runtime
from symptoms import COOL, Sensed, named


def served(**changes: Any) -> EngineSnapshot:
    with Engine(make_runtime) as engine:
        engine.complete([1, 2, 3], max_tokens=4)
        return replace(engine.metrics(), **changes)


def test_a_quiet_engine_has_no_findings() -> None:
    assert running_findings(served()) == ()


class Guesses:
    """A drafter on the host that knows code and not chat."""

    def __init__(self, known: Sequence[int]) -> None:
        self._known = known

    def propose(self, request: Request, outputs: Sequence[int], limit: int) -> Sequence[int]:
        right = list(self._known[len(outputs) : len(outputs) + min(2, limit)])
        return right if request.task == "code" else [(token + 1) % 40 for token in right]


def test_low_acceptance_is_named_by_task() -> None:
    with Engine(make_runtime) as engine:
        known = engine.complete([1, 2, 3], max_tokens=120).token_ids
    runtime = make_runtime(cells=make_cells(256, rows=(1, 3)), drafter=Guesses(known))
    with Engine(lambda: runtime) as engine:
        for task in ("chat", "code"):
            assert engine.complete([1, 2, 3], max_tokens=120, task=task).token_ids == known
        taken = engine.metrics()
    assert "task chat: 0 of " in named(running_findings(taken), "acceptance low").cause


def test_a_first_token_that_waits_for_a_slot_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgert")
    backend: list[FakeBackend] = []

    def open_() -> Any:
        runtime = make_runtime(slots=1, cost_s=lambda _cell: 0.05)
        assert isinstance(runtime.backend, FakeBackend)
        backend.append(runtime.backend)
        return runtime

    with Engine(open_, clock=lambda: backend[0].now_s if backend else 0.0) as engine:
        for handle in [engine.submit([1, 2, 3], max_tokens=30) for _ in range(6)]:
            handle.result(30)
        cause = named(running_findings(engine.metrics()), "first token slow").cause
    assert "s for a slot on average" in cause
    assert f"first token slow: {cause}; next: more slots" in caplog.text, "the log has it when the engine closes"


def test_heat_and_a_closed_door_are_named() -> None:
    hot = Sensed(replace(COOL, temperature_c=96.0, throttle_reasons=("hw_slowdown",)))
    limits = GuardLimits(4, 85.0, 95.0)
    with Engine(lambda: make_runtime(guard=lambda now_s: Guard(hot, limits, now_s))) as engine:
        found = running_findings(engine.metrics())
    assert named(found[1:], "requests wait or are refused").cause
    assert found[0].symptom == "latency drifts"
    assert "1 of 4 slots may be active at 96.0 °C; the hardware throttled: hw_slowdown 1 times" in found[0].cause


def test_prompts_that_are_mostly_padding_are_named() -> None:
    with Engine(lambda: make_runtime(cells=make_cells(256, chunks=(64,)))) as engine:
        for _ in range(55):
            engine.complete([1, 2, 3], max_tokens=1)
        found = running_findings(engine.metrics())
    assert "95% of the prefill rows were padding" in named(found, "first token slow").cause


def test_batches_that_are_mostly_idle_are_named() -> None:
    with Engine(make_runtime) as engine:
        engine.complete([1, 2, 3], max_tokens=2)
        taken = replace(engine.metrics(), launches={"decode-4x1@128": 80}, decode_rows=320, idle_rows=220)
    cause = named(running_findings(taken), "throughput collapses with concurrency").cause
    assert cause.startswith("69% of the decode rows were idle")


def test_a_clock_that_is_held_down_while_tokens_are_made_is_named() -> None:
    held = replace(COOL, gpu_clock_mhz=306.0, gpu_clock_max_mhz=1020.0)
    assert running_findings(served(device=held)) == ()
    cause = named(running_findings(served(device=held, decoding=2)), "latency drifts").cause
    assert cause == "while tokens are made the GPU clock is 306 MHz of 1020 MHz"


def test_a_write_to_the_wrong_cache_position_is_stopped_and_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The KV check: a slot table that is off by one after ten tokens, as a scheduler's fault would make it."""
    written = SlotTable.launched

    def off_by_one(self: SlotTable, index: int, forced: int, drafts: int) -> None:
        written(self, index, forced + (self.written(index) == 10), drafts)

    monkeypatch.setattr(SlotTable, "launched", off_by_one)
    with Engine(make_runtime) as engine:
        handle = engine.submit([1, 2, 3], max_tokens=30)
        with pytest.raises((KvWriteError, BackendError), match="the step starts at position 11, the slot ends at 12"):
            handle.result(30)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.startswith("garbled or repeated output: decode-1x1@128, slot 0: the step starts at position 11")
    assert "next: stopped before anything wrong was written" in line


def test_eager_steps_among_captured_ones_are_named() -> None:
    taken = served(graph_launches=97, eager_launches=3)
    assert "3 of 100 steps ran eager" in named(running_findings(taken), "capture failed").cause


def test_a_peak_beyond_the_plan_is_named_with_the_phase_that_reached_it_first() -> None:
    phases = {"opened": 300_000_000, "prefill-64": 900_000_000, "decode-4": 900_000_000}
    taken = served(memory_phases=phases, memory_planned_bytes=500_000_000, memory_baseline_bytes=100_000_000)
    cause = named(running_findings(taken), "memory peak").cause
    assert cause == "800 MB in use at its peak, in phase prefill-64; the plan says 500 MB"
    assert running_findings(replace(taken, memory_planned_bytes=None)) == ()
