"""The traffic histograms with chunks and tiers drawn on them, and padding against the alternatives.

Geometry is worked out here, drawn by templates/report as inline SVG. The same inputs give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgebuild.report.numbers import Bar, Bars, percent

# The viewBox is as wide as a phone, so that text keeps its size there and grows on a desk.
WIDTH, HEIGHT = 360.0, 200.0
LEFT, RIGHT, BASE = 8.0, 8.0, 172.0
LABEL_ROW, LABEL_GAP, LABEL_ROWS = 12.0, 4.0, 6
CHARACTER = 7.0  # width of one digit at the label's font size
BINS = 72


@dataclass(frozen=True)
class Column:
    """A column of a histogram, with the words it shows when pointed at."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Mark:
    """A vertical line with a label in one of the rows above the plot; `minor` lines have no label.

    label_x  centre of the label, which stays inside the frame where the line is at its edge
    """

    x: float
    y: float
    label: str
    minor: bool
    label_x: float


@dataclass(frozen=True)
class Chart:
    """A histogram with marks. `ticks` are (x, label) on the axis; `beyond` says what lies right of it, or ""."""

    title: str
    columns: tuple[Column, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    beyond: str


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
    columns = tuple(
        Column(
            x=_round(LEFT + index * width * scale),
            y=_round(BASE - (BASE - top) * count / tallest),
            width=_round(max(0.3, width * scale - 0.4)),
            height=_round((BASE - top) * count / tallest),
            title=f"{index * width + 1:,} to {(index + 1) * width:,} tokens: {count:,} {unit}",
        )
        for index, count in enumerate(bins.tolist())
        if count
    )
    places = [_round(LEFT + tokens * scale) for tokens in minor if tokens <= end]
    lines = [Mark(x, top, "", True, x) for x in places]
    beyond = int(counts[end + 1 :].sum())
    return Chart(
        title=title,
        columns=columns,
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
        placed.append(Mark(_round(x), _round(LABEL_ROW * (row + 1)), label, False, _round(centre)))
    return placed, used


def _ticks(end: int) -> list[int]:
    step = next(s for e in range(9) for s in (10**e, 2 * 10**e, 5 * 10**e) if end / s <= 5)
    return list(range(0, end + 1, step))


def padding_bars(plan: Mapping[str, Any]) -> tuple[Bars, Bars]:
    """What chunk sizes and KV tiers waste, against the usual lists of as many sizes. plan: plan.json."""
    prefill, decode = plan["prefill"], plan["decode"]
    chunks = _against("Prefill rows that are padding", prefill, "chunk_sizes", "expected_padding_fraction")
    tiers = _against("Cache positions read in vain by decode", decode, "kv_tiers", "expected_waste_fraction")
    return chunks, tiers


def _against(title: str, part: Mapping[str, Any], sizes: str, fraction: str) -> Bars:
    others = part["alternatives"]
    rows = (("this plan", part), ("powers of two", others["powers_of_two"]), ("uniform steps", others["uniform"]))
    widest = max(float(row[fraction]) for _, row in rows)
    bars = tuple(
        Bar(
            label=label,
            value=f"{row[fraction]:.1%}",
            width=percent(float(row[fraction]), widest),
            detail=", ".join(f"{size:,}" for size in row[sizes]),
            tone="chosen" if row is part else "plain",
        )
        for label, row in rows
    )
    return Bars(title, bars)


def _round(value: float) -> float:
    return round(value, 2)
