"""Which device this is, what runs on it, and what it says about itself right now."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from edgert.cpu import board_name, cpu_clock_mhz, cpu_name
from edgert.guards.readings import DeviceReading, Run, run_command
from edgert.hostmemory import total_bytes
from edgert.manifest import BackendInfo

from edgebuild import __version__
from edgebuild.artifact import canonical_json
from edgebuild.tune.records import Conditions, DeviceId

_MIB = 1 << 20


def this_device(backend: str, *, root: Path = Path("/"), run: Run = run_command) -> DeviceId:
    """The device that an artifact for `backend` runs on here. Never raises: what cannot be read is None.

    Identity: what does not change over reboots. Memory is rounded to 256 MiB, since a kernel takes a little of it.
    """
    board = board_name(root)
    memory = total_bytes(root / "proc/meminfo")
    name, capability, driver = board or cpu_name(root) or platform.machine(), None, None
    if backend != "onnxruntime":
        gpu = _gpu(run)
        name, capability, driver = gpu or (board or "unknown GPU", None, None)
    fixed = {
        "name": name,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": None if memory is None else round(memory / (256 * _MIB)) * 256 * _MIB,
        "compute_capability": capability,
    }
    identity = hashlib.sha256(canonical_json(fixed)).hexdigest()
    return DeviceId(identity=identity, driver=driver, **fixed)  # type: ignore[arg-type]


def versions(backend: BackendInfo) -> dict[str, str]:
    """What a figure depends on beside the artifact."""
    found = {"edgebuild": __version__, "python": platform.python_version(), "backend": backend.version}
    for package in ("onnxruntime",) if backend.name == "onnxruntime" else ("tensorrt-rtx-cu13", "tensorrt"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def conditions(reading: DeviceReading | Mapping[str, object] | None, *, root: Path = Path("/")) -> Conditions | None:
    """A look at the device as the logbook keeps it.

    reading: taken here just now, or by a trial while it ran, as JSON and with the CPU's clock at that time.
    """
    if reading is None:
        return None
    if isinstance(reading, Mapping):
        seen = reading
    else:
        seen = {
            **{each.name: getattr(reading, each.name) for each in fields(reading)},
            "cpu_clock_mhz": cpu_clock_mhz(root),
        }
    throttle: Any = seen["throttle_reasons"]
    return Conditions.model_validate(
        {
            "sensors": seen["sensors"],
            "temperature_c": seen["temperature_c"],
            "power_w": seen["power_w"],
            "cpu_clock_mhz": seen.get("cpu_clock_mhz"),
            "gpu_clock_mhz": seen["gpu_clock_mhz"],
            "memory_clock_mhz": seen["memory_clock_mhz"],
            "throttle_reasons": None if throttle is None else tuple(throttle),
            "memory_available_bytes": seen["memory_available_bytes"],
        }
    )


def _gpu(run: Run) -> tuple[str, str | None, str | None] | None:
    """Name, compute capability and driver of the visible GPU, from nvidia-smi; None where it does not answer."""
    from edgert.guards.nvml import visible_gpu

    fields = "name,compute_cap,driver_version"
    try:
        text = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={visible_gpu()}"])
    except OSError:
        return None
    parts = [part.strip() for part in text.strip().splitlines()[0].split(",")] if text.strip() else []
    if len(parts) != 3 or not parts[0]:
        return None
    return parts[0], *(None if part in ("", "[N/A]") else part for part in parts[1:])  # type: ignore[return-value]
