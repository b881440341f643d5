"""The TensorRT backend, both flavours: one graph launch a step, everything a step needs next on the device.

Per slot the device holds caches, the next token and the length. A captured step is: inputs from a pinned block, token
and length from the slot, the engine, token and length back into the slot, outputs to a pinned block. So a step can be
launched before the one before it was read. One scratch buffer, fixed addresses, one stream. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgert import cuda
from edgert.backends import trt_cache
from edgert.backends.base import Setup, StepInputs, StepOutputs
from edgert.backends.trt_engine import PLAN_NAME, BuiltFor, CellShape, Engine, check_compatible
from edgert.backends.trt_layout import ALIGNMENT, TOKEN_BYTES, StepLayout, read_outputs, step_layout, write_inputs
from edgert.cells import Cell
from edgert.errors import BackendError
from edgert.graphs import GraphKey, GraphPool, graph_keys, size_order
from edgert.manifest_records import StateSpec

logger = logging.getLogger(__name__)
RING = 4  # pinned block pairs: one more than can be in flight, and one to spare for a slow reader
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}


def open_backend(setup: Setup) -> TensorRTBackend:
    """Loads the plan on GPU 0. Raises ArtifactError when it was made for something else, BackendError otherwise."""
    return TensorRTBackend(setup)


@dataclass
class _Cell:
    """One cell as it runs. bound_slot: whose caches the context's addresses name now."""

    cell: Cell
    profile: int
    shape: CellShape
    layout: StepLayout
    context: Any = None
    bound_slot: int | None = None
    jit_s: float = 0.0


@dataclass
class _RingSlot:
    """A pair of pinned blocks, the event after which the outputs are there, and who still has to read them."""

    inputs: cuda.PinnedMemory
    outputs: cuda.PinnedMemory
    done: cuda.Event
    logits: cuda.PinnedMemory | None = None
    ticket: _Ticket | None = None


class _Ticket:
    """A launched step; reads its ring slot once, at the latest when the slot is needed again."""

    def __init__(self, slot: _RingSlot, cell: _Cell, views: dict[str, Any], logits_shape: tuple[int, ...] | None):
        self._slot, self._cell, self._views, self._logits_shape = slot, cell, views, logits_shape
        self._outputs: StepOutputs | None = None

    def result(self) -> StepOutputs:
        if self._outputs is None:
            self._slot.done.wait()
            logits = None
            if self._logits_shape is not None and self._slot.logits is not None:
                count = int(np.prod(self._logits_shape))
                logits = self._slot.logits.bytes[: 4 * count].view(np.float32).reshape(self._logits_shape)
            self._outputs = read_outputs(self._views, self._cell.cell, logits)
            self._slot.ticket = None
        return self._outputs


