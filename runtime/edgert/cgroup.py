"""What a container may use of the memory: the limits of this process's control groups, version 2 and 1.

A limit counts at every level above the process too. Knows files only; no limit, or files that are not there, is ().
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60  # version 1 writes 2^63 less a page for "no limit"


@dataclass(frozen=True)
class Version:
    """Where the kernel puts a version's files, and what they are called."""

    mount: str
    limit: str
    usage: str
    reclaimable: str  # in memory.stat: file pages that go as soon as somebody needs the room


V2 = Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
V1 = Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True)
class MemoryGroup:
    """One group with a limit. used_bytes: without what can be reclaimed; None = it does not say."""

    limit_bytes: int
    used_bytes: int | None


def memory_groups(root: Path) -> tuple[MemoryGroup, ...]:
    """Every limited group that this process is in; root: "/" on a real machine."""
    return tuple(group for folder, version in _folders(root) for group in _group(folder, version))


def _folders(root: Path) -> Iterator[tuple[Path, Version]]:
    """The process's group of each version and those above it, up to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, name = parts
        version = V2 if controllers == "" else V1 if "memory" in controllers.split(",") else None
        if version is None:
            continue
        # a path that is not below the mount names the host's tree: inside the container the mount is the group
        path = PurePosixPath(name.lstrip("/"))
        for below in (path, *path.parents):
            if ".." not in below.parts:
                yield root / version.mount / below, version


def _group(folder: Path, version: Version) -> Iterator[MemoryGroup]:
    limit = _number(folder / version.limit)
    if limit is None or limit >= UNLIMITED:
        return
    usage = _number(folder / version.usage)
    used = None if usage is None else max(0, usage - (_stat(folder / "memory.stat", version.reclaimable) or 0))
    yield MemoryGroup(limit, used)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _stat(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return None
    return None
