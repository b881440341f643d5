"""Costs of cells from a data sheet, where nothing was measured: bytes ÷ bandwidth + launch. Always labelled as such.

A step reads the weights once, and for each sequence the cache positions of its tier; a chunk adds the arithmetic of its
rows, in units of the rows that take as long as one weight read (edgebuild.plan.from_profile: measured).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgert.cells import Cell
from edgert.costs import StepCosts
from edgert.manifest import Manifest

from edgebuild.plan import Plan
from edgebuild.plan.memory import ELEMENT_BYTES

LAUNCH_MS = {"onnxruntime": 0.2, "tensorrt": 0.1, "tensorrt-rtx": 0.1}
HOST_MS = 0.3
# What a step reaches of the bandwidth on the data sheet. 4B shape on an H200: 4.03 ms for 8.0 GB of weights at
# 4.8 TB/s = 0.41; SmolLM2 on two cores: 27 ms for 538 MB at 25.6 GB/s = 0.78.
BANDWIDTH_SHARE = {"onnxruntime": 0.78, "tensorrt": 0.6, "tensorrt-rtx": 0.6}


@dataclass(frozen=True)
class Reading:
    """weight_bytes a step reads; kv_bytes of one position; fixed_bytes of one sequence whatever its length.

    launch_cost_tokens, attention_share   as in edgebuild.plan.cells.CostModel
    """

    weight_bytes: float
    kv_bytes: float
    fixed_bytes: float
    launch_cost_tokens: float
    attention_share: float


def estimated(
    cells: Sequence[Cell],
    reading: Reading,
    *,
    backend: str,
    bandwidth_bytes_per_s: float,
    device: str,
    draft_ratios: Sequence[float] = (),
    run_ahead: int = 0,
    model: str = "",
) -> StepCosts:
    """The estimate. draft_ratios: a step with k = 0, 1, ... drafts against one without."""
    speed = bandwidth_bytes_per_s * BANDWIDTH_SHARE[backend] / 1e3  # bytes a millisecond
    read_ms = reading.weight_bytes / speed

    def step_ms(cell: Cell) -> float:
        sequences = cell.batch * (cell.kv_tier * reading.kv_bytes + reading.fixed_bytes) / speed
        rows = cell.query_rows if cell.kind == "prefill" else cell.batch * (cell.query_rows - 1)
        arithmetic = rows / reading.launch_cost_tokens * (1 + cell.kv_tier * reading.attention_share)
        return LAUNCH_MS[backend] + read_ms * (1 + arithmetic) + sequences

    def costs(cell: Cell) -> tuple[float, ...]:
        plain = step_ms(cell)
        if not draft_ratios or cell.kind == "prefill":
            return (plain,)
        # rows for drafts are in the cell already: what is left of the ratio is drafting itself
        return tuple(plain + max(0.0, ratio - 1) * read_ms / 2 for ratio in draft_ratios)

    return StepCosts(
        source="estimate",
        device=device,
        backend=backend,
        version="",
        model=model,
        reads="written" if backend == "onnxruntime" else "tier",
        run_ahead=run_ahead,
        host_ms=HOST_MS,
        cells={cell: costs(cell) for cell in cells},
        note=f"not measured: bytes / ({bandwidth_bytes_per_s / 1e9:g} GB/s x {BANDWIDTH_SHARE[backend]:g}) + "
        f"{LAUNCH_MS[backend]:g} ms a launch; {reading.launch_cost_tokens:g} rows take as long as the weights",
    )


def of_plan(plan: Plan) -> StepCosts:
    """The estimate for what a plan would build."""
    limits, model = plan.limits, plan.model
    element = ELEMENT_BYTES[limits.precision]
    weights = model.weight_elements * element
    reading = Reading(
        weight_bytes=weights,
        kv_bytes=plan.cost.kv_share_per_token * weights,
        fixed_bytes=model.recurrent_bytes_per_slot(element),
        launch_cost_tokens=plan.cost.launch_cost_tokens,
        attention_share=plan.cost.attention_share,
    )
    return estimated(
        plan.cells,
        reading,
        backend=limits.backend,
        bandwidth_bytes_per_s=limits.bandwidth_bytes_per_s,
        device=limits.device,
        draft_ratios=limits.step_cost_ms if plan.draft.length else (),
        run_ahead=0 if limits.backend == "onnxruntime" else 1,
    )


def of_artifact(
    manifest: Manifest,
    plan: Mapping[str, Any],
    cells: Sequence[Cell],
    device: str,
    bandwidth_bytes_per_s: float,
    launch_cost_tokens: float,
) -> StepCosts:
    """The estimate for an artifact on a device of so much bandwidth. plan: plan.json, {} = unknown."""
    weights = sum(line.bytes for line in manifest.ledger if line.label == "weights")
    if not weights:
        weights = max((entry.bytes for entry in manifest.files), default=0)
    per_position, fixed = 0.0, 0.0
    for state in manifest.states:
        size = state.slot_bytes
        if state.kind == "kv":
            per_position += size / manifest.cache_tokens
        else:
            fixed += size
    share = per_position / max(1, weights) * _query_heads_a_kv_head(plan)
    reading = Reading(weights, per_position, fixed, launch_cost_tokens, share)
    return estimated(
        cells,
        reading,
        backend=manifest.backend.name,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        device=device,
        run_ahead=0 if manifest.backend.name == "onnxruntime" else 1,
        model=manifest.model.identity,
        draft_ratios=tuple(1 + 0.15 * k for k in range(manifest.draft_length + 1)) if manifest.draft_length else (),
    )


def _query_heads_a_kv_head(plan: Mapping[str, Any]) -> float:
    """What attention computes beyond one query head for each cached one; 1 where the plan does not say."""
    model = plan.get("model")
    if not isinstance(model, dict):
        return 1.0
    heads, kv_heads = model.get("heads"), model.get("kv_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads > 0 and kv_heads > 0:
        return heads / kv_heads
    return 1.0
