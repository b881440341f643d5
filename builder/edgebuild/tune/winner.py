"""When one trial beats another: pure decisions on the repeats of each.

A change wins only beyond the spread: every repeat is better than every repeat of the other, and the medians lie further
apart than the repeats of either do among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from edgert.figures import BY_KEY

from edgebuild.tune.records import Verdict

# Repeats may agree to the microsecond by luck; a change smaller than this is not one worth keeping.
LEAST_CHANGE = 0.01

Samples: TypeAlias = Mapping[str, Sequence[float | None]]
Comparison: TypeAlias = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True)
class Goal:
    """`figure` must become better; `guard` may become worse by the share `most_loss`, None = whatever."""

    figure: str
    guard: str | None = None
    most_loss: float = 0.0


def known(samples: Samples, figure: str) -> list[float]:
    """The repeats of one figure that were measured."""
    return [value for value in samples.get(figure, ()) if value is not None]


def middle(samples: Samples, figure: str) -> float | None:
    """Median over the repeats."""
    values = known(samples, figure)
    return median(values) if values else None


def spread(samples: Samples, figure: str) -> float | None:
    """Largest − smallest repeat."""
    values = known(samples, figure)
    return max(values) - min(values) if values else None


def compare(before: Samples, after: Samples, figure: str) -> Comparison:
    """What `after` is to `before` in one figure."""
    old, new = known(before, figure), known(after, figure)
    if not old or not new:
        return "unknown"
    if BY_KEY[figure].better == "lower":
        old, new = [-value for value in old], [-value for value in new]
    gap = abs(median(new) - median(old))
    within = max(max(old) - min(old), max(new) - min(new))
    if gap <= within or gap <= LEAST_CHANGE * abs(median(old)):
        return "same"
    if min(new) > max(old):
        return "better"
    return "worse" if max(new) < min(old) else "same"


def judge(goal: Goal, before: Samples, after: Samples, start: Samples | None = None) -> tuple[Verdict, str]:
    """The verdict on a change, and why. start: what the guard is held against, where changes follow each other."""
    figure = BY_KEY[goal.figure]
    found = compare(before, after, goal.figure)
    old, new = middle(before, goal.figure), middle(after, goal.figure)
    text = f"{figure.title} {figure.show(old)} → {figure.show(new)}"
    if found == "unknown":
        return "no gain", f"{figure.title} was not measured in both"
    width = max(spread(before, goal.figure) or 0.0, spread(after, goal.figure) or 0.0)
    if found == "same":
        return "no gain", f"{text}, within the spread ({figure.show(width)})"
    if found == "worse":
        return "loses", f"{text}, beyond the spread ({figure.show(width)})"
    if goal.guard is not None:
        guard = BY_KEY[goal.guard]
        reference = before if start is None else start
        first, now = middle(reference, goal.guard), middle(after, goal.guard)
        if first and now is not None and compare(reference, after, goal.guard) == "worse":
            loss = abs(now - first) / abs(first)
            if loss > goal.most_loss:
                return "loses", (
                    f"{text}, but {guard.title} {guard.show(first)} → {guard.show(now)}: {loss:.0%} worse, "
                    f"{goal.most_loss:.0%} is allowed"
                )
    return "wins", f"{text}, beyond the spread ({figure.show(width)})"
