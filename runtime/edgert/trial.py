"""`python -m edgert.trial`: one trial of a tuning run, in a process of its own. A job in on stdin, one JSON object out.

Whoever starts it keeps stdin open: when it closes, the trial ends at once. A line {"progress": [done, of]} on stdout
after each request, the result on the last line; an error is one line on stderr and its exit code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgert.bench import WARM_UP_TASK, BenchRequest, closed_loop, run_bench, run_warm_up, summarise
from edgert.cpu import cpu_clock_mhz
from edgert.drafting import DraftControl
from edgert.engine import Engine
from edgert.errors import EdgertError, RequestError
from edgert.figures import figures_of
from edgert.handles import Completion
from edgert.hostmemory import resident_bytes
from edgert.loading import open_runtime, plan_loading
from edgert.metrics import EngineSnapshot

Emit = Callable[[Mapping[str, Any]], None]
Clock = Callable[[], float]


def run_trial(job: Mapping[str, Any], emit: Emit, *, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Load the artifact as the job says and run its requests. Raises EdgertError.

    job: artifact (path), overrides (as Engine.load's), requests [{prompt_ids, output_tokens, task, ignore_eos}],
    concurrency, repeats, fixed_drafts (true: always as many as allowed, null costs), slo_ttft_ms, slo_tpot_ms,
    want_tokens (true: the output ids too), soak_s (null: `repeats` runs; else run that long, over and over).
    """
    requests = [
        BenchRequest(tuple(each["prompt_ids"]), each["output_tokens"], task=each["task"], ignore_eos=each["ignore_eos"])
        for each in job["requests"]
    ]
    if not requests:
        raise RequestError("a trial without requests")
    with load(job) as engine:
        measure = soak if job["soak_s"] is not None else repeats
        found = measure(engine, requests, job, emit, clock)
        snapshot, description = engine.metrics(), engine.describe()
    return {
        **found,
        "acceptance": {task: each for task, each in snapshot.acceptance.items() if task != WARM_UP_TASK},
        "peak_memory_bytes": peak_memory(snapshot),
        "memory_phases": dict(snapshot.memory_phases),
        "eager_launches": snapshot.eager_launches,
        "graph_launches": snapshot.graph_launches,
        "throttle_events": dict(snapshot.throttle_events),
        "device": None
        if snapshot.device is None
        else {**asdict(snapshot.device), "cpu_clock_mhz": found["cpu_clock_mhz"]},
        "power_mode": (description.get("guards") or {}).get("power_mode"),
        "fallbacks": list(description.get("fallbacks", ())),
        "warnings": list(description.get("warnings", ())),
    }


def load(job: Mapping[str, Any]) -> Engine:
    """The engine; with fixed_drafts it drafts as many tokens as the configuration allows, whatever they gain."""
    loading = plan_loading(Path(job["artifact"]), {**job["overrides"], "verify_files": False})
    length = loading.config.draft_length
    if not job["fixed_drafts"] or not length:
        return Engine(lambda: open_runtime(loading))
    return Engine(lambda: replace(open_runtime(loading), draft_control=lambda: DraftControl(length)))


def repeats(
    engine: Engine, requests: Sequence[BenchRequest], job: Mapping[str, Any], emit: Emit, clock: Clock
) -> dict[str, Any]:
    """All requests, `repeats` times; figures of each time."""
    concurrency, times = min(job["concurrency"], len(requests)), job["repeats"]
    run_warm_up(engine, requests[:concurrency])
    figures, by_task, digests = [], [], set()
    clock_mhz: float | None = None
    completions: list[Completion] = []
    for number in range(times):

        def progress(done: int, of: int, before: int = number * len(requests)) -> None:
            nonlocal clock_mhz
            if done == (of + 1) // 2:
                clock_mhz = cpu_clock_mhz()  # while steps run: an idle core lowers it
            emit({"progress": [before + done, times * of]})

        completions, seconds = run_bench(
            engine, requests, concurrency=concurrency, progress=progress, clock=clock, warm_up=False
        )
        report = summarise(
            completions,
            seconds,
            requests,
            concurrency=concurrency,
            traffic="",
            seed=0,
            slo_ttft_ms=job["slo_ttft_ms"],
            slo_tpot_ms=job["slo_tpot_ms"],
        )
        figures.append(figures_of(report, peak_memory_bytes=peak_memory(engine.metrics())))
        by_task.append(decode_by_task(completions))
        digests.add(digest(completions))
    return {
        "figures": figures,
        "by_task": by_task,
        "outputs_sha256": digests.pop() if len(digests) == 1 else None,
        "output_tokens": [list(each.token_ids) for each in completions] if job["want_tokens"] else None,
        "cpu_clock_mhz": clock_mhz,
        "soak": None,
    }


