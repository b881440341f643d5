"""Minutes of mixed load: memory back to where it began, latency that does not drift, outputs equal to single runs.

python benchmarks/soak.py --artifact ARTIFACT --minutes 10 --output benchmarks/results/soak.json

Clients ask again at once: prompts and outputs of random length, half of them sampled, one in seven cancelled at a
random token, one client that reads slowly. Among them go checked requests, greedy, whose ids are compared with those
they had alone before the load; where a batch of another shape rounds differently, the reference's two best logits at
the first different token are listed.
"""

from __future__ import annotations

import argparse
import math
import random
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from edgert.engine import Engine
from edgert.errors import QueueFull
from edgert.handles import Handle
from edgert.loading import open_runtime, plan_loading
from edgert.manifest import Manifest
from edgert.metrics import percentile
from edgert.policy import choose_prefill_cell
from edgert.step import empty_step
from serving import finish, load_manifest, memory_now, opened, requests_of, rounded

WHAT = "mixed load: figures of equal windows of time; memory idle before and after; greedy ids against single runs"
CANCELLED, CHECKED, SAMPLED = 1 / 7, 1 / 8, 1 / 2  # shares of the requests
SLOW_S = 0.05  # the slow client's pause after each delta


@dataclass
class Log:
    """What the clients saw. Compact, so that what grows in memory is not this: gaps and ttft hold time, ms, time ...

    different: (checked request, place) -> the token alone and the one under load, as first seen.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    checked: int = 0
    checked_different: int = 0
    different: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return 8 * (len(self.gaps) + len(self.ttft))

    def compare(self, number: int, alone: Sequence[int], got: Sequence[int]) -> None:
        """Note a checked run. Call with the lock held."""
        self.checked += 1
        self.checked_different += tuple(alone) != tuple(got)
        place = next((at for at, (a, b) in enumerate(zip(alone, got, strict=False)) if a != b), None)
        if place is not None:
            self.different.setdefault((number, place), (alone[place], got[place]))


def pairs_of(log: array[float]) -> Iterator[tuple[float, float]]:
    """time, ms, time, ms ... → (time, ms)."""
    return zip(log[::2], log[1::2], strict=True)


@dataclass(frozen=True)
class Checked:
    """A request whose ids are known."""

    prompt_ids: tuple[int, ...]
    tokens: int
    alone: tuple[int, ...]


class Client(threading.Thread):
    """Asks until `stop` is set. The slow one reads its deltas one by one, with pauses."""

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        checks: Sequence[Checked],
        log: Log,
        stop: threading.Event,
        number: int,
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._engine, self._manifest, self._checks, self._log, self._stop_now = engine, manifest, checks, log, stop
        self._rng, self._slow = random.Random(number), number == 0

    def run(self) -> None:
        while not self._stop_now.is_set():
            try:
                self._one()
            except QueueFull:
                with self._log.lock:
                    self._log.refused += 1
                time.sleep(0.05)
            except Exception as error:
                with self._log.lock:
                    self._log.failed.append(f"{type(error).__name__}: {error}"[:200])
                return

    def _one(self) -> None:
        rng, log = self._rng, self._log
        with log.lock:
            log.started += 1
        if rng.random() < CHECKED:
            number = rng.randrange(len(self._checks))
            check = self._checks[number]
            done = self._engine.submit(check.prompt_ids, max_tokens=check.tokens, ignore_eos=True, seed=0).result()
            with log.lock:
                log.compare(number, check.alone, done.token_ids)
                log.finished += 1
            return
        context = self._engine.context_tokens
        prompt = int(math.exp(rng.uniform(math.log(4), math.log(context // 2))))
        output = rng.randint(2, max(2, min(256, context // 4)))
        ids = [rng.randrange(3, self._manifest.model.token_limit) for _ in range(prompt)]
        options: dict[str, Any] = {"max_tokens": output, "ignore_eos": True, "seed": rng.randrange(1 << 30)}
        if rng.random() < SAMPLED:
            options |= {"temperature": 0.8, "top_k": rng.choice([0, 40]), "top_p": rng.choice([0.9, 1.0])}
        handle = self._engine.submit(ids, **options)
        cancel_at = rng.randrange(output) if rng.random() < CANCELLED else None
        if cancel_at is not None or self._slow:
            self._read(handle, cancel_at)
        done = handle.result()
        times = done.metrics.token_s
        with log.lock:
            log.cancelled += done.finish_reason == "cancelled"
            log.finished += done.finish_reason != "cancelled"
            for before, after in pairwise(times):
                log.gaps.extend((after, (after - before) * 1e3))
            if done.metrics.ttft_ms is not None:
                log.ttft.extend((times[0], done.metrics.ttft_ms / max(1, prompt)))

    def _read(self, handle: Handle, cancel_at: int | None) -> None:
        for place, _ in enumerate(handle):
            if place == cancel_at:
                handle.cancel()
            if self._slow:
                time.sleep(SLOW_S)


def alone(engine: Engine, manifest: Manifest, count: int) -> list[Checked]:
    """The checked requests, each run by itself."""
    context = engine.context_tokens
    lengths = [(1 + (37 * n * n) % (context // 2), 32 + 8 * (n % 5)) for n in range(count)]
    checks = []
    for request in requests_of(lengths, manifest, seed=99, context=context):
        tokens = request.output_tokens
        done = engine.complete(request.prompt_ids, max_tokens=tokens, ignore_eos=True, seed=0)
        checks.append(Checked(request.prompt_ids, tokens, done.token_ids))
    return checks


def quiet_ms(engine: Engine, manifest: Manifest) -> float:
    """TPOT of one stream, median of five."""
    times = []
    for request in requests_of([(64, min(128, engine.context_tokens // 4))] * 5, manifest, seed=5):
        done = engine.complete(request.prompt_ids, max_tokens=request.output_tokens, ignore_eos=True, seed=0)
        times.append(done.metrics.tpot_ms or 0.0)
    return median(times)


def windows(log: Log, begin: float, end: float, count: int) -> list[dict[str, float]]:
    """Gap and TTFT figures of equal spans of time."""
    rows = []
    span = (end - begin) / count
    for number in range(count):
        low, high = begin + number * span, begin + (number + 1) * span
        gaps = [gap for at, gap in pairs_of(log.gaps) if low <= at < high]
        first = [ms for at, ms in pairs_of(log.ttft) if low <= at < high]
        if gaps and first:
            row = {"window": number + 1, "from_s": low - begin, "tokens": len(gaps), "requests": len(first)}
            row |= {"itl_p50_ms": percentile(gaps, 50), "itl_mean_ms": sum(gaps) / len(gaps)}
            rows.append(row | {"itl_p95_ms": percentile(gaps, 95), "ttft_ms_per_prompt_token": median(first)})
    return rows


def best_two(artifact: Path, prompts: Sequence[Sequence[int]]) -> list[tuple[int, float, float]]:
    """(best id, gap to the second, best logit) after each prompt, from the artifact's own prefill cells."""
    loading = plan_loading(artifact, {"verify_files": False, "check_golden_at_load": False, "warm_up": True})
    runtime = open_runtime(loading)
    found = []
    try:
        for ids in prompts:
            runtime.backend.reset_slot(0)
            logits, start = None, 0
            while start < len(ids):
                cell = choose_prefill_cell(loading.cells, start, len(ids) - start)
                assert cell is not None
                part = ids[start : start + cell.query_rows]
                step = empty_step(cell, 0)
                step.tokens[0, : len(part)] = part
                step.length[0] = start
                step.valid[0] = step.forced[0] = len(part)
                logits = runtime.backend.launch(replace(step, want_logits=True)).result().logits
                start += len(part)
            assert logits is not None
            row = logits[0, 0]
            second, best = np.argsort(row)[-2:]
            found.append((int(best), float(row[best] - row[second]), float(row[best])))
    finally:
        runtime.backend.close()
    return found


