"""Which device this is and what it says: from files and a command, unknown is None, the same device keeps its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgebuild.tune.device import conditions, this_device
from edgert.cpu import cpu_clock_mhz
from edgert.guards.readings import DeviceReading


def make_root(root: Path, *, memory_kb: int = 16_000_000, model: str = "", board: str = "") -> Path:
    (root / "proc/device-tree").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {memory_kb} kB\nMemAvailable: 1000 kB\n")
    (root / "proc/cpuinfo").write_text(f"processor : 0\nmodel name : {model}\ncpu MHz : 2500.5\n")
    if board:
        (root / "proc/device-tree/model").write_text(f"{board}\0")
    return root


def no_command(_: Sequence[str]) -> str:
    raise OSError("not installed")


def test_a_cpu_is_known_by_its_name_cores_and_memory(tmp_path: Path) -> None:
    one = this_device("onnxruntime", root=make_root(tmp_path / "a", model="Cortex-A78"), run=no_command)
    assert (one.name, one.compute_capability, one.driver) == ("Cortex-A78", None, None)
    again = this_device(
        "onnxruntime", root=make_root(tmp_path / "b", model="Cortex-A78", memory_kb=15_990_000), run=no_command
    )
    assert again.identity == one.identity  # a kernel update takes a little memory
    other = this_device("onnxruntime", root=make_root(tmp_path / "c", model="Cortex-A55"), run=no_command)
    assert other.identity != one.identity


def test_a_gpu_is_known_by_its_name_and_a_new_driver_changes_nothing(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    old = this_device("tensorrt", root=root, run=lambda _: "NVIDIA H200, 9.0, 580.1\n")
    new = this_device("tensorrt", root=root, run=lambda _: "NVIDIA H200, 9.0, 590.2\n")
    assert (old.name, old.compute_capability, old.driver, new.driver) == ("NVIDIA H200", "9.0", "580.1", "590.2")
    assert old.identity == new.identity


def test_a_jetson_is_known_by_its_board(tmp_path: Path) -> None:
    found = this_device("tensorrt", root=make_root(tmp_path, board="NVIDIA Jetson AGX Orin"), run=no_command)
    assert (found.name, found.driver) == ("NVIDIA Jetson AGX Orin", None)


def test_a_machine_that_says_nothing_has_a_device_too(tmp_path: Path) -> None:
    found = this_device("onnxruntime", root=tmp_path, run=no_command)
    assert found.name
    assert found.memory_bytes is None
    assert cpu_clock_mhz(tmp_path) is None


def test_unknown_is_null_and_a_reading_may_come_as_json(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    found = conditions(DeviceReading("none", throttle_reasons=("sw_power_cap",)), root=root)
    assert found is not None
    assert (found.temperature_c, found.gpu_clock_mhz, found.cpu_clock_mhz) == (None, None, 2500.5)
    assert found.throttle_reasons == ("sw_power_cap",)
    crossed = conditions(
        {"sensors": "nvml", "temperature_c": 51.0, "power_w": None, "gpu_clock_mhz": 1980.0, "memory_clock_mhz": None,
         "throttle_reasons": [], "memory_available_bytes": 5, "cpu_clock_mhz": 3100.0},
        root=root,
    )  # fmt: skip
    assert crossed is not None
    assert (crossed.temperature_c, crossed.gpu_clock_mhz, crossed.throttle_reasons) == (51.0, 1980.0, ())
    assert crossed.cpu_clock_mhz == 3100.0  # of the time when the trial ran
    assert conditions(None) is None
