"""CUDA as this runtime uses it: memory, one stream, events, graph capture; a thin layer over cuda-bindings.

Every call's status is checked; a failure is a `CudaError` that names the call and CUDA's own reason. This module knows
nothing of engines, cells or tokens. It is imported only by the tensorrt backend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import runtime as rt

from edgert.errors import BackendError

Bytes = npt.NDArray[np.uint8]
TO_DEVICE = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
TO_HOST = rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
ON_DEVICE = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice


class CudaError(BackendError):
    """A CUDA call failed; `reason` is the name that CUDA gives the failure."""

    def __init__(self, call: str, status: Any) -> None:
        _, name = rt.cudaGetErrorName(status)
        _, text = rt.cudaGetErrorString(status)
        self.reason = name.decode() if isinstance(name, bytes) else str(name)
        words = text.decode() if isinstance(text, bytes) else str(text)
        hint = None
        if self.reason in ("cudaErrorInsufficientDriver", "cudaErrorNoDevice"):
            hint = "this machine has no NVIDIA GPU, or a driver older than the CUDA of cuda-bindings"
        super().__init__(f"{call}: {self.reason} ({words})", hint=hint)


def check(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a cuda-bindings result tuple (status, value ...). Raises CudaError."""
    if result[0] != rt.cudaError_t.cudaSuccess:
        raise CudaError(call, result[0])
    if len(result) == 2:
        return result[1]
    return result[1:] or None


@dataclass(frozen=True)
class DeviceInfo:
    """GPU 0 as CUDA names it. driver: the CUDA version that the driver speaks, as 13000."""

    name: str
    compute_capability: str
    driver: int
    total_bytes: int


def device_info() -> DeviceInfo:
    """Raises CudaError without a driver or a device."""
    properties = check("cudaGetDeviceProperties", rt.cudaGetDeviceProperties(0))
    name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
    return DeviceInfo(
        name=name.rstrip("\0"),
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=int(check("cudaDriverGetVersion", rt.cudaDriverGetVersion())),
        total_bytes=int(properties.totalGlobalMem),
    )


def free_bytes() -> int:
    """Device memory that is free now, other processes counted in."""
    free, _ = check("cudaMemGetInfo", rt.cudaMemGetInfo())
    return int(free)


class DeviceMemory:
    """One allocation at a fixed address, zeroed."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 256)
        self.address = int(check(f"cudaMalloc({self.size} bytes)", rt.cudaMalloc(self.size)))
        check("cudaMemset", rt.cudaMemset(self.address, 0, self.size))

    def free(self) -> None:
        if self.address:
            check("cudaFree", rt.cudaFree(self.address))
            self.address = 0


class PinnedMemory:
    """Page-locked host memory, seen by numpy as `bytes`."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 64)
        self.address = int(check(f"cudaHostAlloc({self.size} bytes)", rt.cudaHostAlloc(self.size, 0)))
        buffer = (ctypes.c_uint8 * self.size).from_address(self.address)
        self.bytes: Bytes = np.ctypeslib.as_array(buffer)
        self.bytes[:] = 0

    def free(self) -> None:
        if self.address:
            self.bytes = np.zeros(0, np.uint8)
            check("cudaFreeHost", rt.cudaFreeHost(self.address))
            self.address = 0


