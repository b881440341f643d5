"""Drafting on a CPU: CPU time a token and acceptance by draft length, on an artifact with a drafter.

`python benchmarks/drafting_cpu.py ARTIFACT [--prompts N] [--tokens N]`. One thread, and the process's own CPU time, so
that a busy machine changes little; the lengths take turns prompt by prompt. Prompts are held-out built-in ones; the ids
of all lengths must be the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from edgebuild.train.prompts import built_in
from edgert import Engine
from edgert.manifest import load_manifest
from environment import environment

TASKS = ("json", "code", "chat", "story")


def measure(artifact: Path, prompts: int, tokens: int) -> list[dict[str, Any]]:
    """One row for each draft length and task, and one for all tasks."""
    lengths = range(load_manifest(artifact).draft_length + 1)
    engines = {
        k: Engine.load(artifact, check_golden_at_load=False, warm_up=False, enable_mtp=k > 0, threads=1,
                       **({"mtp_num_heads": k} if k else {}))
        for k in lengths
    }  # fmt: skip
    asked = [p for task in TASKS for p in [q for q in built_in("held_out", 30) if q.task == task][:prompts]]
    totals: dict[tuple[str, int], list[float]] = {}
    for engine in engines.values():
        engine.complete(chat="Hello", max_tokens=4)
    for number, prompt in enumerate(asked):
        ids = set()
        for k in lengths if number % 2 else reversed(lengths):
            started = time.process_time()
            engines[k].complete(chat=prompt.text, max_tokens=1)
            prefilled = time.process_time()
            done = engines[k].complete(chat=prompt.text, max_tokens=tokens, task=prompt.task)
            spent_ms = (time.process_time() - prefilled - (prefilled - started)) * 1e3
            ids.add(done.token_ids)
            usage = done.usage
            found = (len(done.token_ids) - 1, spent_ms, usage.draft_proposed, usage.draft_accepted, usage.draft_steps)
            for task in (prompt.task, "all"):
                total = totals.setdefault((task, k), [0.0] * 5)
                totals[task, k] = [a + b for a, b in zip(total, found, strict=True)]
        if len(ids) != 1:
            raise SystemExit(f"the ids differ between draft lengths: {prompt.text!r}")
    for engine in engines.values():
        engine.close()
    rows = []
    for (task, k), (count, spent_ms, proposed, accepted, steps) in sorted(totals.items()):
        plain = totals[task, 0]
        rows.append(
            {
                "task": task,
                "draft_length": k,
                "cpu_ms_a_token": round(spent_ms / count, 2),
                "speed_up": round(plain[1] / plain[0] / (spent_ms / count), 3),
                "acceptance": round(accepted / proposed, 3) if proposed else "",
                "mean_accepted_length": round(1 + accepted / steps, 3) if steps else "",
                "tokens": int(count),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompts", type=int, default=2, help="a task")
    parser.add_argument("--tokens", type=int, default=80)
    options = parser.parse_args()
    vocabulary = load_manifest(options.artifact).draft_vocabulary
    document: dict[str, Any] = {
        "what": f"drafting on one CPU thread, {vocabulary:,} tokens that may be drafted; CPU time of the process",
        **environment("onnxruntime", "numpy"),
        "rows": measure(options.artifact, options.prompts, options.tokens),
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
