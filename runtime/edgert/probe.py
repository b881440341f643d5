"""How fast a device runs an artifact's steps, and how fast it copies memory. For `edgert doctor`.

Steps whose rows are all idle cost what real ones do and leave no trace. The clock is passed in.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from edgert.backends.base import Backend
from edgert.cells import Cell
from edgert.guards.readings import DeviceReading, Sensors
from edgert.manifest_records import Manifest
from edgert.step import empty_step

PROBE_S = 0.5  # a cell is measured for about this long
COPY_BYTES = 128 << 20  # past every cache


@dataclass(frozen=True)
class StepProbe:
    """One cell. bytes: what one step reads at least (weights, and the cells' share of the cache); rows: of a chunk."""

    cell: str
    batch: int
    step_ms: float
    bytes: int
    rows: int = 1

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.step_ms * 1e3

    @property
    def tokens_per_s(self) -> float:
        return self.batch * self.rows / self.step_ms * 1e3


def phase_of(cell: Cell) -> str:
    """Under which name the memory of a step is kept: each chunk size, and each decode batch."""
    return f"prefill-{cell.query_rows}" if cell.kind == "prefill" else f"decode-{cell.batch}"


def probe_cells(cells: Sequence[Cell], slots: int) -> tuple[Cell, ...]:
    """A sequence alone, and as many as there is a cell for; each at its smallest tier with the fewest rows."""
    decode = [cell for cell in cells if cell.kind == "decode" and cell.batch <= slots]
    batches = sorted({cell.batch for cell in decode})
    wanted = dict.fromkeys((batches[0], batches[-1]))
    return tuple(min((c for c in decode if c.batch == b), key=lambda c: (c.kv_tier, c.query_rows)) for b in wanted)


def probe_steps(
    backend: Backend,
    cells: Sequence[Cell],
    slots: int,
    manifest: Manifest,
    clock: Callable[[], float],
    mark: Callable[[str], None] = lambda _phase: None,
) -> tuple[StepProbe, ...]:
    """Median step time of the probe cells; mark: told the phase after each. Raises BackendError."""
    probes = []
    for cell in probe_cells(cells, slots):
        probes.append(StepProbe(cell.label, cell.batch, _step_ms(backend, cell, clock), step_bytes(manifest, cell)))
        mark(phase_of(cell))
    return tuple(probes)


def probe_chunks(
    backend: Backend,
    cells: Sequence[Cell],
    manifest: Manifest,
    clock: Callable[[], float],
    mark: Callable[[str], None],
) -> tuple[StepProbe, ...]:
    """One step of each chunk size at its smallest tier, small chunks first; mark: told the phase after each."""
    prefill = [cell for cell in cells if cell.kind == "prefill"]
    probes = []
    for rows in sorted({cell.query_rows for cell in prefill}):
        cell = min((c for c in prefill if c.query_rows == rows), key=lambda c: c.kv_tier)
        start = clock()
        backend.launch(empty_step(cell, 0)).result()
        step_ms = max((clock() - start) * 1e3, 1e-6)
        probes.append(StepProbe(cell.label, 1, step_ms, step_bytes(manifest, cell), rows))
        mark(phase_of(cell))
    return tuple(probes)


def read_under_load(
    backend: Backend, cells: Sequence[Cell], slots: int, sensors: Sensors, clock: Callable[[], float]
) -> DeviceReading:
    """The sensors while decode steps run, as long as a governor takes to follow: the reading with the highest clock.

    An idle device lowers its clocks, which is no fault.
    """
    step = empty_step(probe_cells(cells, slots)[-1], 0)
    readings: list[DeviceReading] = []
    begin = clock()
    while len(readings) < 3 or (clock() - begin < PROBE_S and len(readings) < 200):
        ticket = backend.launch(step)
        readings.append(sensors.read())
        ticket.result()
    return max(readings, key=lambda reading: reading.gpu_clock_mhz or 0.0)


def step_bytes(manifest: Manifest, cell: Cell) -> int:
    """Weights once, and for each sequence the cache positions of its tier and all of its other states."""
    weights = sum(line.bytes for line in manifest.ledger if line.label.startswith("weights"))
    total = float(weights)
    for state in manifest.states:
        size = state.slot_bytes
        total += cell.batch * (size * min(1.0, cell.kv_tier / manifest.cache_tokens) if state.kind == "kv" else size)
    return int(total)


def copy_bytes_per_s(threads: int, clock: Callable[[], float], size: int = COPY_BYTES) -> float:
    """Bytes read and written a second by a copy of `size` bytes over `threads` threads; the best of five."""
    threads = max(1, threads)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    edges = [size * part // threads for part in range(threads + 1)]
    best = math.inf
    for _ in range(5):
        workers = [
            threading.Thread(target=np.copyto, args=(target[low:high], source[low:high]))
            for low, high in pairwise(edges)
        ]
        start = clock()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, clock() - start)
    return 2 * size / max(best, 1e-9)


def _step_ms(backend: Backend, cell: Cell, clock: Callable[[], float]) -> float:
    step = empty_step(cell, 0)
    backend.launch(step).result()
    times: list[float] = []
    begin = clock()
    while len(times) < 3 or (clock() - begin < PROBE_S and len(times) < 200):
        start = clock()
        backend.launch(step).result()
        times.append(max((clock() - start) * 1e3, 1e-6))
    return median(times)
