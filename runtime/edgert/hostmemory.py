"""What the operating system says about memory. Unknown is None, never 0.

On unified memory MemAvailable counts, not MemFree: caches are given back when they are needed.
"""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """MemAvailable, or None where the system does not say."""
    return _line(meminfo, "MemAvailable:")


def total_bytes(meminfo: Path = MEMINFO) -> int | None:
    """MemTotal, or None where the system does not say."""
    return _line(meminfo, "MemTotal:")


def _line(meminfo: Path, name: str) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def resident_bytes(statm: Path = STATM) -> int | None:
    """Memory of this process that is in RAM, or None where the system does not say."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