class Stream:
    """The one stream that every step runs on; steps are ordered by it and by nothing else."""

    def __init__(self) -> None:
        self.raw = check("cudaStreamCreateWithFlags", rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
        self.handle = int(self.raw)

    def copy(self, target: int, source: int, size: int, kind: Any) -> None:
        check("cudaMemcpyAsync", rt.cudaMemcpyAsync(target, source, size, kind, self.raw))

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """`rows` pieces of `width` bytes, device to device, at a stride on either side."""
        check(
            "cudaMemcpy2DAsync",
            rt.cudaMemcpy2DAsync(target, target_pitch, source, source_pitch, width, rows, ON_DEVICE, self.raw),
        )

    def zero(self, target: int, size: int) -> None:
        check("cudaMemsetAsync", rt.cudaMemsetAsync(target, 0, size, self.raw))

    def synchronize(self) -> None:
        check("cudaStreamSynchronize", rt.cudaStreamSynchronize(self.raw))

    def close(self) -> None:
        if self.handle:
            check("cudaStreamDestroy", rt.cudaStreamDestroy(self.raw))
            self.handle = 0


class Event:
    """A point in the stream. With `timing`, the time between two of them can be read."""

    def __init__(self, *, timing: bool = False) -> None:
        flags = rt.cudaEventDefault if timing else rt.cudaEventDisableTiming
        self.raw = check("cudaEventCreateWithFlags", rt.cudaEventCreateWithFlags(flags))

    def record(self, stream: Stream) -> None:
        check("cudaEventRecord", rt.cudaEventRecord(self.raw, stream.raw))

    def wait(self) -> None:
        check("cudaEventSynchronize", rt.cudaEventSynchronize(self.raw))

    def ms_since(self, earlier: Event) -> float:
        return float(check("cudaEventElapsedTime", rt.cudaEventElapsedTime(earlier.raw, self.raw)))

    def close(self) -> None:
        check("cudaEventDestroy", rt.cudaEventDestroy(self.raw))


@dataclass(frozen=True)
class Transfer:
    """One of the two host transfers of a captured step: `device` and `size` are fixed, the host side may change."""

    device: int
    size: int
    kind: Any


class CapturedGraph:
    """An executable graph whose host buffers are chosen at each launch.

    A step's inputs come from, and its outputs go to, whichever buffer of a ring is free, so a graph that was captured
    with one pair is told of the next pair before it is launched; launches already queued keep theirs.
    """

    def __init__(
        self, graph: Any, executable: Any, nodes: int, transfers: dict[str, tuple[Any, Transfer, int]]
    ) -> None:
        self._graph = graph  # owns the node handles in `transfers`
        self._executable = executable
        self._transfers = transfers
        self.nodes = nodes

    def point(self, name: str, host: int) -> None:
        """Make the transfer `name` use the host address `host` from the next launch on."""
        node, transfer, current = self._transfers[name]
        if host == current:
            return
        target, source = (transfer.device, host) if transfer.kind == TO_DEVICE else (host, transfer.device)
        check(
            "cudaGraphExecMemcpyNodeSetParams1D",
            rt.cudaGraphExecMemcpyNodeSetParams1D(self._executable, node, target, source, transfer.size, transfer.kind),
        )
        self._transfers[name] = (node, transfer, host)

    def launch(self, stream: Stream) -> None:
        check("cudaGraphLaunch", rt.cudaGraphLaunch(self._executable, stream.raw))

    def close(self) -> None:
        if self._executable is not None:
            check("cudaGraphExecDestroy", rt.cudaGraphExecDestroy(self._executable))
            check("cudaGraphDestroy", rt.cudaGraphDestroy(self._graph))
            self._graph = self._executable = None


class Capture:
    """What `body` of `capture` is given: it may add named host transfers, whose host side can be changed later."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.named: dict[str, tuple[Any, Transfer, int]] = {}

    def transfer(self, name: str, device: int, host: int, size: int, kind: Any) -> None:
        target, source = (device, host) if kind == TO_DEVICE else (host, device)
        self._stream.copy(target, source, size, kind)
        # the stream's only dependency is now the node just added
        info = check("cudaStreamGetCaptureInfo", rt.cudaStreamGetCaptureInfo(self._stream.raw))
        dependencies = next(value for value in info if isinstance(value, (list, tuple)))
        self.named[name] = (dependencies[0], Transfer(device, size, kind), host)


def capture(stream: Stream, body: Callable[[Capture], None]) -> CapturedGraph:
    """Runs `body` under stream capture and instantiates what it queued. Raises CudaError or what `body` raises;
    the stream is usable again afterwards in either case."""
    mode = rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    check("cudaStreamBeginCapture", rt.cudaStreamBeginCapture(stream.raw, mode))
    recorded = Capture(stream)
    try:
        body(recorded)
    except BaseException:
        status, graph = rt.cudaStreamEndCapture(stream.raw)
        if status == rt.cudaError_t.cudaSuccess and graph is not None:
            rt.cudaGraphDestroy(graph)
        rt.cudaGetLastError()  # a capture that failed leaves its error behind; the next call must not see it
        raise
    try:
        graph = check("cudaStreamEndCapture", rt.cudaStreamEndCapture(stream.raw))
    except CudaError:
        rt.cudaGetLastError()
        raise
    try:
        found = rt.cudaGraphGetNodes(graph, 0)
        check("cudaGraphGetNodes", (found[0],))
        executable = check("cudaGraphInstantiate", rt.cudaGraphInstantiate(graph, 0))
    except CudaError:
        rt.cudaGraphDestroy(graph)
        raise
    return CapturedGraph(graph, executable, int(found[-1]), recorded.named)
