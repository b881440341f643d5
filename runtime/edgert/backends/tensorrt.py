"""The TensorRT backend, both flavours: one graph launch a step, everything a step needs next on the device.

Per slot the device holds caches, the next token and the length. A captured step is: inputs from a pinned block, token
and length from the slot, the engine, token and length back into the slot, the drafter's passes where it drafts, outputs
to a pinned block. So a step can be launched before the one before it was read. One scratch buffer, fixed addresses, one
stream. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgert import cuda
from edgert.backends import trt_cache, trt_module
from edgert.backends.base import Setup, StepInputs
from edgert.backends.trt_drafter import PLAN_NAME as DRAFTER_PLAN_NAME
from edgert.backends.trt_drafter import Drafter, Rows
from edgert.backends.trt_engine import PLAN_NAME, BuiltFor, CellShape, Engine, check_compatible
from edgert.backends.trt_layout import TOKEN_BYTES, StepLayout, step_layout, write_inputs
from edgert.backends.trt_ring import Held, Ring, RingSlot, Ticket
from edgert.backends.trt_states import SlotStates
from edgert.cells import Cell
from edgert.errors import ArtifactError, BackendError
from edgert.graphs import GraphKey, GraphPool, graph_keys, size_order
from edgert.manifest_records import DRAFTING_OUTPUTS

logger = logging.getLogger(__name__)
# Where the first run of every cell takes so long, none came from the cache: 2 to 7 s on an H200, 0.3 s from the cache.
# A slow host may take that long with it; then the cache is written once a start, no more.
COMPILED_S = 1.0


def open_backend(setup: Setup) -> TensorRTBackend:
    """Loads the plan on GPU 0. Raises ArtifactError when it was made for something else, BackendError otherwise."""
    return TensorRTBackend(setup)


@dataclass(frozen=True)
class _Plan:
    """A plan of the artifact, and of what its JIT cache held: size and hash (0 and of nothing where there was none)."""

    engine: Engine
    cache_key: trt_cache.CacheKey
    cached_bytes: int
    cached_hash: bytes


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
        self._device = cuda.device_info()
        check_compatible(built, str(trt_module.load(built.flavour).__version__), self._device)
        self._free_at_start = cuda.free_bytes()
        self._plans: dict[str, _Plan] = {}
        self._engine = self._open(PLAN_NAME)
        self._engine.check_states(setup.states)
        self._weights_bytes = self._free_at_start - cuda.free_bytes()
        self._stream = cuda.Stream()
        order = setup.manifest.cells if setup.manifest is not None else setup.cells
        self._cells: dict[Cell, _Cell] = {}
        for cell in setup.cells:
            profile = order.index(cell)
            shape = self._engine.check_cell(profile, cell)
            layout = step_layout(shape.batch, shape.rows, shape.logit_rows, draft_length=setup.draft_length)
            self._cells[cell] = _Cell(cell, profile, shape, layout)
        self._drafter, self._drafter_bytes = self._open_drafter()
        self._allocate()
        self._graphs: GraphPool[cuda.CapturedGraph] = GraphPool()
        self._graph_bytes = 0
        self._timings = {"load_s": time.monotonic() - started}

    @property
    def cells(self) -> Sequence[Cell]:
        return self._setup.cells

    def _open(self, name: str) -> Engine:
        """A plan of the artifact, with what was compiled of it before."""
        setup, plan = self._setup, self._setup.artifact / name
        device, version = self._device, str(trt_module.load(self.name).__version__)
        hashed = trt_cache.plan_hash(plan) if plan.is_file() else ""
        key = trt_cache.CacheKey(device.name, device.compute_capability, device.driver, version, hashed)
        cached = trt_cache.load(setup.artifact, key) if hashed else None
        engine = Engine(self.name, plan, cached, setup.options)
        self._plans[name] = _Plan(engine, key, len(cached or b""), hashlib.sha256(cached or b"").digest())
        return engine

    def _open_drafter(self) -> tuple[Drafter | None, int]:
        if not self._setup.draft_length:
            return None, 0
        missing = {"following", *DRAFTING_OUTPUTS} - set(self._engine.names)
        if missing:
            raise ArtifactError(f"{PLAN_NAME} lacks {', '.join(sorted(missing))}: it was built without a drafter")
        before = cuda.free_bytes()
        shapes = {cell: each.shape for cell, each in self._cells.items()}
        engine = self._open(DRAFTER_PLAN_NAME)
        weights = before - cuda.free_bytes()
        return Drafter(engine, self._setup, shapes, self._stream), weights

    # -- memory ------------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        setup, cells = self._setup, list(self._cells.values())
        # of the cells in use: a chunk size that scheduler.yaml leaves out takes no memory
        needed = [self._engine.scratch_by_profile[each.profile] for each in cells]
        needed += [plan.engine.scratch_bytes for name, plan in self._plans.items() if name != PLAN_NAME]
        self._scratch = cuda.DeviceMemory(max(needed))
        self._states = SlotStates(setup.states, setup.slots, max(each.shape.batch for each in cells))
        # row 0: the token that each slot feeds next; row 1: its length; then its drafts
        self._slots = cuda.DeviceMemory((2 + setup.draft_length) * setup.slots * TOKEN_BYTES)
        most = max(each.shape.tier for each in cells)
        tiers = np.arange(max(most, 0 if self._drafter is None else self._drafter.most_positions), dtype=np.int64)
        self._positions = cuda.DeviceMemory(tiers.nbytes)
        if self._drafter is not None:
            self._drafter.attach(self._scratch.address, self._positions.address)
        self._ring, self._held = Ring({each.cell: each.layout for each in cells}), Held(setup.slots)
        self._inputs = cuda.DeviceMemory(self._ring.input_bytes)
        self._outputs = cuda.DeviceMemory(self._ring.output_bytes)
        self._logits = cuda.DeviceMemory(max(self._logits_bytes(each) for each in cells))
        rows = max(each.shape.batch * each.shape.rows for each in cells)
        self._rows = {
            name: cuda.DeviceMemory(rows * self._engine.row_bytes(name))
            for name in DRAFTING_OUTPUTS
            if name in self._engine.names
        }
        staging = cuda.PinnedMemory(tiers.nbytes)
        staging.bytes[: tiers.nbytes] = tiers.view(np.uint8)
        self._stream.copy(self._positions.address, staging.address, tiers.nbytes, cuda.TO_DEVICE)
        self._stream.synchronize()
        staging.free()

    def _logits_bytes(self, cell: _Cell) -> int:
        return 4 * cell.shape.batch * cell.shape.logit_rows * self._setup.token_limit

    def _drafting_rows(self) -> Rows:
        return Rows(embedding=self._rows["next_embedding"].address, hidden=self._rows["hidden"].address)

    # -- warm-up -----------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        self._usable()
        setup, started = self._setup, time.monotonic()
        slot = self._ring.first
        slot.inputs.bytes[:] = 0
        for cell in size_order(self._cells):
            each, began = self._cells[cell], time.monotonic()
            self._bind(each, 0)
            slot.views[cell][0]["top_p"][:] = 1.0  # the rest of an all-idle step is 0
            self._stream.copy(self._inputs.address, slot.inputs.address, each.layout.inputs.size, cuda.TO_DEVICE)
            self._run_engine(each)  # compiles the kernels, leaves no trace
            self._stream.synchronize()
            slot.inputs.bytes[:] = 0
            each.jit_s = time.monotonic() - began
        if self._drafter is not None:
            self._drafter.warm_up(self._drafting_rows())
        self._timings["compile_s"] = time.monotonic() - started
        self._setup.on_phase("compiled")
        self._store_caches()
        started, before = time.monotonic(), cuda.free_bytes()
        if setup.options.get("enable_cuda_graph", True):
            keys = graph_keys(self._cells, setup.slots, setup.draft_length)
            self._graphs.capture(keys, self._capture, limit=setup.options.get("max_graphs"))
        self._stream.zero(self._slots.address, self._slots.size)
        self._stream.synchronize()
        self._graph_bytes = max(0, before - cuda.free_bytes())
        self._timings["capture_s"] = time.monotonic() - started

    def _store_caches(self) -> None:
        """Keeps what was compiled: more than the cache held, or something else where the cache was of no use."""
        quickest_s = {PLAN_NAME: min(each.jit_s for each in self._cells.values())}
        if self._drafter is not None:
            quickest_s[DRAFTER_PLAN_NAME] = self._drafter.quickest_s
        for name, plan in self._plans.items():
            content = plan.engine.cache_content() or b""
            useless = quickest_s[name] > COMPILED_S and hashlib.sha256(content).digest() != plan.cached_hash
            if content and (len(content) > plan.cached_bytes or useless):
                trt_cache.store(self._setup.artifact, plan.cache_key, content)

    def _capture(self, key: GraphKey) -> cuda.CapturedGraph:
        each, slot = self._cells[key.cell], self._ring.first
        self._bind(each, key.first_slot)

        def step(capture: cuda.Capture) -> None:
            layout = each.layout
            capture.transfer("in", self._inputs.address, slot.inputs.address, layout.inputs.size, cuda.TO_DEVICE)
            self._queue(each, key.first_slot, key.drafts)
            capture.transfer("out", self._outputs.address, slot.outputs.address, layout.outputs.size, cuda.TO_HOST)

        return cuda.capture(self._stream, step)

    # -- one step ----------------------------------------------------------------------------------------------------

    def launch(self, step: StepInputs) -> Ticket:
        self._usable()
        each = self._cells.get(step.cell)
        if each is None:
            raise BackendError(f"{step.cell.label} cannot be launched: it is not a cell of this engine")
        first, batch = step.first_slot, step.cell.batch
        if first < 0 or first + batch > self._setup.slots or (batch > 1 and first):
            raise BackendError(f"{step.cell.label} at slot {first} of {self._setup.slots}: no such place")
        drafts = self._variant(step)
        slot = self._ring.take()
        write_inputs(slot.views[step.cell][0], step)
        known = self._held.known(step)
        if not known.all():
            self._host_rows_to_slot(each, slot, first, known)
        graph = self._graphs.take(GraphKey(step.cell, first, drafts))
        if graph is not None:
            graph.point("in", slot.inputs.address)
            graph.point("out", slot.outputs.address)
            graph.launch(self._stream)
        else:
            self._run_eagerly(each, slot, first, drafts)
        logits_shape = None
        if step.want_logits:
            logits_shape = (each.shape.batch, each.shape.logit_rows, self._setup.token_limit)
            if slot.logits is None:
                slot.logits = cuda.PinnedMemory(self._logits.size)
            self._stream.copy(slot.logits.address, self._logits.address, self._logits_bytes(each), cuda.TO_HOST)
        slot.done.record(self._stream)
        slot.ticket = Ticket(slot, step.cell, logits_shape, step.draft_length if drafts else 0)
        self._held.wrote(slot.ticket, first, batch)
        return slot.ticket

    def _variant(self, step: StepInputs) -> int | None:
        """How many drafts the step makes, see GraphKey. A chunk makes all or none: fewer graphs."""
        if self._drafter is None or not step.prime:
            return None
        most = self._setup.draft_length
        if step.draft_length > most:
            raise BackendError(f"{step.draft_length} drafts were asked for, the drafter makes {most}")
        return most if step.cell.kind == "prefill" and step.draft_length else step.draft_length

    def _run_eagerly(self, each: _Cell, slot: RingSlot, first: int, drafts: int | None) -> None:
        layout = each.layout
        self._bind(each, first)
        self._stream.copy(self._inputs.address, slot.inputs.address, layout.inputs.size, cuda.TO_DEVICE)
        self._queue(each, first, drafts)
        self._stream.copy(slot.outputs.address, self._outputs.address, layout.outputs.size, cuda.TO_HOST)

    def _queue(self, each: _Cell, first: int, drafts: int | None) -> None:
        """The step on the device: token and length from the slot, the decoder, both back, then the drafter."""
        self._slot_to_inputs(each, first)
        self._run_engine(each)
        self._outputs_to_slot(each, first)
        if drafts is None or self._drafter is None:
            return
        layout = each.layout
        lengths = (
            self._inputs.address + layout.inputs["length"].offset,
            self._outputs.address + layout.outputs["new_length"].offset,
        )
        targets = [self._outputs.address + field.offset for field in layout.draft_fields(drafts)]
        self._drafter.queue(each.cell, first, self._drafting_rows(), lengths, targets)
        if targets:
            apart, width = layout.draft_pitch, each.shape.batch * TOKEN_BYTES
            self._stream.copy_rows(self._draft_row(first), self._pitch, targets[0], apart, width, drafts)

    def _bind(self, each: _Cell, first: int) -> None:
        """Addresses of every tensor; only the caches depend on the slot. Makes the context where there is none yet."""
        if each.context is None:
            shapes = self._engine.input_shapes(each.shape, self._setup.states)
            each.context = self._engine.context(each.profile, shapes, self._scratch.address, self._stream)
        context = each.context
        if each.bound_slot is None:
            addresses = {"kv_positions": self._positions.address, "logits": self._logits.address}
            addresses |= {name: memory.address for name, memory in self._rows.items()}
            for block, base in ((each.layout.inputs, self._inputs), (each.layout.outputs, self._outputs)):
                addresses |= {field.name: base.address + field.offset for field in block.fields}
            for name, address in addresses.items():
                if name in self._engine.names:
                    context.set_tensor_address(name, address)
        if each.bound_slot != first:
            self._states.bind(context, first)
            each.bound_slot = first

    def _run_engine(self, each: _Cell) -> None:
        if not each.context.execute_async_v3(self._stream.handle):
            raise BackendError(f"{each.cell.label}: TensorRT refused to run: {self._engine.log.last()}")
        self._states.settle(self._stream, each.bound_slot or 0, each.shape.batch)

    @property
    def _pitch(self) -> int:
        """Bytes from what a slot holds in one row of `_slots` to the next row."""
        return self._setup.slots * TOKEN_BYTES

    def _draft_row(self, slot: int) -> int:
        """Address of a slot's first draft."""
        return self._slots.address + 2 * self._pitch + slot * TOKEN_BYTES

    def _verified(self, each: _Cell) -> int:
        """Drafts that a step of this cell takes from its slots."""
        return min(self._setup.draft_length, each.cell.query_rows - 1) if each.cell.kind == "decode" else 0

    def _slot_to_inputs(self, each: _Cell, first: int) -> None:
        """token 0, length and drafts of each row: from where the step before left them."""
        batch, block, drafts = each.shape.batch, each.layout.inputs, self._verified(each)
        tokens, length = (self._inputs.address + block[name].offset for name in ("tokens", "length"))
        source, place = self._slots.address + first * TOKEN_BYTES, self._draft_row(first)
        if batch == 1:  # token and length are one strided copy, the drafts another
            self._stream.copy_rows(tokens, length - tokens, source, self._pitch, TOKEN_BYTES, 2)
            if drafts:
                self._stream.copy_rows(tokens + TOKEN_BYTES, TOKEN_BYTES, place, self._pitch, TOKEN_BYTES, drafts)
            return
        apart = each.shape.rows * TOKEN_BYTES
        self._stream.copy_rows(tokens, apart, source, TOKEN_BYTES, TOKEN_BYTES, batch)
        self._stream.copy(length, source + self._pitch, batch * TOKEN_BYTES, cuda.ON_DEVICE)
        for draft in range(drafts):
            to, at = tokens + (1 + draft) * TOKEN_BYTES, place + draft * self._pitch
            self._stream.copy_rows(to, apart, at, TOKEN_BYTES, TOKEN_BYTES, batch)

    def _outputs_to_slot(self, each: _Cell, first: int) -> None:
        block, width = each.layout.outputs, each.shape.batch * TOKEN_BYTES
        token, length = (self._outputs.address + block[name].offset for name in ("next_token", "new_length"))
        target = self._slots.address + first * TOKEN_BYTES
        self._stream.copy_rows(target, self._pitch, token, length - token, width, 2)

    def _host_rows_to_slot(self, each: _Cell, slot: RingSlot, first: int, known: Any) -> None:
        """What the host knows better goes to the slot first, so that a captured step always reads the slot."""
        block, source = each.layout.inputs, slot.inputs.address
        tokens, length = source + block["first_tokens"].offset, source + block["length"].offset
        target, drafts = self._slots.address + first * TOKEN_BYTES, self._verified(each)
        if not known.any():
            runs = [(0, each.shape.batch)]
        else:
            runs = [(row, 1) for row in range(each.shape.batch) if not known[row]]
        for row, count in runs:
            at, size = row * TOKEN_BYTES, count * TOKEN_BYTES
            self._stream.copy(target + at, tokens + at, size, cuda.TO_DEVICE)
            self._stream.copy(target + self._pitch + at, length + at, size, cuda.TO_DEVICE)
            for draft in range(drafts):
                given = source + block["given_drafts"].offset + draft * each.shape.batch * TOKEN_BYTES
                to = self._draft_row(first) + draft * self._pitch
                self._stream.copy(to + at, given + at, size, cuda.TO_DEVICE)

    def reset_slot(self, slot: int) -> None:
        self._usable()
        if not 0 <= slot < self._setup.slots:
            raise BackendError(f"slot {slot} of {self._setup.slots}: no such slot")
        self._states.reset(self._stream, slot)
        self._held.forget(slot)
        for row in (0, 1):
            self._stream.zero(self._slots.address + (row * self._setup.slots + slot) * TOKEN_BYTES, TOKEN_BYTES)

    # -- reports -----------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        kinds, drafter = self._states.bytes_by_label(), self._drafter
        buffers = (self._inputs, self._outputs, self._logits, self._positions, *self._rows.values())
        if drafter is not None:
            for label, size in drafter.bytes_by_label().items():
                kinds[label] = kinds.get(label, 0) + size
        return {
            "weights": self._weights_bytes,
            **({} if drafter is None else {"drafter_weights": self._drafter_bytes}),
            **kinds,
            "scratch": self._scratch.size,
            "step_buffers": sum(memory.size for memory in buffers) + (0 if drafter is None else drafter.buffer_bytes),
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
                {"cell": f.key.label, "first_slot": f.key.first_slot, "reason": f.reason}
                for f in self._graphs.fallbacks
            ],
            "jit_cache": "warm" if all(plan.cached_bytes for plan in self._plans.values()) else "cold",
            "jit_s": {each.cell.label: round(each.jit_s, 3) for each in self._cells.values()},
            "timings": {name: round(value, 3) for name, value in self._timings.items()},
            "scratch_bytes_by_cell": {
                each.cell.label: self._engine.scratch_by_profile[each.profile] for each in self._cells.values()
            },
            **({} if self._drafter is None else {"drafter": self._drafter.describe()}),
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stream.synchronize()
        self._graphs.close()
        for each in self._cells.values():
            each.context = None
        if self._drafter is not None:
            self._drafter.close()
        self._engine.close()
        blocks = (self._scratch, self._slots, self._positions, self._inputs, self._outputs, self._logits)
        for memory in (*blocks, *self._rows.values()):
            memory.free()
        self._states.free()
        self._ring.free()
        self._stream.close()

    def _usable(self) -> None:
        if self._closed:
            raise BackendError("the TensorRT backend was closed")
