"""Plain-text tables that `edgert doctor`, `edgert bench` and `edgebuild tune` end with. Numbers in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines: the first column to the left, the others to the right, but for a last one headed ""."""
    last = len(columns) - 1
    return _aligned([columns, *rows], left={0} if columns[last] else {0, last})


def wrapped_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines: titles that are wrapped at their spaces, a rule, and the rows; the first column to the left."""
    words = [title.split(" ") for title in titles]
    height = max(map(len, words))
    head = list(zip(*([""] * (height - len(each)) + each for each in words), strict=True))
    rule = ["-" * max(map(len, column)) for column in zip(*head, *rows, strict=True)]
    return _aligned([*head, rule, *rows], left={0})


def _aligned(rows: Sequence[Sequence[str]], left: Set[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def memory_table(phases: Mapping[str, int], planned_bytes: int | None = None, baseline_bytes: int = 0) -> list[str]:
    """Memory in use by phase, in the order in which the phases came; the peak is marked. [] where none is known.

    phases          most bytes in use by phase; baseline_bytes: in use before the load, taken off each
    planned_bytes   what the ledger plans, None = unknown
    """
    if not phases:
        return []
    net = {phase: used - baseline_bytes for phase, used in phases.items()}
    peak = max(net, key=lambda phase: net[phase])  # the first that reached it
    rows, before = [], 0
    for phase, used in net.items():
        share = "" if not planned_bytes else f"{used / planned_bytes:.0%}"
        note = "peak" if phase == peak else ""
        rows.append((phase, f"{used / 1e6:,.0f}", f"{(used - before) / 1e6:+,.0f}", share, note))
        before = used
    plan = "" if not planned_bytes else f" (plan {planned_bytes / 1e6:,.0f})"
    return table(("memory by phase", f"MB{plan}", "change", "of plan" if planned_bytes else "", ""), rows)


def acceptance_table(acceptance: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Accepted drafts by task and position. acceptance: task → drafting.Acceptance as JSON. [] without drafts."""
    rows = []
    for task, each in sorted(acceptance.items()):
        if not each.get("steps"):
            continue
        places = " / ".join("-" if rate is None else f"{rate:.2f}" for rate in each["by_position"])
        length = each["mean_accepted_length"]
        rows.append((task or "(no task)", places, "" if length is None else f"{length:.2f}", f"{each['steps']:,}"))
    columns = ("acceptance by task", "position 1 / 2 / ...", "tokens a step", "steps")
    return table(columns, rows) if rows else []


def cells_table(launches: Mapping[str, int], *, most: int = 8) -> list[str]:
    """The cells that ran most, and how many others did. [] before anything ran."""
    total = sum(launches.values())
    if not total:
        return []
    ordered = sorted(launches.items(), key=lambda item: (-item[1], item[0]))
    rows = [(cell, f"{count:,}", f"{count / total:.0%}") for cell, count in ordered[:most]]
    if len(ordered) > most:
        rest = sum(count for _, count in ordered[most:])
        rows.append((f"{len(ordered) - most} others", f"{rest:,}", f"{rest / total:.0%}"))
    return table(("cells that ran", "launches", "share"), rows)
