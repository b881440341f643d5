"""An NVIDIA GPU through NVML (nvidia-ml-py), else through one answer of nvidia-smi. Neither is required.

On unified memory (DGX Spark, Jetson) the GPU has no memory of its own to report: the driver says "not supported", or
[N/A], and the host's MemAvailable counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgert.guards.readings import DeviceReading, Run, run_command
from edgert.hostmemory import MEMINFO, available_bytes, total_bytes

# nvml.h, nvmlClocksEventReason*: bits that hold clocks down. Idle (0x1), clocks set by the user (0x2) and a display's
# setting (0x100) are no throttling.
THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
SMI_FIELDS = (
    "temperature.gpu",
    "power.draw",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "memory.free",
    "memory.total",
)


class NvmlSensors:
    """nvml: the module pynvml (tests give their own). index: of the GPU among those NVML sees, or its UUID."""

    name = "nvml"

    def __init__(self, nvml: Any, index: int | str = 0, meminfo: Path = MEMINFO) -> None:
        """Raises what NVML raises where there is no driver or no such GPU."""
        self._nvml = nvml
        self._meminfo = meminfo
        nvml.nvmlInit()
        by = nvml.nvmlDeviceGetHandleByUUID if isinstance(index, str) else nvml.nvmlDeviceGetHandleByIndex
        self._device = by(index)
        largest = self._ask("largest clock", [], lambda d: float(nvml.nvmlDeviceGetMaxClockInfo(d, 1)))
        self._largest_clock_mhz: float | None = largest  # of the chip: it does not change

    def read(self) -> DeviceReading:
        nvml, notes = self._nvml, list[str]()
        temperature = self._ask("temperature", notes, lambda d: float(nvml.nvmlDeviceGetTemperature(d, 0)))
        bits = self._ask("throttle reasons", notes, self._throttle_bits)
        free = self._ask("memory", notes, lambda d: int(nvml.nvmlDeviceGetMemoryInfo(d).free))
        unified = free is None
        total = None if unified else self._ask("memory", notes, lambda d: int(nvml.nvmlDeviceGetMemoryInfo(d).total))
        return DeviceReading(
            self.name,
            temperature_c=temperature,
            temperature_source=None if temperature is None else "gpu",
            power_w=self._ask("power", notes, lambda d: float(nvml.nvmlDeviceGetPowerUsage(d)) / 1e3),
            gpu_clock_mhz=self._ask("clock", notes, lambda d: float(nvml.nvmlDeviceGetClockInfo(d, 1))),
            memory_clock_mhz=self._ask("memory clock", notes, lambda d: float(nvml.nvmlDeviceGetClockInfo(d, 2))),
            throttle_reasons=None if bits is None else throttle_names(bits),
            memory_available_bytes=available_bytes(self._meminfo) if unified else free,
            memory_total_bytes=total_bytes(self._meminfo) if unified else total,
            gpu_clock_max_mhz=self._largest_clock_mhz,
            notes=tuple(notes),
        )

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return None, ()  # a discrete GPU has a power limit and no named mode

    def _throttle_bits(self, device: Any) -> int:
        # the name changed with driver 535; old bindings have only the old one
        new = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return int((new or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(device))

    def _ask(self, what: str, notes: list[str], call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._device)
        except Exception as error:  # NVMLError's subclasses are made at run time; a missing symbol is an AttributeError
            notes.append(f"{what}: {error}")
            return None


class SmiSensors:
    """One answer of nvidia-smi. For a look (`doctor`), not for every second: each reading starts a process."""

    name = "nvidia-smi"

    def __init__(self, index: int | str = 0, run: Run = run_command, meminfo: Path = MEMINFO) -> None:
        self._index = index
        self._run = run
        self._meminfo = meminfo

    def read(self) -> DeviceReading:
        command = (
            "nvidia-smi",
            f"--id={self._index}",
            f"--query-gpu={','.join(SMI_FIELDS)}",
            "--format=csv,noheader,nounits",
        )
        try:
            values, notes = parse_smi(self._run(command))
        except OSError as error:
            values, notes = dict.fromkeys(SMI_FIELDS), (f"nvidia-smi: {error}",)
        free, total, temperature = values["memory.free"], values["memory.total"], values["temperature.gpu"]
        unified = free is None
        bits = values["clocks_throttle_reasons.active"]
        return DeviceReading(
            self.name,
            temperature_c=temperature,
            temperature_source=None if temperature is None else "gpu",
            power_w=values["power.draw"],
            gpu_clock_mhz=values["clocks.sm"],
            memory_clock_mhz=values["clocks.mem"],
            gpu_clock_max_mhz=values["clocks.max.sm"],
            throttle_reasons=None if bits is None else throttle_names(int(bits)),
            memory_available_bytes=available_bytes(self._meminfo) if free is None else int(free * (1 << 20)),
            memory_total_bytes=total_bytes(self._meminfo) if unified or total is None else int(total * (1 << 20)),
            notes=notes,
        )

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return None, ()


def parse_smi(printed: str) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """The fields of one CSV line; what is not a number ([N/A], [Not Supported]) is None and a note."""
    line = next((line for line in printed.splitlines() if line.count(",") == len(SMI_FIELDS) - 1), None)
    if line is None:
        return dict.fromkeys(SMI_FIELDS), (f"nvidia-smi printed no reading: {printed.strip()[:80]!r}",)
    values: dict[str, float | None] = {}
    notes = []
    for name, text in zip(SMI_FIELDS, (part.strip() for part in line.split(",")), strict=True):
        try:
            values[name] = float(int(text, 16)) if text.lower().startswith("0x") else float(text)
        except ValueError:
            values[name] = None
            notes.append(f"nvidia-smi: {name} is {text}")
    return values, tuple(notes)


def throttle_names(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def visible_gpu(environment: Mapping[str, str] = os.environ) -> int | str:
    """Which GPU NVML should look at: CUDA's device 0 as CUDA_VISIBLE_DEVICES has it (a number, or a UUID)."""
    first = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith("GPU-"):
        return first
    return int(first) if first.isdecimal() else 0
