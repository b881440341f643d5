"""From a profile to the plan's plain limits: the one place where both are known, and where backend constants stand."""

from __future__ import annotations

from dataclasses import dataclass

from edgert.costs import StepCosts

from edgebuild.errors import SimulationError
from edgebuild.plan.assemble import plan_for
from edgebuild.plan.cells import CellBudget
from edgebuild.plan.memory import MIB, ModelShape
from edgebuild.plan.records import Limits, Plan
from edgebuild.plan.tuned import Tuned, tuned_limits, tuned_plan
from edgebuild.profile import Profile
from edgebuild.traffic.histogram import Histogram

BATCH_SIZES = (1, 2, 4)
MAX_KV_TIERS = 6


@dataclass(frozen=True)
class BackendCosts:
    """What a backend costs beyond the weights and the cache; `source` says where the launch cost was measured.

    budget_bytes_per_layer_and_cell   what a cell counts in the profile's graph_memory_bytes
    cell_bytes_per_layer              what it takes, for the ledger
    """

    launch_cost_tokens: float
    source: str
    budget_bytes_per_layer_and_cell: int
    cell_bytes_per_layer: int
    runtime_bytes: int
    weight_copy_factor: float
    min_decode_rows: int
    draft_cost_ratios: tuple[float, ...] = ()


@dataclass(frozen=True)
class DrafterShape:
    """A drafter in plain numbers. acceptance: measured by position, () = not; kv_elements: of one position."""

    elements: int
    kv_elements: int
    acceptance: tuple[float, ...] = ()


# A decode step takes as long as this many prompt tokens in a chunk; an engine of at least two rows in every profile
# holds its weights once; a one-row profile would double them. A cell takes 0.34 MB a layer (SmolLM2, 12 cells) or 0.45
# (0.6B, 9 cells) of constants, kernels and graphs, one graph a slot where the batch is 1. The budget counts 1.4: a cell
# is also seconds of compilation at the first start. Once: CUDA's context, 553 MB on an H200, and 130 to 185 MB of what
# TensorRT and the first graph take.
GPU = BackendCosts(96, "measured on an H200: 91 for a 4B model, 103 for 0.6B", 1_400_000, 400_000, 660 * MIB, 0.0, 2)
# ONNX Runtime keeps prepacked copies where memory allows: +640 MB beside 538 MB of weights. A cell is a shape, it holds
# no memory. A step with k drafts against one without: SmolLM2-135M, 8,192 tokens that may be drafted, CPU time of one
# thread at a tier of 512 (43.1 ms plain; 46.5, 50.8, 54.3 ms for 2, 3, 4 rows; 3.0, 4.5, 6.0 ms for 1, 2, 3 drafts).
CPU = BackendCosts(
    launch_cost_tokens=19,
    source="measured on 2 CPU cores: 23 ms a chunk, 1.22 ms a prompt token at 135M",
    budget_bytes_per_layer_and_cell=0,
    cell_bytes_per_layer=0,
    runtime_bytes=160 * MIB,
    weight_copy_factor=1.19,
    min_decode_rows=1,
    draft_cost_ratios=(1.0, 1.15, 1.28, 1.40),
)


def limits_from(
    profile: Profile, model: ModelShape, max_cells: int | None = None, drafter: DrafterShape | None = None
) -> Limits:
    """The plan's limits. `max_cells` caps prefill and decode cells together, below what the profile allows."""
    costs = CPU if profile.backend == "onnxruntime" else GPU
    limits, mechanisms = profile.limits, profile.mechanisms
    graph_bytes = costs.budget_bytes_per_layer_and_cell * model.layers
    total = limits.max_prefill_cells + limits.max_decode_cells
    if graph_bytes:
        total = max(2, min(total, limits.graph_memory_bytes // graph_bytes))
    if max_cells is not None:
        total = min(total, max_cells)
    ratio = profile.scheduling.prefill_decode_ratio
    return Limits(
        device=profile.name,
        backend=profile.backend,
        precision=profile.precision,
        device_bytes=profile.device.memory_bytes,
        slots=limits.slots,
        context_tokens=limits.context_tokens,
        context_may_shrink="context_tokens" not in limits.model_fields_set,
        min_chunk=limits.min_chunk,
        max_chunk=limits.max_chunk,
        max_kv_tiers=min(MAX_KV_TIERS, limits.max_decode_cells),
        batch_sizes=BATCH_SIZES,
        budget=CellBudget(limits.max_prefill_cells, limits.max_decode_cells, total),
        bandwidth_bytes_per_s=profile.device.bandwidth_gb_per_s * 1e9,
        launch_cost_tokens=costs.launch_cost_tokens,
        launch_cost_source=costs.source,
        margin_fraction=limits.memory_margin_fraction,
        graph_bytes_per_cell=costs.cell_bytes_per_layer * model.layers,
        runtime_bytes=costs.runtime_bytes,
        weight_copy_factor=costs.weight_copy_factor,
        min_decode_rows=costs.min_decode_rows,
        weight_copies_optional=profile.backend == "onnxruntime",
        queue_limit=16 * limits.slots,
        acceptance_threshold=mechanisms.mtp_acceptance_threshold,
        itl_ms=profile.slo.itl_ms,
        itl_p95_ratio=profile.slo.itl_p95_ratio,
        ttft_ms=profile.slo.ttft_ms,
        tpot_ms=profile.slo.tpot_ms,
        throughput_headroom_fraction=limits.throughput_headroom_fraction,
        other_precisions=() if profile.backend == "onnxruntime" else ("float16", "bfloat16"),
        headroom_fraction=limits.headroom_fraction,
        ratio_range=(ratio.min, ratio.max),
        enable_chunked_prefill=mechanisms.enable_chunked_prefill,
        enable_cuda_graph=mechanisms.enable_cuda_graph,
        temperature_soft_c=profile.device.temperature_soft_c,
        temperature_hard_c=profile.device.temperature_hard_c,
        power_mode=profile.device.power_mode,
        draft_length=profile.draft.length if drafter is not None else 0,
        drafter_elements=0 if drafter is None else drafter.elements,
        drafter_kv_elements=0 if drafter is None else drafter.kv_elements,
        acceptance=() if drafter is None else drafter.acceptance[: profile.draft.length],
        step_cost_ms=() if drafter is None else costs.draft_cost_ratios,
    )


def make_plan(
    profile: Profile,
    histogram: Histogram,
    model: ModelShape,
    max_cells: int | None = None,
    drafter: DrafterShape | None = None,
    tuned: Tuned | None = None,
    costs: StepCosts | None = None,
) -> Plan:
    """Decide everything for this device, traffic and model. Raises DoesNotFit with what to change.

    tuned: what `edgebuild tune` measured on the device, over what is estimated here. costs: costs.json of an earlier
    build of this model for this device, for slo.itl_p95_ratio. Raises SimulationError where they are of another
    backend.
    """
    if costs is not None and costs.backend != profile.backend:
        raise SimulationError(
            f"costs of backend {costs.backend!r}, the profile's is {profile.backend!r}",
            hint="measure an artifact of this profile: edgebuild simulate ARTIFACT --measure",
        )
    limits = limits_from(profile, model, max_cells, drafter)
    if tuned is None:
        return plan_for(limits, histogram, model, costs)
    return tuned_plan(plan_for(tuned_limits(limits, tuned), histogram, model, costs), tuned)
