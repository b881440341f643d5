"""Plain inputs for the plan's tests: model shapes, limits and histograms made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from edgebuild.plan.cells import CellBudget
from edgebuild.plan.memory import ModelShape
from edgebuild.plan.records import Limits
from edgebuild.traffic import Histogram

SMOLLM2 = ModelShape(
    layers=30,
    hidden_size=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocabulary_size=49152,
    context_tokens=2048,
    weight_elements=134_515_008,
)
FOUR_B = ModelShape(
    layers=36,
    hidden_size=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocabulary_size=151_936,
    context_tokens=40_960,
    weight_elements=4_022_468_096,
)
LIMITS = Limits(
    device="bench",
    backend="tensorrt",
    precision="float16",
    device_bytes=16 * 10**9,
    slots=4,
    context_tokens=4096,
    context_may_shrink=False,
    min_chunk=16,
    max_chunk=2048,
    max_kv_tiers=4,
    batch_sizes=(1, 2, 4),
    budget=CellBudget(prefill=8, decode=12, total=11),
    bandwidth_bytes_per_s=200e9,
    launch_cost_tokens=96.0,
    launch_cost_source="a test",
    margin_fraction=0.12,
    graph_bytes_per_cell=40_000_000,
    runtime_bytes=500_000_000,
    weight_copy_factor=0.08,
    min_decode_rows=2,
    other_precisions=("float16", "bfloat16"),
)


def limits(**changes: Any) -> Limits:
    return replace(LIMITS, **changes)


def histogram(requests: list[tuple[int, int]] | np.ndarray) -> Histogram:
    """A histogram of (prompt, output) token counts."""
    lengths = np.asarray(requests, dtype=np.int64)
    prompts, outputs = lengths[:, 0], lengths[:, 1]
    contexts = np.zeros(int(lengths.sum(axis=1).max()) + 2, np.int64)
    np.add.at(contexts, prompts + 1, 1)
    np.add.at(contexts, prompts + outputs + 1, -1)
    return Histogram(
        name="by hand",
        source_sha256="0" * 64,
        attribution="",
        requests=len(lengths),
        skipped={},
        prompt_counts=np.bincount(prompts).astype(np.int64),
        output_counts=np.bincount(outputs).astype(np.int64),
        decode_context_counts=np.cumsum(contexts)[:-1],
    )
