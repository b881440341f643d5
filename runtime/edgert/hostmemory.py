"""What the operating system says about memory. Unknown is None, never 0.

On unified memory MemAvailable counts, not MemFree: caches are given back when they are needed. In a container the
limit of its control group counts where it is lower; it is looked for beside the meminfo file, so that a fake root has
its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from edgert.cgroup import memory_groups

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """MemAvailable, or less where a control group leaves less; None where the system does not say."""
    found = _line(meminfo, "MemAvailable:")
    if found is None:
        return None
    groups = memory_groups(_root(meminfo))
    return min([found, *(max(0, each.limit_bytes - (each.used_bytes or 0)) for each in groups)])


def total_bytes(meminfo: Path = MEMINFO) -> int | None:
    """MemTotal, or the lowest limit of a control group; None where the system does not say."""
    found = _line(meminfo, "MemTotal:")
    return None if found is None else min([found, *(each.limit_bytes for each in memory_groups(_root(meminfo)))])


def _root(meminfo: Path) -> Path:
    """The root under which `proc/meminfo` lies."""
    return meminfo.parent.parent


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
