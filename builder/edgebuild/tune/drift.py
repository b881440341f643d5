"""Does a long run get slower, or larger? The first window of a soak against its last. Pure.

Requests differ in length, so each is compared with itself: the same request in both windows, the median of the ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from edgebuild.tune.records import Drift

WINDOW = 0.2  # share of the soak that one window is
LEAST_PAIRS = 3  # requests that must have run in both windows


def drift_of(samples: Sequence[Mapping[str, Any]], seconds: float, limit: float) -> Drift:
    """samples: {at_s, request, ttft_ms, tpot_ms, memory_bytes} of each request, as edgert.trial gives them."""
    first = [each for each in samples if each["at_s"] <= WINDOW * seconds]
    last = [each for each in samples if each["at_s"] >= (1 - WINDOW) * seconds]
    both = {each["request"] for each in first} & {each["request"] for each in last}
    return Drift(
        seconds=seconds,
        requests=len(samples),
        pairs=len(both),
        ttft=_slower(first, last, both, "ttft_ms"),
        tpot=_slower(first, last, both, "tpot_ms"),
        memory=_larger(first, last),
        limit=limit,
    )


def verdict_of(drift: Drift) -> tuple[bool, str]:
    """Whether it held steady, and the figures. What could not be told does not count as drift, and is said."""
    parts, bad = [], []
    for name, value in (("TTFT", drift.ttft), ("TPOT", drift.tpot), ("memory", drift.memory)):
        text = f"{name} unknown" if value is None else f"{name} {value:+.1%}"
        parts.append(text)
        if value is not None and value > drift.limit:
            bad.append(text)
    seen = f"{', '.join(parts)} from the first to the last fifth of {drift.seconds:.0f} s"
    if bad:
        return False, f"{' and '.join(bad)}: {drift.limit:.0%} is allowed ({seen})"
    short = "" if drift.tpot is not None or drift.ttft is not None else "; too short to tell latencies apart"
    return True, f"{seen}, {drift.limit:.0%} is allowed{short}"


def _slower(
    first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], both: set[int], key: str
) -> float | None:
    ratios = []
    for request in both:
        before = [each[key] for each in first if each["request"] == request and each[key]]
        after = [each[key] for each in last if each["request"] == request and each[key]]
        if before and after:
            ratios.append(median(after) / median(before))
    return median(ratios) - 1 if len(ratios) >= LEAST_PAIRS else None


def _larger(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> float | None:
    before = [each["memory_bytes"] for each in first if each["memory_bytes"]]
    after = [each["memory_bytes"] for each in last if each["memory_bytes"]]
    return max(after) / max(before) - 1 if before and after else None
