"""ONNX Runtime on the CPU: the embedded default, and the reference that other backends are compared with.

Caches and states are arrays of this module, one row per slot. A launch binds the rows of its slots as the graph's state
inputs and, at the same addresses, as its state outputs, so that a cache update writes in place and nothing is copied.
That is safe for a cache, whose update is one operator made for it. A state of another kind is read by several operators
and replaced as a whole: it is written to a second buffer and copied after the step. Launches block: run_ahead is 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from edgert.backends.base import Setup, StepInputs, StepOutputs
from edgert.backends.onnxruntime_mtp import OnnxDrafter
from edgert.cells import Cell
from edgert.errors import ArtifactError, BackendError, ConfigError
from edgert.hostmemory import available_bytes, resident_bytes
from edgert.manifest_records import DRAFTING_INPUTS, DRAFTING_OUTPUTS

MODEL_NAME = "decoder.onnx"
WEIGHTS_NAME = "decoder.weights"
STEP_INPUTS = ("tokens", "length", "valid", "forced", "kv_positions", "uniform", "temperature", "top_k", "top_p")
STEP_OUTPUTS = ("sampled", "accepted", "next_token")
DTYPES = {"float32": np.float32, "float16": np.float16}
TIER_STEP = 64  # cache positions; new shapes cost ONNX Runtime a memory plan, so not every length is one
OLDEST = (1, 25)  # 1.24 reads opset 24 but has no TensorScatter; Python 3.10 gets nothing newer than 1.23
OPTIONS = ("threads", "prepack", "enable_cuda_graph")

# Prepacking lays the weights out for batches a second time: measured on SmolLM2 (540 MB, fp32, 2 threads) +640 MB and
# 0.65 s at load, for batches 1.5 times as fast; one sequence alone gains nothing.
PREPACK_COPIES = 1.25

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ticket:
    """A step that has run."""

    outputs: StepOutputs

    def result(self) -> StepOutputs:
        return self.outputs


@dataclass(frozen=True)
class _Bound:
    """A cell at a first slot: its buffers, and the binding that holds their addresses."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    replaced: tuple[tuple[Array, Array], ...]  # (state rows, the buffer that holds their next values)
    binding: Any