def different(artifact: Path, checks: Sequence[Checked], log: Log) -> list[dict[str, Any]]:
    """Each checked request that once had other ids than alone: where first, and how close the two best were there."""
    first = log.different
    prompts = [(*checks[number].prompt_ids, *checks[number].alone[:place]) for number, place in first]
    rows = []
    for ((number, place), (known, got)), (_, gap, size) in zip(
        first.items(), best_two(artifact, prompts) if prompts else [], strict=True
    ):
        row = {"request": number, "token": place, "alone": known, "under_load": got, "top2_gap": gap, "top1": size}
        rows.append(rounded(row, 5))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--checked", type=int, default=40)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    manifest = load_manifest(args.artifact)
    log, stop = Log(), threading.Event()
    samples: list[dict[str, float]] = []
    with opened(args.artifact) as engine:
        checks = alone(engine, manifest, args.checked)
        # buffers and allocators reach their size under load: the baseline is taken after a short one
        _load(engine, manifest, checks, Log(), min(20.0, args.minutes * 6), args.clients, [])
        before, quiet_before = memory_now(engine), quiet_ms(engine, manifest)
        begin = time.perf_counter()
        _load(engine, manifest, checks, log, args.minutes * 60, args.clients, samples, stop)
        end = time.perf_counter()
        quiet_after, after = quiet_ms(engine, manifest), memory_now(engine)
        snapshot, says = engine.metrics(), dict(engine.describe())
    spans = windows(log, begin, end, args.windows)
    found = different(args.artifact, checks, log)
    drift = {key: spans[-1][key] / spans[0][key] - 1 for key in ("itl_p50_ms", "itl_mean_ms", "itl_p95_ms")} | {
        "quiet_tpot": quiet_after / quiet_before - 1
    }
    document = {
        "what": WHAT,
        "rows": [rounded({"model": manifest.model.name, **row}) for row in spans],
        "summary": {
            "minutes": args.minutes,
            "requests": log.started,
            "finished": log.finished,
            "cancelled": log.cancelled,
            "refused": log.refused,
            "failed": log.failed,
            "drift": rounded(drift, 4),
            "quiet_tpot_ms": rounded({"before": quiet_before, "after": quiet_after}, 4),
            "memory_before_bytes": before,
            "memory_after_bytes": after,
            "memory_grown_bytes": {key: after[key] - before[key] for key in before},
            "of_which_this_log_bytes": log.bytes,
            "checked_runs": log.checked,
            "different_runs": log.checked_different,
            "eager_launches": snapshot.eager_launches,
            "rejected": snapshot.rejected,
            "state": snapshot.state,
        },
        "differences": found,
        "memory_samples": samples,
    }
    finish(args.output, document, engine_says=says)
    print(document["summary"])


def _load(
    engine: Engine,
    manifest: Manifest,
    checks: Sequence[Checked],
    log: Log,
    seconds: float,
    clients: int,
    samples: list[dict[str, float]],
    stop: threading.Event | None = None,
) -> None:
    """Clients for so long; then every request has its end."""
    stop = stop or threading.Event()
    threads = [Client(engine, manifest, checks, log, stop, number) for number in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    while (left := begin + seconds - time.perf_counter()) > 0:
        time.sleep(min(left, 10.0))
        samples.append({"s": round(time.perf_counter() - begin, 1), **memory_now(engine)})
    stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