def decode_by_task(completions: Sequence[Completion]) -> dict[str, dict[str, float]]:
    """What decoding cost, by task ("" = none) and over all ("all"): tokens after the first one, ms, steps.

    Meant for one request at a time: with more, a request's time holds its neighbours' chunks too.
    """
    sums: dict[str, dict[str, float]] = {}
    for each in completions:
        token_s = each.metrics.token_s
        if len(token_s) < 2:
            continue
        later = [at for at in token_s if at > token_s[0]]  # tokens that came with the first cost no step of their own
        for key in (f"task:{each.metrics.task or ''}", "all"):
            sum_ = sums.setdefault(key, {"tokens": 0, "ms": 0.0, "steps": 0})
            sum_["tokens"] += len(later)
            sum_["ms"] += (token_s[-1] - token_s[0]) * 1e3
            sum_["steps"] += len(set(later))
    return sums


def digest(completions: Sequence[Completion]) -> str:
    """SHA-256 of every output id, in the order of the requests."""
    ids = json.dumps([list(each.token_ids) for each in completions], separators=(",", ":"))
    return hashlib.sha256(ids.encode()).hexdigest()


def soak(
    engine: Engine, requests: Sequence[BenchRequest], job: Mapping[str, Any], emit: Emit, clock: Clock
) -> dict[str, Any]:
    """The requests over and over for `soak_s`; each one's times, and the memory in use when it ended."""
    concurrency = min(job["concurrency"], len(requests))
    run_warm_up(engine, requests[:concurrency])
    start = clock()
    samples: list[dict[str, Any]] = []

    def work() -> Iterator[tuple[int, BenchRequest]]:
        for index in itertools.count():
            if clock() - start >= job["soak_s"]:
                return
            yield index, requests[index % len(requests)]

    def finished(index: int, completion: Completion) -> None:
        at_s = clock() - start
        samples.append(
            {
                "at_s": at_s,
                "request": index % len(requests),
                "ttft_ms": completion.metrics.ttft_ms,
                "tpot_ms": completion.metrics.tpot_ms,
                "memory_bytes": memory_now(engine.metrics()),
            }
        )
        emit({"progress": [min(round(at_s), int(job["soak_s"])), int(job["soak_s"])]})

    closed_loop(engine, work(), concurrency=concurrency, finished=finished)
    return {
        "figures": [],
        "by_task": [],
        "outputs_sha256": None,
        "output_tokens": None,
        "cpu_clock_mhz": cpu_clock_mhz(),
        "soak": {"seconds": clock() - start, "samples": samples},
    }


def peak_memory(snapshot: EngineSnapshot) -> int | None:
    """Most bytes in use so far, in any phase: the device's where it is measured, the process's else."""
    return max(snapshot.memory_phases.values(), default=None)


def memory_now(snapshot: EngineSnapshot) -> int | None:
    """Bytes in use: what the device lacks on a GPU with memory of its own, what the process holds else."""
    device = snapshot.device
    if snapshot.graph_launches is not None and device is not None:
        free, total = device.memory_available_bytes, device.memory_total_bytes
        return None if free is None or total is None else total - free
    return resident_bytes()


def end_with_parent() -> None:
    """Leave when stdin closes: whoever started this has gone, and nobody reads the result."""

    def watch() -> None:
        while os.read(0, 1 << 16):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> int:
    def emit(line: Mapping[str, Any]) -> None:
        print(json.dumps(line, allow_nan=False), flush=True)

    line = sys.stdin.readline()
    if not line:
        return 1  # whoever started this has gone already
    job = json.loads(line)
    end_with_parent()
    try:
        emit({"result": run_trial(job, emit)})
    except EdgertError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if os.environ.get("EDGERT_DEBUG"):
            raise
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
