"""Where and how a figure was obtained: the part that every result file has in common. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from edgert.cpu import cpu_name

ROOT = Path(__file__).parent.parent


def environment(*packages: str, device: str | None = None) -> dict[str, Any]:
    """device, versions of Python and `packages`, clocks (GPU only), commit and command.

    device: a name that the caller knows better; else the processor.
    """
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    record: dict[str, Any] = {"device": device or processor(), "versions": versions}
    if clocks := gpu_clocks():
        record["clocks"] = clocks
    return record | {"commit": commit(), "command": " ".join(["python", *sys.argv])}


def saved(record: Mapping[str, Any], output: Path | None) -> str:
    """A result as text, written to `output` where one is given."""
    text = json.dumps(record, indent=1) + "\n"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    return text


def processor() -> str:
    """`2 x Intel(R) Xeon(R) Processor, Linux x86_64`."""
    name = cpu_name() or platform.processor() or platform.machine()
    return f"{os.cpu_count()} x {name}, {platform.system()} {platform.machine()}"


def commit() -> str:
    """What EDGEBUILD_COMMIT says (a copy of the checkout elsewhere), else the checkout's hash, else "unknown"."""
    if told := os.environ.get("EDGEBUILD_COMMIT"):
        return told
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def gpu_clocks() -> str | None:
    """Current and highest clocks and the driver, as nvidia-smi gives them; None without one."""
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu"
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        one = ["-i", visible] if visible else []
        command = ["nvidia-smi", *one, f"--query-gpu={query}", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return f"{query}: {result.stdout.strip()}" if result.returncode == 0 else None
