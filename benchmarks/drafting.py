"""Drafting on a GPU: what a step with k drafts costs, what is accepted, and what comes of it.

python benchmarks/drafting.py export --shape 4b --directory D      (torch; any machine)
python benchmarks/drafting.py build  --directory D                 (TensorRT-RTX, onnx)
python benchmarks/drafting.py steps  --directory D --output steps-4b.json
python benchmarks/drafting.py serve  --artifact A --output serve.json
python benchmarks/drafting.py table  PART ... --output benchmarks/results/drafting.json

`steps` needs no real weights: time depends on shapes alone. `serve` runs SmolLM2 with its shipped head on held-out
prompts. `table` puts together what was measured apart: tokens/s of a shape are its step time and SmolLM2's acceptance,
and each such row says `computed`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import SHAPES, Exported, export_shape, fill_weights, run_steps, setup_for
from edgert.backends.base import StepInputs
from edgert.cells import Cell
from environment import ROOT, environment, saved

LONGEST = 4
CONTEXT, TIER = 600, 768
TASKS = ("json", "code", "chat", "story")
HEAD = ROOT / "builder" / "edgebuild" / "heads" / "smollm2-135m-instruct.mtp.safetensors"
WHAT = (
    "one decode step that verifies and makes k drafts, TensorRT-RTX, float16, one captured graph, 600 tokens of "
    "context; random weights, waited for; k = 0: no drafts, plain cell, the faster of waited for and one step ahead. "
    "computed: tokens/s = this step time x the mean accepted length of SmolLM2 with its shipped head, measured apart "
    "on held-out prompts (the mean over JSON, code, chat and story; k = 4 was not). measured: whole engine, real "
    "weights; k = chosen: the policy's choice"
)


def cells_of(batches: Iterable[int]) -> list[Cell]:
    """Of each batch a plain cell and one that verifies."""
    return [Cell("decode", batch, rows, TIER) for batch in batches for rows in (1, 1 + LONGEST)]


def build(directory: Path, batches: Sequence[int]) -> dict[str, Any]:
    """Both plans, for every draft vocabulary that was exported."""
    from edgebuild.engine.tensorrt import build_drafter_engine, build_engine

    info, cells = Exported.load(directory), cells_of(batches)
    result: dict[str, Any] = {"cells": [cell.label for cell in cells]}
    for drafter in sorted(directory.glob("mtp-*")):
        fill_weights(drafter / "mtp.onnx", drafter / "mtp.weights")
        (drafter / "mtp.plan").unlink(missing_ok=True)
        built = build_drafter_engine(
            drafter / "mtp.onnx", drafter / "mtp.plan", cells, draft_length=LONGEST, cache_tokens=info.cache_tokens
        )
        result[drafter.name] = {"plan_mb": round(built.plan_bytes / 1e6, 1), "build_s": round(built.seconds, 1)}
    fill_weights(directory / "decoder.onnx", directory / "decoder.weights")
    (directory / "decoder.plan").unlink(missing_ok=True)
    built = build_engine(directory / "decoder.onnx", directory / "decoder.plan", cells)
    result["decoder"] = {"plan_mb": round(built.plan_bytes / 1e6, 1), "build_s": round(built.seconds, 1)}
    (directory / "build.json").write_text(json.dumps(result))
    return result


def step_ms(backend: Any, cell: Cell, drafts: int, count: int, *, ahead: bool = False) -> float:
    """Median time of a step at `CONTEXT` tokens that verifies and makes `drafts` drafts; ahead: not waited for."""
    from edgert.step import empty_step

    def step_at(place: int) -> StepInputs:
        step = empty_step(cell, 0)
        step.tokens[:] = 11
        step.valid[:], step.forced[:] = 1 + drafts, 1
        step.length[:] = CONTEXT
        if ahead and place % 100:
            step.from_device[:] = True
        return replace(step, prime=drafts > 0, draft_length=drafts)

    times, _ = run_steps(backend, map(step_at, range(count)), ahead=ahead)
    return 1e3 * float(np.median(times[10:]))


def steps(directory: Path, batches: Sequence[int], count: int) -> dict[str, Any]:
    """Step times by draft vocabulary, batch and draft length."""
    from edgert.backends.tensorrt import TensorRTBackend

    info = Exported.load(directory)
    report: dict[str, Any] = {"kind": "steps", "shape": info.shape, "context_tokens": CONTEXT, "rows": []}
    if (directory / "build.json").exists():
        report["build"] = json.loads((directory / "build.json").read_text())
    for drafter in sorted(directory.glob("mtp-*"), key=lambda path: int(path.name[4:])):
        (directory / "mtp.plan").unlink(missing_ok=True)
        (directory / "mtp.plan").symlink_to(drafter / "mtp.plan")
        setup = setup_for(
            directory, info, cells_of(batches), max(batches), {"flavour": "tensorrt-rtx"}, draft_length=LONGEST
        )
        backend = TensorRTBackend(setup)
        backend.warm_up()
        described = backend.describe()
        report["device"] = described["device"]
        for batch in batches:
            plain, verify = (cell for cell in cells_of(batches) if cell.batch == batch)
            row: dict[str, Any] = {"draft_vocabulary": int(drafter.name[4:]), "batch": batch}
            row["plain_ahead_ms"] = step_ms(backend, plain, 0, count, ahead=True)
            row["plain_waited_ms"] = step_ms(backend, plain, 0, count)
            row["k0_in_the_wide_cell_ms"] = step_ms(backend, verify, 0, count, ahead=True)
            row["step_ms"] = [step_ms(backend, verify, k, count) for k in range(LONGEST + 1)]
            report["rows"].append({k: v if isinstance(v, int) else np.round(v, 4).tolist() for k, v in row.items()})
        report["memory"], report["timings"] = backend.memory(), described["timings"]
        report["eager_launches"] = backend.describe()["eager_launches"]
        report["drafter"] = described["drafter"]
        backend.close()
    return report


def serve(artifact: Path, prompts: int, tokens: int, batches: Sequence[int]) -> dict[str, Any]:
    """Tokens a second of the whole engine by draft length, batch and task; in the last round the policy chooses."""
    from edgebuild.train.prompts import built_in
    from edgert import Engine, loading
    from edgert.manifest import load_manifest

    asked = [p for task in TASKS for p in [q for q in built_in("held_out", 30) if q.task == task][:prompts]]
    measured, plain = loading.measure_step_costs, dict[str, tuple[int, ...]]()
    longest = load_manifest(artifact).draft_length
    report: dict[str, Any] = {"kind": "serve", "rows": [], "differing": []}
    for length in (*range(longest + 1), None):
        # without costs the control always takes the longest
        loading.measure_step_costs = measured if length is None else lambda *_: {}  # type: ignore[assignment]
        most = longest if length is None else length
        changed = {"enable_mtp": most > 0, **({"mtp_num_heads": most} if most else {}), "adaptive": False}
        with Engine.load(artifact, verify_files=False, **changed) as engine:
            name = "chosen" if length is None else str(length)
            report["device"] = engine.describe()["device"]
            report.setdefault("loads", {})[name] = dict(engine.describe().get("timings", {}))
            engine.complete(chat="Hello", max_tokens=8)
            for batch in batches:
                for task in TASKS:
                    mine = [p for p in asked if p.task == task]
                    row = _serve_task(engine, mine, tokens, batch, f"{task}-{batch}", plain)
                    report["differing"] += row.pop("differing")
                    report["rows"].append({"draft_length": name, "batch": batch, "task": task, **row})
            report.setdefault("acceptance", {})[name] = dict(engine.metrics().acceptance)
            report.setdefault("draft_lengths", {})[name] = {
                task: dict(lengths) for task, lengths in engine.metrics().draft_lengths.items()
            }
            report.setdefault("eager", {})[name] = engine.describe().get("eager_launches")
    loading.measure_step_costs = measured
    return report


def _serve_task(
    engine: Any, prompts: Sequence[Any], tokens: int, batch: int, label: str, plain: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Groups of `batch` prompts at once, each to its own end; the time of the first token is taken off."""
    spent, count, steps, accepted, differing = 0.0, 0, 0, 0, []
    for start in range(0, len(prompts) - batch + 1, batch):
        group = prompts[start : start + batch]
        times = []
        for most in (1, tokens):
            began = time.perf_counter()
            handles = [engine.submit(chat=p.text, max_tokens=most, task=label) for p in group]
            done = [handle.result() for handle in handles]
            times.append(time.perf_counter() - began)
        spent += times[1] - times[0]
        for prompt, result in zip(group, done, strict=True):
            count += len(result.token_ids) - 1
            steps += result.usage.draft_steps
            accepted += result.usage.draft_accepted
            expected = plain.setdefault(prompt.text, result.token_ids)
            if expected != result.token_ids:
                pairs = zip(expected, result.token_ids, strict=False)
                place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(expected))
                differing.append({"label": label, "place": place, "prompt": prompt.text[:40]})
    return {
        "tokens_per_s": round(count / spent, 1),
        "mean_accepted_length": round(1 + accepted / steps, 3) if steps else 1.0,
        "tokens": count,
        "differing": differing,
    }


