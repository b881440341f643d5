"""How each cell of an artifact runs on a backend: from a captured graph, eager and why, or not at all.

Pure: reads what `Backend.describe()` says. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgert.cells import Cell

# captured: replayed from a graph; partly: at some slots; eager: launched kernel by kernel; direct: this backend has no
# graphs; unused: scheduler.yaml leaves it out
Status = Literal["captured", "partly", "eager", "direct", "unused"]


@dataclass(frozen=True)
class CellState:
    """reason: why not captured, "" where it is."""

    cell: str
    status: Status
    reason: str


def cell_states(
    cells: Iterable[Cell], used: Iterable[Cell], description: Mapping[str, Any], slots: int
) -> tuple[CellState, ...]:
    """One state for each cell of the artifact.

    used         the cells that the configuration selects
    slots        places that a cell of one sequence may run at
    description  of the opened backend: `graphs` (absent: it has none), `fallbacks` [{cell, first_slot, reason}]
    """
    selected = set(used)
    fallbacks: dict[str, dict[int, str]] = {}
    for each in description.get("fallbacks") or ():
        fallbacks.setdefault(str(each["cell"]), {})[int(each.get("first_slot", 0))] = str(each["reason"])
    return tuple(_state(cell, cell in selected, description, fallbacks.get(cell.label, {}), slots) for cell in cells)


def _state(cell: Cell, used: bool, description: Mapping[str, Any], failed: Mapping[int, str], slots: int) -> CellState:
    if not used:
        return CellState(cell.label, "unused", "scheduler.yaml leaves it out")
    if "graphs" not in description:
        return CellState(cell.label, "direct", f"{description.get('backend', 'this backend')} has no graphs")
    if not failed and not description["graphs"]:
        return CellState(cell.label, "eager", "enable_cuda_graph is false")
    if not failed:
        return CellState(cell.label, "captured", "")
    reasons = "; ".join(dict.fromkeys(failed.values()))
    if cell.batch == 1 and len(failed) < slots:
        return CellState(cell.label, "partly", f"not at slots {', '.join(map(str, sorted(failed)))}: {reasons}")
    return CellState(cell.label, "eager", reasons)


def counts(states: Iterable[CellState]) -> dict[str, int]:
    """Status → cells, in the order of Status; those without a cell are left out."""
    found = [state.status for state in states]
    order: tuple[Status, ...] = ("captured", "partly", "eager", "direct", "unused")
    return {status: found.count(status) for status in order if status in found}
