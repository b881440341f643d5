"""Histograms of durations with fixed bounds: cheap to fill on the engine's thread, frozen for whoever reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# Seconds. A token of a small model on a GPU takes 1 ms, one of a large model on a CPU 1 s.
TOKEN_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
# Seconds. A first token waits for the queue and for a prompt of up to the whole context.
REQUEST_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True)
class HistogramSnapshot:
    """counts[i]: observations in (bounds_s[i-1], bounds_s[i]]; the last one is above every bound. max_s: 0 if none."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float
    max_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._max = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds
        self._max = max(self._max, seconds)

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum, self._max)
