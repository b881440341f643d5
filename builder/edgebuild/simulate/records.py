"""What goes into a simulation and what comes out of it. Plain records; times in seconds of virtual time."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arrival:
    """One request of a traffic file. at_s counts from the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    task: str | None = None


@dataclass
class Outcome:
    """What became of a request. Times in seconds; longest_gap_s 0.0 with a single moment of output."""

    arrival: Arrival
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.arrival.at_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """(latency − TTFT) ÷ (n − 1); None for one token."""
        return (self.last_s - self.first_s) * 1e3 / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class Gaps:
    """Gaps between the moments at which tokens of a stream came out, in seconds, each with how often it was seen."""

    values: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))

    def add(self, gap_s: float, count: int = 1) -> None:
        self.values.append(gap_s)
        self.counts.append(count)


@dataclass
class Run:
    """One simulation. `clipped` requests were cut to the context; busy_s is the device's time in steps."""

    outcomes: list[Outcome]
    gaps: Gaps
    end_s: float = 0.0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    clipped: int = 0
    most_waiting: int = 0
    prompt_tokens: int = 0
    padded_tokens: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0
    launches: Counter[str] = field(default_factory=Counter)
