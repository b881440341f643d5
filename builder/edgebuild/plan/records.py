"""The plan as data: what was asked (`Limits`), what was decided (`Plan`), and the JSON of both.

Frozen records only; no decision is made here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgert.cells import Cell

from edgebuild.plan.buckets import Padding
from edgebuild.plan.cells import CellBudget, CostModel, PlannedCell
from edgebuild.plan.drafts import ACCEPTANCE_THRESHOLD, DraftChoice
from edgebuild.plan.memory import Ledger, ModelShape
from edgebuild.plan.tiers import TierCost


@dataclass(frozen=True)
class Limits:
    """What the device allows, as plain numbers: the plan's view of a profile.

    device_bytes          memory that the plan may count on, the margin included
    context_tokens        tokens of one sequence; `context_may_shrink`: it is a default, memory may reduce it
    min_chunk, max_chunk  prefill chunk sizes, token rows
    budget                cells that may be captured
    launch_cost_tokens    prompt tokens that take as long as one launch (one weight read)
    launch_cost_source    where that number came from, for people
    min_decode_rows       2 where a one-row profile would double the engine (measured: 1.76-1.99 x the weights)
    weight_copy_factor    engine bytes beyond the weights / weights; `weight_copies_optional`: it can do without
    bandwidth_bytes_per_s peak memory bandwidth
    itl_ms                longest gap between two tokens that the plan should keep, None = no aim; ttft_ms: first token;
                          tpot_ms: time per token; itl_p95_ratio: p95 of a stream's gaps against its quiet gap
    throughput_headroom_fraction   share of the measured throughput that admission leaves free
    headroom_fraction     share of the planned memory that should stay free
    acceptance, step_cost_ms   measured for drafts, () = not measured
    measured_draft        a draft length that `edgebuild tune` measured on the device; goes before the two above
    draft_length          drafts a step at most, as the profile asks
    drafter_elements, drafter_kv_elements   its weights, and what its cache holds of one position
    ratio_range           decode steps after each prefill chunk, least and most
    other_precisions      what the backend could run instead, for advice when memory is short
    enable_*              mechanisms switched on
    """

    device: str
    backend: str
    precision: str
    device_bytes: int
    slots: int
    context_tokens: int
    context_may_shrink: bool
    min_chunk: int
    max_chunk: int
    max_kv_tiers: int
    batch_sizes: tuple[int, ...]
    budget: CellBudget
    bandwidth_bytes_per_s: float
    launch_cost_tokens: float
    launch_cost_source: str
    margin_fraction: float
    graph_bytes_per_cell: int
    runtime_bytes: int
    weight_copy_factor: float
    min_decode_rows: int
    chunk_granularity: int = 8
    tier_granularity: int = 64
    padding_target: float = 0.10
    queue_limit: int = 64
    acceptance: tuple[float, ...] = ()
    step_cost_ms: tuple[float, ...] = ()
    acceptance_threshold: float = ACCEPTANCE_THRESHOLD
    itl_ms: float | None = None
    itl_p95_ratio: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    throughput_headroom_fraction: float = 0.0
    other_precisions: tuple[str, ...] = ()
    weight_copies_optional: bool = False
    headroom_fraction: float = 0.0
    ratio_range: tuple[int, int] = (4, 8)
    enable_chunked_prefill: bool = True
    enable_cuda_graph: bool = True
    temperature_soft_c: float | None = None
    temperature_hard_c: float | None = None
    power_mode: str | None = None
    draft_length: int = 0
    drafter_elements: int = 0
    drafter_kv_elements: int = 0
    measured_draft: DraftChoice | None = None


@dataclass(frozen=True)
class Traffic:
    """What the plan says of the trace. `unservable` requests have a prompt that leaves no room for one token."""

    name: str
    source_sha256: str
    attribution: str
    requests: int
    unservable: int


@dataclass(frozen=True)
class PrefillPlan:
    """Chunk sizes ascending, what they pad, and what the usual lists would pad with as many sizes."""

    padding: Padding
    powers_of_two: Padding
    uniform: Padding

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return self.padding.sizes


@dataclass(frozen=True)
class DecodePlan:
    """KV tiers ascending, what they read in vain, and what the usual lists would read with as many tiers."""

    tiers: TierCost
    powers_of_two: TierCost
    uniform: TierCost
    batch_sizes: tuple[int, ...]
    query_rows: tuple[int, ...]

    @property
    def kv_tiers(self) -> tuple[int, ...]:
        return self.tiers.tiers


@dataclass(frozen=True)
class Ratio:
    """Decode steps after each prefill chunk: the start value, the range, and why."""

    start: int
    low: int
    high: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """Every decision of a build. `context_tokens` is usable and `cache_tokens` allocated, both per slot."""

    limits: Limits
    model: ModelShape
    traffic: Traffic
    slots: int
    context_tokens: int
    cache_tokens: int
    prefill: PrefillPlan
    decode: DecodePlan
    planned_cells: tuple[PlannedCell, ...]
    draft: DraftChoice
    ratio: Ratio
    cost: CostModel
    ledger: Ledger
    notes: tuple[str, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell, prefill and decode, in the order of `Cell`."""
        return tuple(planned.cell for planned in self.planned_cells)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `edgebuild plan --json` and the report: stable keys, no dates, no paths."""
        return {
            "device": self.limits.device,
            "bandwidth_gb_per_s": round(self.limits.bandwidth_bytes_per_s / 1e9, 3),
            "backend": self.limits.backend,
            "precision": self.limits.precision,
            "model": asdict(self.model),
            "traffic": asdict(self.traffic),
            "slots": self.slots,
            "context_tokens": self.context_tokens,
            "cache_tokens": self.cache_tokens,
            "prefill": {
                "chunk_sizes": list(self.prefill.chunk_sizes),
                "max_chunk_size": self.prefill.chunk_sizes[-1],
                "launch_cost_tokens": round(self.limits.launch_cost_tokens, 3),
                "launch_cost_source": self.limits.launch_cost_source,
                "objective": "padded tokens + launch_cost_tokens x launches",
                **_padding(self.prefill.padding),
                "chunks_by_size": list(self.prefill.padding.chunks_by_size),
                "alternatives": {
                    "powers_of_two": {
                        "chunk_sizes": list(self.prefill.powers_of_two.sizes),
                        **_padding(self.prefill.powers_of_two),
                    },
                    "uniform": {
                        "chunk_sizes": list(self.prefill.uniform.sizes),
                        **_padding(self.prefill.uniform),
                    },
                },
                "cells": [_cell(planned) for planned in self.planned_cells if planned.cell.kind == "prefill"],
            },
            "decode": {
                "kv_tiers": list(self.decode.kv_tiers),
                "batch_sizes": list(self.decode.batch_sizes),
                "query_rows": list(self.decode.query_rows),
                **_reads(self.decode.tiers),
                "steps_by_tier": list(self.decode.tiers.steps_by_tier),
                "alternatives": {
                    "powers_of_two": {
                        "kv_tiers": list(self.decode.powers_of_two.tiers),
                        **_reads(self.decode.powers_of_two),
                    },
                    "uniform": {"kv_tiers": list(self.decode.uniform.tiers), **_reads(self.decode.uniform)},
                },
                "cells": [_cell(planned) for planned in self.planned_cells if planned.cell.kind == "decode"],
            },
            "draft": asdict(self.draft),
            "prefill_decode_ratio": asdict(self.ratio),
            "slo": {
                "ttft_ms": self.limits.ttft_ms,
                "itl_ms": self.limits.itl_ms,
                "itl_p95_ratio": self.limits.itl_p95_ratio,
                "tpot_ms": self.limits.tpot_ms,
            },
            "memory": {
                "ledger": [asdict(line) for line in self.ledger.lines],
                "needed_bytes": self.ledger.needed_bytes,
                "budget_bytes": self.ledger.device_bytes,
                "headroom_bytes": self.ledger.headroom_bytes,
                "margin_fraction": self.limits.margin_fraction,
            },
            "notes": list(self.notes),
        }


def _padding(padding: Padding) -> dict[str, Any]:
    return {
        "expected_padding_fraction": padding.fraction,
        "padded_tokens": padding.padded_tokens,
        "real_tokens": padding.real_tokens,
        "launches": padding.launches,
    }


def _reads(tiers: TierCost) -> dict[str, Any]:
    return {
        "expected_waste_fraction": tiers.waste_fraction,
        "read_positions": tiers.read_positions,
        "used_positions": tiers.used_positions,
    }


def _cell(planned: PlannedCell) -> dict[str, Any]:
    return {
        **asdict(planned.cell),
        "label": planned.cell.label,
        "launches": planned.launches,
        "gain_weight_reads": round(planned.gain, 3),
    }
