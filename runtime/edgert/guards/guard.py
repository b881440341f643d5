"""The guard that the worker asks before it admits: polls the sensors at most once a second and logs every change.

Between two polls `poll` is one comparison. It knows neither queue nor backend.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from edgert.guards.policy import (
    Change,
    ThermalRules,
    ThermalState,
    first_state,
    memory_refusal,
    next_thermal,
    power_mode_warning,
)
from edgert.guards.readings import DeviceReading, Sensors

log = logging.getLogger("edgert.guards")

POLL_S = 1.0


@dataclass(frozen=True)
class Verdict:
    """What may be admitted now. active_slots: running sequences at most. refusal: why none at all, or None.

    memory_short  the refusal is for memory: waiting does not help where nothing of ours runs
    """

    active_slots: int
    refusal: str | None = None
    memory_short: bool = False


@dataclass(frozen=True)
class GuardLimits:
    """From scheduler.yaml. slot_bytes: memory that a sequence may touch which no sequence touched before."""

    slots: int
    soft_temperature_c: float | None = None
    hard_temperature_c: float | None = None
    power_mode: str | None = None
    memory_margin_fraction: float = 0.0
    slot_bytes: int = 0


class Guard:
    """One per engine, on the engine's thread. The clock is the caller's: it passes now_s."""

    def __init__(
        self, sensors: Sensors, limits: GuardLimits, now_s: float, *, rules: ThermalRules | None = None
    ) -> None:
        """Reads the power mode (may start a process) and takes the first reading; logs what is unknown or wrong."""
        self.sensors = sensors
        self.limits = limits
        self.rules = rules or ThermalRules(limits.slots, limits.soft_temperature_c, limits.hard_temperature_c)
        self.thermal: ThermalState = first_state(self.rules, now_s)
        self.changes = 0
        self.throttle_events: dict[str, int] = {}
        self.power_mode, notes = sensors.power_mode()
        self.reading: DeviceReading
        self.verdict = Verdict(limits.slots)
        self._throttling: frozenset[str] = frozenset()
        self._overcurrent: int | None = None
        self._next_s = now_s
        self._was_short = False
        self.poll(now_s)
        self.warnings = tuple(self._warnings())
        for warning in self.warnings:
            log.warning("%s", warning)
        for note in (*notes, *self.reading.notes):
            log.info("%s: %s", sensors.name, note)

    def poll(self, now_s: float) -> Verdict:
        """The verdict as of the latest reading, taken anew once a second."""
        if now_s < self._next_s:
            return self.verdict
        self._next_s = now_s + POLL_S
        self.reading = reading = self.sensors.read()
        self.thermal, change = next_thermal(self.rules, self.thermal, now_s, reading.temperature_c)
        if change is not None:
            self.changes += 1
            _log_change(change, reading)
        self._count_throttling(reading)
        limits = self.limits
        short = memory_refusal(
            reading.memory_available_bytes, reading.memory_total_bytes, limits.memory_margin_fraction, limits.slot_bytes
        )
        if (short is not None) != self._was_short:
            self._was_short = short is not None
            log.warning("admission stops: %s", short) if short else log.warning("admission goes on: memory is back")
        hot = None if self.thermal.prefill else f"the device is at its hard limit ({_celsius(reading.temperature_c)})"
        self.verdict = Verdict(self.thermal.slots, hot or short, memory_short=short is not None)
        return self.verdict

    def describe(self) -> dict[str, object]:
        """For Engine.describe() and reports: the sensors, the modes, what is wrong."""
        return {
            "sensors": self.sensors.name,
            "power_mode": self.power_mode,
            "expected_power_mode": self.limits.power_mode,
            "soft_temperature_c": self.limits.soft_temperature_c,
            "hard_temperature_c": self.limits.hard_temperature_c,
            "temperature_c": self.reading.temperature_c,
            "active_slots": self.verdict.active_slots,
        }

    def _warnings(self) -> list[str]:
        warnings = []
        mode = power_mode_warning(self.limits.power_mode, self.power_mode)
        if mode:
            warnings.append(mode)
        if self.rules.limited and self.reading.temperature_c is None:
            why = "; ".join(self.reading.notes) or "this machine has no such sensor"
            warnings.append(
                f"no temperature can be read ({why}): the thermal guard is blind and keeps {self.rules.blind_slots} of "
                f"{self.rules.slots} slots active"
            )
        return warnings

    def _count_throttling(self, reading: DeviceReading) -> None:
        """An event is a reason that was not there at the poll before; over-current is counted by the hardware."""
        reasons = frozenset(reading.throttle_reasons or ())
        for reason in sorted(reasons - self._throttling):
            self.throttle_events[reason] = self.throttle_events.get(reason, 0) + 1
            log.warning(
                "the hardware throttles: %s at %s, GPU clock %s MHz",
                reason,
                _celsius(reading.temperature_c),
                "unknown" if reading.gpu_clock_mhz is None else f"{reading.gpu_clock_mhz:.0f}",
            )
        self._throttling = reasons
        before, self._overcurrent = self._overcurrent, reading.overcurrent_events
        if before is not None and reading.overcurrent_events is not None:
            new = reading.overcurrent_events - before
            if new > 0:
                self.throttle_events["over_current"] = self.throttle_events.get("over_current", 0) + new
                log.warning("the hardware throttled on current %d times since the last look", new)


def _celsius(temperature_c: float | None) -> str:
    return "unknown temperature" if temperature_c is None else f"{temperature_c:.1f} °C"


def _log_change(change: Change, reading: DeviceReading) -> None:
    before, after = change.before, change.after
    admission = "" if before.prefill == after.prefill else f", admission {'on' if after.prefill else 'off'}"
    log.warning(
        "active slots %d -> %d%s: %s (%s), %s",
        before.slots,
        after.slots,
        admission,
        _celsius(change.temperature_c),
        reading.temperature_source or reading.sensors,
        change.reason,
    )
