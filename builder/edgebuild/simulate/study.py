"""One question put to the simulator: which arrivals, which policies, which limits; and the answer as table and JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgert.config import CONFIG_NAME
from edgert.costs import COSTS_NAME, StepCosts
from edgert.headroom import Headroom, headroom_of
from edgert.tempo import Targets

from edgebuild.simulate.arrivals import Pattern, draw, has_times, read_arrivals
from edgebuild.simulate.artifact import Subject, setting_of
from edgebuild.simulate.engine import simulate
from edgebuild.simulate.records import Arrival, Run
from edgebuild.simulate.setting import Setting
from edgebuild.simulate.summary import Figures, Slo, changes, figures
from edgebuild.traffic import read_traffic

DEFAULT_LOAD = 0.7
CAPACITY_REQUESTS = 200  # served at once, to see how many a second the device can serve
Progress = Callable[[int, int], None]

ROWS: tuple[tuple[str, str, str], ...] = (
    ("TTFT p50, ms", "ttft_ms_p50", ",.0f"),
    ("TTFT p95, ms", "ttft_ms_p95", ",.0f"),
    ("TPOT p50, ms", "tpot_ms_p50", ",.1f"),
    ("TPOT p95, ms", "tpot_ms_p95", ",.1f"),
    ("ITL p95, ms", "itl_ms_p95", ",.1f"),
    ("longest gap, ms", "longest_gap_ms", ",.1f"),
    ("goodput, requests/s", "goodput_per_s", ",.3f"),
    ("good requests", "good_share", ".1%"),
    ("output tokens/s", "output_tokens_per_s", ",.1f"),
    ("all tokens/s", "total_tokens_per_s", ",.1f"),
    ("device busy", "device_busy", ".1%"),
    ("padded prefill rows", "padding", ".1%"),
    ("most waiting", "most_waiting", ",d"),
    ("drafts accepted", "acceptance", ".1%"),
)
LOWER_IS_BETTER = {"ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "itl_ms_p95", "longest_gap_ms"}
HIGHER_IS_BETTER = {"goodput_per_s", "good_share", "output_tokens_per_s", "total_tokens_per_s"}


@dataclass(frozen=True)
class Ask:
    """As the command line has it. rate, load: None = the trace's times, or DEFAULT_LOAD where it has none.

    concurrency: a closed loop instead, so many requests at any time
    """

    traffic: Path
    policies: tuple[str, ...] = ("fixed", "adaptive")
    rate: float | None = None
    load: float | None = None
    concurrency: int | None = None
    burstiness: float | None = None
    requests: int | None = None
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
    targets: Targets = field(default_factory=Targets)


@dataclass(frozen=True)
class Study:
    """The answer. runs and figures by policy."""

    title: str
    pattern: Pattern
    costs: StepCosts
    slo: Slo
    runs: dict[str, Run]
    figures: dict[str, Figures]
    headroom: Headroom
    headroom_line: str
    notes: tuple[str, ...]

    @property
    def costs_line(self) -> str:
        """Where the costs are from."""
        costs = self.costs
        if costs.source == "estimate":
            return f"costs: ESTIMATED for {costs.device}, {costs.note}"
        return f"costs: measured on {costs.device}, {costs.backend} {costs.version}; {costs.note}"

    @property
    def changes(self) -> dict[str, float] | None:
        """What adaptive gains over fixed, as a share; positive is better. None with one policy."""
        if set(self.figures) != {"fixed", "adaptive"}:
            return None
        return changes(self.figures["fixed"], self.figures["adaptive"])

    def table(self) -> list[list[str]]:
        """Head and rows for people; rows without a figure are left out."""
        both = self.changes is not None
        rows = [["", *self.figures, *(["change"] if both else [])]]
        for label, key, form in ROWS:
            values = [getattr(each, key) for each in self.figures.values()]
            if all(value is None for value in values):
                continue
            shown = ["-" if value is None else format(value, form) for value in values]
            rows.append([label, *shown, *([_change(key, values)] if both else [])])
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "traffic": {"name": self.pattern.name, "arrivals": self.pattern.how, "rate_per_s": self.pattern.rate,
                        "attribution": self.pattern.attribution},
            "costs": {"source": self.costs.source, "device": self.costs.device, "backend": self.costs.backend,
                      "version": self.costs.version, "note": self.costs.note},
            "slo": {"ttft_ms": self.slo.ttft_ms, "itl_ms": self.slo.itl_ms, "tpot_ms": self.slo.tpot_ms},
            "policies": {name: each.to_json() for name, each in self.figures.items()},
            "adaptive_gains": self.changes,
            "headroom": {"slots": self.headroom.slots, "of_slots": self.headroom.of_slots,
                         "tokens_per_s": self.headroom.tokens_per_s,
                         "all_tokens_per_s": self.headroom.all_tokens_per_s},
            "notes": list(self.notes),
        }  # fmt: skip


def _change(key: str, values: list[float | None]) -> str:
    before, after = values
    if before is None or after is None or not before or key not in LOWER_IS_BETTER | HIGHER_IS_BETTER:
        return ""
    return f"{after / before - 1:+.1%}"


def study(subject: Subject, costs: StepCosts, ask: Ask, progress: Progress | None = None) -> Study:
    """Simulate. Raises TrafficError, SimulationError or ConfigError."""
    settings = {
        policy: setting_of(subject, costs, adaptive=policy == "adaptive", targets=ask.targets)
        for policy in ask.policies
    }
    arrivals, pattern = arrivals_of(ask, next(iter(settings.values())), progress)
    runs = {
        name: simulate(each, arrivals, concurrency=ask.concurrency, seed=ask.seed, progress=progress)
        for name, each in settings.items()
    }
    made = {name: figures(run, ask.slo) for name, run in runs.items()}
    fraction = subject.config.throughput_headroom_fraction
    headroom = headroom_of(next(iter(settings.values())).limits.rules, subject.config)
    headroom_line = headroom.describe(fraction, f"decode alone, {costs.source} costs")
    notes = [headroom_line] if fraction else []
    if headroom.slots < headroom.of_slots:
        notes.append(_who_admits(subject))
    if pattern.attribution:
        notes.append(pattern.attribution)
    if pattern.skipped:
        notes.append(f"{pattern.skipped:,} rows of the trace were skipped: no time or no lengths")
    clipped = next(iter(made.values())).clipped
    if clipped:
        notes.append(f"{clipped:,} requests were cut to the context of {subject.config.context_tokens:,} tokens")
    if not ask.slo.asks:
        notes.append("no goodput: neither the artifact nor an option names a limit (--slo-ttft-ms, --slo-itl-ms)")
    title = f"{subject.manifest.name}: {len(arrivals):,} requests of {pattern.name}, {pattern.how}"
    return Study(title, pattern, costs, ask.slo, runs, made, headroom, headroom_line, tuple(notes))


def _who_admits(subject: Subject) -> str:
    """What edgert itself does about headroom, which it keeps by costs that were measured."""
    if (subject.directory / COSTS_NAME).exists():
        return f"so does edgert, by {COSTS_NAME}; throughput_headroom_fraction: 0.0 in {CONFIG_NAME} admits all"
    return f"edgert admits all {subject.config.slots} while there is no {COSTS_NAME} (--measure, edgebuild tune)"


def arrivals_of(ask: Ask, setting: Setting, progress: Progress | None = None) -> tuple[list[Arrival], Pattern]:
    """The requests, at the rate that is asked for."""
    if ask.concurrency is not None:
        arrivals, pattern = read_arrivals(ask.traffic, requests=ask.requests, rate=1.0, seed=ask.seed)
        return arrivals, replace(pattern, how=f"{ask.concurrency} at any time, seed {ask.seed}", rate=0.0)
    rate = ask.rate
    timed = has_times(ask.traffic)
    if ask.load is not None or (rate is None and not timed):
        rate = (ask.load or DEFAULT_LOAD) * capacity(setting, ask, progress)
    arrivals, pattern = read_arrivals(
        ask.traffic, requests=ask.requests, rate=rate, burstiness=ask.burstiness, seed=ask.seed
    )
    if ask.rate is None and rate is not None:
        pattern = replace(pattern, how=f"{pattern.how}: {ask.load or DEFAULT_LOAD:g} of what can be served")
    return arrivals, pattern


def capacity(setting: Setting, ask: Ask, progress: Progress | None = None) -> float:
    """Requests a second with a queue that never empties, by the fixed policy."""
    if has_times(ask.traffic):
        arrivals, _ = read_arrivals(ask.traffic, requests=CAPACITY_REQUESTS, seed=ask.seed)
    else:
        arrivals = draw(read_traffic(ask.traffic), CAPACITY_REQUESTS, 1.0, 1.0, ask.seed)
    at_once = [replace(each, at_s=0.0) for each in arrivals]
    fixed = replace(setting, limits=replace(setting.limits, adaptive=False))
    return len(at_once) / simulate(fixed, at_once, seed=ask.seed, progress=progress).end_s
