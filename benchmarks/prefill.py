"""Prompts of 512 and 4,096 tokens through the engine: tokens a second in chunks and at one go, scratch, memory.

python benchmarks/prefill.py --artifact ARTIFACT --lengths 512 4096 --output benchmarks/results/prefill-0.6b.json

Time is to the first token, one prompt at a time, host included. Scratch is what TensorRT needs for a cell's profile;
memory is read from the device after each phase. The ledger stands beside what the backend measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from edgert.engine import Engine
from edgert.manifest import Manifest
from serving import device_bytes_in_use, finish, load_manifest, opened, requests_of, rounded

WHAT = "a prompt to its first token, alone; llama.cpp's figures were taken apart, on another day"
LLAMA_CPP = {("0.6b", 512): 57_000, ("0.6b", 4096): 44_200, ("4b", 512): 23_300}  # tokens a second, -fa 1, graphs on
# ledger line -> what the backend measures of it
ACTUAL = {
    "weights": ("weights", "weight copies"),
    "kv_cache": ("KV cache",),
    "state": ("recurrent state",),
    "scratch": ("scratch",),
    "graphs": ("graphs",),
}


def first_token_ms(engine: Engine, manifest: Manifest, tokens: int, repeats: int) -> list[float]:
    """TTFT of prompts of one length, one after another; the first is not counted."""
    times = []
    for request in requests_of([(tokens, 1)] * (repeats + 1), manifest, context=engine.context_tokens):
        done = engine.complete(request.prompt_ids, max_tokens=1, ignore_eos=True, seed=0)
        times.append(done.metrics.ttft_ms or 0.0)
    return times[1:]


def chunked_rows(engine: Engine, manifest: Manifest, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for tokens in args.lengths:
        if tokens >= engine.context_tokens:
            continue
        ms = median(first_token_ms(engine, manifest, tokens, args.repeats))
        row: dict[str, Any] = {"shape": args.name, "prompt_tokens": tokens, "way": f"chunks of {args.chunk}"}
        row |= {"ttft_ms": ms, "tokens_per_s": tokens / ms * 1e3}
        if (args.name, tokens) in LLAMA_CPP:
            row["llama_cpp_tokens_per_s"] = LLAMA_CPP[args.name, tokens]
        rows.append(row)
    return rows


def scratch_of(says: dict[str, Any], chunk: int, whole: int) -> dict[str, Any] | None:
    """Scratch of the largest chunk cell that a prompt of `whole` tokens needs against one cell for all of it."""
    cells: dict[str, int] = says.get("scratch_bytes_by_cell") or {}
    one = cells.get(f"prefill-{whole}@{whole}")
    parts = {int(label.split("@")[1]): size for label, size in cells.items() if label.startswith(f"prefill-{chunk}@")}
    reach = [tier for tier in sorted(parts) if tier >= whole]
    if one is None or not reach:
        return None
    return {"one_shot_bytes": one, "chunked_bytes": parts[reach[0]], "share": parts[reach[0]] / one}


def ledger_rows(manifest: Manifest, measured: dict[str, int], overhead: int | None) -> list[dict[str, Any]]:
    """Planned against actual, by part and in all.

    overhead: device memory in use that no part accounts for, CUDA's context included.
    """
    planned = {line.label: line.bytes for line in manifest.ledger}
    rows = []
    for part, labels in ACTUAL.items():
        plan, actual = sum(planned.get(label, 0) for label in labels), measured.get(part, 0)
        if plan or actual:
            rows.append({"part": part, "planned_mb": plan / 1e6, "actual_mb": actual / 1e6})
    if overhead is not None:
        rows.append({"part": "runtime", "planned_mb": planned.get("runtime", 0) / 1e6, "actual_mb": overhead / 1e6})
    total = {key: sum(row[key] for row in rows) for key in ("planned_mb", "actual_mb")}
    rows.append({"part": "total", **total})
    for row in rows:
        row["difference_mb"] = row["actual_mb"] - row["planned_mb"]
        row["share"] = row["actual_mb"] / row["planned_mb"] if row["planned_mb"] else 0.0
    return [rounded(row, 2) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--name", default="", help="shape, for llama.cpp's figures: 0.6b or 4b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--one-shot", type=int, default=4096, help="rows of the cell that takes a prompt whole")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    manifest = load_manifest(args.artifact)
    sizes = sorted({cell.query_rows for cell in manifest.prefill_cells})
    chunks = [size for size in sizes if size <= args.chunk]
    rows: list[dict[str, Any]] = []
    before = device_bytes_in_use()
    with opened(args.artifact, graph_bucket_sizes=chunks, max_prefill_chunk_size=chunks[-1]) as engine:
        args.chunk = chunks[-1]
        rows += chunked_rows(engine, manifest, args)
        engine.complete(requests_of([(64, 1)], manifest)[0].prompt_ids, max_tokens=32, ignore_eos=True, seed=0)
        snapshot, says, after = engine.metrics(), dict(engine.describe()), device_bytes_in_use()
    measured = dict(snapshot.memory_bytes)
    used = measured.pop("device_used", None)
    with_context = None if after is None or before is None else after - before
    overhead = None if with_context is None else with_context - sum(measured.values())
    phases = [{"label": phase, "value": size / 1e6} for phase, size in snapshot.memory_phases.items()]
    if args.one_shot in sizes:
        tiers = sorted({cell.kv_tier for cell in manifest.decode_cells if cell.kv_tier <= args.one_shot})
        whole = {"graph_bucket_sizes": [args.one_shot], "max_prefill_chunk_size": args.one_shot}
        with opened(
            args.artifact, context_tokens=tiers[-1], kv_tiers=tiers, check_golden_at_load=False, **whole
        ) as engine:
            tokens = min(args.one_shot, tiers[-1] - 1)
            ms = median(first_token_ms(engine, manifest, tokens, args.repeats))
            row = {"shape": args.name, "prompt_tokens": tokens, "way": "one launch", "ttft_ms": ms}
            rows.append(row | {"tokens_per_s": tokens / ms * 1e3})
            says["scratch_bytes_by_cell"] = {
                **(engine.describe().get("scratch_bytes_by_cell") or {}),
                **(says.get("scratch_bytes_by_cell") or {}),
            }
    document = {
        "what": WHAT,
        "rows": [rounded(row) for row in rows],
        "ledger": ledger_rows(manifest, measured, overhead),
        "scratch": scratch_of(says, args.chunk, args.one_shot),
        "scratch_bytes_by_cell": says.get("scratch_bytes_by_cell"),
        "picture": {"title": f"Memory by phase, {manifest.model.name} (MB)", "bars": phases},
        "timings": says.get("timings"),
        "cuda_context_mb": None if with_context is None or used is None else (with_context - used) / 1e6,
    }
    finish(args.output, document, engine_says=says)


if __name__ == "__main__":
    main()
