"""What the diagnosis tests share: sensors that say what a test says, and the check that a symptom was named."""

from __future__ import annotations

from collections.abc import Sequence

from edgert.diagnosis import Finding
from edgert.guards.readings import DeviceReading

GB = 1_000_000_000
COOL = DeviceReading(
    "fake",
    temperature_c=50.0,
    temperature_source="tj-thermal",
    throttle_reasons=(),
    memory_available_bytes=5 * GB,
    memory_total_bytes=8 * GB,
)


class Sensed:
    """Sensors that give these readings one after the other, and the last one for good."""

    name = "fake"

    def __init__(self, *readings: DeviceReading, mode: str | None = None) -> None:
        self._readings, self._mode = list(readings), mode

    def read(self) -> DeviceReading:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return self._mode, ()


def named(found: Sequence[Finding], symptom: str) -> Finding:
    """The one finding, which has this name and says what to do next."""
    assert [each.symptom for each in found] == [symptom], found
    assert found[0].next_step
    return found[0]