class OnnxRuntimeBackend:
    """See backends.base.Backend. Options: threads (default: the CPUs this process may use), prepack (default: when
    memory allows); enable_cuda_graph is taken and has no meaning here."""

    name = "onnxruntime"
    run_ahead = 0
    any_first_slot = True

    def __init__(self, setup: Setup) -> None:
        self.cells = setup.cells
        self._setup = setup
        unknown = [key for key in setup.options if key not in OPTIONS]
        if unknown:
            raise ConfigError(f"the onnxruntime backend has no option {unknown[0]!r}", hint=f"known: {OPTIONS}")
        self._threads = _threads(setup.options.get("threads"))
        weights = setup.artifact / WEIGHTS_NAME
        self._weight_bytes = weights.stat().st_size if weights.exists() else 0
        prepack = setup.options.get("prepack")
        self._prepack = _memory_allows(self._weight_bytes) if prepack is None else bool(prepack)
        before = resident_bytes() or 0
        self._session: Any = self._open(setup.artifact / MODEL_NAME)
        self._session_bytes = max(0, (resident_bytes() or 0) - before)
        self._check_graph()
        every = (*setup.states, *setup.draft_states)
        self._states = {state.input: _state_array(setup.slots, state.dtype, state.shape) for state in every}
        self._drafter = OnnxDrafter(setup, self._open, self._states) if setup.draft_length else None
        batch = max((cell.batch for cell in setup.cells), default=1)
        self._next = {
            state.input: _state_array(batch, state.dtype, state.shape) for state in setup.states if state.kind != "kv"
        }
        self._bound: dict[tuple[Cell, int, bool], _Bound] = {}
        self._token = np.zeros(setup.slots, np.int64)
        self._length = np.zeros(setup.slots, np.int64)

    def warm_up(self) -> None:
        """Run each decode shape and the largest chunk once, with idle rows: the arena grows now, weights are read in.

        Shapes are dynamic here, so other chunks and tiers gain nothing from a run of their own.
        """
        shapes: dict[tuple[int, int], Cell] = {}
        largest = max((cell.query_rows for cell in self.cells if cell.kind == "prefill"), default=0)
        for cell in sorted(self.cells, key=lambda cell: -cell.kv_tier):
            if cell.kind == "decode" or cell.query_rows == largest:
                shapes[(cell.batch, cell.query_rows)] = cell
        for cell in sorted(shapes.values(), key=lambda cell: -cell.batch * cell.query_rows):
            bound = self._binding(cell, 0, logits=False)
            for name in ("tokens", "length", "valid", "forced"):
                bound.inputs[name].fill(0)
            self._run(bound, cell)
            self._draft(bound, cell, 0, np.zeros(cell.batch, np.int64), self._setup.draft_length)

    def launch(self, step: StepInputs) -> Ticket:
        cell, first = step.cell, step.first_slot
        rows = slice(first, first + cell.batch)
        bound = self._binding(cell, first, logits=step.want_logits)
        for name in STEP_INPUTS:
            if name != "kv_positions":
                bound.inputs[name][...] = getattr(step, name)
        if self._drafter is not None:
            bound.inputs["following"][...] = -1 if step.following is None else step.following
        if step.from_device.any():
            tokens, length = bound.inputs["tokens"], bound.inputs["length"]
            tokens[:, 0] = np.where(step.from_device, self._token[rows], tokens[:, 0])
            length[...] = np.where(step.from_device, self._length[rows], length)
        self._read_what_is_written(bound, cell)
        self._run(bound, cell)
        out = {name: array.copy() for name, array in bound.outputs.items() if name not in DRAFTING_OUTPUTS}
        committed = np.where(step.valid > 0, step.forced + out["accepted"], 0)
        self._length[rows] = bound.inputs["length"] + committed
        self._token[rows] = out["next_token"]
        drafts = self._draft(bound, cell, first, committed, step.draft_length) if step.prime else None
        return Ticket(StepOutputs(out["sampled"], out["accepted"], out["next_token"], out.get("logits"), drafts))

    def _draft(self, bound: _Bound, cell: Cell, first: int, committed: Array, draft_length: int) -> Array | None:
        if self._drafter is None:
            return None
        if draft_length > self._setup.draft_length:
            raise BackendError(f"{draft_length} drafts were asked for, the drafter makes {self._setup.draft_length}")
        hidden, embedding = (bound.outputs[name] for name in DRAFTING_OUTPUTS)
        length = bound.inputs["length"]
        return self._drafter.run(first, hidden, embedding, length, committed, cell.kv_tier, draft_length)

    def reset_slot(self, slot: int) -> None:
        for state in self._setup.states:
            if state.kind != "kv":
                self._states[state.input][slot] = 0
        self._length[slot] = 0

    def memory(self) -> dict[str, int]:
        """session: growth of the process while the session was made (mapped weights count once they are read)."""
        kinds = {state.input: state.kind for state in (*self._setup.states, *self._setup.draft_states)}
        kv = sum(array.nbytes for name, array in self._states.items() if kinds[name] == "kv")
        buffers = sum(
            array.nbytes
            for bound in self._bound.values()
            for array in (*bound.inputs.values(), *bound.outputs.values())
        )
        drafter = self._drafter
        return {
            "weights": self._weight_bytes,
            **({} if drafter is None else {"drafter_weights": drafter.weight_bytes}),
            "kv_cache": kv,
            "state": sum(array.nbytes for array in (*self._states.values(), *self._next.values())) - kv,
            "session": self._session_bytes,
            "step_buffers": buffers + (0 if drafter is None else drafter.buffer_bytes),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "version": ort.__version__,
            "device": "cpu",
            "threads": self._threads,
            "prepack": self._prepack,
            "slots": self._setup.slots,
            "cells": [cell.label for cell in self.cells],
        }

    def close(self) -> None:
        self._bound.clear()
        self._drafter = None
        self._states.clear()
        self._next.clear()
        self._session = None

    def _open(self, model: Path) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if self._setup.draft_length:  # threads of one session that spin after a step starve those of the other
            options.add_session_config_entry("session.force_spinning_stop", "1")
        if not self._prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exception classes are private to its extension module
            hint = None
            if tuple(int(part) for part in ort.__version__.split(".")[:2]) < OLDEST:
                hint = f"this is ONNX Runtime {ort.__version__}; {'.'.join(map(str, OLDEST))} is the first that runs it"
            raise BackendError(f"{model.name} cannot be opened: {_first_line(error)}", hint=hint) from error

    def _check_graph(self) -> None:
        """The session's inputs and outputs are those this module binds."""
        states = self._setup.states
        found = [value.name for value in self._session.get_inputs()]
        drafting = "following" in found
        expected = [*STEP_INPUTS, *(DRAFTING_INPUTS if drafting else ()), *(state.input for state in states)]
        if sorted(found) != sorted(expected):
            wrong = sorted(set(found) ^ set(expected))
            raise ArtifactError(f"{MODEL_NAME} has other inputs than the manifest: {', '.join(wrong[:5])}")
        outputs = {value.name for value in self._session.get_outputs()}
        needed = {*STEP_OUTPUTS, "logits", *(state.output for state in states)}
        missing = (needed | set(DRAFTING_OUTPUTS if drafting or self._setup.draft_length else ())) - outputs
        if missing:
            raise ArtifactError(f"{MODEL_NAME} lacks outputs: {', '.join(sorted(missing)[:5])}")
        self._following = drafting
        for value in self._session.get_inputs():
            shape = {state.input: state.shape for state in states}.get(value.name)
            if shape is not None and tuple(value.shape[1:]) != shape:
                raise ArtifactError(f"{MODEL_NAME}: {value.name} is {value.shape[1:]}, the manifest says {list(shape)}")

    def _binding(self, cell: Cell, first: int, *, logits: bool) -> _Bound:
        key = (cell, first, logits)
        if key in self._bound:
            return self._bound[key]
        if self._session is None:
            raise BackendError("the backend is closed")
        batch, rows, sampled_rows = cell.batch, cell.query_rows, cell.logit_rows
        inputs: dict[str, Array] = {
            "tokens": np.zeros((batch, rows), np.int64),
            "length": np.zeros(batch, np.int64),
            "valid": np.zeros(batch, np.int64),
            "forced": np.zeros(batch, np.int64),
            "kv_positions": np.arange(cell.kv_tier, dtype=np.int64),
            "uniform": np.zeros((batch, sampled_rows), np.float32),
            "temperature": np.zeros(batch, np.float32),
            "top_k": np.zeros(batch, np.int64),
            "top_p": np.ones(batch, np.float32),
        }
        if self._following:
            inputs["following"] = np.full(batch, -1, np.int64)
        outputs: dict[str, Array] = {
            "sampled": np.zeros((batch, sampled_rows), np.int64),
            "accepted": np.zeros(batch, np.int64),
            "next_token": np.zeros(batch, np.int64),
        }
        if self._drafter is not None:
            for name in DRAFTING_OUTPUTS:
                width = self._drafter.width if name == "hidden" else self._drafter.embedding_width
                outputs[name] = np.zeros((batch, rows, width), np.float32)
        if logits:
            outputs["logits"] = np.zeros((batch, sampled_rows, self._setup.token_limit), np.float32)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        replaced = []
        for state in self._setup.states:
            part = self._states[state.input][first : first + batch]
            target = part
            if state.input in self._next:
                target = self._next[state.input][:batch]
                replaced.append((part, target))
            binding.bind_input(state.input, "cpu", 0, part.dtype, part.shape, part.ctypes.data)
            binding.bind_output(state.output, "cpu", 0, part.dtype, part.shape, target.ctypes.data)
        self._bound[key] = _Bound(inputs, outputs, tuple(replaced), binding)
        return self._bound[key]

    def _read_what_is_written(self, bound: _Bound, cell: Cell) -> None:
        """Shapes are dynamic here: a tier is the most that a step may read, and this binds what it needs to read."""
        valid = bound.inputs["valid"]
        written = int(((bound.inputs["length"] + valid) * (valid > 0)).max())
        tier = min(cell.kv_tier, max(cell.query_rows, -(-written // TIER_STEP) * TIER_STEP))
        positions = bound.inputs["kv_positions"]
        bound.binding.bind_input("kv_positions", "cpu", 0, positions.dtype, (tier,), positions.ctypes.data)

    def _run(self, bound: _Bound, cell: Cell) -> None:
        try:
            self._session.run_with_iobinding(bound.binding)
        except Exception as error:  # onnxruntime's exception classes are private to its extension module
            raise BackendError(f"step {cell.label} failed: {_first_line(error)}") from error
        for current, following in bound.replaced:
            current[...] = following


def open_backend(setup: Setup) -> OnnxRuntimeBackend:
    """See edgert.backends.resolve."""
    return OnnxRuntimeBackend(setup)


def _threads(wanted: Any) -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted is None:
        return available
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= 1024:
        raise ConfigError(f"threads is {wanted!r}: expected 1 to 1024", hint=f"this process may use {available} CPUs")
    return wanted


def _state_array(slots: int, dtype: str, shape: tuple[int, ...]) -> Array:
    if dtype not in DTYPES:
        raise BackendError(f"state dtype {dtype} is not one of {', '.join(DTYPES)}", hint="build for float32")
    return np.zeros((slots, *shape), DTYPES[dtype])


def _memory_allows(weight_bytes: int) -> bool:
    """Whether the weights and their packed copy fit into half of what is available; no figure: no packing."""
    available = available_bytes()
    return available is not None and (1 + PREPACK_COPIES) * weight_bytes <= available / 2


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
