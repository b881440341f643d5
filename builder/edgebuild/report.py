"""report.html: one self-contained page that shows what was decided for this traffic and device, and why.

Geometry is worked out here, drawn by templates/report.html.j2 as inline SVG: no script, no network, no date. The same
inputs give the same bytes. Knows the plan and the manifest, measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgebuild.plan.records import Plan
from edgebuild.scheduler_config import template_environment
from edgebuild.traffic.histogram import Histogram

# The viewBox is as wide as a phone, so that text keeps its size there and grows on a desk.
WIDTH, HEIGHT = 360.0, 200.0
LEFT, RIGHT, BASE = 8.0, 8.0, 172.0
LABEL_ROW, LABEL_GAP, LABEL_ROWS = 12.0, 4.0, 6
CHARACTER = 7.0  # width of one digit at the label's font size
BINS = 72


@dataclass(frozen=True)
class Bar:
    """A rectangle of a histogram, with the words it shows when pointed at."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Mark:
    """A vertical line with a label in one of the rows above the plot; `minor` lines have no label."""

    x: float
    y: float
    label: str
    minor: bool


@dataclass(frozen=True)
class Chart:
    """A histogram with marks. `ticks` are (x, label) on the axis; `beyond` says what lies right of it, or ""."""

    title: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    beyond: str


@dataclass(frozen=True)
class Step:
    """One line of the memory waterfall; positions in percent of the widest value."""

    label: str
    formula: str
    planned: str
    actual: str
    start: float
    width: float
    actual_width: float
    kind: str


@dataclass(frozen=True)
class Share:
    """One bar of a comparison; `width` in percent of the widest."""

    label: str
    detail: str
    text: str
    width: float
    chosen: bool


def render_report(
    manifest: Mapping[str, Any], plan: Plan, histogram: Histogram, actual: Mapping[str, Any] | None = None
) -> str:
    """The page.

    manifest  the artifact's manifest as plain data
    actual    ledger label -> measured bytes; optionally "golden": {"steps", "worst_error", "tolerance"}
    """
    measured = dict(actual or {})
    golden = measured.pop("golden", None)
    chunks = plan.prefill.chunk_sizes
    longest = plan.context_tokens
    repeats = range(2 * chunks[-1], plan.context_tokens, chunks[-1])
    return (
        template_environment(autoescape=True)
        .get_template("report.html.j2")
        .render(
            manifest=manifest,
            plan=plan,
            view=(WIDTH, HEIGHT, LEFT, BASE),
            prompts=histogram_chart(
                "Prompts by length, and the chunk sizes",
                histogram.prompt_counts,
                "requests",
                longest,
                chunks,
                repeats,
            ),
            contexts=histogram_chart(
                "Decode steps by context, and the KV tiers",
                histogram.decode_context_counts,
                "steps",
                longest,
                plan.decode.kv_tiers,
            ),
            padding=_padding(plan),
            waste=_waste(plan),
            waterfall=waterfall(plan, measured),
            has_actual=bool(measured),
            golden=golden,
            attribution=histogram.attribution,
            skipped=sorted(histogram.skipped.items()),
        )
    )


