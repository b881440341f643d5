"""What each cell costs on one device: the numbers that the adaptive policy and the simulator go by, and costs.json.

Measured by edgert.measure, or estimated by edgebuild from a profile: `source` says which. Knows shapes and times only.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgert.cells import Cell
from edgert.errors import ArtifactError, ConfigError
from edgert.strictjson import Node, parse_json, read_bounded

COSTS_NAME = "costs.json"
MAX_COSTS_BYTES = 1 << 20
FORMAT_VERSION = 1
LONGEST_MS = 3.6e6
LEAST_MS = 1e-6
MAX_CELLS = 1024
MAX_DRAFTS = 16

Source = Literal["measured", "estimate"]
Reads = Literal["tier", "written"]


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step in each cell.

    source     "measured" on the device named, or an "estimate" from its data sheet
    device     for people: name, threads, driver
    backend    name and version that the figures are of
    model      identity of the model (manifest.model.identity), "" = unknown
    reads      "tier": a step costs what its tier costs; "written": the backend reads only what is written, so a step
               between two measured tiers costs in between
    run_ahead  steps that the backend takes before the oldest is read; where it is 0 the device waits for the host
               between steps: host_ms
    host_ms    planning, launching and committing one step on the host; 0 where it was not measured
    cells      cell -> (plain, with 1 draft, ..., with K): the step with its drafting. In prefill the entry past the
               first is the chunk with the drafter following it
    note       how it was obtained
    """

    source: Source
    device: str
    backend: str
    version: str
    model: str
    reads: Reads
    run_ahead: int
    host_ms: float
    cells: Mapping[Cell, tuple[float, ...]]
    note: str = ""
    _shapes: dict[tuple[str, int, int], tuple[list[int], list[tuple[float, ...]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Raises ValueError for a cost that is no time."""
        for cell, costs in self.cells.items():
            if not costs or any(not LEAST_MS <= ms <= LONGEST_MS for ms in costs):
                raise ValueError(f"{cell.label}: {costs} are not milliseconds")
        for cell in sorted(self.cells):
            tiers, costs_of = self._shapes.setdefault((cell.kind, cell.batch, cell.query_rows), ([], []))
            tiers.append(cell.kv_tier)
            costs_of.append(self.cells[cell])

    def missing(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """Cells of which no cost is known."""
        return tuple(cell for cell in cells if cell not in self.cells)

    def step_ms(self, cell: Cell, written: int, drafts: int = 0) -> float:
        """One step in `cell` whose longest sequence then has `written` positions, and which makes `drafts` drafts.

        In prefill any draft means that the drafter follows. Raises KeyError for a cell without a cost.
        """
        costs = self.cells[cell]
        if self.reads == "tier":
            return costs[min(drafts, len(costs) - 1)]
        tiers, costs_of = self._shapes[(cell.kind, cell.batch, cell.query_rows)]
        return _between(tiers, costs_of, min(written, cell.kv_tier), drafts)

    def shape_ms(self, kind: str, batch: int, rows: int, written: int, drafts: int = 0) -> float | None:
        """The same for a shape, in the smallest tier that serves it; None where the shape is unknown."""
        shape = self._shapes.get((kind, batch, rows))
        if shape is None:
            return None
        tiers, costs_of = shape
        if self.reads == "written":
            return _between(tiers, costs_of, written, drafts)
        costs = costs_of[min(bisect_left(tiers, written), len(tiers) - 1)]
        return costs[min(drafts, len(costs) - 1)]

    def to_json(self) -> dict[str, Any]:
        """costs.json, without dates and paths."""
        return {
            "format_version": FORMAT_VERSION,
            "source": self.source,
            "device": self.device,
            "backend": {"name": self.backend, "version": self.version},
            "model": self.model,
            "reads": self.reads,
            "run_ahead": self.run_ahead,
            "host_ms": round(self.host_ms, 6),
            "note": self.note,
            "cells": [
                {
                    "kind": cell.kind,
                    "batch": cell.batch,
                    "query_rows": cell.query_rows,
                    "kv_tier": cell.kv_tier,
                    "ms": [round(ms, 6) for ms in self.cells[cell]],
                }
                for cell in sorted(self.cells)
            ],
        }

    def dump(self) -> str:
        """The text of costs.json: one line a cell."""
        document = self.to_json()
        cells = ",\n".join(f"    {json.dumps(cell)}" for cell in document.pop("cells"))
        head = json.dumps(document, indent=2, ensure_ascii=True)[:-2]
        return f'{head},\n  "cells": [\n{cells}\n  ]\n}}\n'


def _between(tiers: Sequence[int], costs_of: Sequence[tuple[float, ...]], written: int, drafts: int) -> float:
    """Linear between measured tiers. Below the smallest the line of the first two goes on, to half of its cost."""

    def cost(index: int) -> float:
        costs = costs_of[index]
        return costs[min(drafts, len(costs) - 1)]

    at = bisect_left(tiers, written)
    if at == len(tiers):
        return cost(at - 1)
    if tiers[at] == written or len(tiers) == 1:
        return cost(at)
    low, high = (at - 1, at) if at else (0, 1)
    slope = (cost(high) - cost(low)) / (tiers[high] - tiers[low])
    value = cost(low) + slope * (written - tiers[low])
    return value if at else min(max(value, cost(0) / 2), cost(0))


def parse_costs(data: bytes, name: str = COSTS_NAME) -> StepCosts:
    """A strict reading of costs.json. Raises ArtifactError."""
    root = Node(parse_json(data, name), name)
    keys = ("format_version", "source", "device", "backend", "model", "reads", "run_ahead", "host_ms", "note", "cells")
    at = root.fields(keys)
    at["format_version"].integer(FORMAT_VERSION, FORMAT_VERSION)
    backend = at["backend"].fields(("name", "version"))
    cells: dict[Cell, tuple[float, ...]] = {}
    for node in at["cells"].items(1, MAX_CELLS):
        entry = node.fields(("kind", "batch", "query_rows", "kv_tier", "ms"))
        kind = entry["kind"].choice(("prefill", "decode"))
        sizes = [entry[key].integer(1, 1 << 24) for key in ("batch", "query_rows", "kv_tier")]
        try:
            cell = Cell(kind, *sizes)  # type: ignore[arg-type]
        except ValueError as error:
            raise node.fail(f"a cell ({error})") from None
        if cell in cells:
            raise node.fail("each cell once")
        cells[cell] = tuple(ms.number(LEAST_MS, LONGEST_MS) for ms in entry["ms"].items(1, MAX_DRAFTS + 1))
    return StepCosts(
        source="measured" if at["source"].choice(("measured", "estimate")) == "measured" else "estimate",
        device=at["device"].text(most=256),
        backend=backend["name"].text(least=1, most=64),
        version=backend["version"].text(most=64),
        model=at["model"].text(most=64),
        reads="tier" if at["reads"].choice(("tier", "written")) == "tier" else "written",
        run_ahead=at["run_ahead"].integer(0, 8),
        host_ms=at["host_ms"].number(0.0, LONGEST_MS),
        cells=cells,
        note=at["note"].text(most=4096),
    )


def load_costs(path: Path) -> StepCosts:
    """costs.json at `path`. Raises ArtifactError: the artifact is sound without it, what helps is to measure again."""
    try:
        return parse_costs(read_bounded(path, MAX_COSTS_BYTES), str(path))
    except ArtifactError as error:
        raise ArtifactError(error.args[0], hint="measure again: edgebuild simulate ARTIFACT --measure") from None


def require_costs(costs: StepCosts, cells: Sequence[Cell]) -> None:
    """Raise ConfigError unless every cell has a cost."""
    missing = costs.missing(cells)
    if missing:
        shown = ", ".join(cell.label for cell in missing[:5])
        raise ConfigError(
            f"no cost is known of {len(missing)} of {len(cells)} cells: {shown}",
            hint="measure this artifact: edgebuild simulate ARTIFACT --measure",
        )
