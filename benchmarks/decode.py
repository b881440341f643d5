"""Time of one decode step on a GPU: eager, captured, captured and run ahead; against the bandwidth floor.

python benchmarks/decode.py export --shape 0.6b --directory D     (torch; any machine)
python benchmarks/decode.py build  --directory D                  (TensorRT-RTX, onnx)
python benchmarks/decode.py run    --directory D --output benchmarks/results/decode-0.6b.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import SHAPES, Exported, copy_bandwidth, export_shape, fill_weights, floor_ms, run_steps, setup_for
from edgert.backends.base import StepInputs
from edgert.cells import Cell
from environment import environment, saved

KERNEL_GROUPS = (  # first match names the group
    ("matrix products", ("gemm", "matmul", "cutlass", "xmma", "gemv", "fc_")),
    ("softmax and reductions", ("softmax", "reduce", "argmax", "topk", "scan", "cumsum")),
    ("norms", ("norm",)),
    ("copies and resets", ("memcpy", "memset", "copy", "slice", "transpose", "permut", "shuffle", "reformat")),
    ("cache update", ("scatter", "kvcache", "kv_cache")),
)

WHAT = "one decode step or prefill chunk, random weights, float16; step_ms: host one step ahead, waited_ms: it waits"


def parse_cell(text: str) -> Cell:
    """`decode-1x1@768` or `prefill-512@1024`."""
    kind, rest = text.split("-")
    shape, tier = rest.split("@")
    batch, rows = (1, int(shape)) if kind == "prefill" else (int(n) for n in shape.split("x"))
    return Cell(kind, batch, rows, int(tier))  # type: ignore[arg-type]


def steps_of(backend: Any, cell: Cell, context: int, count: int, *, ahead: bool) -> dict[str, float]:
    """Medians over steps whose context stays within `context` .. `context` + 100 tokens."""
    from edgert.step import empty_step

    def step_at(place: int) -> StepInputs:
        step = empty_step(cell, 0)
        step.valid[:] = step.forced[:] = 1
        first = place % 100 == 0
        if first:
            step.tokens[:, 0], step.length[:] = 11, context
        step.from_device[:] = not first
        return step

    wall, host = run_steps(backend, map(step_at, range(count)), ahead=ahead)
    return {
        "step_ms": round(1e3 * float(np.median(wall[10:])), 4),
        "step_p95_ms": round(1e3 * float(np.percentile(wall[10:], 95)), 4),
        "launch_host_ms": round(1e3 * float(np.median(host[10:])), 4),
    }


def steps_busy(backend: Any, cell: Cell, context: int, count: int = 200) -> float:
    """Share of the wall time in which some step runs on the device, by CUDA events around each launch, host one step
    ahead. Gaps between the kernels of a step count as the step's; what it shows is whether the device waits for the
    host."""
    from edgert import cuda

    stream, launch = backend._stream, backend.launch
    events: list[tuple[Any, Any]] = []

    class Watched:
        def launch(self, step: Any) -> Any:
            begin, end = cuda.Event(timing=True), cuda.Event(timing=True)
            begin.record(stream)
            ticket = launch(step)
            end.record(stream)
            events.append((begin, end))
            return ticket

    steps_of(Watched(), cell, context, count, ahead=True)
    stream.synchronize()
    busy = sum(end.ms_since(begin) for begin, end in events)
    share = busy / events[-1][1].ms_since(events[0][0])
    for event in (event for pair in events for event in pair):
        event.close()
    return round(share, 4)


def prefill_ms(backend: Any, cell: Cell, repeats: int = 12) -> float:
    """Median time of one chunk at position 0, waited for."""
    from edgert.step import empty_step

    times = []
    for _ in range(repeats):
        step = empty_step(cell, 0)
        step.tokens[:] = 11
        step.valid[:] = step.forced[:] = cell.query_rows
        began = time.perf_counter()
        backend.launch(step).result()
        times.append(time.perf_counter() - began)
    return round(1e3 * float(np.median(times[2:])), 4)


def prompt_ms(backend: Any, cells: list[Cell], tokens: int, repeats: int = 4) -> dict[str, float] | None:
    """A whole prompt in chunks of the largest prefill cell, each on the smallest tier that holds it; waited for once.

    None where the cells do not reach `tokens`.
    """
    from edgert.step import empty_step

    prefill = [cell for cell in cells if cell.kind == "prefill"]
    rows = max((cell.query_rows for cell in prefill), default=0)
    tiers = sorted((cell for cell in prefill if cell.query_rows == rows), key=lambda cell: cell.kv_tier)
    if not tiers or tiers[-1].kv_tier < tokens:
        return None
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        ticket = None
        for start in range(0, tokens, rows):
            step = empty_step(next(cell for cell in tiers if cell.kv_tier >= start + rows), 0)
            step.tokens[:], step.length[:] = 11, start
            step.valid[:] = step.forced[:] = rows
            ticket = backend.launch(step)
        assert ticket is not None
        ticket.result()
        times.append(time.perf_counter() - began)
    best = float(np.median(times[1:]))
    return {"tokens": tokens, "ms": round(1e3 * best, 3), "tokens_per_s": round(tokens / best, 1)}


def kernel_table(backend: Any, cell: Cell, context: int, steps: int = 200) -> dict[str, Any]:
    """Device time per step by kernel, from torch's profiler (CUPTI), captured graph replayed, host one step ahead.

    busy_fraction: time in which some kernel or copy ran, over the wall time of the same steps without the profiler,
    which lengthens gaps and, a little, short kernels: it may pass 1. watched_fraction: over its own wall time.
    """
    from torch.profiler import ProfilerActivity, profile

    steps_of(backend, cell, context, 20, ahead=True)
    unwatched = steps_of(backend, cell, context, steps, ahead=True)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        steps_of(backend, cell, context, steps, ahead=True)
    spans: list[tuple[float, float]] = []
    by_kernel: dict[str, list[float]] = {}
    for event in recorded.events():
        if event.device_type.name != "CUDA":
            continue
        start, end = event.time_range.start, event.time_range.end
        spans.append((start, end))
        by_kernel.setdefault(event.name, []).append(end - start)
    spans.sort()
    busy, last = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    groups: dict[str, float] = {}
    for name, times in by_kernel.items():
        lower = name.lower()
        group = next((g for g, words in KERNEL_GROUPS if any(w in lower for w in words)), "pointwise and other")
        groups[group] = groups.get(group, 0.0) + sum(times) / steps
    top = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "kernels_per_step": round(sum(map(len, by_kernel.values())) / steps, 1),
        "busy_us_per_step": round(busy / steps, 1),
        "busy_fraction": round(busy / steps / (1e3 * unwatched["step_ms"]), 4),
        "watched_fraction": round(busy / (spans[-1][1] - spans[0][0]), 4),
        "launch_host_ms": unwatched["launch_host_ms"],
        "group_us_per_step": {name: round(value, 1) for name, value in sorted(groups.items(), key=lambda i: -i[1])},
        "top": [
            {"us_per_step": round(sum(t) / steps, 1), "calls_per_step": round(len(t) / steps, 1), "kernel": name[:160]}
            for name, t in top
        ],
    }


def build(directory: Path, cells: list[Cell], min_rows: int) -> dict[str, Any]:
    from edgebuild.engine.tensorrt import build_engine

    weights = directory / "decoder.weights"
    if not weights.exists():
        fill_weights(directory / "decoder.onnx", weights)
    (directory / "decoder.plan").unlink(missing_ok=True)
    built = build_engine(directory / "decoder.onnx", directory / "decoder.plan", cells, min_matrix_rows=min_rows)
    result = {
        "build_s": round(built.seconds, 1),
        "plan_mb": round(built.plan_bytes / 1e6, 1),
        "weights_mb": round(built.weight_bytes / 1e6, 1),
        "plan_over_weights": round(built.plan_bytes / built.weight_bytes, 4),
        "rows": [shape.rows for shape in built.shapes],
        "cells": [cell.label for cell in cells],
    }
    (directory / "build.json").write_text(json.dumps(result))
    return result


def run(directory: Path, cells: list[Cell], context: int, count: int, *, eager: bool, kernels: bool) -> dict[str, Any]:
    from edgert.backends.tensorrt import TensorRTBackend

    info = Exported.load(directory)
    shape = SHAPES[info.shape]
    bandwidth = copy_bandwidth()
    slots = max(cell.batch for cell in cells)
    report: dict[str, Any] = {
        "shape": shape.name,
        "context_tokens": context,
        "copy_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "build": json.loads((directory / "build.json").read_text()),
        "cells": {},
    }
    for graphs in (True, False) if eager else (True,):
        options = {"flavour": "tensorrt-rtx", "enable_cuda_graph": graphs}
        backend = TensorRTBackend(setup_for(directory, info, cells, slots, options))
        backend.warm_up()
        mode = "graph" if graphs else "eager"
        described = backend.describe()
        report[mode] = {key: described[key] for key in ("timings", "jit_s", "jit_cache", "fallbacks", "graphs")}
        report[mode]["memory"] = backend.memory()
        report["device"] = described["device"]
        report["scratch_bytes_by_cell"] = described["scratch_bytes_by_cell"]
        for cell in cells:
            entry = report["cells"].setdefault(cell.label, {})
            if cell.kind == "prefill":
                entry[mode] = {"chunk_ms": prefill_ms(backend, cell)}
                continue
            floor = floor_ms(shape, context + 50, cell.batch, bandwidth)
            waited = steps_of(backend, cell, context, count, ahead=False)
            ahead = steps_of(backend, cell, context, count, ahead=True)
            entry[mode] = {"waited": waited, "ahead": ahead, "over_floor": round(ahead["step_ms"] / floor, 3)}
            entry[mode]["busy"] = steps_busy(backend, cell, context)
            entry["floor_ms"] = round(floor, 4)
            if graphs and kernels:
                entry["kernels"] = kernel_table(backend, cell, context)
        report[mode]["prompt"] = prompt_ms(backend, cells, 4096)
        backend.close()
    return report


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One flat row a cell and mode, for the table in docs/benchmarks.md."""
    rows = []
    for label, entry in measured["cells"].items():
        for mode in ("graph", "eager"):
            if mode not in entry:
                continue
            row = {"shape": measured["shape"], "cell": label, "mode": mode}
            if "chunk_ms" in entry[mode]:
                rows.append(row | {"step_ms": entry[mode]["chunk_ms"]})
                continue
            ahead, waited = entry[mode]["ahead"], entry[mode]["waited"]
            row |= {"step_ms": ahead["step_ms"], "p95_ms": ahead["step_p95_ms"], "waited_ms": waited["step_ms"]}
            row |= {"launch_host_ms": ahead["launch_host_ms"], "floor_ms": entry["floor_ms"]}
            row |= {"over_floor": entry[mode]["over_floor"]}
            row["gpu_busy"] = entry[mode].get("busy", "")
            if mode == "graph" and "kernels" in entry:
                row["kernels_busy"] = entry["kernels"]["busy_fraction"]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["export", "build", "run"])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--attention", choices=["native", "written_out"], default="written_out")
    parser.add_argument("--sampling", choices=["conditional", "branchless"], default="branchless")
    parser.add_argument("--processors", type=int, default=132, help="export: cut narrow products for this many")
    parser.add_argument("--cache-tokens", type=int, default=4608)
    parser.add_argument("--cells", nargs="+", type=parse_cell, default=[Cell("decode", 1, 1, 768)])
    parser.add_argument("--min-rows", type=int, default=2)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="kernel table through torch's profiler")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.action == "export":
        export_shape(
            SHAPES[args.shape],
            args.directory,
            cache_tokens=args.cache_tokens,
            attention=args.attention,
            sampling=args.sampling,
            processors=args.processors,
        )
        return
    if args.action == "build":
        result = build(args.directory, args.cells, args.min_rows)
    else:
        measured = run(
            args.directory, args.cells, args.context, args.steps, eager=not args.no_eager, kernels=args.kernels
        )
        found = environment("tensorrt-rtx-cu13", "cuda-bindings", "numpy", device=measured.pop("device"))
        result = {"what": WHAT, **found, "rows": rows_of(measured), "measured": measured}
    sys.stdout.write(saved(result, args.output))


if __name__ == "__main__":
    main()
