"""The KV check of `edgert doctor`: sequences that run side by side must not see each other.

The golden vectors run in slot 0 alone. Here every slot of the largest decode batch holds another golden prompt, and one
step over all of them must still give each its own reference logits: a wrong stride, slot or length shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgert.backends.base import Backend
from edgert.cells import Cell
from edgert.errors import GoldenMismatch
from edgert.golden import Golden, GoldenCase, compare_logits, prefill_logits
from edgert.step import empty_step


def check_side_by_side(
    backend: Backend, golden: Golden, *, cells: Sequence[Cell], slots: int, context_tokens: int
) -> int:
    """Sequences compared; 0 where there is no batch, or no case that decodes. Raises GoldenMismatch."""
    cases = [case for case in golden.cases if len(case.steps) > 1 and len(case.prompt_ids) < context_tokens]
    cell = _widest(cells, slots, max((len(case.prompt_ids) for case in cases), default=0) + 1)
    if not cases or cell is None:
        return 0
    placed = [cases[slot % len(cases)] for slot in range(cell.batch)]
    try:
        _compare(backend, golden, placed, cell, cells)
    finally:
        for slot in range(cell.batch):
            backend.reset_slot(slot)
    return cell.batch


def _widest(cells: Sequence[Cell], slots: int, tokens: int) -> Cell | None:
    fitting = [c for c in cells if c.kind == "decode" and 1 < c.batch <= slots and c.kv_tier >= tokens]
    return min(fitting, key=lambda c: (-c.batch, c.kv_tier, c.query_rows), default=None)


def _compare(backend: Backend, golden: Golden, placed: Sequence[GoldenCase], cell: Cell, cells: Sequence[Cell]) -> None:
    for slot, case in enumerate(placed):
        backend.reset_slot(slot)
        prefill_logits(backend, case.prompt_ids, cells, slot=slot)
    step = empty_step(cell, 0)
    for slot, case in enumerate(placed):
        step.tokens[slot, 0] = case.steps[1].token
        step.length[slot] = len(case.prompt_ids)
        step.valid[slot] = step.forced[slot] = 1
    logits = backend.launch(replace(step, want_logits=True)).result().logits
    if logits is None:
        raise GoldenMismatch(f"backend {backend.name} returned no logits for {cell.label}")
    for slot, case in enumerate(placed):
        _, wrong = compare_logits(logits[slot, 0], case.steps[1], golden.tolerance)
        if wrong is not None:
            raise GoldenMismatch(
                f"KV check: {cell.batch} sequences side by side disturb each other, slot {slot} of {cell.label}: "
                f"{wrong}",
                hint="graph_batch_sizes: [1] avoids it meanwhile; rebuild the artifact on this device",
            )
