"""A Jetson as a directory of files: what is read, what is skipped, and that unknown stays unknown."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from edgert.guards.detect import detect_sensors
from edgert.guards.jetson import JetsonSensors, parse_power_mode

CONF = """\
# the Orin Nano's own list
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< PM_CONFIG DEFAULT=1 >
"""


def absent(command: Sequence[str]) -> str:
    raise FileNotFoundError(f"{command[0]}: not found")


def device(root: Path, zones: dict[str, str]) -> Path:
    """zones: type → what its temp file holds."""
    for number, (kind, temperature) in enumerate(zones.items()):
        zone = root / f"sys/class/thermal/thermal_zone{number}"
        zone.mkdir(parents=True)
        (zone / "type").write_text(f"{kind}\n")
        (zone / "temp").write_text(f"{temperature}\n")
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text("MemTotal: 8000000 kB\nMemFree: 400000 kB\nMemAvailable: 5000000 kB\n")
    return root


def again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The temp file of the zones of this type answers EAGAIN."""
    read = Path.read_text

    def fake(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "temp" and read(path.with_name("type")).strip() == kind:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", fake)


def test_the_junction_counts_whatever_number_its_zone_has(tmp_path: Path) -> None:
    root = device(tmp_path, {"cpu-thermal": "51000", "gpu-thermal": "63500", "tj-thermal": "64125"})
    reading = JetsonSensors(root, absent).read()
    assert (reading.temperature_source, reading.temperature_c) == ("tj-thermal", 64.125)
    assert reading.notes == ()


def test_a_zone_that_answers_eagain_or_minus_256_is_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = device(tmp_path, {"gpu-thermal": "0", "tj-thermal": "-256000", "cpu-thermal": "48500"})
    again(monkeypatch, "gpu-thermal")
    reading = JetsonSensors(root, absent).read()
    assert (reading.temperature_source, reading.temperature_c) == ("cpu-thermal", 48.5)
    assert any("gpu-thermal" in note and "unavailable" in note for note in reading.notes)
    assert any("tj-thermal" in note and "-256 °C" in note for note in reading.notes)


def test_without_a_preferred_zone_the_hottest_counts(tmp_path: Path) -> None:
    reading = JetsonSensors(device(tmp_path, {"soc1-thermal": "50000", "cv0-thermal": "55000"}), absent).read()
    assert (reading.temperature_source, reading.temperature_c) == ("cv0-thermal", 55.0)


@pytest.mark.parametrize("zones", [{}, {"tj-thermal": "-256000"}, {"tj-thermal": "hot"}])
def test_none_readable_is_unknown_and_said(tmp_path: Path, zones: dict[str, str]) -> None:
    reading = JetsonSensors(device(tmp_path, zones), absent).read()
    assert reading.temperature_c is None
    assert "no thermal zone" in reading.notes[-1]


def test_memavailable_counts_and_not_memfree(tmp_path: Path) -> None:
    reading = JetsonSensors(device(tmp_path, {}), absent).read()
    assert reading.memory_available_bytes == 5_000_000 * 1024
    assert reading.memory_total_bytes == 8_000_000 * 1024


def test_rails_clock_and_over_current(tmp_path: Path) -> None:
    root = device(tmp_path, {"tj-thermal": "50000"})
    chip = root / "sys/class/hwmon/hwmon3"
    chip.mkdir(parents=True)
    (chip / "name").write_text("ina3221\n")
    for number, (name, millivolts, milliamperes) in enumerate((("VDD_IN", 5000, 2400), ("VDD_CPU", 5000, 600)), 1):
        (chip / f"in{number}_label").write_text(name)
        (chip / f"in{number}_input").write_text(str(millivolts))
        (chip / f"curr{number}_input").write_text(str(milliamperes))
    (chip / "in7_label").write_text("sum of shunt voltages")
    (chip / "oc1_event_cnt").write_text("2")
    (chip / "oc3_event_cnt").write_text("1")
    clock = root / "sys/class/devfreq/17000000.gpu"
    clock.mkdir(parents=True)
    (clock / "cur_freq").write_text("612000000")
    (clock / "max_freq").write_text("1020000000")
    reading = JetsonSensors(root, absent).read()
    assert reading.power_w == 12.0
    assert {rail.name: rail.power_w for rail in reading.rails} == {"VDD_IN": 12.0, "VDD_CPU": 3.0}
    assert (reading.gpu_clock_mhz, reading.gpu_clock_max_mhz, reading.overcurrent_events) == (612.0, 1020.0, 3)


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    reading = JetsonSensors(device(tmp_path, {"tj-thermal": "50000"}), absent).read()
    assert (reading.power_w, reading.gpu_clock_mhz, reading.overcurrent_events) == (None, None, None)
    assert reading.throttle_reasons is None


@pytest.mark.parametrize(
    ("printed", "conf", "mode"),
    [
        ("NV Power Mode: MAXN_SUPER\n2\n", CONF, "MAXN_SUPER"),
        ("NV Power Mode: MODE_25W\n1\n", CONF, "25W"),
        ("NVPM WARN: fan mode is not set!\nNV Power Mode: MAXN_SUPER\n2\n", CONF, "MAXN_SUPER"),
        ("NV Fan Mode:quiet\nNV Power Mode: 15W\n0\n", CONF, "15W"),
        ("NV Power Mode: MAXN_SUPER\n2\n\nNVPM WARN: 3 things\n", CONF, "MAXN_SUPER"),
        ("NV Power Mode: MAXN\n0\n", "", "MAXN"),
        ("NV Power Mode: 30W\n7\n", CONF, "30W"),
        ("2\n", CONF, "MAXN_SUPER"),
        ("NVPM ERROR: no permission\n", CONF, None),
        ("", "", None),
    ],
)
def test_the_mode_is_named_as_the_devices_own_configuration_names_it(printed: str, conf: str, mode: str | None) -> None:
    assert parse_power_mode(printed, conf) == mode


def test_nvpmodel_that_is_not_installed_is_unknown_and_said(tmp_path: Path) -> None:
    mode, notes = JetsonSensors(tmp_path, absent).power_mode()
    assert mode is None
    assert "nvpmodel" in notes[0]


def test_a_jetson_is_known_by_its_release_file(tmp_path: Path) -> None:
    assert detect_sensors(gpu=True, root=device(tmp_path, {}), once=True, run=absent).name != "jetson"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3\n")
    assert detect_sensors(gpu=False, root=tmp_path).name == "jetson"
