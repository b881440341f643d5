"""The clock of the CPU now. Unknown is None, never 0."""

from __future__ import annotations

from pathlib import Path

CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
CPUINFO = "proc/cpuinfo"


def cpu_clock_mhz(root: Path = Path("/")) -> float | None:
    """Of the first core: cpufreq's, else what /proc/cpuinfo says; None where neither does."""
    try:
        return float((root / CPUFREQ).read_text()) / 1e3
    except (OSError, ValueError):
        pass
    try:
        for line in (root / CPUINFO).read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "cpu MHz":
                return float(value)
    except (OSError, ValueError):
        return None
    return None
