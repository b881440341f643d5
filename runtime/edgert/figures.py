"""The figures by which runs are compared, and the table they are shown in: `edgert bench`, `edgebuild tune`, reports.

Knows names, units and how to print; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgert.tables import wrapped_table


@dataclass(frozen=True)
class Figure:
    """key: in JSON, with its unit. better: which way is good. scale: printed = value × scale, with `digits`."""

    key: str
    title: str
    better: Literal["lower", "higher"]
    digits: int = 1
    scale: float = 1.0
    suffix: str = ""

    def show(self, value: float | None) -> str:
        """ "-" where it is unknown."""
        return "-" if value is None else f"{value * self.scale:,.{self.digits}f}{self.suffix}"


FIGURES = (
    Figure("ttft_p50_ms", "TTFT p50 ms", "lower"),
    Figure("ttft_p95_ms", "TTFT p95 ms", "lower"),
    Figure("tpot_ms", "TPOT ms", "lower", 2),
    Figure("itl_p95_ms", "ITL p95 ms", "lower"),
    Figure("longest_gap_ms", "longest gap ms", "lower"),
    Figure("output_tokens_per_s", "tokens/s", "higher"),
    Figure("goodput_requests_per_s", "goodput req/s", "higher", 2),
    Figure("peak_memory_bytes", "memory MB", "lower", 0, 1e-6),
    Figure("acceptance", "drafts accepted", "higher", 0, 100.0, " %"),
    Figure("mean_accepted_length", "tokens a step", "higher", 2),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}


def figures_of(report: Mapping[str, Any], *, peak_memory_bytes: float | None = None) -> dict[str, float | None]:
    """Every figure of one run, from `edgert.bench.summarise`'s report; None = not measured, or does not apply."""
    drafts = report["drafts"] or {}
    return {
        "ttft_p50_ms": _at(report["ttft_ms"], "p50"),
        "ttft_p95_ms": _at(report["ttft_ms"], "p95"),
        "tpot_ms": _at(report["tpot_ms"], "p50"),
        "itl_p95_ms": _at(report["itl_ms"], "p95"),
        "longest_gap_ms": report["longest_gap_ms"],
        "output_tokens_per_s": report["output_tokens_per_s"],
        "goodput_requests_per_s": report["goodput_requests_per_s"],
        "peak_memory_bytes": peak_memory_bytes,
        "acceptance": drafts.get("acceptance"),
        "mean_accepted_length": drafts.get("mean_accepted_length"),
    }


def _at(spread: Mapping[str, float] | None, key: str) -> float | None:
    return None if spread is None else spread[key]


def shown_figures(rows: Sequence[Mapping[str, float | None]]) -> tuple[Figure, ...]:
    """The columns of a table of these rows: what none of them has is left out."""
    return tuple(figure for figure in FIGURES if any(row.get(figure.key) is not None for row in rows))


def figure_table(rows: Sequence[tuple[str, Mapping[str, float | None]]], label: str = "run") -> str:
    """The table as text: a row for each (name, figures)."""
    columns = shown_figures([figures for _, figures in rows])
    cells = [[name, *(figure.show(figures.get(figure.key)) for figure in columns)] for name, figures in rows]
    return "\n".join(wrapped_table([label, *(figure.title for figure in columns)], cells))
