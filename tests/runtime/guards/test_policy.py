"""The thermal and the memory policy on plain numbers."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import pytest
from edgert.guards.guard import Guard, GuardLimits
from edgert.guards.policy import (
    Change,
    ThermalRules,
    ThermalState,
    first_state,
    memory_refusal,
    next_thermal,
    power_mode_warning,
)
from edgert.guards.readings import DeviceReading
from hypothesis import given
from hypothesis import strategies as st

RULES = ThermalRules(4, 85.0, 95.0)


def follow(rules: ThermalRules, readings: list[float | None]) -> tuple[list[ThermalState], list[Change]]:
    """One reading a second."""
    state, states, changes = first_state(rules, 0.0), [], []
    for second, reading in enumerate(readings):
        state, change = next_thermal(rules, state, float(second), reading)
        states.append(state)
        changes += [change] if change else []
    return states, changes


def test_above_the_soft_limit_slots_go_one_at_a_time() -> None:
    states, changes = follow(RULES, [86.0] * 41)
    assert [state.slots for state in states[::10]] == [3, 2, 1, 1, 1]
    assert all(state.prefill for state in states)
    assert [change.temperature_c for change in changes] == [86.0] * 3
    assert "soft limit of 85" in changes[0].reason


def test_noise_within_the_hysteresis_changes_nothing() -> None:
    _, changes = follow(RULES, [86.0] + [82.5, 84.9] * 100)
    assert len(changes) == 1


def test_slots_come_back_one_at_a_time_and_more_slowly() -> None:
    states, _ = follow(RULES, [86.0] * 25 + [80.0] * 100)
    assert states[24].slots == 1
    back = [second for second in range(1, len(states)) if states[second].slots > states[second - 1].slots]
    assert [states[second].slots for second in back] == [2, 3, 4]
    assert [after - before for before, after in pairwise(back)] == [30, 30]
    assert states[-1].level == "normal"


def test_at_the_hard_limit_nothing_new_starts_until_hysteresis_below() -> None:
    states, changes = follow(RULES, [70.0, 95.0, 93.0, 92.5, 92.0, 92.0])
    assert [state.prefill for state in states] == [True, False, False, False, True, True]
    assert states[1].slots == states[-1].slots == 1
    assert [change.after.prefill for change in changes] == [False, True]


def test_one_missing_reading_is_nothing_and_ten_seconds_of_them_are_blind() -> None:
    states, changes = follow(RULES, [70.0, None, 70.0] + [None] * 20)
    assert states[10].slots == 4
    assert states[-1].slots == RULES.blind_slots == 2
    assert states[-1].prefill
    assert "no temperature" in changes[0].reason


def test_blind_from_the_start_is_blind_at_once_and_without_limits_never() -> None:
    assert follow(RULES, [None])[0][0].level == "blind"
    states, changes = follow(ThermalRules(4, None, None), [None, 140.0])
    assert (states[-1].slots, states[-1].level, changes) == (4, "normal", [])


def test_blind_at_the_hard_limit_stays_shut_before_it_opens_with_one_slot() -> None:
    states, _ = follow(RULES, [96.0] + [None] * 60)
    assert not states[29].prefill
    assert (states[-1].prefill, states[-1].slots) == (True, 1)


def test_after_a_pause_a_cool_device_starts_whole() -> None:
    state = replace(first_state(RULES, 0.0), slots=1, changed_s=0.0)
    state, change = next_thermal(RULES, state, 600.0, 50.0)
    assert (state.slots, state.level) == (4, "normal")
    assert change is not None


def test_a_hard_limit_alone_guards_too() -> None:
    states, _ = follow(ThermalRules(4, None, 90.0), [91.0] + [80.0] * 100)
    assert (states[0].prefill, states[1].prefill, states[-1].slots) == (False, True, 4)


@given(st.lists(st.one_of(st.none(), st.floats(-40, 130)), min_size=1, max_size=200), st.integers(1, 8))
def test_whatever_is_read_the_state_keeps_its_bounds_and_every_change_is_told(
    readings: list[float | None], slots: int
) -> None:
    rules = ThermalRules(slots, 85.0, 95.0)
    state = first_state(rules, 0.0)
    for second, reading in enumerate(readings):
        after, change = next_thermal(rules, state, float(second), reading)
        assert 1 <= after.slots <= slots
        moved = (after.slots, after.prefill) != (state.slots, state.prefill)
        assert not moved or change is not None
        if reading is not None and reading >= 95.0:
            assert not after.prefill
        if not moved:
            assert after.changed_s == state.changed_s or after.level == "blind"
        assert after.slots <= state.slots + 1
        state = after


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="hard limit 80"):
        ThermalRules(4, 85.0, 80.0)


def test_memory_is_refused_before_the_margin_is_touched() -> None:
    total = 8_000_000_000
    assert memory_refusal(5_000_000_000, total, 0.12) is None
    assert memory_refusal(960_000_000, total, 0.12) is None
    refusal = memory_refusal(959_999_999, total, 0.12)
    assert refusal is not None
    assert "960 MB" in refusal
    assert memory_refusal(1_000_000_000, total, 0.12, next_bytes=50_000_000) is not None
    assert memory_refusal(None, total, 0.12) is memory_refusal(1, None, 0.12) is None


def test_a_power_mode_other_than_the_profiles_warns_with_both() -> None:
    warning = power_mode_warning("MAXN_SUPER", "15W")
    assert warning is not None
    assert "15W" in warning
    assert "MAXN_SUPER" in warning
    assert power_mode_warning("MAXN", "maxn") is power_mode_warning(None, "15W") is power_mode_warning("15W", None)


class Scripted:
    """Sensors that give the readings of a list, the last one for ever."""

    name = "scripted"

    def __init__(self, *readings: DeviceReading, mode: str | None = None) -> None:
        self._readings = list(readings)
        self._mode = mode
        self.reads = 0

    def read(self) -> DeviceReading:
        self.reads += 1
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return self._mode, ()


def hot(temperature_c: float | None, **more: object) -> DeviceReading:
    return DeviceReading("scripted", temperature_c=temperature_c, temperature_source="tj-thermal", **more)  # type: ignore[arg-type]


def test_the_sensors_are_read_once_a_second_at_most() -> None:
    sensors = Scripted(hot(50.0))
    guard = Guard(sensors, GuardLimits(4, 85.0, 95.0), 0.0)
    for step in range(1000):
        guard.poll(step / 100)
    assert sensors.reads == 10


def test_every_change_is_logged_with_the_reading(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "edgert.guards"):
        guard = Guard(Scripted(hot(70.0), hot(86.5), hot(96.0), hot(91.0)), GuardLimits(4, 85.0, 95.0), 0.0)
        for second in range(1, 5):
            guard.poll(float(second))
    assert [record.getMessage() for record in caplog.records] == [
        "active slots 4 -> 3: 86.5 °C (tj-thermal), at or above the soft limit of 85 °C",
        "active slots 3 -> 1, admission off: 96.0 °C (tj-thermal), at or above the hard limit of 95 °C",
        "active slots 1 -> 1, admission on: 91.0 °C (tj-thermal), 3 °C below the hard limit",
    ]
    assert guard.changes == 3


def test_what_is_wrong_at_load_is_warned_of_and_described(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(Scripted(hot(None), mode="15W"), GuardLimits(4, 85.0, 95.0, "MAXN_SUPER"), 0.0)
    assert len(guard.warnings) == 2
    assert "15W" in guard.warnings[0]
    assert "keeps 2 of 4 slots active" in guard.warnings[1]
    assert guard.verdict.active_slots == 2
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING][-2:] == list(guard.warnings)
    assert guard.describe()["power_mode"] == "15W"


def test_throttle_events_are_counted_when_they_begin(caplog: pytest.LogCaptureFixture) -> None:
    on = hot(88.0, throttle_reasons=("hw_thermal_slowdown",), gpu_clock_mhz=900.0, overcurrent_events=2)
    off = hot(80.0, throttle_reasons=(), overcurrent_events=2)
    again = hot(80.0, throttle_reasons=("hw_thermal_slowdown",), overcurrent_events=5)
    guard = Guard(Scripted(off, on, on, off, again), GuardLimits(4), 0.0)
    for second in range(1, 5):
        guard.poll(float(second))
    assert guard.throttle_events == {"hw_thermal_slowdown": 2, "over_current": 3}
    assert "hw_thermal_slowdown at 88.0 °C, GPU clock 900 MHz" in caplog.text


def test_memory_below_the_margin_refuses_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    short = DeviceReading("scripted", memory_available_bytes=500_000_000, memory_total_bytes=8_000_000_000)
    plenty = DeviceReading("scripted", memory_available_bytes=5_000_000_000, memory_total_bytes=8_000_000_000)
    guard = Guard(Scripted(plenty, short, short, plenty), GuardLimits(4, memory_margin_fraction=0.12), 0.0)
    assert guard.verdict.refusal is None
    assert "500 MB" in (guard.poll(1.0).refusal or "")
    assert guard.poll(2.0).memory_short
    assert guard.poll(3.0).refusal is None
    assert [record.getMessage()[:15] for record in caplog.records] == ["admission stops", "admission goes "]
