"""From a traffic file to arrivals: timestamps where the file has them, a Poisson or gamma process where it has not.

Traces with times: Azure and BurstGPT CSV, Mooncake JSONL, and our own list of requests (CSV or JSONL with arrival_s,
prompt_tokens, output_tokens and optionally task). Everything else that `edgebuild traffic` reads gives lengths only.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from edgebuild.errors import TrafficError
from edgebuild.simulate.records import Arrival
from edgebuild.traffic import Histogram, read_traffic
from edgebuild.traffic.histogram import LONGEST_TOKENS, Counts

MOST_BYTES = 1 << 30
# (time, prompt, output, task, seconds a unit of time): columns in lower case; the first that are all there win.
TIMED_COLUMNS = (
    ("arrival_s", "prompt_tokens", "output_tokens", "task", 1.0),
    ("timestamp", "contexttokens", "generatedtokens", "", 1.0),
    ("timestamp", "request tokens", "response tokens", "log type", 1.0),
)
TIMED_KEYS = (
    ("arrival_s", "prompt_tokens", "output_tokens", "task", 1.0),
    ("timestamp", "input_length", "output_length", "", 1e-3),
)


@dataclass(frozen=True)
class Pattern:
    """How requests come. `how` is for people; rate is the mean, requests a second."""

    name: str
    attribution: str
    how: str
    rate: float
    skipped: int = 0


def read_arrivals(
    path: Path,
    *,
    requests: int | None = None,
    rate: float | None = None,
    burstiness: float | None = None,
    seed: int = 0,
) -> tuple[list[Arrival], Pattern]:
    """The requests of a trace in order of time, or `requests` drawn from a histogram. Raises TrafficError.

    A trace whose requests all come at once has no rate, and takes none.

    requests    at most so many of a trace, from its beginning; a histogram gives 1,000 unless told otherwise
    rate        requests a second. A trace keeps its pattern and is stretched to it; a histogram needs it
    burstiness  shape of the gamma process where there are no times: 1 = Poisson, smaller = in bursts; None: what the
                histogram says, else 1
    """
    timed = _timed(path)
    if timed is not None:
        arrivals, skipped = timed
        arrivals = arrivals[:requests]
        natural = mean_rate(arrivals)
        how = f"times of the trace, {natural:.3g} requests/s" if natural else "all at once, as the trace says"
        if rate is not None and not natural and len(arrivals) > 1:
            raise TrafficError(
                f"{path}: its {len(arrivals):,} requests all come at once, no rate can be made of that",
                hint="leave out --rate and --load, or keep so many at any time: --concurrency",
            )
        if rate is not None and natural:
            arrivals = [replace(each, at_s=each.at_s * natural / rate) for each in arrivals]
            how += f", stretched to {rate:.3g}"
        return arrivals, Pattern(path.name.split(".")[0], "", how, rate or natural, skipped)
    histogram = read_traffic(path)
    if rate is None:
        raise TrafficError(
            f"{path}: lengths without times",
            hint="say how many requests come a second (--rate), or what share of the possible (--load)",
        )
    shape = (histogram.burstiness or 1.0) if burstiness is None else burstiness
    process = "Poisson" if shape == 1 else f"gamma of shape {shape:g}"
    how = f"{process}, {rate:.3g} requests/s, seed {seed}"
    drawn = draw(histogram, requests or 1000, rate, shape, seed)
    return drawn, Pattern(histogram.name, histogram.attribution, how, rate)


def has_times(path: Path) -> bool:
    """Whether the file says when its requests came."""
    return _rows(path) is not None


def draw(histogram: Histogram, requests: int, rate: float, burstiness: float, seed: int) -> list[Arrival]:
    """Lengths drawn independently from the two counts, gaps from a gamma process with mean 1 / rate."""
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), requests)
    times = np.cumsum(gaps) - gaps[0]
    prompts, outputs = (
        _lengths(counts, requests, rng) for counts in (histogram.prompt_counts, histogram.output_counts)
    )
    return [Arrival(float(t), int(p), int(n)) for t, p, n in zip(times, prompts, outputs, strict=True)]


def _lengths(counts: Counts, requests: int, rng: np.random.Generator) -> Counts:
    places = np.cumsum(counts)
    return np.searchsorted(places, rng.integers(0, places[-1], requests), side="right").astype(np.int64)


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests a second from the first to the last; 0 where they all come at once."""
    span = arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0
    return (len(arrivals) - 1) / span if span > 0 else 0.0


