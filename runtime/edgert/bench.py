"""Measures an artifact under real lengths: requests drawn from a traffic file, a fixed number of them at a time.

Reads edgebuild's histogram YAML or an Azure-style CSV. Knows the engine's public face only; the clock is the engine's.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from edgert.errors import EdgertError, RequestError
from edgert.figures import figure_table, figures_of
from edgert.handles import Completion, Handle
from edgert.metrics import Usage, percentile
from edgert.strictjson import BAD_YAML_VALUE
from edgert.tables import acceptance_table, cells_table, memory_table

MAX_TRAFFIC_BYTES = 1 << 30
WARM_UP_TOKENS = 4
WARM_UP_TASK = "warm-up"
PERCENTILES = (50, 95, 99)


class TrafficFileError(EdgertError):
    """The traffic file cannot be read as a histogram or as a trace."""

    exit_code = 8


class Submits(Protocol):
    """The part of edgert.Engine used here."""

    @property
    def context_tokens(self) -> int: ...
    def submit(
        self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool, seed: int, task: str | None
    ) -> Handle: ...


@dataclass(frozen=True)
class Draws:
    """Where lengths come from. `draw` gives (prompt tokens, output tokens) as the trace has them."""

    name: str
    draw: Callable[[random.Random], tuple[int, int]]


@dataclass(frozen=True)
class BenchRequest:
    """output_tokens: exactly so many, or with ignore_eos=False at most. clipped: shorter than asked for."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    clipped: bool = False
    task: str | None = None
    ignore_eos: bool = True


def read_lengths(path: Path) -> Draws:
    """A histogram YAML (prompt and output drawn independently) or a CSV trace (rows drawn whole)."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_TRAFFIC_BYTES:
            raise TrafficFileError(f"{path}: {path.stat().st_size} bytes, at most {MAX_TRAFFIC_BYTES} are read")
        if path.suffix.lower() == ".csv":
            return _from_csv(path)
        return _from_histogram(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise TrafficFileError(f"{path}: cannot be read: {reason}", hint="give a histogram YAML or a CSV") from None


def _from_csv(path: Path) -> Draws:
    pairs: list[tuple[int, int]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        names = {name.strip().lower(): name for name in rows.fieldnames or ()}
        prompt, output = names.get("contexttokens"), names.get("generatedtokens")
        if prompt is None or output is None:
            found = ", ".join(rows.fieldnames or ()) or "nothing"
            raise TrafficFileError(
                f"{path}: the header has {found[:200]}",
                hint="ContextTokens and GeneratedTokens are needed; make a histogram with: edgebuild traffic",
            )
        for row in rows:
            try:
                pair = int(row[prompt] or ""), int(row[output] or "")
            except (TypeError, ValueError):
                continue
            if pair[0] > 0 and pair[1] > 0:
                pairs.append(pair)
    if not pairs:
        raise TrafficFileError(f"{path}: no row has both lengths", hint="is it a trace?")
    return Draws(path.stem, lambda rng: rng.choice(pairs))


def _from_histogram(path: Path) -> Draws:
    try:
        document = yaml.load(path.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, *BAD_YAML_VALUE) as error:
        raise TrafficFileError(
            f"{path}: not YAML: {str(error).splitlines()[0]}",
            hint="give a histogram YAML or a CSV; edgebuild traffic makes one of any trace",
        ) from None
    if not isinstance(document, dict) or document.get("edgebuild_traffic") != 1:
        raise TrafficFileError(
            f"{path}: not a traffic histogram (edgebuild_traffic: 1)", hint="make one with: edgebuild traffic"
        )
    prompt = _sampler(document, "prompt_counts", path)
    output = _sampler(document, "output_counts", path)
    return Draws(str(document.get("name", path.stem)), lambda rng: (prompt(rng), output(rng)))


def _sampler(document: Mapping[str, Any], key: str, path: Path) -> Callable[[random.Random], int]:
    try:
        pairs = [(int(at), int(count)) for at, count in (p.split(":") for p in document[key]["counts"].split())]
        if any(at < 0 or count < 0 for at, count in pairs):
            raise ValueError("a negative number")
        lengths = [max(1, at) for at, _ in pairs]
        totals = list(itertools.accumulate(count for _, count in pairs))
        if not totals or totals[-1] == 0:
            raise ValueError("no requests")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrafficFileError(f"{path}: {key}: {error}", hint="expected 'counts: length:requests ...'") from None
    return lambda rng: lengths[bisect.bisect_right(totals, rng.randrange(totals[-1]))]


def make_requests(draws: Draws, *, count: int, context_tokens: int, vocabulary: int, seed: int) -> list[BenchRequest]:
    """`count` requests with random prompt ids; lengths past the context are clipped, and marked."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt, output = draws.draw(rng)
        kept_prompt = max(1, min(prompt, context_tokens - 1))
        kept_output = max(1, min(output, context_tokens - kept_prompt))
        ids = tuple(rng.randrange(vocabulary) for _ in range(kept_prompt))
        requests.append(BenchRequest(ids, kept_output, (kept_prompt, kept_output) != (prompt, output)))
    return requests


