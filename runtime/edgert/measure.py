"""Measures what each cell costs on this machine, for costs.json and for the policy. In slots that nobody owns yet.

A step here has every row valid and ends at the cell's tier, so it reads all that the cell can read. With a backend that
runs ahead the steps overlap as they do in service. The clock is passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from edgert.backends.base import Backend, StepInputs
from edgert.cells import Cell
from edgert.costs import COSTS_NAME, LEAST_MS, Reads, StepCosts, load_costs
from edgert.cpu import board_name, cpu_name
from edgert.errors import ArtifactError
from edgert.handles import Handle
from edgert.output import Output
from edgert.requests import Request
from edgert.sampling import SamplingParams
from edgert.step import empty_step
from edgert.stepcosts import mean_step_ms

if TYPE_CHECKING:
    from edgert.loading import Runtime

log = logging.getLogger("edgert.measure")

STEPS = 5  # steps in a row that one reading is the mean of, where they are short
SHORT_MS = 20.0  # longer ones are read singly
QUICK_MS = 400.0  # what a load may spend on this, about
ROUNDS = 3  # readings of a cell; the median counts
HOST_TOKENS = 32  # tokens of the request that the host's share is measured with

Progress = Callable[[int, int], None]


def measure_costs(
    runtime: Runtime, clock: Callable[[], float], *, model: str = "", progress: Progress | None = None
) -> StepCosts:
    """Every cell of a runtime that serves nobody. Raises BackendError.

    progress  called with (cells done, cells in all)
    """
    backend, limits = runtime.backend, runtime.limits
    length = runtime.draft_control().length if runtime.draft_control is not None else 0
    cells = [cell for cell in sorted(limits.cells) if cell.batch <= limits.slots]
    measured: dict[Cell, tuple[float, ...]] = {}
    for done, cell in enumerate(cells):
        if progress is not None:
            progress(done, len(cells))
        measured[cell] = tuple(
            measure_step(backend, step, clock) for step in steps_of(cell, length, runtime.cache_tokens)
        )
        for slot in range(cell.batch):
            backend.reset_slot(slot)
    reads: Reads = "written" if backend.name == "onnxruntime" else "tier"
    costs = _costs(backend, model, reads, measured, f"median of {ROUNDS} readings a cell, at the end of its tier")
    if progress is not None:
        progress(len(cells), len(cells))
    # with a step launched ahead the host works while the device does
    return costs if backend.run_ahead else replace(costs, host_ms=measure_host_ms(runtime, costs, clock))


def stored_costs(directory: Path, model: str, backend: Backend, cells: Sequence[Cell]) -> StepCosts | None:
    """costs.json where it is of this model, device and version; None, and a warning where there is one that is not."""
    path = directory / COSTS_NAME
    if not path.exists():
        return None
    described = backend.describe()
    here = (model, device_label(described), backend.name, str(described.get("version", "")))
    try:
        costs = load_costs(path)
    except ArtifactError as error:
        log.warning("%s is not used: %s", COSTS_NAME, error)
        return None
    if (costs.model, costs.device, costs.backend, costs.version) != here or costs.missing(cells):
        what = f"{costs.device}, {costs.backend} {costs.version}"
        log.warning("%s is not used, it is of another model, device, version or set of cells: %s", COSTS_NAME, what)
        return None
    return costs


def quick_costs(
    backend: Backend, cells: Sequence[Cell], slots: int, cache_tokens: int, clock: Callable[[], float], model: str = ""
) -> StepCosts:
    """One cell of each decode batch and chunk size, the smallest first, until QUICK_MS are spent; chunks that are not
    reached go on along the line of the two largest that were. Raises BackendError."""
    measured: dict[Cell, tuple[float, ...]] = {}
    smallest: dict[tuple[str, int, int], Cell] = {}
    for cell in sorted(cells, key=lambda cell: (cell.kind, cell.batch * cell.query_rows, cell.kv_tier)):
        if cell.batch <= slots:
            smallest.setdefault((cell.kind, cell.batch, cell.query_rows), cell)
    spent = 0.0
    unmeasured = []
    for cell in smallest.values():
        chunks = [each for each in measured if each.kind == "prefill"]
        if cell.kind == "prefill" and len(chunks) > 1 and spent > QUICK_MS:
            unmeasured.append(cell)
            continue
        (step, *_) = steps_of(cell, 0, cache_tokens)
        readings = [_run(backend, step, 1, clock) for _ in range(2)]
        spent += sum(readings)
        measured[cell] = (max(min(readings), LEAST_MS),)
        for slot in range(cell.batch):
            backend.reset_slot(slot)
    for cell in unmeasured:
        low, high = sorted(each for each in measured if each.kind == "prefill")[-2:]
        slope = (measured[high][0] - measured[low][0]) / (high.query_rows - low.query_rows)
        measured[cell] = (measured[high][0] + max(0.0, slope) * (cell.query_rows - high.query_rows),)
    note = "measured when the artifact was loaded, at the smallest tier of each shape"
    return _costs(backend, model, "tier", measured, note)


def _costs(backend: Backend, model: str, reads: Reads, cells: Mapping[Cell, tuple[float, ...]], note: str) -> StepCosts:
    """Of this device and version, the host's share not measured yet."""
    described = backend.describe()
    return StepCosts(
        source="measured",
        device=device_label(described),
        backend=backend.name,
        version=str(described.get("version", "")),
        model=model,
        reads=reads,
        run_ahead=backend.run_ahead,
        host_ms=0.0,
        cells=cells,
        note=note,
    )


