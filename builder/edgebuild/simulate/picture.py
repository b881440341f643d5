"""A simulation to look at: bars and a line over time for a terminal, one self-contained HTML page for a browser."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgebuild.simulate.records import Run

BLOCKS = " ▁▂▃▄▅▆▇█"
COLUMNS = 60
COLOURS = {"fixed": "#d97706", "adaptive": "#0d9488"}  # both readable on white and on black
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 260, 64, 34


def over_time(run: Run, highest: float, columns: int = COLUMNS) -> str:
    """Worst time to first token of each stretch of arrivals, on a log scale that ends at `highest` ms."""
    worst = _worst(run, columns)
    top = math.log1p(max(highest, 1.0))
    return "".join(
        " " if value is None else BLOCKS[max(1, round(math.log1p(value) / top * (len(BLOCKS) - 1)))] for value in worst
    )


def arrivals_line(run: Run, columns: int = COLUMNS) -> str:
    """Requests of each stretch of time."""
    counts = np.bincount(_stretch(run, columns), minlength=columns)
    top = max(1, int(counts.max()))
    return "".join(BLOCKS[math.ceil(int(count) / top * (len(BLOCKS) - 1))] for count in counts)


def _stretch(run: Run, columns: int) -> Any:
    times = np.array([each.arrival.at_s for each in run.outcomes])
    span = max(float(times.max()), 1e-9)
    return np.minimum((times / span * columns).astype(np.int64), columns - 1)


def _worst(run: Run, columns: int) -> list[float | None]:
    found: list[float | None] = [None] * columns
    for at, outcome in zip(_stretch(run, columns).tolist(), run.outcomes, strict=True):
        before = found[at]
        found[at] = outcome.ttft_ms if before is None else max(before, outcome.ttft_ms)
    return found


def page(title: str, runs: Mapping[str, Run], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """HTML without scripts or network. rows: the table, its head first."""
    head, *body = rows
    table = "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"
    for row in body:
        first, *rest = row
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        table += f"<tr><th scope='row'>{html.escape(first)}</th>{cells}</tr>"
    legend = " ".join(f"<span style='color:{COLOURS[name]}'>■ {name}</span>" for name in runs)
    charts = (
        _chart("Time to first token by arrival", "s after the first arrival", _points(runs), dots=True)
        + _chart("Share of requests whose first token came within", "ms", _shares(runs, "ttft"), dots=False)
        + _chart("Share of requests whose longest gap was at most", "ms", _shares(runs, "gap"), dots=False)
    )
    lines = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>"
        ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}table{border-collapse:collapse;display:block;overflow-x:auto}th,td{padding:.25rem .75rem;"
        "text-align:right;border-bottom:1px solid #8884}h1{font-size:1.4rem}h2{font-size:1.1rem}"
        "@media(max-width:30rem){table{font-size:.85rem}th,td{padding:.25rem .3rem}}"
        "th[scope]{text-align:left;font-weight:normal}"
        "svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:currentColor}"
        f"</style></head><body><h1>{html.escape(title)}</h1><table>{table}</table><p>{legend}</p>{charts}{lines}"
        "</body></html>\n"
    )


Series = list[tuple[str, list[tuple[float, float]]]]


def _points(runs: Mapping[str, Run]) -> Series:
    """At most 2,000 points a run: the worst of each stretch, so that none that matters is left out."""
    series: Series = []
    for name, run in runs.items():
        span = max(each.arrival.at_s for each in run.outcomes)
        worst = _worst(run, 2000)
        points = [(span * (at + 0.5) / 2000, value / 1e3) for at, value in enumerate(worst) if value is not None]
        series.append((name, points))
    return series


def _shares(runs: Mapping[str, Run], what: str) -> Series:
    series: Series = []
    for name, run in runs.items():
        values = sorted(each.ttft_ms if what == "ttft" else each.longest_gap_s * 1e3 for each in run.outcomes)
        steps = [round(at * (len(values) - 1) / 200) for at in range(201)]
        series.append((name, [(values[at], (at + 1) / len(values)) for at in steps]))
    return series


def _chart(title: str, unit: str, series: Series, *, dots: bool) -> str:
    x_top = max((x for _, points in series for x, _ in points), default=1.0) or 1.0
    y_top = max((y for _, points in series for _, y in points), default=1.0) if dots else 1.0
    y_top = y_top or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_top * (WIDTH - LEFT - 12), HEIGHT - BOTTOM - y / y_top * (HEIGHT - BOTTOM - 14)

    drawn = []
    for step in range(5):
        x, y = place(x_top * step / 4, y_top * step / 4)
        label = f"{y_top * step / 4:.3g} s" if dots else f"{25 * step} %"
        anchor = "end" if step == 4 else "middle"
        drawn.append(
            f"<line x1='{LEFT}' x2='{WIDTH - 12}' y1='{y:.1f}' y2='{y:.1f}' stroke='#8884'/>"
            f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>"
            f"<text x='{x:.1f}' y='{HEIGHT - 12}' text-anchor='{anchor}'>{x_top * step / 4:,.0f}</text>"
        )
    for name, points in series:
        spots = [place(x, y) for x, y in points]
        if dots:
            drawn += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{COLOURS[name]}'/>" for x, y in spots]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            drawn.append(f"<polyline points='{path}' fill='none' stroke='{COLOURS[name]}' stroke-width='2'/>")
    return (
        f"<h2>{html.escape(title)} <small>({html.escape(unit)})</small></h2>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{html.escape(title)}'>{''.join(drawn)}</svg>"
    )
