"""Sensors of an NVIDIA Jetson, read from sysfs under a root that tests replace, and nvpmodel.

Layout: Jetson Linux Developer Guide, "Power and Performance". Zones are matched by their `type`, never by number: the
numbers differ between modules and between boots. A zone whose block is powered down answers EAGAIN, one that was never
calibrated −256 °C; both are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from edgert.guards.readings import DeviceReading, Rail, Run, run_command
from edgert.hostmemory import available_bytes, total_bytes

# The junction zone is the maximum over the die that the hardware's own throttling goes by.
JUNCTION = "tj-thermal"
ZONES_BY_PREFERENCE = (JUNCTION, "gpu-thermal", "GPU-therm", "soc0-thermal", "cpu-thermal", "CPU-therm")
# What no chip reads while it runs: below is the −256 °C of an uncalibrated zone, above a sensor that is broken.
PLAUSIBLE_C = (-60.0, 150.0)
MODULE_RAILS = ("VDD_IN", "VIN", "POM_5V_IN")  # the rail that feeds the whole module, by its names over the boards
GPU_DEVFREQ = re.compile(r"gpu|ga10b|gv11b|gp10b|gb10b")
CONF_MODE = re.compile(r"<\s*POWER_MODEL\b[^>]*?\bID=(\d+)[^>]*?\bNAME=([^\s>]+)")


class JetsonSensors:
    """root: "/" on a device. run: starts nvpmodel."""

    name = "jetson"

    def __init__(self, root: Path = Path("/"), run: Run = run_command) -> None:
        self._root = root
        self._run = run

    @staticmethod
    def present(root: Path = Path("/")) -> bool:
        """Whether this is a Jetson: its release file, or a Tegra in the device tree."""
        model = _text(root / "proc/device-tree/compatible") or ""
        return (root / "etc/nv_tegra_release").exists() or "nvidia,tegra" in model

    def read(self) -> DeviceReading:
        notes: list[str] = []
        source, temperature = self._temperature(notes)
        rails = tuple(self._rails())
        module = [rail.power_w for rail in rails if rail.name in MODULE_RAILS]
        meminfo = self._root / "proc/meminfo"
        return DeviceReading(
            self.name,
            temperature_c=temperature,
            temperature_source=source,
            power_w=module[0] if module else None,
            rails=rails,
            gpu_clock_mhz=self._gpu_clock_mhz("cur_freq"),
            gpu_clock_max_mhz=self._gpu_clock_mhz("max_freq"),
            overcurrent_events=self._overcurrent_events(),
            memory_available_bytes=available_bytes(meminfo),
            memory_total_bytes=total_bytes(meminfo),
            notes=tuple(notes),
        )

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        try:
            printed = self._run(("nvpmodel", "-q"))
        except OSError as error:
            return None, (f"nvpmodel: {error}",)
        mode = parse_power_mode(printed, _text(self._root / "etc/nvpmodel.conf") or "")
        return (mode, ()) if mode else (None, (f"nvpmodel -q printed no mode: {printed.strip()[:80]!r}",))

    def _temperature(self, notes: list[str]) -> tuple[str | None, float | None]:
        """The junction; else GPU and CPU by preference; else the hottest zone that can be read."""
        zones: dict[str, float] = {}
        found = False
        for zone in sorted(self._glob("sys/class/thermal", "thermal_zone*")):
            found = True
            kind = _text(zone / "type")
            try:
                value = int((zone / "temp").read_text()) / 1000
            except (OSError, ValueError) as error:
                notes.append(f"thermal zone {kind or zone.name}: {_reason(error)}")
                continue
            if not PLAUSIBLE_C[0] < value < PLAUSIBLE_C[1]:
                notes.append(f"thermal zone {kind or zone.name}: {value:g} °C is no temperature")
            elif kind:
                zones[kind] = value
        for kind in ZONES_BY_PREFERENCE:
            if kind in zones:
                return kind, zones[kind]
        if zones:
            hottest = max(zones, key=lambda kind: zones[kind])
            return hottest, zones[hottest]
        notes.append("no thermal zone can be read" if found else "no thermal zone exists")
        return None, None

    def _rails(self) -> Iterator[Rail]:
        """INA3221 channels: millivolts × milliamperes."""
        for chip in sorted(self._glob("sys/class/hwmon", "hwmon*")):
            if not (_text(chip / "name") or "").startswith("ina"):
                continue
            for label in sorted(chip.glob("in*_label")):
                number = label.name[2 : -len("_label")]
                name = _text(label)
                volts, amperes = _number(chip / f"in{number}_input"), _number(chip / f"curr{number}_input")
                if name and volts is not None and amperes is not None:
                    yield Rail(name, volts * amperes / 1e6)

    def _gpu_clock_mhz(self, which: str) -> float | None:
        for device in sorted(self._glob("sys/class/devfreq", "*")):
            hertz = _number(device / which) if GPU_DEVFREQ.search(device.name) else None
            if hertz:
                return hertz / 1e6
        return None

    def _overcurrent_events(self) -> int | None:
        counts = [_number(path) for path in self._glob("sys/class/hwmon", "hwmon*/oc*_event_cnt")]
        known = [int(count) for count in counts if count is not None]
        return sum(known) if known else None

    def _glob(self, directory: str, pattern: str) -> Iterator[Path]:
        return (self._root / directory).glob(pattern)


def parse_power_mode(printed: str, conf: str) -> str | None:
    """The mode of `nvpmodel -q`: warnings may come first, then `NV Power Mode: NAME`, then the id on a line of its own.

    The name is the device's own: that which /etc/nvpmodel.conf gives the id (the same id is another mode on another
    module). Without the id, or without the file, the printed name.
    """
    named = re.search(r"^\s*NV Power Mode\s*:\s*(\S+)", printed, re.MULTILINE)
    after = printed[named.end() :] if named else printed
    number = re.search(r"^\s*(\d+)\s*$", after, re.MULTILINE)
    names = {int(found[1]): found[2] for found in CONF_MODE.finditer(conf)}
    if number and int(number[1]) in names:
        return names[int(number[1])]
    return named[1] if named else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip("\x00\n ") or None
    except OSError:
        return None


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
