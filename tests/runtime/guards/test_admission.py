"""Guards in front of the real worker, on the fake backend's virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest
from edgert.engine import Engine
from edgert.errors import MemoryShort
from edgert.guards.guard import Guard, GuardLimits
from edgert.guards.readings import DeviceReading
from edgert.handles import Handle
from edgert.output import Output
from edgert.requests import Request
from edgert.sampling import SamplingParams
from edgert.worker import MEMORY_PATIENCE_S, Worker
from fakes import FakeBackend, make_runtime

GB = 1_000_000_000


@dataclass
class Sensed:
    """Sensors that say what the test says. on_read runs first."""

    temperature_c: float | None = 50.0
    available_bytes: int = 5 * GB
    on_read: Callable[[], None] | None = None
    name: str = "fake"

    def read(self) -> DeviceReading:
        if self.on_read is not None:
            self.on_read()
        return DeviceReading(
            self.name,
            temperature_c=self.temperature_c,
            temperature_source="tj-thermal",
            memory_available_bytes=self.available_bytes,
            memory_total_bytes=8 * GB,
        )

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return None, ()


LIMITS = GuardLimits(4, 85.0, 95.0, memory_margin_fraction=0.12)


class Bench:
    """A worker whose steps cost `step_s` of virtual time each; `run` goes on until a moment."""

    def __init__(self, sensors: Sensed, limits: GuardLimits = LIMITS, step_s: float = 0.1) -> None:
        runtime = make_runtime(guard=lambda now_s: Guard(sensors, limits, now_s), cost_s=lambda _cell: step_s)
        assert isinstance(runtime.backend, FakeBackend)
        self.backend = runtime.backend
        self.worker: Worker = runtime.worker(lambda: self.backend.now_s)
        self.handles: list[Handle] = []
        self.most_active = 0

    def submit(self, tokens: int) -> Handle:
        number = len(self.handles)
        params = SamplingParams(max_tokens=tokens)
        request = Request(number, (1, 2, 3), params, 0, frozenset(), None, self.backend.now_s)
        self.handles.append(Handle(number, self.worker.cancel))
        self.worker.add(Output(request, self.handles[-1], None, None))
        return self.handles[-1]

    def run(self, until_s: float, each: Callable[[], None] = lambda: None) -> None:
        while self.backend.now_s < until_s:
            before = self.backend.now_s
            self.worker.step()
            if self.backend.now_s == before:
                self.backend.now_s += 0.5  # nothing runs: time goes on
            _, prefilling, decoding, _ = self.worker.queues
            self.most_active = max(self.most_active, prefilling + decoding)
            each()


def test_fewer_slots_hold_new_requests_and_never_stop_running_ones() -> None:
    sensors = Sensed(50.0)
    bench = Bench(sensors)
    running = [bench.submit(200) for _ in range(4)]
    bench.run(5.0)
    sensors.temperature_c = 86.0
    bench.run(17.0)
    assert bench.worker.guard is not None
    assert bench.worker.guard.verdict.active_slots == 2
    assert bench.worker.queues[2] == 4, "four streams run on"
    late = bench.submit(5)
    bench.run(60.0)
    assert all(len(handle.result(0).token_ids) == 200 for handle in running)
    assert late.result(0).finish_reason == "length"


def test_at_the_hard_limit_a_request_waits_and_comes_when_it_is_cool() -> None:
    sensors = Sensed(96.0)
    bench = Bench(sensors)
    handle = bench.submit(5)
    bench.run(20.0)
    assert bench.worker.held
    assert not bench.backend.launches
    sensors.temperature_c = 90.0
    bench.run(25.0)
    assert len(handle.result(0).token_ids) == 5


def test_short_memory_queues_while_something_runs_and_is_refused_when_nothing_does() -> None:
    sensors = Sensed(available_bytes=5 * GB)
    bench = Bench(sensors)
    first = bench.submit(100)
    bench.run(2.0)
    sensors.available_bytes = 500_000_000
    bench.run(4.0)
    second = bench.submit(5)
    bench.run(9.0)
    assert not second.done, "it waits for the one that runs"
    bench.run(12.0 + MEMORY_PATIENCE_S)
    assert first.result(0).finish_reason == "length"
    with pytest.raises(MemoryShort, match=r"500 MB .* 960 MB \(12%\) are left to the system"):
        second.result(0)
    sensors.available_bytes = 5 * GB
    third = bench.submit(5)
    bench.run(25.0)
    assert third.result(0).finish_reason == "length"


def test_short_memory_that_comes_back_in_time_refuses_nothing() -> None:
    sensors = Sensed(available_bytes=100)
    bench = Bench(sensors)
    handle = bench.submit(5)
    bench.run(MEMORY_PATIENCE_S - 2)
    sensors.available_bytes = 5 * GB
    bench.run(MEMORY_PATIENCE_S + 5)
    assert handle.result(0).finish_reason == "length"


def test_an_engine_held_by_a_guard_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgert.loop.POLL_S", 0.01)
    monkeypatch.setattr("edgert.guards.guard.POLL_S", 0.01)
    reads = itertools.count()
    sensors = Sensed(96.0)

    def cool_down() -> None:
        if next(reads) == 5:
            sensors.temperature_c = 60.0

    sensors.on_read = cool_down
    with Engine(lambda: make_runtime(guard=lambda now_s: Guard(sensors, LIMITS, now_s))) as engine:
        assert engine.metrics().admission_open is False
        assert engine.complete([1, 2, 3], max_tokens=4).finish_reason == "length"
        metrics = engine.metrics()
        assert (metrics.admission_open, metrics.slots, metrics.slot_limit) == (True, 4, 1)
        assert metrics.device is not None
        assert metrics.device.temperature_c == 60.0
        assert metrics.guard_changes == 2


def test_warnings_of_the_load_stand_in_describe() -> None:
    limits = GuardLimits(4, 85.0, 95.0)
    with Engine(lambda: make_runtime(guard=lambda now_s: Guard(Sensed(None), limits, now_s))) as engine:
        described = engine.describe()
    assert described["backend"] == "fake"
    assert "no temperature can be read" in described["warnings"][0]
    assert described["guards"]["soft_temperature_c"] == 85.0


@dataclass
class Heat:
    """A module with a heat sink: T follows ambient + resistance · power with a time constant. Reads as the junction."""

    backend: FakeBackend | None = None
    temperature_c: float = 45.0
    seen: int = 0
    at_s: float = 0.0
    trace: list[float] = field(default_factory=list)

    AMBIENT_C, K_PER_W, TAU_S, IDLE_W, ROW_W = 25.0, 3.0, 90.0, 6.0, 5.0

    def catch_up(self) -> float:
        """Add the heat of the steps launched since the last look."""
        assert self.backend is not None
        for launch in self.backend.launches[self.seen :]:
            rows = int((launch.step.valid > 0).sum()) if launch.step.cell.kind == "decode" else 4
            self._heat(launch.start_s - self.at_s, 0)
            self._heat(launch.end_s - launch.start_s, rows)
            self.at_s = launch.end_s
        self.seen = len(self.backend.launches)
        self._heat(self.backend.now_s - self.at_s, 0)
        self.at_s = self.backend.now_s
        self.trace.append(self.temperature_c)
        return self.temperature_c

    def _heat(self, seconds: float, rows: int) -> None:
        target = self.AMBIENT_C + self.K_PER_W * (self.IDLE_W + self.ROW_W * rows)
        self.temperature_c += (target - self.temperature_c) * min(1.0, seconds / self.TAU_S)


def heat_up(
    limits: GuardLimits, until_s: float = 600.0
) -> tuple[Heat, list[tuple[float, int]], list[tuple[float, float]]]:
    """Eight clients that ask again as soon as they are answered. Temperatures, (time, slot limit), (end, latency)."""
    heat = Heat()
    sensors = Sensed()
    bench = Bench(sensors, limits, step_s=0.25)
    heat.backend = bench.backend

    def sense() -> None:
        sensors.temperature_c = heat.catch_up()

    sensors.on_read = sense
    active: list[Handle] = [bench.submit(60) for _ in range(8)]
    limit: list[tuple[float, int]] = []
    latency: list[tuple[float, float]] = []

    def clients() -> None:
        for place, handle in enumerate(active):
            if handle.done:
                times = handle.result(0).metrics
                latency.append((times.finished_s, times.latency_ms / 1e3))
                active[place] = bench.submit(60)
        assert bench.worker.guard is not None
        limit.append((bench.backend.now_s, bench.worker.guard.verdict.active_slots))

    bench.run(until_s, clients)
    return heat, limit, latency


def test_ten_minutes_of_heat_cost_latency_in_steps_and_never_reach_the_hard_limit() -> None:
    unguarded, _, _ = heat_up(GuardLimits(4), 400.0)
    assert max(unguarded.trace) > 95.0, "the model device overheats when it is left alone"
    heat, limit, latency = heat_up(GuardLimits(4, 85.0, 95.0))
    assert max(heat.trace) < 95.0
    assert max(heat.trace) >= 85.0
    steps = [after - before for (_, before), (_, after) in itertools.pairwise(limit) if after != before]
    assert steps
    assert set(steps) <= {-1, 1}, "one slot at a time"
    first = next(at for (at, slots) in limit if slots < 4)
    cold = mean(each for end, each in latency if end < first)
    hot = mean(each for end, each in latency if end > 300.0)
    assert hot > 1.2 * cold, "it costs latency"
    assert hot < 2 * 4 / min(slots for _, slots in limit) * cold
