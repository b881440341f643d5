"""Memory of a container: the limits of its control groups, in both versions, under a fake root."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgert.guards.readings import NoSensors
from edgert.hostmemory import available_bytes, total_bytes

MB = 1_000_000
NONE_V1 = "9223372036854771712\n"


def root(tmp_path: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine with 8 GB of which 5 GB are available, and these files; returns its meminfo."""
    files = {"proc/meminfo": "MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 5000000 kB\n", **files}
    if groups:
        files["proc/self/cgroup"] = groups
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "proc/meminfo"


def v2(folder: str, limit: str, used: int = 0, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup{folder}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": f"anon 1\nfile {inactive}\ninactive_file {inactive}\n",
    }


def v1(folder: str, limit: str, used: int = 0, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": f"{used}\n",
        f"{base}/memory.stat": f"inactive_file 0\ntotal_inactive_file {inactive}\n",
    }


V1_LINES = "5:cpu,cpuacct:/\n4:memory:/docker/ab\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "available_mb", "total_mb"),
    [
        ("", {}, 5120, 8192),
        ("0::/app\n", v2("/app", "max"), 5120, 8192),
        ("0::/app\n", v2("/app", str(2000 * MB), 700 * MB, 200 * MB), 1500, 2000),
        ("0::/app\n", v2("/app", str(9000 * MB), 100 * MB), 5120, 8192),
        ("0::/a/b\n", v2("/a/b", "max") | v2("/a", str(3000 * MB), 500 * MB), 2500, 3000),
        ("0::/\n", v2("", str(1000 * MB), 1200 * MB), 0, 1000),
        ("0::/../host\n", v2("", str(1000 * MB), 100 * MB), 900, 1000),
        (V1_LINES, v1("/docker/ab", NONE_V1), 5120, 8192),
        (V1_LINES, v1("/docker/ab", str(2000 * MB), 700 * MB, 200 * MB), 1500, 2000),
        # without a namespace of its own the container sees the host's path, and its group at the mount
        (V1_LINES, v1("", str(2000 * MB), 500 * MB), 1500, 2000),
        ("garbage\n0::\n4:memory\n", {}, 5120, 8192),
        ("0::/app\n", {"sys/fs/cgroup/app/memory.max": f"{2000 * MB}\n"}, 2000, 2000),
        ("0::/app\n", {"sys/fs/cgroup/app/memory.max": "a lot\n"}, 5120, 8192),
    ],
)
def test_the_lower_of_the_machine_and_every_group_counts(
    tmp_path: Path, groups: str, files: dict[str, str], available_mb: int, total_mb: int
) -> None:
    meminfo = root(tmp_path, groups, files)
    assert available_bytes(meminfo) == pytest.approx(available_mb * MB, abs=1)
    assert total_bytes(meminfo) == pytest.approx(total_mb * MB, abs=1)


def test_a_guard_in_a_container_goes_by_the_containers_memory(tmp_path: Path) -> None:
    meminfo = root(tmp_path, "0::/app\n", v2("/app", str(2000 * MB), 1900 * MB))
    reading = NoSensors(meminfo).read()
    assert (reading.memory_available_bytes, reading.memory_total_bytes) == (100 * MB, 2000 * MB)


def test_what_the_machine_does_not_say_stays_unknown(tmp_path: Path) -> None:
    meminfo = root(tmp_path, "0::/app\n", v2("/app", str(2000 * MB)))
    meminfo.write_text("MemFree: 1 kB\n")
    assert available_bytes(meminfo) is None
    assert total_bytes(meminfo) is None
