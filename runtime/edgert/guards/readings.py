"""What a device says about itself at one moment, and the protocol of whatever reads it. Unknown is None, never 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgert.hostmemory import MEMINFO, available_bytes, total_bytes

# Runs a command with a time limit and returns what it printed. Raises OSError when it is not installed or fails.
Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Rail:
    """One supply rail of a power monitor."""

    name: str
    power_w: float


@dataclass(frozen=True)
class DeviceReading:
    """One look at the device. None: this device, driver or sensor does not say.

    temperature_c           the hottest point that limits count against: junction, else GPU, else the hottest zone
    temperature_source      which sensor that was
    power_w                 whole module or board; rails: the parts that have a monitor of their own
    gpu_clock_mhz, memory_clock_mhz   as they run now; gpu_clock_max_mhz: the most that this power mode allows
    throttle_reasons        why clocks are held down now, by name; () = they are not
    overcurrent_events      times the hardware throttled on current since it was started (Jetson)
    memory_available_bytes  what can still be taken: MemAvailable on unified memory, the GPU's free memory else
    notes                   what could not be read, and why
    """

    sensors: str
    temperature_c: float | None = None
    temperature_source: str | None = None
    power_w: float | None = None
    rails: tuple[Rail, ...] = ()
    gpu_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    overcurrent_events: int | None = None
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    gpu_clock_max_mhz: float | None = None
    notes: tuple[str, ...] = ()


class Sensors(Protocol):
    """Reads one device. Never raises for what the device does not have: that is None and a note."""

    name: str

    def read(self) -> DeviceReading:
        """Cheap enough for once a second: files and library calls, no process."""

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        """Name of the power mode the device is in, and notes; may start a process. (None, ...) = unknown."""


class NoSensors:
    """A machine without device sensors. meminfo: the host's memory is the device's; None: that is unknown too."""

    name = "none"

    def __init__(self, meminfo: Path | None = MEMINFO, notes: tuple[str, ...] = ()) -> None:
        self._meminfo = meminfo
        self._notes = notes

    def read(self) -> DeviceReading:
        return DeviceReading(
            self.name,
            memory_available_bytes=available_bytes(self._meminfo) if self._meminfo else None,
            memory_total_bytes=total_bytes(self._meminfo) if self._meminfo else None,
            notes=self._notes,
        )

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return None, ()


def run_command(command: Sequence[str]) -> str:
    """The Run of a real machine: stdout, then stderr; at most five seconds."""
    import subprocess

    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer within 5 s") from None
    if done.returncode:
        raise OSError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[:200]}")
    return f"{done.stdout}\n{done.stderr}"
