"""What a decode step costs with 0, 1, ... drafts, on this machine: from costs.json, else measured at load.

Steps whose rows are all idle cost what real ones do and leave no trace. Steps are launched ahead where the backend
can, so that is how each is measured. The clock is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgert.backends.base import Backend, StepInputs, Ticket
from edgert.cells import Cell
from edgert.costs import StepCosts
from edgert.step import empty_step

REPEATS = 2  # rounds over all lengths; the least counts: what disturbs a step only makes it longer
AHEAD = 8  # steps in a row that are launched ahead, so that waiting for the last is an eighth of a step


def measure_step_costs(
    backend: Backend, cells: Sequence[Cell], slots: int, draft_length: int, clock: Callable[[], float]
) -> dict[int, tuple[float, ...]]:
    """Decode batch → ms of a step with k = 0..draft_length drafts: 1 + k rows verified, k drafted.

    Each is measured in the cell that the scheduler would take at a short context. Raises BackendError.
    """
    costs: dict[int, tuple[float, ...]] = {}
    for batch, taken in drafting_cells(cells, slots, draft_length).items():
        steps = [
            replace(empty_step(cell, 0), prime=drafts > 0, draft_length=drafts) for drafts, cell in enumerate(taken)
        ]
        rounds = [[_time(backend, step, clock) for step in steps] for _ in range(REPEATS)]
        costs[batch] = tuple(min(column) for column in zip(*rounds, strict=True))
    return costs


def step_costs_of(
    costs: StepCosts, cells: Sequence[Cell], slots: int, draft_length: int
) -> dict[int, tuple[float, ...]] | None:
    """The same from costs that are known; None where they hold fewer drafts. Raises KeyError for a cell without one."""
    taken = drafting_cells(cells, slots, draft_length)
    if any(len(costs.cells[cell]) <= drafts for each in taken.values() for drafts, cell in enumerate(each)):
        return None
    return {
        batch: tuple(costs.step_ms(cell, cell.query_rows, drafts) for drafts, cell in enumerate(each))
        for batch, each in taken.items()
    }


def drafting_cells(cells: Sequence[Cell], slots: int, draft_length: int) -> dict[int, tuple[Cell, ...]]:
    """Decode batch → the cell that a step with 0..draft_length drafts takes at a short context; batches that lack one
    are left out."""
    decode = [cell for cell in cells if cell.kind == "decode" and cell.batch <= slots]
    found: dict[int, tuple[Cell, ...]] = {}
    for batch in sorted({cell.batch for cell in decode}):
        enough = [
            [cell for cell in decode if cell.batch == batch and cell.query_rows > drafts]
            for drafts in range(draft_length + 1)
        ]
        if all(enough):
            found[batch] = tuple(min(each, key=lambda cell: (cell.kv_tier, cell.query_rows)) for each in enough)
    return found


def _time(backend: Backend, step: StepInputs, clock: Callable[[], float]) -> float:
    """ms of a step, as the worker launches such a one."""
    ahead = backend.run_ahead
    return max(mean_step_ms(backend, step, clock, count=AHEAD if ahead else 1, ahead=ahead), 1e-6)


def mean_step_ms(backend: Backend, step: StepInputs, clock: Callable[[], float], *, count: int, ahead: int) -> float:
    """The mean of `count` steps in a row, `ahead` of which are launched before the oldest is read."""
    flying: deque[Ticket] = deque()
    start = clock()
    for _ in range(count):
        flying.append(backend.launch(step))
        if len(flying) > ahead:
            flying.popleft().result()
    while flying:
        flying.popleft().result()
    return (clock() - start) * 1e3 / count
