"""Which sensors this machine has. The order: a Jetson's own, NVML, nvidia-smi (one look only), none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgert.guards.jetson import JetsonSensors
from edgert.guards.nvml import NvmlSensors, SmiSensors, visible_gpu
from edgert.guards.readings import NoSensors, Run, Sensors, run_command


def detect_sensors(*, gpu: bool, once: bool = False, root: Path = Path("/"), run: Run = run_command) -> Sensors:
    """Never raises.

    gpu   the artifact runs on a GPU; a CPU artifact on a host with a GPU is not guarded by that GPU's temperature
    once  for one look: nvidia-smi is good enough where nvidia-ml-py is not installed
    """
    if JetsonSensors.present(root):
        return JetsonSensors(root, run)
    meminfo = root / "proc/meminfo"
    if not gpu:
        return NoSensors(meminfo)
    nvml = _nvml()
    if nvml is not None:
        try:
            return NvmlSensors(nvml, visible_gpu(), meminfo)
        except Exception as error:  # NVMLError's subclasses are made at run time: no driver, no GPU
            return NoSensors(None, (f"NVML: {error}",))
    if once:
        return SmiSensors(visible_gpu(), run, meminfo)
    return NoSensors(None, ("nvidia-ml-py is not installed: temperature and memory of the GPU are unknown",))


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