def run_bench(
    engine: Submits,
    requests: Sequence[BenchRequest],
    *,
    concurrency: int,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: bool = True,
) -> tuple[list[Completion], float]:
    """Closed loop: `concurrency` requests at any time. Returns the completions and the seconds it took.

    A warm-up request per stream runs first and is not counted. The first failure ends the run and is raised.
    """
    if warm_up:
        run_warm_up(engine, requests[:concurrency])
    done: dict[int, Completion] = {}

    def finished(index: int, completion: Completion) -> None:
        done[index] = completion
        if progress is not None:
            progress(len(done), len(requests))

    start = clock()
    closed_loop(engine, enumerate(requests), concurrency=concurrency, finished=finished)
    return [done[index] for index in sorted(done)], clock() - start


def run_warm_up(engine: Submits, requests: Sequence[BenchRequest]) -> None:
    """The beginning of each request, all at once. Their task is WARM_UP_TASK."""
    handles = [
        engine.submit(r.prompt_ids[:64], max_tokens=WARM_UP_TOKENS, ignore_eos=True, seed=0, task=WARM_UP_TASK)
        for r in requests
    ]
    for handle in handles:
        handle.result()


def closed_loop(
    engine: Submits,
    work: Iterator[tuple[int, BenchRequest]],
    *,
    concurrency: int,
    finished: Callable[[int, Completion], None],
) -> None:
    """Run what `work` gives, `concurrency` requests at any time, until it gives no more. A request's seed is its index.

    finished is called by one stream at a time. The first failure stops all streams and is raised.
    """
    lock = threading.Lock()
    failures: list[BaseException] = []
    running: dict[int, Handle] = {}
    stop = threading.Event()

    def stream(number: int) -> None:
        while not stop.is_set():
            try:
                with lock:
                    item = next(work, None)
                if item is None:
                    return
                index, request = item
                handle = engine.submit(
                    request.prompt_ids,
                    max_tokens=request.output_tokens,
                    ignore_eos=request.ignore_eos,
                    seed=index,
                    task=request.task,
                )
                with lock:
                    running[number] = handle
                completion = handle.result()
                with lock:
                    running.pop(number, None)
                    finished(index, completion)
            except BaseException as error:
                failures.append(error)
                stop.set()
                return

    threads = [
        threading.Thread(target=stream, args=(number,), name=f"bench-{number}", daemon=True)
        for number in range(concurrency)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        with lock:
            handles = list(running.values())
        for handle in handles:
            handle.cancel()
        raise
    if failures:
        raise failures[0]


def summarise(
    completions: Sequence[Completion],
    seconds: float,
    requests: Sequence[BenchRequest],
    *,
    concurrency: int,
    traffic: str,
    seed: int,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
) -> dict[str, Any]:
    """The report as JSON. Goodput counts the requests that met both limits; without limits it is null."""
    if not completions:
        raise RequestError("no request was run", hint="--requests 1 or more")
    metrics = [completion.metrics for completion in completions]
    output = sum(completion.usage.completion_tokens for completion in completions)
    prompt = sum(completion.usage.prompt_tokens for completion in completions)
    gaps = [gap for entry in metrics for gap in entry.itl_ms]
    good = None
    if slo_ttft_ms is not None or slo_tpot_ms is not None:
        good = sum(
            (slo_ttft_ms is None or (m.ttft_ms is not None and m.ttft_ms <= slo_ttft_ms))
            and (slo_tpot_ms is None or m.tpot_ms is None or m.tpot_ms <= slo_tpot_ms)
            for m in metrics
        )
    return {
        "traffic": traffic,
        "seed": seed,
        "requests": len(completions),
        "clipped_requests": sum(request.clipped for request in requests),
        "concurrency": concurrency,
        "duration_s": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(completions) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "ttft_ms": _spread(m.ttft_ms for m in metrics),
        "tpot_ms": _spread(m.tpot_ms for m in metrics),
        "itl_ms": _spread(gaps),
        "longest_gap_ms": max(gaps, default=None),
        "slo": {"ttft_ms": slo_ttft_ms, "tpot_ms": slo_tpot_ms},
        "goodput_requests_per_s": None if good is None else good / seconds,
        "drafts": _drafts(completions),
        "finish_reasons": {
            reason: sum(c.finish_reason == reason for c in completions)
            for reason in sorted({c.finish_reason for c in completions})
        },
    }


def _drafts(completions: Sequence[Completion]) -> dict[str, Any] | None:
    """Acceptance over all requests and by task; None where nothing was drafted. The bonus token counts as accepted."""
    by_task: dict[str, list[Usage]] = {}
    for completion in completions:
        by_task.setdefault(completion.metrics.task or "", []).append(completion.usage)

    def rates(usages: Sequence[Usage]) -> dict[str, float] | None:
        proposed, accepted = sum(u.draft_proposed for u in usages), sum(u.draft_accepted for u in usages)
        steps = sum(u.draft_steps for u in usages)
        if not steps or not proposed:
            return None
        return {"acceptance": accepted / proposed, "mean_accepted_length": 1 + accepted / steps, "steps": steps}

    total = rates([completion.usage for completion in completions])
    return None if total is None else {**total, "by_task": {task: rates(each) for task, each in by_task.items()}}


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    spread = {f"p{share}": percentile(known, share) for share in PERCENTILES}
    return {"mean": sum(known) / len(known), **spread, "max": max(known)}


def render(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{report['requests']} requests from {report['traffic']}, {report['concurrency']} at a time, "
        f"{report['clipped_requests']} clipped to the context, {report['duration_s']:.1f} s",
        f"output  {report['output_tokens_per_s']:.1f} tokens/s   total {report['total_tokens_per_s']:.1f} tokens/s   "
        f"{report['requests_per_s']:.2f} requests/s",
        f"{'ms':8}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}",
    ]
    for label, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms")):
        spread = report[key]
        cells = "".join(f"{spread[k]:10.1f}" for k in ("mean", "p50", "p95", "p99", "max")) if spread else " (none)"
        lines.append(f"{label:8}{cells}")
    lines += [*(f"warning: {warning}" for warning in report.get("warnings", ())), ""]
    row = figures_of(report, peak_memory_bytes=report.get("peak_memory_bytes"))
    text = "\n".join(lines) + figure_table([(str(report["traffic"]), row)])
    for shown in (
        memory_table(
            report.get("memory_phases") or {},
            report.get("memory_planned_bytes"),
            report.get("memory_baseline_bytes", 0),
        ),
        cells_table(report.get("launches") or {}),
        acceptance_table(report.get("acceptance") or {}),
    ):
        text += "\n\n" + "\n".join(shown) if shown else ""
    return text


def to_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=2, allow_nan=False)
