"""The TensorRT backend without a GPU: its own code, on host memory, with ONNX Runtime where TensorRT would run.

`on_the_host(monkeypatch)` replaces what `edgert.cuda` gives (memory, stream, capture: a captured graph is a list of
calls with the addresses of that moment, as CUDA's is) and the deserialised plan (the ONNX file beside it, with the
profiles that a build would make). What it shows is the backend's bookkeeping; numbers of a GPU it cannot show.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
import pytest
from edgebuild.engine.shapes import EngineShape, draft_shapes, engine_shape
from edgert import cuda
from edgert.backends import tensorrt as backend_module
from edgert.backends.trt_engine import Engine
from edgert.cells import Cell

DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class HostMemory:
    """As DeviceMemory and PinnedMemory, and 256-byte aligned as CUDA's is."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 256)
        self._block = np.zeros(self.size + 256, np.uint8)
        start = -self._block.ctypes.data % 256
        self.bytes = self._block[start : start + self.size]
        self.address = self.bytes.ctypes.data

    def free(self) -> None:
        self.address = 0


class HostStream:
    """Runs what is queued at once; under capture it is written down instead."""

    handles: ClassVar[dict[int, HostStream]] = {}

    def __init__(self) -> None:
        self.recording: list[Callable[[], None]] | None = None
        self.handle = len(self.handles) + 1
        self.handles[self.handle] = self

    def do(self, call: Callable[[], None]) -> None:
        if self.recording is None:
            call()
        else:
            self.recording.append(call)

    def copy(self, target: int, source: int, size: int, _kind: Any) -> None:
        self.do(lambda: ctypes.memmove(target, source, size) and None)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        assert width <= min(target_pitch, source_pitch), "cudaMemcpy2DAsync refuses a pitch below the width"
        for row in range(rows):
            self.copy(target + row * target_pitch, source + row * source_pitch, width, None)

    def zero(self, target: int, size: int) -> None:
        self.do(lambda: ctypes.memset(target, 0, size) and None)

    def synchronize(self) -> None:
        if self.recording is not None:
            raise cuda.BackendError("synchronized under capture")

    def close(self) -> None:
        self.handles.pop(self.handle, None)


class HostEvent:
    def record(self, _stream: HostStream) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class HostGraph:
    """What a capture wrote down. Its two host transfers may be pointed elsewhere, as those of a CUDA graph."""

    def __init__(self, calls: list[Callable[[], None]], hosts: dict[str, list[int]]) -> None:
        self._calls, self._hosts = calls, hosts

    def point(self, name: str, host: int) -> None:
        self._hosts[name][0] = host

    def launch(self, _stream: HostStream) -> None:
        for call in self._calls:
            call()

    def close(self) -> None:
        self._calls = []


@dataclass
class HostCapture:
    stream: HostStream
    hosts: dict[str, list[int]]

    def transfer(self, name: str, device: int, host: int, size: int, kind: Any) -> None:
        place = self.hosts[name] = [host]
        if kind == cuda.TO_DEVICE:
            self.stream.do(lambda: ctypes.memmove(device, place[0], size) and None)
        else:
            self.stream.do(lambda: ctypes.memmove(place[0], device, size) and None)


def capture(stream: HostStream, body: Callable[[Any], None]) -> HostGraph:
    stream.recording = calls = []
    recorded = HostCapture(stream, {})
    try:
        body(recorded)
    finally:
        stream.recording = None
    return HostGraph(calls, recorded.hosts)


class HostContext:
    """An execution context: runs the session on the addresses that were set last."""

    def __init__(self, session: Any, shape: EngineShape) -> None:
        self._session, self._shape = session, shape
        self._addresses: dict[str, int] = {}

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address % 256 == 0, f"{name} is not aligned"
        self._addresses[name] = address

    def execute_async_v3(self, handle: int) -> bool:
        addresses = dict(self._addresses)
        HostStream.handles[handle].do(lambda: self._run(addresses))
        return True

    def _run(self, addresses: dict[str, int]) -> None:
        binding = self._session.io_binding()
        kept = []  # outputs that share an input's memory and are no cache would be written while they are read
        for values, bind in ((self._session.get_inputs(), binding.bind_input),
                             (self._session.get_outputs(), binding.bind_output)):  # fmt: skip
            for value in values:
                dtype, shape = DTYPES[value.type], self._dims(value.shape)
                size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                memory = (ctypes.c_uint8 * size).from_address(addresses[value.name])
                kept.append(np.ctypeslib.as_array(memory))
                bind(value.name, "cpu", 0, dtype, shape, addresses[value.name])
        self._session.run_with_iobinding(binding)

    def _dims(self, shape: Sequence[Any]) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else self._shape.dim(d) for d in shape)


class HostEngine(Engine):
    """`Engine` with ONNX Runtime behind it. `cells` and `draft_length`: what the plans were built for."""

    cells: Sequence[Cell] = ()
    draft_length = 0
    cache_tokens = 0

    def __init__(self, flavour: str, plan: Path, _cache: bytes | None, _options: Any) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(str(plan.with_suffix(".onnx")), options)
        self._values = {v.name: v for v in (*self._session.get_inputs(), *self._session.get_outputs())}
        shapes = [engine_shape(cell) for cell in self.cells]
        if plan.stem == "mtp":
            shapes = list(draft_shapes(self.cells, draft_length=self.draft_length, cache_tokens=self.cache_tokens))
        self._shapes = shapes
        self.flavour, self.version = flavour, "on the host"
        self.names = tuple(self._values)
        self.profiles = len(shapes)
        self.scratch_bytes, self.scratch_by_profile = 256, (256,) * len(shapes)
        self._engine = self
        self.log: Any = SimpleNamespace(last=lambda: "no reason given")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self._values[name].shape)

    def get_tensor_dtype(self, name: str) -> Any:
        return np.dtype(DTYPES[self._values[name].type])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        dims = (d if isinstance(d, int) else self._shapes[profile].dim(d) for d in self._values[name].shape)
        return [tuple(dims)] * 3

    def context(self, profile: int, shapes: Any, _scratch: int, _stream: Any) -> HostContext:
        context = HostContext(self._session, self._shapes[profile])
        for name, dims in shapes.items():
            assert name not in self._values or context._dims(self._values[name].shape) == dims, name
        return context

    def cache_content(self) -> bytes | None:
        return None

    def close(self) -> None:
        self._session = None


def on_the_host(patch: pytest.MonkeyPatch, cells: Sequence[Cell], *, draft_length: int, cache_tokens: int) -> None:
    """From here on a TensorRTBackend opens on the host, on the ONNX files of its artifact directory."""

    class Made(HostEngine):
        pass

    Made.cells, Made.draft_length, Made.cache_tokens = tuple(cells), draft_length, cache_tokens
    patch.setattr(backend_module, "Engine", Made)
    patch.setattr(backend_module, "check_compatible", lambda *_: None)
    patch.setattr(backend_module.trt_module, "load", lambda _: type("library", (), {"__version__": "0"}))
    for name, value in {
        "DeviceMemory": HostMemory,
        "PinnedMemory": HostMemory,
        "Stream": HostStream,
        "Event": HostEvent,
        "capture": capture,
        "free_bytes": lambda: 1 << 30,
        "device_info": lambda: cuda.DeviceInfo("host memory", "0.0", 0, 1 << 30),
    }.items():
        patch.setattr(cuda, name, value)