def lengths_of(head: Path, vocabularies: Path) -> dict[int, list[float]]:
    """Draft vocabulary → mean accepted length of SmolLM2 with k = 0, 1, ... drafts, the mean over the tasks.

    By position from the card of the shipped head (every token may be drafted). What a smaller vocabulary loses was
    measured at the longest k and is taken to be the same share at the shorter ones.
    """
    from safetensors import safe_open

    with safe_open(str(head), framework="np") as file:
        held_out = json.loads(file.metadata()["card"])["acceptance"]["held_out"]
    rates = [held_out[task]["acceptance"] for task in TASKS]
    full = [float(np.mean([mean_length(each, k) for each in rates])) for k in range(len(rates[0]) + 1)]
    rows = [row for row in json.loads(vocabularies.read_text())["rows"] if row["prompts"] == "held_out"]
    longest = {row["draft_vocabulary"]: float(np.mean([row[task] for task in TASKS])) for row in rows}
    return {size: [1.0 + (each - 1.0) * (found - 1.0) / (full[-1] - 1.0) for each in full]
            for size, found in longest.items()}  # fmt: skip


def mean_length(rates: Sequence[float], k: int) -> float:
    """Tokens a step commits with k drafts, the bonus token included."""
    return 1.0 + float(sum(np.prod(rates[: place + 1]) for place in range(k)))


