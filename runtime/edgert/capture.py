"""How each cell of an artifact runs on a backend: from a captured graph, eager and why, or not at all.

Pure: reads what `Backend.describe()` says. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgert.cells import Cell
from edgert.config import RuntimeConfig
from edgert.graphs import graph_keys
from edgert.manifest_records import Manifest

# captured: replayed from a graph; partly: at some slots, or with some drafts; eager: launched kernel by kernel; direct:
# this backend has no graphs; unused: scheduler.yaml leaves it out
Status = Literal["captured", "partly", "eager", "direct", "unused"]


@dataclass(frozen=True)
class CellState:
    """reason: why not captured, "" where it is."""

    cell: str
    status: Status
    reason: str


def cell_states(
    cells: Iterable[Cell], used: Iterable[Cell], description: Mapping[str, Any], slots: int, draft_length: int = 0
) -> tuple[CellState, ...]:
    """One state for each cell of the artifact.

    used         the cells that the configuration selects
    slots        places that a cell of one sequence may run at
    description  of the opened backend: `graphs` (absent: it has none), `fallbacks` [{cell, first_slot, reason}], cell
                 being the label of graphs.GraphKey
    draft_length drafts a step at most: a cell has a graph for each thing that the drafter may do after it
    """
    selected = set(used)
    fallbacks: dict[str, list[tuple[str, int, str]]] = {}
    for each in description.get("fallbacks") or ():
        label, _, drafting = str(each["cell"]).partition(" + ")
        fallbacks.setdefault(label, []).append((drafting, int(each["first_slot"]), str(each["reason"])))
    states = []
    for cell in cells:
        failed = fallbacks.get(cell.label, [])
        whole = len(failed) >= len(graph_keys([cell], slots, draft_length))
        states.append(_state(cell, cell in selected, description, failed, whole))
    return tuple(states)


def _state(
    cell: Cell, used: bool, description: Mapping[str, Any], failed: Sequence[tuple[str, int, str]], whole: bool
) -> CellState:
    if not used:
        return CellState(cell.label, "unused", "scheduler.yaml leaves it out")
    if "graphs" not in description:
        return CellState(cell.label, "direct", f"{description.get('backend', 'this backend')} has no graphs")
    if not failed and not description["graphs"]:
        return CellState(cell.label, "eager", "enable_cuda_graph is false")
    if not failed:
        return CellState(cell.label, "captured", "")
    if whole:
        return CellState(cell.label, "eager", "; ".join(dict.fromkeys(reason for _, _, reason in failed)))
    places: dict[tuple[str, str], list[str]] = {}
    for drafting, slot, reason in sorted(failed):
        places.setdefault((drafting, reason), []).append(str(slot))
    parts = [
        f"not{f' with {drafting}' if drafting else ''} at slot{'s' if len(at) > 1 else ''} {', '.join(at)}: {reason}"
        for (drafting, reason), at in places.items()
    ]
    return CellState(cell.label, "partly", "; ".join(parts))


def artifact_states(manifest: Manifest, config: RuntimeConfig, description: Mapping[str, Any]) -> tuple[CellState, ...]:
    """The states of an artifact's cells under a configuration; () where no backend has described itself."""
    if not description:
        return ()
    used = config.select_cells(manifest)
    return cell_states(manifest.cells, used, description, config.slots, config.draft_length)


def counts(states: Iterable[CellState]) -> dict[str, int]:
    """Status → cells, in the order of Status; those without a cell are left out."""
    found = [state.status for state in states]
    order: tuple[Status, ...] = ("captured", "partly", "eager", "direct", "unused")
    return {status: found.count(status) for status in order if status in found}
