"""What a request and the engine measured, with vLLM's definitions. The clock is passed in by whoever records.

TTFT   first token − arrival (waiting in the queue counts)
ITL    gaps between the moments at which tokens reached the caller; tokens of one step share a moment
TPOT   (latency − TTFT) / (n − 1) for n output tokens; undefined (None) for n = 1
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgert.guards.readings import DeviceReading
from edgert.histogram import REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, Histogram, HistogramSnapshot
from edgert.prometheus import prometheus_text

__all__ = ["Counters", "EngineSnapshot", "RequestMetrics", "Usage", "percentile", "prometheus_text"]


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. draft_*: proposed, and accepted by verification, in that many steps (0 without drafts)."""

    prompt_tokens: int
    completion_tokens: int
    draft_proposed: int = 0
    draft_accepted: int = 0
    draft_steps: int = 0

    @property
    def acceptance(self) -> float | None:
        """Accepted ÷ proposed drafts; None where nothing was drafted."""
        return self.draft_accepted / self.draft_proposed if self.draft_proposed else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens that a step with drafts committed, the bonus token included; None where nothing was drafted."""
        return 1 + self.draft_accepted / self.draft_steps if self.draft_steps else None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class RequestMetrics:
    """One request's times in engine-clock seconds; None where that moment was never reached."""

    task: str | None
    arrival_s: float
    admitted_s: float | None
    token_s: tuple[float, ...]
    finished_s: float
    usage: Usage

    @property
    def latency_ms(self) -> float:
        return (self.finished_s - self.arrival_s) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        return (self.token_s[0] - self.arrival_s) * 1e3 if self.token_s else None

    @property
    def tpot_ms(self) -> float | None:
        if len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) * 1e3 / (len(self.token_s) - 1)

    @property
    def itl_ms(self) -> tuple[float, ...]:
        return tuple((after - before) * 1e3 for before, after in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def queue_ms(self) -> float:
        return ((self.finished_s if self.admitted_s is None else self.admitted_s) - self.arrival_s) * 1e3

    @property
    def prefill_ms(self) -> float:
        """From the slot to the first token (or to the end, if there never was one)."""
        if self.admitted_s is None:
            return 0.0
        return ((self.token_s[0] if self.token_s else self.finished_s) - self.admitted_s) * 1e3

    @property
    def decode_ms(self) -> float:
        return (self.finished_s - self.token_s[0]) * 1e3 if self.token_s else 0.0

    def to_json(self) -> dict[str, Any]:
        itl = self.itl_ms
        return {
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "itl_ms": {f"p{share}": percentile(itl, share) for share in (50, 90, 99)} if itl else None,
            "latency_ms": self.latency_ms,
            "phases": {"queue_ms": self.queue_ms, "prefill_ms": self.prefill_ms, "decode_ms": self.decode_ms},
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics, as numpy.percentile; share in 0..100, values not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at one moment: queues now, counters since it was loaded. What is unknown is None, or not in a mapping.

    slots            sequences that can be held; slot_limit: how many the thermal guard lets be active now
    admission_open   False while a guard lets nothing new start
    chunk_limit      largest prefill chunk that may be launched now, tokens; steps_per_chunk: decode steps that a full
                     one owes; draft_limit: drafts a step at most. The tempo as of the latest decision
    launches         steps by cell label
    prompt_tokens    launched in prefill chunks; padded_prompt_tokens: rows of those chunks that carried nothing
    output_tokens    delivered
    decode_rows      batch rows launched in decode; idle_rows: those that were padding; discarded_rows: results that
                     came for a request which had finished (the price of running ahead)
    draft_*          proposed and accepted drafts; *_by_task: by (task, position), position 1 is the first draft
    finished         requests by finish reason
    rejected         requests refused at the door
    queue_wait, ttft, tpot, itl   histograms; itl.max_s is the longest gap
    graph_launches, eager_launches   None where the backend has no graphs
    memory_bytes     by part, as the backend measured at load
    memory_phases    most bytes in use (device, or process) by phase: opened, compiled, warmed_up, checked, then
                     prefill-N for chunks of N rows and decode-N for batches of N
    device           the guard's latest reading; None without a guard
    throttle_events  by reason, counted when one begins
    guard_changes    changes of what the thermal guard allows
    acceptance       task ("" = none given) → drafting.Acceptance as JSON
    memory_baseline_bytes   of memory_phases, in use before the load; memory_planned_bytes: what the ledger expects
    power_mode       the device's at load, expected_power_mode: the plan's; None = unknown, none named
    draft_lengths    task → batch → drafts a step now; draft_switched_off, _on: how often that fell to 0, and rose again
    """

    state: str
    waiting: int
    prefilling: int
    decoding: int
    free_slots: int
    slots: int
    slot_limit: int
    admission_open: bool
    launches: Mapping[str, int]
    prompt_tokens: int
    padded_prompt_tokens: int
    output_tokens: int
    decode_rows: int
    idle_rows: int
    discarded_rows: int
    draft_proposed: int
    draft_accepted: int
    draft_proposed_by_task: Mapping[tuple[str, int], int]
    draft_accepted_by_task: Mapping[tuple[str, int], int]
    finished: Mapping[str, int]
    rejected: int
    queue_wait: HistogramSnapshot
    ttft: HistogramSnapshot
    tpot: HistogramSnapshot
    itl: HistogramSnapshot
    graph_launches: int | None
    eager_launches: int | None
    memory_bytes: Mapping[str, int]
    memory_phases: Mapping[str, int]
    device: DeviceReading | None
    throttle_events: Mapping[str, int]
    guard_changes: int
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    draft_lengths: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    draft_switched_off: int = 0
    draft_switched_on: int = 0
    chunk_limit: int | None = None
    steps_per_chunk: int | None = None
    draft_limit: int | None = None
    power_mode: str | None = None
    expected_power_mode: str | None = None
    memory_baseline_bytes: int = 0
    memory_planned_bytes: int | None = None


@dataclass
class Counters:
    """The growing numbers behind EngineSnapshot. Written by the worker thread."""

    launches: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    padded_prompt_tokens: int = 0
    output_tokens: int = 0
    decode_rows: int = 0
    idle_rows: int = 0
    discarded_rows: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0
    queue_wait: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    ttft: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    tpot: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))
    itl: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))

    def delivered(self, tokens: int, arrival_s: float, previous_s: float | None, now_s: float) -> None:
        """Record one step's tokens of one request. previous_s: when its latest token came, None = these are first."""
        self.output_tokens += tokens
        if not tokens:
            return
        if previous_s is None:
            self.ttft.observe(now_s - arrival_s)
        else:
            self.itl.observe(now_s - previous_s)
        for _ in range(tokens - 1):  # tokens of one step share a moment
            self.itl.observe(0.0)
