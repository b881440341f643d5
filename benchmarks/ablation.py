"""What each mechanism gives, one at a time: no chunks, no graphs, no drafts → chunked prefill → graphs → drafts.

python benchmarks/ablation.py --artifact ARTIFACT --prompt 3584 --output-tokens 128 --output benchmarks/results/X.json

The baseline takes a prompt in one launch of the artifact's largest chunk; with chunked prefill the largest chunk is at
most half as long and decode steps run in between. Closed loop, prompts of one length, outputs of several.

--temperature, --top-k: for the artifacts of shape_artifacts.py --drafter, whose acceptance they set.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgert.bench import run_bench
from edgert.manifest import Manifest
from serving import Drawn, figures, finish, load_manifest, middle, opened, requests_of, rounded

WHAT = (
    "one mechanism more in each row, the rest unchanged; TTFT and TPOT: medians of a run, every figure the median of "
    "the runs; peak memory: the device's by the backend, else the process's"
)


def variants(manifest: Manifest, prompt: int, output_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(name, overrides of scheduler.yaml) in order; drafts only where the artifact has a drafter."""
    whole, sizes = _chunks(manifest, prompt)
    context = _context(manifest, prompt + output_tokens)
    tiers = [tier for tier in sorted({cell.kv_tier for cell in manifest.decode_cells})]
    base: dict[str, Any] = {
        "context_tokens": context,
        "kv_tiers": [tier for tier in tiers if tier <= context] or tiers,
        "adaptive": False,
        "enable_mtp": False,
        "enable_cuda_graph": False,
        "enable_chunked_prefill": False,
        "graph_bucket_sizes": [whole],
        "max_prefill_chunk_size": whole,
    }
    chunked = {
        **base,
        "enable_chunked_prefill": True,
        "graph_bucket_sizes": sizes,
        "max_prefill_chunk_size": sizes[-1],
    }
    graphs = {**chunked, "enable_cuda_graph": True}
    steps = [("baseline", base), ("+ chunked prefill", chunked), ("+ graphs", graphs)]
    if manifest.draft_length:
        steps.append(("+ drafting", {**graphs, "enable_mtp": True, "mtp_num_heads": manifest.draft_length}))
    steps.append(("+ adaptive policy", {**steps[-1][1], "adaptive": True}))
    return steps


def _chunks(manifest: Manifest, prompt: int) -> tuple[int, list[int]]:
    """The chunk that takes the prompt in one launch, and the sizes at most half as long."""
    sizes = sorted({cell.query_rows for cell in manifest.prefill_cells})
    whole = next((size for size in sizes if size >= prompt), sizes[-1])
    return whole, [size for size in sizes if size <= whole // 2] or [whole]


def _context(manifest: Manifest, tokens: int) -> int:
    """The smallest decode tier of batch 1 that holds a request."""
    tiers = sorted(cell.kv_tier for cell in manifest.decode_cells if cell.batch == 1)
    return min(next((tier for tier in tiers if tier >= tokens), tiers[-1]), manifest.context_tokens)


def measure(
    artifact: Path,
    overrides: dict[str, Any],
    prompt: int,
    output_tokens: int,
    count: int,
    repeats: int,
    sampling: Mapping[str, float],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for one stream and one for four, and what the backend says of itself."""
    manifest = load_manifest(artifact)
    rows = []
    with opened(artifact, **overrides) as engine:
        for concurrency in (1, 4):
            # outputs of three lengths, so that a prompt arrives while others decode
            shares = (1.0, 0.5, 0.75)
            lengths = [(prompt, max(2, int(output_tokens * shares[n % 3]))) for n in range(count * min(concurrency, 2))]
            runs = []
            for repeat in range(repeats):
                requests = requests_of(lengths, manifest, seed=repeat, context=overrides["context_tokens"])
                runs.append(figures(*run_bench(Drawn(engine, **sampling), requests, concurrency=concurrency)))
            rows.append({"concurrency": concurrency, **middle(runs)})
        snapshot, says = engine.metrics(), dict(engine.describe())
    peak = max(snapshot.memory_phases.values(), default=0)
    scratch = snapshot.memory_bytes.get("scratch")
    for row in rows:
        row["peak_mb"] = peak / 1e6
        if scratch is not None:
            row["scratch_mb"] = scratch / 1e6
        if snapshot.draft_proposed:
            row["acceptance"] = snapshot.draft_accepted / snapshot.draft_proposed
    return rows, says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=3584, help="tokens of every prompt")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=6, help="of a run of one stream; twice as many for four")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    manifest = load_manifest(args.artifact)
    rows: list[dict[str, Any]] = []
    says: dict[str, Any] = {}
    sampling = {"temperature": args.temperature, "top_k": args.top_k}
    for name, overrides in variants(manifest, args.prompt, args.output_tokens):
        made, says = measure(
            args.artifact, overrides, args.prompt, args.output_tokens, args.requests, args.repeats, sampling
        )
        rows += [{"model": manifest.model.name, "variant": name, **rounded(row)} for row in made]
        for row in rows[-len(made) :]:
            sys.stderr.write(f"{row['variant']}, {row['concurrency']} at once: {row['tokens_per_s']} tokens/s\n")
    settings = {"prompt_tokens": args.prompt, "output_tokens": args.output_tokens, "repeats": args.repeats, **sampling}
    finish(args.output, {"what": WHAT, "rows": rows, "settings": settings}, engine_says=says)


if __name__ == "__main__":
    main()