class TensorRTBackend:
    """See `edgert.backends.base.Backend`. Options: enable_cuda_graph, max_graphs, kernel_specialization."""

    run_ahead = 1
    any_first_slot = False

    def __init__(self, setup: Setup) -> None:
        started = time.monotonic()
        self._setup, self._closed = setup, False
        backend = setup.manifest.backend if setup.manifest is not None else None
        built = BuiltFor(
            flavour=backend.name if backend else str(setup.options.get("flavour", "tensorrt-rtx")),
            version=backend.version if backend else None,
            compute_capabilities=tuple(backend.compute_capabilities) if backend else (),
        )
        self.name = built.flavour
        from edgert.backends import trt_module

        self._device = cuda.device_info()
        check_compatible(built, str(trt_module.load(built.flavour).__version__), self._device)
        plan = setup.artifact / PLAN_NAME
        self._free_at_start = cuda.free_bytes()
        self._cache_key = trt_cache.CacheKey(
            self._device.name,
            self._device.compute_capability,
            self._device.driver,
            str(trt_module.load(built.flavour).__version__),
            trt_cache.plan_hash(plan),
        )
        cached = trt_cache.load(setup.artifact, self._cache_key)
        self._cached_bytes = len(cached or b"")
        self._engine = Engine(built.flavour, plan, cached, setup.options)
        self._engine.check_states(setup.states)
        self._weights_bytes = self._free_at_start - cuda.free_bytes()
        self._stream = cuda.Stream()
        order = setup.manifest.cells if setup.manifest is not None else setup.cells
        self._cells: dict[Cell, _Cell] = {}
        for cell in setup.cells:
            profile = order.index(cell)
            shape = self._engine.check_cell(profile, cell)
            self._cells[cell] = _Cell(cell, profile, shape, step_layout(shape.batch, shape.rows, shape.logit_rows))
        self._allocate()
        self._graphs: GraphPool[cuda.CapturedGraph] = GraphPool()
        self._graph_bytes = 0
        self._timings = {"load_s": time.monotonic() - started}

    @property
    def cells(self) -> Sequence[Cell]:
        return self._setup.cells

    # -- memory ------------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        setup, cells = self._setup, list(self._cells.values())
        self._scratch = cuda.DeviceMemory(self._engine.scratch_bytes)
        self._states = {state.input: cuda.DeviceMemory(setup.slots * _slot_bytes(state)) for state in setup.states}
        # Only a cache is updated in place: the next value of another state has its own memory, copied behind the step.
        batch = max(each.shape.batch for each in cells)
        self._following = {
            state.input: cuda.DeviceMemory(batch * _slot_bytes(state)) for state in setup.states if state.kind != "kv"
        }
        # row 0: the token that each slot feeds next; row 1: its length
        self._slots = cuda.DeviceMemory(2 * setup.slots * TOKEN_BYTES)
        tiers = np.arange(max(each.shape.tier for each in cells), dtype=np.int64)
        self._positions = cuda.DeviceMemory(tiers.nbytes)
        self._inputs = cuda.DeviceMemory(max(each.layout.inputs.size for each in cells))
        self._outputs = cuda.DeviceMemory(max(each.layout.outputs.size for each in cells))
        self._logits = cuda.DeviceMemory(max(self._logits_bytes(each) for each in cells))
        self._ring = [
            _RingSlot(cuda.PinnedMemory(self._inputs.size), cuda.PinnedMemory(self._outputs.size), cuda.Event())
            for _ in range(RING)
        ]
        self._views = [
            {
                each.cell: (each.layout.inputs.views(slot.inputs.bytes), each.layout.outputs.views(slot.outputs.bytes))
                for each in cells
            }
            for slot in self._ring
        ]
        self._next = 0
        staging = cuda.PinnedMemory(tiers.nbytes)
        staging.bytes[: tiers.nbytes] = tiers.view(np.uint8)
        self._stream.copy(self._positions.address, staging.address, tiers.nbytes, cuda.TO_DEVICE)
        self._stream.synchronize()
        staging.free()

    def _logits_bytes(self, cell: _Cell) -> int:
        return 4 * cell.shape.batch * cell.shape.logit_rows * self._setup.token_limit

    # -- warm-up -----------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        self._usable()
        started = time.monotonic()
        for cell in size_order(self._cells):
            each, began = self._cells[cell], time.monotonic()
            each.context = self._engine.context(
                each.profile, each.shape, self._setup.states, self._scratch.address, self._stream.handle
            )
            self._bind(each, 0)
            self._run_engine(each)  # an all-idle step: compiles the kernels, leaves no trace
            self._stream.synchronize()
            each.jit_s = time.monotonic() - began
        self._timings["compile_s"] = time.monotonic() - started
        self._store_cache()
        started, before = time.monotonic(), cuda.free_bytes()
        if self._setup.options.get("enable_cuda_graph", True):
            limit = self._setup.options.get("max_graphs")
            self._graphs.capture(graph_keys(self._cells, self._setup.slots), self._capture, limit=limit)
        self._stream.zero(self._slots.address, self._slots.size)
        self._stream.synchronize()
        self._graph_bytes = max(0, before - cuda.free_bytes())
        self._timings["capture_s"] = time.monotonic() - started

    def _store_cache(self) -> None:
        content = self._engine.cache_content()
        if content and len(content) > self._cached_bytes:  # more kernels than the cache held
            trt_cache.store(self._setup.artifact, self._cache_key, content)

    def _capture(self, key: GraphKey) -> cuda.CapturedGraph:
        each, slot = self._cells[key.cell], self._ring[0]
        self._bind(each, key.first_slot)

        def step(capture: cuda.Capture) -> None:
            layout = each.layout
            capture.transfer("in", self._inputs.address, slot.inputs.address, layout.inputs.size, cuda.TO_DEVICE)
            self._slot_to_inputs(each, key.first_slot)
            self._run_engine(each)
            self._outputs_to_slot(each, key.first_slot)
            capture.transfer("out", self._outputs.address, slot.outputs.address, layout.outputs.size, cuda.TO_HOST)

        return cuda.capture(self._stream, step)

    # -- one step ----------------------------------------------------------------------------------------------------

    def launch(self, step: StepInputs) -> _Ticket:
        self._usable()
        each = self._cells.get(step.cell)
        if each is None or each.context is None:
            raise BackendError(f"{step.cell.label} cannot be launched: it is not a cell of this engine, or not warm")
        first, batch = step.first_slot, step.cell.batch
        if first < 0 or first + batch > self._setup.slots or (batch > 1 and first):
            raise BackendError(f"{step.cell.label} at slot {first} of {self._setup.slots}: no such place")
        index = self._next
        self._next = (index + 1) % RING
        slot = self._ring[index]
        if slot.ticket is not None:
            slot.ticket.result()
        views_in, views_out = self._views[index][step.cell]
        write_inputs(views_in, step)
        if not step.from_device.all():
            self._host_rows_to_slot(each, slot, first, step.from_device)
        graph = self._graphs.take(GraphKey(step.cell, first))
        if graph is not None:
            graph.point("in", slot.inputs.address)
            graph.point("out", slot.outputs.address)
            graph.launch(self._stream)
        else:
            self._run_eagerly(each, slot, first)
        logits_shape = None
        if step.want_logits:
            logits_shape = (each.shape.batch, each.shape.logit_rows, self._setup.token_limit)
            if slot.logits is None:
                slot.logits = cuda.PinnedMemory(self._logits.size)
            self._stream.copy(slot.logits.address, self._logits.address, self._logits_bytes(each), cuda.TO_HOST)
        slot.done.record(self._stream)
        slot.ticket = _Ticket(slot, each, views_out, logits_shape)
        return slot.ticket

    def _run_eagerly(self, each: _Cell, slot: _RingSlot, first: int) -> None:
        layout = each.layout
        self._bind(each, first)
        self._stream.copy(self._inputs.address, slot.inputs.address, layout.inputs.size, cuda.TO_DEVICE)
        self._slot_to_inputs(each, first)
        self._run_engine(each)
        self._outputs_to_slot(each, first)
        self._stream.copy(slot.outputs.address, self._outputs.address, layout.outputs.size, cuda.TO_HOST)

    def _bind(self, each: _Cell, first: int) -> None:
        """Addresses of every tensor; only the caches depend on the slot."""
        context = each.context
        if each.bound_slot is None:
            addresses = {"kv_positions": self._positions.address, "logits": self._logits.address}
            for block, base in ((each.layout.inputs, self._inputs), (each.layout.outputs, self._outputs)):
                addresses |= {field.name: base.address + field.offset for field in block.fields}
            for name, address in addresses.items():
                if name in self._engine.names:
                    context.set_tensor_address(name, address)
        if each.bound_slot != first:
            for state in self._setup.states:
                address = self._states[state.input].address + first * _slot_bytes(state)
                context.set_tensor_address(state.input, address)
                following = self._following.get(state.input)
                context.set_tensor_address(state.output, address if following is None else following.address)
            each.bound_slot = first

    def _run_engine(self, each: _Cell) -> None:
        if not each.context.execute_async_v3(self._stream.handle):
            raise BackendError(f"{each.cell.label}: TensorRT refused to run: {self._engine.log.last()}")
        for state in self._setup.states:
            if state.input in self._following:
                size = _slot_bytes(state)
                target = self._states[state.input].address + (each.bound_slot or 0) * size
                source = self._following[state.input].address
                self._stream.copy(target, source, each.shape.batch * size, cuda.ON_DEVICE)

    def _slot_to_inputs(self, each: _Cell, first: int) -> None:
        """token 0 and length of each row: from where the step before left them."""
        batch, block = each.shape.batch, each.layout.inputs
        tokens, length = (self._inputs.address + block[name].offset for name in ("tokens", "length"))
        pitch = self._setup.slots * TOKEN_BYTES
        source = self._slots.address + first * TOKEN_BYTES
        if batch == 1:  # token and length are one strided copy
            self._stream.copy_rows(tokens, length - tokens, source, pitch, TOKEN_BYTES, 2)
            return
        self._stream.copy_rows(tokens, each.shape.rows * TOKEN_BYTES, source, TOKEN_BYTES, TOKEN_BYTES, batch)
        self._stream.copy(length, source + pitch, batch * TOKEN_BYTES, cuda.ON_DEVICE)

    def _outputs_to_slot(self, each: _Cell, first: int) -> None:
        block, width = each.layout.outputs, each.shape.batch * TOKEN_BYTES
        token, length = (self._outputs.address + block[name].offset for name in ("next_token", "new_length"))
        pitch = self._setup.slots * TOKEN_BYTES
        target = self._slots.address + first * TOKEN_BYTES
        self._stream.copy_rows(target, pitch, token, length - token, width, 2)

    def _host_rows_to_slot(self, each: _Cell, slot: _RingSlot, first: int, from_device: Any) -> None:
        """What the host knows better goes to the slot first, so that a captured step always reads the slot."""
        block, source = each.layout.inputs, slot.inputs.address
        tokens, length = source + block["first_tokens"].offset, source + block["length"].offset
        target, pitch = self._slots.address + first * TOKEN_BYTES, self._setup.slots * TOKEN_BYTES
        if not from_device.any():
            runs = [(0, each.shape.batch)]
        else:
            runs = [(row, 1) for row in range(each.shape.batch) if not from_device[row]]
        for row, count in runs:
            at, size = row * TOKEN_BYTES, count * TOKEN_BYTES
            self._stream.copy(target + at, tokens + at, size, cuda.TO_DEVICE)
            self._stream.copy(target + pitch + at, length + at, size, cuda.TO_DEVICE)

    def reset_slot(self, slot: int) -> None:
        self._usable()
        if not 0 <= slot < self._setup.slots:
            raise BackendError(f"slot {slot} of {self._setup.slots}: no such slot")
        for state in self._setup.states:
            if state.kind != "kv":
                size = _slot_bytes(state)
                self._stream.zero(self._states[state.input].address + slot * size, size)
        for row in (0, 1):
            self._stream.zero(self._slots.address + (row * self._setup.slots + slot) * TOKEN_BYTES, TOKEN_BYTES)

    # -- reports -----------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for state in self._setup.states:
            label = "kv_cache" if state.kind == "kv" else "state"
            kinds[label] = kinds.get(label, 0) + self._states[state.input].size
        return {
            "weights": self._weights_bytes,
            **kinds,
            "scratch": self._scratch.size,
            "step_buffers": self._inputs.size + self._outputs.size + self._logits.size + self._positions.size,
            "graphs": self._graph_bytes,
            "device_used": self._free_at_start - cuda.free_bytes(),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "version": self._engine.version,
            "device": self._device.name,
            "compute_capability": self._device.compute_capability,
            "driver": self._device.driver,
            "cells": len(self._cells),
            "graphs": len(self._graphs),
            "graph_replays": self._graphs.replays,
            "eager_launches": self._graphs.eager,
            "fallbacks": [
                {"cell": f.key.cell.label, "first_slot": f.key.first_slot, "reason": f.reason}
                for f in self._graphs.fallbacks
            ],
            "jit_cache": "warm" if self._cached_bytes else "cold",
            "jit_s": {each.cell.label: round(each.jit_s, 3) for each in self._cells.values()},
            "timings": {name: round(value, 3) for name, value in self._timings.items()},
            "scratch_bytes_by_cell": {
                each.cell.label: self._engine.scratch_by_profile[each.profile] for each in self._cells.values()
            },
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stream.synchronize()
        self._graphs.close()
        for each in self._cells.values():
            each.context = None
        self._engine.close()
        blocks = (self._scratch, self._slots, self._positions, self._inputs, self._outputs, self._logits)
        for memory in (*blocks, *self._states.values(), *self._following.values()):
            memory.free()
        for slot in self._ring:
            for pinned in (slot.inputs, slot.outputs, slot.logits):
                if pinned is not None:
                    pinned.free()
            slot.done.close()
        self._stream.close()

    def _usable(self) -> None:
        if self._closed:
            raise BackendError("the TensorRT backend was closed")


def _slot_bytes(state: StateSpec) -> int:
    """Bytes of one slot; slots are neighbours, so that a batch is one tensor. Raises BackendError when misaligned."""
    size = int(np.prod(state.shape)) * _DTYPE_BYTES[state.dtype]
    if size % ALIGNMENT:
        raise BackendError(f"state {state.input}: {size} bytes a slot is no multiple of {ALIGNMENT}")
    return size
