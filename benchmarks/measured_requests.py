"""A fixed list of requests on a real device, request by request, and what each cell costs there: for the simulator.

python benchmarks/measured_requests.py --artifact ARTIFACT --traffic FILE --output benchmarks/results/requests.json

`edgebuild simulate` fed with these costs and lengths can be held against these times.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edgebuild.simulate.artifact import measured
from edgert.bench import make_requests, read_lengths, run_bench
from serving import figures, finish, load_manifest, opened, rounded

WHAT = "requests drawn from the traffic, closed loop; single requests and the cells' costs stand in the JSON file"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--traffic", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-drafts", action="store_true")
    parser.add_argument("--costs", type=Path, help="write costs.json here too")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    manifest = load_manifest(args.artifact)
    chosen = {"enable_mtp": False} if args.no_drafts else {}
    costs = measured(args.artifact, settings=chosen)
    if args.costs:
        args.costs.write_text(costs.dump())
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    draws = read_lengths(args.traffic)
    with opened(args.artifact, **chosen) as engine:
        requests = make_requests(
            draws,
            count=args.requests,
            context_tokens=engine.context_tokens,
            vocabulary=manifest.model.token_limit,
            seed=args.seed,
        )
        for concurrency in args.concurrency:
            completions, seconds = run_bench(engine, requests, concurrency=concurrency)
            began = min(done.metrics.arrival_s for done in completions)
            runs.append(
                {
                    "concurrency": concurrency,
                    "duration_s": seconds,
                    "requests": [
                        {
                            "arrival_s": round(done.metrics.arrival_s - began, 6),
                            "prompt_tokens": done.usage.prompt_tokens,
                            "output_tokens": done.usage.completion_tokens,
                            "ttft_ms": done.metrics.ttft_ms,
                            "tpot_ms": done.metrics.tpot_ms,
                            "total_ms": done.metrics.latency_ms,
                        }
                        for done in completions
                    ],
                }
            )
            rows.append(
                rounded(
                    {
                        "model": manifest.model.name,
                        "traffic": draws.name,
                        "requests": len(completions),
                        "concurrency": concurrency,
                        "duration_s": seconds,
                        **figures(completions, seconds),
                    }
                )
            )
        says = dict(engine.describe())
    settings = {"seed": args.seed, "traffic": draws.name, "manifest_name": manifest.name}
    document = {"what": WHAT, "rows": rows, "settings": settings, "costs": costs.to_json(), "runs": runs}
    finish(args.output, document, engine_says=says)


if __name__ == "__main__":
    main()
