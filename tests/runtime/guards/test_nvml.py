"""NVML and nvidia-smi, as a driver, a half driver and none answer. Unknown is None."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edgert.guards import detect
from edgert.guards.nvml import THROTTLE_REASONS, NvmlSensors, SmiSensors, parse_smi, throttle_names, visible_gpu
from edgert.guards.readings import NoSensors


class NotSupported(Exception):
    pass


class FakeNvml:
    """A GPU at 71 °C that is throttled by heat. unsupported: calls that answer NVML_ERROR_NOT_SUPPORTED."""

    def __init__(self, *unsupported: str) -> None:
        self._unsupported = unsupported
        self.asked: list[Any] = []

    def _or_raise(self, name: str, value: Any) -> Any:
        if name in self._unsupported:
            raise NotSupported("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self._or_raise("init", None)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked.append(index)
        return "gpu"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "gpu"

    def nvmlDeviceGetTemperature(self, _device: str, _kind: int) -> int:
        return int(self._or_raise("temperature", 71))

    def nvmlDeviceGetPowerUsage(self, _device: str) -> int:
        return int(self._or_raise("power", 350_500))

    def nvmlDeviceGetClockInfo(self, _device: str, kind: int) -> int:
        return int(self._or_raise("clock", {1: 1830, 2: 3201}[kind]))

    def nvmlDeviceGetMaxClockInfo(self, _device: str, kind: int) -> int:
        return int(self._or_raise("clock", {1: 1980}[kind]))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _device: str) -> int:
        return int(self._or_raise("throttle", 0x1 | 0x4 | 0x20))

    def nvmlDeviceGetMemoryInfo(self, _device: str) -> Any:
        return self._or_raise("memory", SimpleNamespace(free=100 << 30, total=141 << 30))


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "proc/meminfo"
    path.parent.mkdir()
    path.write_text("MemTotal: 8000000 kB\nMemFree: 400000 kB\nMemAvailable: 5000000 kB\n")
    return path


def test_a_full_reading() -> None:
    reading = NvmlSensors(FakeNvml()).read()
    assert (reading.temperature_c, reading.power_w) == (71.0, 350.5)
    assert (reading.gpu_clock_mhz, reading.memory_clock_mhz, reading.gpu_clock_max_mhz) == (1830.0, 3201.0, 1980.0)
    assert reading.throttle_reasons == ("sw_power_cap", "sw_thermal_slowdown")
    assert reading.memory_available_bytes == 100 << 30
    assert reading.notes == ()


def test_what_the_driver_does_not_support_is_none_and_never_zero(meminfo: Path) -> None:
    nvml = FakeNvml("temperature", "power", "clock", "throttle", "memory")
    reading = NvmlSensors(nvml, meminfo=meminfo).read()
    assert (reading.temperature_c, reading.power_w, reading.gpu_clock_mhz, reading.throttle_reasons) == (None,) * 4
    assert reading.gpu_clock_max_mhz is None
    assert reading.memory_available_bytes == 5_000_000 * 1024, "on unified memory MemAvailable counts"
    assert len(reading.notes) == 6


def test_the_gpu_is_the_one_that_cuda_sees_first() -> None:
    assert visible_gpu({}) == 0
    assert visible_gpu({"CUDA_VISIBLE_DEVICES": "3,1"}) == 3
    assert visible_gpu({"CUDA_VISIBLE_DEVICES": "GPU-8f,GPU-9a"}) == "GPU-8f"
    nvml = FakeNvml()
    NvmlSensors(nvml, 3)
    NvmlSensors(nvml, "GPU-8f")
    assert nvml.asked == [3, "GPU-8f"]


def test_the_bits_are_nvmls_own() -> None:
    pynvml = pytest.importorskip("pynvml")
    named = {
        "sw_power_cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
        "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "sync_boost": pynvml.nvmlClocksThrottleReasonSyncBoost,
        "sw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "hw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hw_power_brake_slowdown": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    assert {name: bit for bit, name in THROTTLE_REASONS.items()} == named


def test_bits_that_do_not_throttle_are_no_reason() -> None:
    assert throttle_names(0) == throttle_names(0x1 | 0x2 | 0x100) == ()


def test_nvidia_smi_absent_or_not_applicable(meminfo: Path) -> None:
    def absent(command: Sequence[str]) -> str:
        raise FileNotFoundError(command[0])

    reading = SmiSensors(run=absent, meminfo=meminfo).read()
    assert reading.temperature_c is None
    assert reading.memory_available_bytes == 5_000_000 * 1024
    assert "nvidia-smi" in reading.notes[0]
    line = "47, 11.20, 2418, [N/A], 2520, 0x0000000000000001, [N/A], [N/A]\n"
    spark = SmiSensors(run=lambda _command: line, meminfo=meminfo).read()
    assert (spark.temperature_c, spark.memory_clock_mhz, spark.throttle_reasons) == (47.0, None, ())
    assert (spark.gpu_clock_mhz, spark.gpu_clock_max_mhz) == (2418.0, 2520.0)
    assert spark.memory_available_bytes == 5_000_000 * 1024
    h200 = "40, 60, 1980, 2619, 1980, 0x4, 140000, 143771"
    assert SmiSensors(run=lambda _command: h200, meminfo=meminfo).read().throttle_reasons == ("sw_power_cap",)


@pytest.mark.parametrize("printed", ["", "No devices were found\n", "a, b\n"])
def test_nvidia_smi_that_prints_something_else_is_unknown(printed: str) -> None:
    values, notes = parse_smi(printed)
    assert set(values.values()) == {None}
    assert notes


def test_a_gpu_without_any_reader_is_unknown_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_nvml", lambda: None)
    reading = detect.detect_sensors(gpu=True, root=tmp_path).read()
    assert (reading.temperature_c, reading.memory_available_bytes) == (None, None)
    assert "nvidia-ml-py is not installed" in reading.notes[0]
    assert detect.detect_sensors(gpu=True, once=True, root=tmp_path).name == "nvidia-smi"
    monkeypatch.setattr(detect, "_nvml", lambda: FakeNvml("init"))
    assert detect.detect_sensors(gpu=True, root=tmp_path).read().notes == ("NVML: Not Supported",)
    monkeypatch.setattr(detect, "_nvml", lambda: FakeNvml())
    assert detect.detect_sensors(gpu=True, root=tmp_path).name == "nvml"


def test_a_cpu_artifact_reads_the_hosts_memory(meminfo: Path) -> None:
    reading = detect.detect_sensors(gpu=False, root=meminfo.parent.parent).read()
    assert reading == NoSensors(meminfo).read()
    assert reading.memory_available_bytes == 5_000_000 * 1024