def table(parts: Sequence[dict[str, Any]], lengths: dict[int, list[float]]) -> list[dict[str, Any]]:
    """One flat row for each measured or computed figure. lengths: of `lengths_of`."""
    rows = [row for part in parts if part["kind"] == "serve" for row in _served_rows(part)]
    for part in (part for part in parts if part["kind"] == "steps"):
        for row in part["rows"]:
            plain_ms = min(row["plain_ahead_ms"], row["plain_waited_ms"])
            for k in range(LONGEST + 1):
                ms = row["step_ms"][k] if k else plain_ms
                entry = {
                    "shape": part["shape"], "batch": row["batch"], "draft_vocabulary": row["draft_vocabulary"],
                    "k": str(k), "step_ms": round(ms, 3),
                }  # fmt: skip
                known = lengths[row["draft_vocabulary"]]
                if k < len(known):
                    entry |= {
                        "source": "computed",
                        "mean_accepted_length": round(known[k], 3),
                        "tokens_per_s": round(1e3 * row["batch"] * known[k] / ms, 1),
                        "over_k0": round(known[k] * plain_ms / ms, 3),
                    }
                rows.append(entry)
    return rows


def _served_rows(served: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in served["rows"]:
        groups.setdefault((row["draft_length"], row["batch"]), []).append(row)
    for (k, batch), found in groups.items():
        base = groups["0", batch]
        for task in ("all", *TASKS):
            mine, plain = ([r for r in each if task in ("all", r["task"])] for each in (found, base))
            speed, plain_speed = (
                sum(r["tokens"] for r in each) / sum(r["tokens"] / r["tokens_per_s"] for r in each)
                for each in (mine, plain)
            )
            length = float(np.mean([r["mean_accepted_length"] for r in mine]))
            rows.append(
                {
                    "shape": "smollm2", "source": "measured", "batch": batch, "k": k, "task": task,
                    "mean_accepted_length": round(length, 3), "tokens_per_s": round(speed, 1),
                    "over_k0": round(speed / plain_speed, 3),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["export", "build", "steps", "serve", "table"])
    parser.add_argument("parts", nargs="*", type=Path, help="table: what steps and serve wrote")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="4b")
    parser.add_argument("--draft-vocabulary", nargs="+", type=int, default=[32768])
    parser.add_argument("--processors", type=int, default=132, help="export: cut narrow products for this many")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--count", type=int, default=120, help="steps a figure")
    parser.add_argument("--prompts", type=int, default=4, help="of each task")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.action == "export":
        forms = {"attention": "written_out", "sampling": "branchless", "processors": args.processors}
        shape, counts = SHAPES[args.shape], args.draft_vocabulary
        export_shape(shape, args.directory, cache_tokens=1152, **forms, draft_tokens=counts)
        return
    if args.action == "build":
        result = build(args.directory, args.batches)
    elif args.action == "table":
        parts = [json.loads(path.read_text()) for path in args.parts]
        facts = {key: parts[0][key] for key in ("device", "versions", "clocks", "commit") if key in parts[0]}
        commands = "; ".join(dict.fromkeys(part["command"] for part in parts))
        lengths = lengths_of(HEAD, ROOT / "benchmarks" / "results" / "draft_vocabulary.json")
        result = {"what": WHAT, **facts, "command": commands, "rows": table(parts, lengths), "parts": parts}
    else:
        measured = (
            steps(args.directory, args.batches, args.count)
            if args.action == "steps"
            else serve(args.artifact, args.prompts, args.tokens, args.batches)
        )
        result = (
            environment("tensorrt-rtx-cu13-bindings", "cuda-bindings", "numpy", device=measured.pop("device"))
            | measured
        )
    text = saved(result, args.output)
    if not args.output:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
