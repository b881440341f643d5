"""Decode batches on the lowest slots: what a graph for each slot costs, against moving caches so that batches close up.

python benchmarks/compaction.py --directory D --output benchmarks/results/compaction.json

D: as decode.py exports it, and built here where no plan with at least the cells below is there yet. A batch of one runs
at any slot, for which each slot has its own captured graph; a larger batch runs on the lowest slots, with idle rows
where a slot between is free. The other way is one graph a cell and copies: when a sequence ends, the caches of the
highest slot move into the gap. Capturing anew instead of copying costs what a capture costs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import SHAPES, Exported, Shape, copy_bandwidth, setup_for
from decode import build, parse_cell, steps_of
from edgert.cells import Cell
from environment import environment, saved

SLOTS, TIER, CONTEXT = 4, 768, 600
CELLS = [Cell("decode", batch, 1, TIER) for batch in (1, 2, 4)]
WHAT = "a graph for each slot against moving caches: decode by batch, captures, and the copy of one slot's caches"


def slot_copy_ms(shape: Shape, cache_tokens: int, tokens: int, repeats: int = 20) -> float:
    """Time to copy `tokens` positions of every cache of one slot to another, on the device."""
    from edgert import cuda

    width = 2 * shape.head_dim
    size = shape.kv_heads * cache_tokens * width
    stream, start, end = cuda.Stream(), cuda.Event(timing=True), cuda.Event(timing=True)
    caches = [cuda.DeviceMemory(2 * size) for _ in range(2 * shape.layers)]  # two slots of each
    times = []
    for _ in range(repeats):
        start.record(stream)
        for cache in caches:
            pitch = cache_tokens * width
            stream.copy_rows(cache.address, pitch, cache.address + size, pitch, tokens * width, shape.kv_heads)
        end.record(stream)
        end.wait()
        times.append(end.ms_since(start))
    for each in (*caches, start, end, stream):
        each.free() if isinstance(each, cuda.DeviceMemory) else each.close()
    return float(np.median(times[3:]))


def measure(directory: Path) -> dict[str, Any]:
    from edgert.backends.tensorrt import TensorRTBackend

    info = Exported.load(directory)
    shape = SHAPES[info.shape]
    if not (directory / "decoder.plan").exists():
        build(directory, CELLS, 2)
    bandwidth = copy_bandwidth()
    cells = [parse_cell(label) for label in json.loads((directory / "build.json").read_text())["cells"]]
    backend = TensorRTBackend(setup_for(directory, info, cells, SLOTS, {"flavour": "tensorrt-rtx"}))
    backend.warm_up()
    described, memory = backend.describe(), backend.memory()
    steps = {cell.batch: steps_of(backend, cell, CONTEXT, 200, ahead=True)["step_ms"] for cell in CELLS}
    backend.close()
    graphs = described["graphs"]
    copy = slot_copy_ms(shape, info.cache_tokens, CONTEXT)
    row = {
        "shape": shape.name,
        **{f"batch_{batch}_ms": value for batch, value in steps.items()},
        "graphs": graphs,
        "capture_ms_each": round(1e3 * described["timings"]["capture_s"] / graphs, 2),
        "graph_mb_each": round(memory["graphs"] / 1e6 / graphs, 2),
        "slot_copy_ms": round(copy, 4),
        "slot_copy_floor_ms": round(2e3 * shape.kv_bytes(CONTEXT) / bandwidth, 4),
        "idle_rows_cost_ms": round(steps[4] - steps[2], 4),
        "steps_to_pay_a_copy": round(copy / max(1e-6, steps[4] - steps[2]), 2),
    }
    says = {key: described[key] for key in ("device", "timings")}
    return {"rows": [row], "build": json.loads((directory / "build.json").read_text()), **says}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs = [measure(directory) for directory in args.directory]
    found = environment("tensorrt-rtx-cu13", "cuda-bindings", "numpy", device=runs[0]["device"])
    result = {"what": WHAT, **found, "rows": [row for run in runs for row in run["rows"]], "runs": runs}
    print(saved(result, args.output))


if __name__ == "__main__":
    main()