def histogram_chart(
    title: str, counts: npt.NDArray[np.int64], unit: str, longest: int, marks: Sequence[int], minor: Iterable[int] = ()
) -> Chart:
    """Bars over equal ranges of length, up to the last mark or the 99.5th percentile, whichever is further.

    longest  lengths past it are not drawn (they are not served)
    """
    total = int(counts.sum())
    percentile = int(np.searchsorted(np.cumsum(counts), 0.995 * total)) if total else 1
    end = max(min(percentile, longest), marks[-1], 1)
    width = -(-end // BINS)  # tokens in one bar
    end = width * -(-end // width)
    lengths = np.arange(1, min(end, counts.size - 1) + 1)
    bins = np.zeros(end // width, dtype=np.int64)
    np.add.at(bins, (lengths - 1) // width, counts[lengths])
    scale = (WIDTH - LEFT - RIGHT) / end
    placed, rows = _marks(marks, scale)
    top = LABEL_ROW * rows + 6
    tallest = max(1, int(bins.max()))
    bars = tuple(
        Bar(
            x=_round(LEFT + index * width * scale),
            y=_round(BASE - (BASE - top) * count / tallest),
            width=_round(max(0.3, width * scale - 0.4)),
            height=_round((BASE - top) * count / tallest),
            title=f"{index * width + 1:,} to {(index + 1) * width:,} tokens: {count:,} {unit}",
        )
        for index, count in enumerate(bins.tolist())
        if count
    )
    lines = [Mark(_round(LEFT + tokens * scale), top, "", True) for tokens in minor if tokens <= end]
    beyond = int(counts[end + 1 :].sum())
    return Chart(
        title=title,
        bars=bars,
        marks=tuple([*lines, *placed]),
        ticks=tuple((_round(LEFT + tokens * scale), f"{tokens:,}") for tokens in _ticks(end)),
        beyond=f"{beyond:,} of {total:,} {unit} lie beyond {end:,} tokens" if beyond else "",
    )


def _marks(tokens: Sequence[int], scale: float) -> tuple[list[Mark], int]:
    """Labels spread over rows so that none covers another; the rows used."""
    free = [float("-inf")] * LABEL_ROWS
    placed: list[Mark] = []
    used = 1
    for value in tokens:
        x, half = LEFT + value * scale, CHARACTER * len(f"{value:,}") / 2
        centre = min(max(x, half), WIDTH - half)
        row = next((row for row in range(LABEL_ROWS) if centre - half >= free[row]), None)
        label = "" if row is None else f"{value:,}"
        row = row if row is not None else LABEL_ROWS - 1
        free[row] = max(free[row], centre + half + LABEL_GAP)
        used = max(used, row + 1)
        placed.append(Mark(_round(x), _round(LABEL_ROW * (row + 1)), label, False))
    return placed, used


def _ticks(end: int) -> list[int]:
    step = next(s for e in range(9) for s in (10**e, 2 * 10**e, 5 * 10**e) if end / s <= 5)
    return list(range(0, end + 1, step))


def waterfall(plan: Plan, actual: Mapping[str, int]) -> tuple[Step, ...]:
    """The ledger line by line, each starting where the one before ended, then what stays free."""
    widest = max(plan.ledger.device_bytes, plan.ledger.needed_bytes, 1)
    steps: list[Step] = []
    at = 0
    lines = [(line.label, line.bytes, line.formula) for line in plan.ledger.lines]
    lines.append(("free", max(0, plan.ledger.headroom_bytes), "what the ledger leaves"))
    for label, size, formula in lines:
        found = actual.get(label)
        steps.append(
            Step(
                label=label,
                formula=formula,
                planned=human_bytes(size),
                actual="" if found is None else human_bytes(int(found)),
                start=_round(100 * at / widest),
                width=_round(100 * size / widest),
                actual_width=_round(100 * int(found or 0) / widest),
                kind={"margin": "margin", "free": "free"}.get(label, "used"),
            )
        )
        at += size
    return tuple(steps)


def _padding(plan: Plan) -> tuple[Share, ...]:
    prefill = plan.prefill
    return _shares(
        ("this plan", prefill.padding.sizes, prefill.padding.fraction),
        ("powers of two", prefill.powers_of_two.sizes, prefill.powers_of_two.fraction),
        ("uniform steps", prefill.uniform.sizes, prefill.uniform.fraction),
    )


def _waste(plan: Plan) -> tuple[Share, ...]:
    decode = plan.decode
    return _shares(
        ("this plan", decode.tiers.tiers, decode.tiers.waste_fraction),
        ("powers of two", decode.powers_of_two.tiers, decode.powers_of_two.waste_fraction),
        ("uniform steps", decode.uniform.tiers, decode.uniform.waste_fraction),
    )


def _shares(*rows: tuple[str, tuple[int, ...], float]) -> tuple[Share, ...]:
    widest = max(fraction for _, _, fraction in rows) or 1.0
    return tuple(
        Share(label, ", ".join(map(str, sizes)), f"{fraction:.1%}", _round(100 * fraction / widest), not index)
        for index, (label, sizes, fraction) in enumerate(rows)
    )


def human_bytes(count: int) -> str:
    """Decimal units, as data sheets use."""
    if count >= 10**9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.0f} MB" if count >= 10**6 else f"{count:,} B"


def _round(value: float) -> float:
    return round(value, 2)
