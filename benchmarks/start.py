"""How long an artifact takes from a fresh process to ready: without a JIT cache, with one, with a damaged one; and
whether its first request is as quick as its tenth (case G1), and what a budget of graphs leaves eager (case G3).

python benchmarks/start.py --artifact ARTIFACT [--graphs 4] [--options '{"enable_mtp": false}'] --output start.json

Each start is a process of its own, so that nothing of CUDA or of compiled kernels is left from the one before. The
artifact's cache folders are removed first. "ready_s" is from the start of the process; "load_s" is `Engine.load`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REQUESTS, PROMPT, OUTPUT = 10, 256, 4
WHAT = "a fresh process to an engine that is ready, and the time to first token of its first and tenth request"


def child(artifact: Path, began_s: float, options: dict[str, Any]) -> dict[str, Any]:
    """One start in this process. began_s: time.time() of the parent just before it; options: of `Engine.load`."""
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("edgert").addHandler(Keep(logging.WARNING))
    from edgert.engine import Engine

    imported = time.time()
    with Engine.load(artifact, **options) as engine:
        ready = time.time()
        prompt = [3 + place % 97 for place in range(min(PROMPT, engine.context_tokens - OUTPUT))]
        ttft = []
        for number in range(REQUESTS):
            done = engine.submit([3 + number, *prompt[1:]], max_tokens=OUTPUT, ignore_eos=True).result()
            ttft.append(done.metrics.ttft_ms)
        says = dict(engine.describe())
    first, tenth = ttft[0], ttft[-1]
    assert first is not None
    assert tenth is not None
    return {
        "ready_s": ready - began_s,
        "import_s": imported - began_s,
        "load_s": ready - imported,
        **{f"backend_{name}": value for name, value in (says.get("timings") or {}).items()},
        "jit_cache": says.get("jit_cache"),
        "cells": says.get("cells"),
        "graphs": says.get("graphs"),
        "fallbacks": len(says.get("fallbacks") or ()),
        "eager_launches": says.get("eager_launches"),
        "ttft_first_ms": first,
        "ttft_tenth_ms": tenth,
        "first_over_tenth": first / tenth,
        "warnings": len(warnings),
        "says": warnings[:4],
        "device": says.get("device"),
    }


def caches(artifact: Path) -> list[Path]:
    """Files with kernels that were compiled for this artifact."""
    from edgert.backends import trt_cache

    return [file for folder in trt_cache.places(artifact) for file in sorted(folder.glob("*.jit"))]


def start(artifact: Path, label: str, **options: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--artifact", str(artifact), "--child", repr(time.time())]
    command += ["--options", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{label}: the engine did not start: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    size = sum(file.stat().st_size for file in caches(artifact))
    return {"start": label, **found, "cache_mb": size / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--graphs", type=int, help="one more start with a budget of this many captured graphs")
    parser.add_argument("--warm-only", action="store_true", help="cold and warm, no damaged cache")
    parser.add_argument(
        "--options",
        type=json.loads,
        help="one more warm start with these options of Engine.load, as JSON",
    )
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.child is not None:
        sys.stdout.write(json.dumps(child(args.artifact, args.child, args.options)) + "\n")
        return
    for file in caches(args.artifact):
        file.unlink()
    runs = [start(args.artifact, "cold"), start(args.artifact, "warm"), start(args.artifact, "warm again")]
    for file in () if args.warm_only else caches(args.artifact):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        runs.append(start(args.artifact, "damaged cache"))
        runs.append(start(args.artifact, "after the damage"))
    if args.graphs is not None:
        runs.append(start(args.artifact, f"{args.graphs} graphs at most", max_graphs=args.graphs))
    if args.options is not None:
        runs.append(start(args.artifact, f"warm, {json.dumps(args.options)}", **args.options))
    from serving import finish, load_manifest, rounded

    name = load_manifest(args.artifact).model.name
    rows = [{"model": name} | {key: value for key, value in rounded(run).items() if key != "device"} for run in runs]
    finish(args.output, {"what": WHAT, "rows": rows}, engine_says={"device": runs[0]["device"]})


if __name__ == "__main__":
    main()
