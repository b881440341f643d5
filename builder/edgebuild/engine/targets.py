"""Where an engine can be built, and what it is built for: pure decisions, plus one look at what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgert.backends import trt_module

from edgebuild.errors import EngineError

# Compute capabilities that TensorRT-RTX 1.6 cannot name as a target but that run an engine built for another one.
# Measured on an H200 (9.0); NVIDIA's support matrix does not list it.
STAND_INS = {"9.0": "8.0"}


class TargetProfile(Protocol):
    """The two facts of a device profile that decide where its engine is built."""

    @property
    def backend(self) -> str: ...
    @property
    def compute_capability(self) -> str | None: ...


@dataclass(frozen=True)
class BuildPlace:
    """Whether this machine can build the engine, and if not, why and what to do instead."""

    possible: bool
    reason: str
    next_step: str | None = None


def sdk_available(flavour: str) -> bool:
    """Whether the TensorRT of this flavour can be imported here (its version: `trt_module.version`)."""
    return trt_module.version(flavour) is not None


def can_build_here(profile: TargetProfile) -> BuildPlace:
    """TensorRT-RTX builds ahead of time for another device; classic TensorRT builds only on the device itself."""
    backend = profile.backend
    if backend == "onnxruntime":
        return BuildPlace(True, "the onnxruntime backend runs the ONNX file itself: no engine to build")
    name = trt_module.module_name(backend)
    if not sdk_available(backend):
        return BuildPlace(
            False,
            f"the Python module {name} is not installed here",
            next_step="edgebuild resume ARTIFACT, on the device",
        )
    if backend == "tensorrt":
        found = device_capability()
        if found is None:
            return BuildPlace(False, "no NVIDIA GPU here", next_step="edgebuild resume ARTIFACT, on the device")
        wanted = profile.compute_capability
        if wanted is not None and found != wanted:
            return BuildPlace(
                False,
                f"this GPU has compute capability {found}, the profile asks for {wanted}",
                next_step="edgebuild resume ARTIFACT, on the device",
            )
    return BuildPlace(True, f"{name} {trt_module.version(backend)}")


def device_capability() -> str | None:
    """Compute capability of GPU 0 as `8.7`, or None when there is no driver or no device."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError:  # the bindings look for libcuda at the first call and find none
        return None
    if status != driver.CUresult.CUDA_SUCCESS:
        return None
    error, device = driver.cuDeviceGet(0)
    if error != driver.CUresult.CUDA_SUCCESS:
        return None
    attribute = driver.CUdevice_attribute
    _, major = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    _, minor = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return f"{major}.{minor}"


def target_names(capabilities: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """`("8.9",)` → `("SM89",)`; `known` are the enum members the library has. Raises EngineError for an unknown one."""
    names: list[str] = []
    for capability in capabilities:
        name = "SM" + STAND_INS.get(capability, capability).replace(".", "")
        if name not in known:
            listed = ", ".join(f"{n[2:-1]}.{n[-1]}" for n in sorted(known, key=lambda n: int(n[2:])))
            raise EngineError(
                f"this TensorRT-RTX cannot build for compute capability {capability}", hint=f"it knows {listed}"
            )
        if name not in names:
            names.append(name)
    return tuple(names)
