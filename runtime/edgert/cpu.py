"""The name and the clock of the host's CPU and board. Unknown is None, never 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
BOARD = "proc/device-tree/model"
NAMES = ("model name", "Model", "CPU part")  # x86; some ARM boards; the others


def board_name(root: Path = Path("/")) -> str | None:
    """The board as its device tree names it (`NVIDIA Jetson AGX Orin`); None on a PC."""
    return _text(root / BOARD).replace("\0", "").strip() or None


def cpu_name(root: Path = Path("/")) -> str | None:
    """What /proc/cpuinfo calls the processor."""
    found = dict(_cpuinfo(root))
    return next((found[name] for name in NAMES if found.get(name)), None)


def cpu_clock_mhz(root: Path = Path("/")) -> float | None:
    """Of the first core: cpufreq's, else what /proc/cpuinfo says; None where neither does."""
    clocks = ((_text(root / CPUFREQ), 1e3), (dict(_cpuinfo(root)).get("cpu MHz", ""), 1.0))
    for text, divisor in clocks:
        try:
            return float(text) / divisor
        except ValueError:
            continue
    return None


def _cpuinfo(root: Path) -> Iterator[tuple[str, str]]:
    """The `key : value` lines of the first core, and those after the last one."""
    seen = set()
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() not in seen:
            seen.add(key.strip())
            yield key.strip(), value.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