def steps_of(cell: Cell, draft_length: int, cache_tokens: int) -> list[StepInputs]:
    """The step as it is, and with 1..k drafts; in prefill with the drafter following."""
    step = empty_step(cell, 0)
    # never position 0: a sequence that starts anew wants its slot reset before each step
    length = max(1, min(cell.kv_tier, cache_tokens) - cell.query_rows)
    valid = min(cell.query_rows, cell.kv_tier - length)
    step.length[:] = length
    step.tokens[:, :valid] = 1
    step.valid[:] = valid
    step.forced[:] = valid if cell.kind == "prefill" else 1
    if not draft_length:
        return [step]
    if cell.kind == "prefill":
        following = np.full(cell.batch, -1, np.int64)
        return [step, replace(step, prime=True, draft_length=draft_length, following=following)]
    return [
        step,
        *(replace(step, prime=True, draft_length=k) for k in range(1, min(draft_length, cell.query_rows) + 1)),
    ]


def measure_step(backend: Backend, step: StepInputs, clock: Callable[[], float]) -> float:
    """Milliseconds of one step among its like: warmed up once, then the median of ROUNDS readings."""
    first = _run(backend, step, 1, clock)
    count = STEPS if first < SHORT_MS else 1
    return max(median(_run(backend, step, count, clock) for _ in range(ROUNDS)), LEAST_MS)


def _run(backend: Backend, step: StepInputs, count: int, clock: Callable[[], float]) -> float:
    return mean_step_ms(backend, step, clock, count=count, ahead=backend.run_ahead)


def measure_host_ms(runtime: Runtime, costs: StepCosts, clock: Callable[[], float]) -> float:
    """What a step takes beyond its cell's cost: one request alone through the real worker, against the table."""
    limits = runtime.limits
    prompt = min(16, limits.context_tokens - 1)
    tokens = min(HOST_TOKENS, limits.context_tokens - prompt)
    if tokens < 2:
        return 0.0
    readings = []
    for number in range(ROUNDS):
        worker = runtime.worker(clock)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(number, (1,) * prompt, params, 0, frozenset(), None, clock())
        worker.add(Output(request, Handle(number, worker.cancel), None, None))
        spent, expected, steps = 0.0, 0.0, 0
        while worker.busy:
            before = dict(worker.counters.launches)
            start = clock()
            worker.step()
            took = clock() - start
            cell = _launched(limits.cells, before, worker.counters.launches)
            if cell is not None and cell.kind == "decode":
                expected += costs.step_ms(cell, prompt + steps, worker.drafts.control.length)
                spent += took * 1e3
                steps += 1
        readings.append((spent - expected) / max(1, steps))
    runtime.backend.reset_slot(0)
    return max(0.0, median(readings))


def _launched(cells: Sequence[Cell], before: Mapping[str, int], after: Mapping[str, int]) -> Cell | None:
    return next((cell for cell in cells if after.get(cell.label, 0) > before.get(cell.label, 0)), None)


def device_label(described: Mapping[str, Any], root: Path = Path("/")) -> str:
    """The device by name, with what its speed depends on: threads, driver."""
    name = str(described.get("device", "unknown device"))
    if name == "cpu":
        name = board_name(root) or cpu_name(root) or name
    extras = [f"{described['threads']} threads"] if "threads" in described else []
    extras += [f"driver {described['driver']}"] if described.get("driver") else []
    return ", ".join([name, *extras])