def _timed(path: Path) -> tuple[list[Arrival], int] | None:
    """Arrivals and skipped rows of a file with times; None for one without."""
    rows = _rows(path)
    return None if rows is None else _arrivals(path, rows)


def _rows(path: Path) -> Iterator[tuple[str, str, str, str, float]] | None:
    """Time, prompt, output, task and seconds a unit of time of every row; None for a file without times."""
    try:
        if path.is_dir() or path.stat().st_size > MOST_BYTES:
            return None
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise TrafficError(f"{path}: {error.strerror or error}") from error
    if head.startswith(b"\x1f\x8b") or b"\0" in head:
        return None
    return _json_rows(path) if head.lstrip().startswith(b"{") else _csv_rows(path)


def _csv_rows(path: Path) -> Iterator[tuple[str, str, str, str, float]] | None:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        line = next((line for line in file if line.strip() and not line.startswith("#")), "")
    columns = [name.strip().lower() for name in next(csv.reader([line]), [])]
    form = next((form for form in TIMED_COLUMNS if set(form[:3]) <= set(columns)), None)
    if form is None:
        return None
    places = [columns.index(name) for name in form[:3]]
    task = columns.index(form[3]) if form[3] in columns else -1

    def rows() -> Iterator[tuple[str, str, str, str, float]]:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = (line for line in file if line.strip() and not line.startswith("#"))
            next(lines)
            for row in csv.reader(lines):
                if len(row) == len(columns):
                    at, prompt, output = (row[place].strip() for place in places)
                    yield at, prompt, output, row[task].strip() if task >= 0 else "", form[4]
                else:
                    yield "", "", "", "", 1.0

    return rows()


def _json_rows(path: Path) -> Iterator[tuple[str, str, str, str, float]] | None:
    with path.open(encoding="utf-8", errors="replace") as file:
        first = _object(next((line for line in file if line.strip()), ""))
    form = next((form for form in TIMED_KEYS if set(form[:3]) <= set(first)), None)
    if form is None:
        return None

    def rows() -> Iterator[tuple[str, str, str, str, float]]:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.strip():
                    row = _object(line)
                    at, prompt, output = (str(row.get(key, "")) for key in form[:3])
                    yield at, prompt, output, str(row.get(form[3]) or ""), form[4]

    return rows()


def _object(line: str) -> dict[str, object]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _arrivals(path: Path, rows: Iterator[tuple[str, str, str, str, float]]) -> tuple[list[Arrival], int]:
    found: list[Arrival] = []
    skipped = 0
    for at, prompt, output, task, unit in rows:
        time, lengths = _seconds(at), (_tokens(prompt), _tokens(output))
        if time is None or not all(1 <= tokens <= LONGEST_TOKENS for tokens in lengths):
            skipped += 1
            continue
        found.append(Arrival(time * unit, *lengths, task or None))
    if not found:
        raise TrafficError(f"{path}: no row has a time and both lengths ({skipped:,} were skipped)")
    found.sort(key=lambda each: each.at_s)
    first = found[0].at_s
    return [replace(each, at_s=each.at_s - first) for each in found], skipped


def _tokens(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        return 0
    return int(value) if value == value and abs(value) < 1e9 and value == int(value) else 0


def _seconds(text: str) -> float | None:
    """A number, or a date with a time of day. Fractions longer than microseconds are cut."""
    try:
        value = float(text)
        return value if abs(value) < 1e13 else None
    except ValueError:
        pass
    whole, _, fraction = text.removesuffix("Z").partition(".")
    fraction, sign, zone = _zone(fraction)
    try:
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}{sign}{zone}").timestamp()
    except ValueError:
        return None


def _zone(fraction: str) -> tuple[str, str, str]:
    for sign in "+-":
        if sign in fraction:
            digits, _, zone = fraction.partition(sign)
            return digits, sign, zone
    return fraction, "+", "00:00"
