"""Planned against actual memory: today's ledger for the engines whose memory was read from an H200.

python benchmarks/ledger.py     reads prefill-smollm2.json, prefill-0.6b.json and decode.json in benchmarks/results

Only reads what other benchmarks measured, so that a change of the planner's formulas can be held against it anywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import SHAPES
from edgebuild.models.config import ModelConfig
from edgebuild.plan.from_profile import GPU
from edgebuild.plan.memory import MemoryRequest, ModelShape, draw_up

RESULTS = Path(__file__).parent / "results"
WHAT = (
    "the planner's ledger of today against the memory that an engine took; runtime: CUDA's context, libraries, "
    "kernels; graphs: captured graphs and the engine's own constants of each cell"
)


@dataclass(frozen=True)
class Case:
    """One measured engine. actual: bytes by part, "runtime" with CUDA's context."""

    shape: str
    source: str
    cells: int
    slots: int
    context: int
    chunk: int
    decode_rows: int
    cache: int
    actual: dict[str, float]


def cases(results: Path = RESULTS) -> list[Case]:
    """SmolLM2 and 0.6B as whole artifacts, 4B with one decode cell."""
    small, middle = (json.loads((results / f"prefill-{name}.json").read_text()) for name in ("smollm2", "0.6b"))
    context_bytes = middle["cuda_context_mb"] * 1e6  # of this device and driver, the same for every process
    large = json.loads((results / "decode.json").read_text())["measured"]["4b"]["graph"]["memory"]
    parts = {key: large[key] for key in ("weights", "kv_cache", "scratch", "graphs")}
    parts["runtime"] = large["device_used"] - sum(parts.values()) + context_bytes
    with_context = 0.0 if small.get("cuda_context_mb") else context_bytes
    return [
        Case("smollm2", "prefill-smollm2", 12, 4, 8192, 1024, 8, 9216, _actual(small, with_context)),
        Case("0.6b", "prefill-0.6b", 9, 4, 16896, 512, 8, 20992, _actual(middle, 0.0)),
        Case("4b", "decode", 1, 1, 768, 2, 2, 4608, parts),
    ]


def _actual(document: dict[str, Any], context_bytes: float) -> dict[str, float]:
    found = {row["part"]: row["actual_mb"] * 1e6 for row in document["ledger"] if row["part"] != "total"}
    found["runtime"] += context_bytes
    return found


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Part by part and in all: planned, actual, in MB."""
    model = ModelShape.from_config(ModelConfig.from_hf(SHAPES[case.shape].config()))
    request = MemoryRequest(
        precision="float16",
        slots=case.slots,
        context_tokens=case.context,
        largest_chunk=case.chunk,
        cells=case.cells,
        decode_rows=case.decode_rows,
        device_bytes=141 * 10**9,
        margin_fraction=0.12,
        weight_copy_factor=GPU.weight_copy_factor,
        graph_bytes_per_cell=GPU.cell_bytes_per_layer * model.layers,
        runtime_bytes=GPU.runtime_bytes,
        engine=True,
    )
    lines = {line.label: line.bytes for line in draw_up(model, request).lines}
    constants = max(0.0, case.actual["weights"] - lines["weights"])  # of the cells: planned with the graphs
    planned = {
        "weights": lines["weights"] + lines["weight copies"],
        "kv_cache": case.slots * case.cache * model.kv_bytes_per_token(2),
        "scratch": lines["scratch"],
        "graphs": lines["graphs"],
        "runtime": lines["runtime"],
    }
    actual = {
        **case.actual,
        "weights": case.actual["weights"] - constants,
        "graphs": case.actual["graphs"] + constants,
    }
    planned["total"], actual["total"] = sum(planned.values()), sum(actual[part] for part in planned)
    return [
        {
            "shape": case.shape,
            "part": part,
            "planned_mb": round(size / 1e6, 1),
            "actual_mb": round(actual[part] / 1e6, 1),
            "difference_mb": round((size - actual[part]) / 1e6, 1),
            "share": round(size / actual[part], 3) if actual[part] else 0.0,
            "measured_in": case.source,
        }
        for part, size in planned.items()
    ]


def main() -> None:
    measured = json.loads((RESULTS / "prefill-0.6b.json").read_text())
    facts = {key: measured[key] for key in ("device", "versions", "clocks", "commit") if key in measured}
    rows = [row for case in cases() for row in rows_of(case)]
    document = {"what": WHAT, **facts, "command": "python benchmarks/ledger.py", "rows": rows}
    (RESULTS / "ledger.json").write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
