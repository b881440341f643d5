"""How numbers are written on the page, and the one shape that most of its pictures are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNKNOWN = "—"


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart. start, width: percent of the track; detail: a line under it; tone: which colour.

    other_start, other_width: a thin second bar (measured beside planned), None = there is none
    """

    label: str
    value: str
    width: float
    start: float = 0.0
    detail: str = ""
    tone: str = "plain"
    other_start: float | None = None
    other_width: float | None = None


@dataclass(frozen=True)
class Bars:
    """A bar chart. marks: (percent of the track, what is there) drawn through all rows; note: under it."""

    title: str
    rows: tuple[Bar, ...]
    marks: tuple[tuple[float, str], ...] = ()
    note: str = ""
    waterfall: bool = False


@dataclass(frozen=True)
class Table:
    """columns: a name that begins with "<" is set left. Rows are text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Missing:
    """A part that nobody measured: what it would show, and the commands that measure and draw it."""

    what: str
    commands: tuple[str, ...]


def human_bytes(count: float) -> str:
    """Decimal units, as data sheets use."""
    if abs(count) >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.0f} MB" if abs(count) >= 1e6 else f"{count:,.0f} B"


def known(value: Any, form: str, suffix: str = "") -> str:
    """A number in a format, or the sign for unknown."""
    return UNKNOWN if value is None else f"{value:{form}}{suffix}"


def percent(part: float, whole: float) -> float:
    """A width on the page, two digits, within 0..100."""
    return round(min(100.0, max(0.0, 100 * part / whole)), 2) if whole else 0.0
