"""A stream decodes, a long prompt arrives: the gaps that the stream sees, against one chunk and one step.

python benchmarks/interleaving.py --artifact ARTIFACT --prompt 16000 --output benchmarks/results/interleaving.json

Quiet gaps come from the same stream before the prompt arrives. The bound is measured too: the largest chunk and the
stream's decode step, each in its own cell (edgert.measure). The last row has the ratio that the planner takes for
`slo.itl_p95_ratio` with these costs. Without drafts: their tokens come in groups.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgebuild.plan.smooth import Wanted, least_steps, measured_times
from edgebuild.simulate.artifact import measured
from edgert.config import MAX_RATIO
from edgert.costs import StepCosts
from edgert.engine import Engine
from edgert.manifest import Manifest
from edgert.metrics import percentile
from edgert.policy import smooth_steps
from serving import finish, load_manifest, opened, requests_of, rounded

WHAT = (
    "gaps of one decoding stream while a prompt arrives; bound: the largest chunk and one decode step, each measured "
    "alone at the end of its tier"
)


def ratio_for(target: float, costs: StepCosts, manifest: Manifest, chunk: int, prompt: int, stream: int) -> int:
    """Decode steps a chunk that the planner asks for a p95 of `target` times a quiet gap."""
    batch = max(cell.batch for cell in manifest.decode_cells)
    wanted = Wanted(target, max(1, manifest.slots - 1), batch, manifest.context_tokens, prompt, stream)
    return min(MAX_RATIO, least_steps(measured_times(costs), wanted, chunk))


def one_round(engine: Engine, manifest: Manifest, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Gaps before and while the prompt is read, in ms, and the prompt's TTFT."""
    context = engine.context_tokens
    long_prompt = min(args.prompt, context - 2)
    stream, arriving = requests_of([(args.stream_prompt, 1), (long_prompt, 1)], manifest, seed, context)
    room = context - len(stream.prompt_ids) - 1
    handle = engine.submit(stream.prompt_ids, max_tokens=min(args.stream_tokens, room), ignore_eos=True, seed=0)
    deltas = iter(handle)
    for _ in range(args.quiet):
        next(deltas)
    arrival = engine.submit(arriving.prompt_ids, max_tokens=1, ignore_eos=True, seed=0)
    arrived = arrival.result().metrics
    for _ in range(20):
        next(deltas, None)
    handle.cancel()
    token_s = handle.result().metrics.token_s
    assert arrived.admitted_s is not None
    gaps = [(after, (after - before) * 1e3) for before, after in pairwise(token_s)]
    quiet = [gap for at, gap in gaps if at < arrived.arrival_s][10:]
    busy = [gap for at, gap in gaps if arrived.arrival_s <= at <= arrived.token_s[0]]
    return {"quiet": quiet, "busy": busy, "ttft_ms": arrived.ttft_ms}


def row_of(name: str, rounds: list[dict[str, Any]], bound_ms: float, prompt: int) -> dict[str, Any]:
    quiet = [gap for each in rounds for gap in each["quiet"]]
    busy = [gap for each in rounds for gap in each["busy"]]
    quiet_p95, busy_p95 = percentile(quiet, 95), percentile(busy, 95)
    return {
        "way": name,
        "prompt_tokens": prompt,
        "quiet_p50_ms": percentile(quiet, 50),
        "quiet_p95_ms": quiet_p95,
        "p50_ms": percentile(busy, 50),
        "p95_ms": busy_p95,
        "p95_over_quiet": busy_p95 / quiet_p95,
        "longest_gap_ms": max(busy),
        "bound_ms": bound_ms,
        "over_bound": max(busy) / bound_ms,
        "gaps": len(busy),
        "prompt_ttft_ms": percentile([each["ttft_ms"] for each in rounds], 50),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=16000)
    parser.add_argument("--stream-prompt", type=int, default=256)
    parser.add_argument("--stream-tokens", type=int, default=4000)
    parser.add_argument("--quiet", type=int, default=300, help="tokens before the prompt arrives")
    parser.add_argument("--chunk", type=int, default=512, help="chunks of at most so many rows")
    parser.add_argument("--ratio", type=int, default=24, help="decode steps a chunk in the second row")
    parser.add_argument("--p95-ratio", type=float, default=1.5, help="slo.itl_p95_ratio of the last row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    manifest = load_manifest(args.artifact)
    sizes = sorted({cell.query_rows for cell in manifest.prefill_cells if cell.query_rows <= args.chunk})
    common: dict[str, Any] = {"graph_bucket_sizes": sizes, "max_prefill_chunk_size": sizes[-1], "enable_mtp": False}
    costs = measured(args.artifact, settings=common)
    chunk_ms = max(ms[0] for cell, ms in costs.cells.items() if cell.kind == "prefill")
    step_ms = max(ms[0] for cell, ms in costs.cells.items() if cell.kind == "decode" and cell.batch == 1)
    fixed = {"prefill_decode_ratio": f"1:{args.ratio}", "prefill_decode_ratio_range": [args.ratio, args.ratio]}
    steps = ratio_for(args.p95_ratio, costs, manifest, sizes[-1], args.prompt, args.stream_prompt)
    smooth = {"prefill_decode_ratio": f"1:{steps}", "prefill_decode_ratio_range": [min(steps, smooth_steps(1)), steps]}
    smooth |= {"itl_p95_ratio": args.p95_ratio}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("as planned", {}),
        (f"1:{args.ratio}", {**fixed, "adaptive": False}),
        (f"itl_p95_ratio {args.p95_ratio:g}, 1:{steps} planned", smooth),
    ]
    rows, says = [], {}
    for name, overrides in ways:
        with opened(args.artifact, check_golden_at_load=False, **common, **overrides) as engine:
            args.prompt = min(args.prompt, engine.context_tokens - 2)
            rounds = [one_round(engine, manifest, args, seed) for seed in range(args.rounds)]
            says = dict(engine.describe())
        rows.append(rounded({"model": manifest.model.name, **row_of(name, rounds, chunk_ms + step_ms, args.prompt)}))
    document = {"what": WHAT, "rows": rows, "chunk_ms": chunk_ms, "step_ms": step_ms, "costs": costs.to_json()}
    finish(args.output, document, engine_says=says)


if __name__ == "__main__":
    main()
