"""The figures of a simulation: latencies, goodput under an SLO, throughput; and fixed against adaptive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgebuild.simulate.records import Gaps, Outcome, Run


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good, milliseconds; None = not asked. itl_ms: its longest gap."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def asks(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def met(self, outcome: Outcome) -> bool:
        tpot = outcome.tpot_ms
        return (
            (self.ttft_ms is None or outcome.ttft_ms <= self.ttft_ms)
            and (self.itl_ms is None or outcome.longest_gap_s * 1e3 <= self.itl_ms)
            and (self.tpot_ms is None or tpot is None or tpot <= self.tpot_ms)
        )


@dataclass(frozen=True)
class Figures:
    """One policy on one traffic. goodput: requests a second that met the whole SLO; None = there is none."""

    requests: int
    seconds: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    itl_ms_p95: float | None
    longest_gap_ms: float | None
    goodput_per_s: float | None
    good_share: float | None
    output_tokens_per_s: float
    total_tokens_per_s: float
    device_busy: float
    padding: float
    most_waiting: int
    clipped: int
    acceptance: float | None

    def to_json(self) -> dict[str, Any]:
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def figures(run: Run, slo: Slo) -> Figures:
    """Of a run with at least one request."""
    outcomes = run.outcomes
    seconds = max(run.end_s, 1e-9)
    ttft = [each.ttft_ms for each in outcomes]
    tpot = [value for each in outcomes if (value := each.tpot_ms) is not None]
    output = sum(each.tokens for each in outcomes)
    good = sum(slo.met(each) for each in outcomes) if slo.asks else None
    gaps = run.gaps
    return Figures(
        requests=len(outcomes),
        seconds=seconds,
        ttft_ms_p50=_percentile(ttft, 50),
        ttft_ms_p95=_percentile(ttft, 95),
        tpot_ms_p50=_percentile(tpot, 50) if tpot else None,
        tpot_ms_p95=_percentile(tpot, 95) if tpot else None,
        itl_ms_p95=None if not len(gaps.values) else 1e3 * _weighted(gaps, 95),
        longest_gap_ms=None if not len(gaps.values) else 1e3 * max(gaps.values),
        goodput_per_s=None if good is None else good / seconds,
        good_share=None if good is None else good / len(outcomes),
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(output + run.prompt_tokens) / seconds,
        device_busy=run.busy_s / seconds,
        padding=run.padded_tokens / max(1, run.padded_tokens + run.prompt_tokens),
        most_waiting=run.most_waiting,
        clipped=run.clipped,
        acceptance=run.draft_accepted / run.draft_proposed if run.draft_proposed else None,
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.asarray(values), share))


def _weighted(gaps: Gaps, share: float) -> float:
    """The smallest gap that at least `share` % of the gaps do not exceed."""
    values, counts = np.frombuffer(gaps.values, np.float64), np.frombuffer(gaps.counts, np.int64)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(reached, reached[-1] * share / 100)])


# (key, higher is better): what adaptive must not lose
COMPARED = (("ttft_ms_p95", False), ("longest_gap_ms", False), ("goodput_per_s", True))


def changes(fixed: Figures, adaptive: Figures) -> dict[str, float]:
    """What adaptive gains in each compared figure, as a share of fixed: positive is better."""
    found = {}
    for key, higher in COMPARED:
        before, after = getattr(fixed, key), getattr(adaptive, key)
        if before is None or after is None:
            continue
        gain = after - before if higher else before - after
        found[key] = gain / before if before else (1.0 if gain > 0 else 0.0)
    return found
