"""The memory ledger as a waterfall, planned beside measured, and what was in use in each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgebuild.report.numbers import UNKNOWN, Bar, Bars, Table, human_bytes, percent

# Backend.memory()'s parts that are lines of the ledger. What else it says is shown beside them.
PART_OF_LINE = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "state": "recurrent state",
    "scratch": "scratch",
    "graphs": "graphs",
    "drafter_weights": "drafter weights",
    "drafter_kv_cache": "drafter KV cache",
}


def measured_lines(parts: Mapping[str, int], ledger: Mapping[str, int]) -> dict[str, int]:
    """Measured bytes by ledger line. A backend that counts the drafter's cache with the model's is told apart by the
    plan: both are arrays of known size."""
    lines = {PART_OF_LINE[part]: int(size) for part, size in parts.items() if part in PART_OF_LINE}
    drafter = ledger.get("drafter KV cache", 0)
    if drafter and "KV cache" in lines and "drafter KV cache" not in lines and lines["KV cache"] > drafter:
        lines["drafter KV cache"] = drafter
        lines["KV cache"] -= drafter
    return lines


# Where the ledger takes less of the device than this, the picture ends at so many times the ledger.
LEAST_SHARE, ROOM = 0.5, 1.4


def waterfall(memory: Mapping[str, Any], measured: Mapping[str, int]) -> Bars:
    """Each line starts where the one before ended; the thin bar is what was measured. memory: of plan.json."""
    budget, needed = int(memory["budget_bytes"]), int(memory["needed_bytes"])
    whole = needed >= LEAST_SHARE * budget
    widest = max(budget if whole else int(ROOM * needed), needed, 1)
    rows = []
    at = found_at = 0
    for line in memory["ledger"]:
        size, found = int(line["bytes"]), measured.get(line["label"])
        if size or found:
            rows.append(_step(line["label"], line["formula"], size, found, at, found_at, widest))
        at += size
        found_at += size if found is None else found
    rows.append(_step("free", "what the ledger leaves", max(0, budget - needed), None, at, found_at, widest))
    marks = ((percent(budget, widest), f"the device: {human_bytes(budget)}"),) if whole else ()
    notes = ["Thick bars are planned, thin ones measured; a line without a thin bar is taken as planned."]
    notes += [] if whole else [f"The device has {human_bytes(budget)}: the bar of what is free is cut off."]
    return Bars("Ledger, line by line", tuple(rows), marks, " ".join(notes), waterfall=True)


def _step(label: str, formula: str, size: int, found: int | None, at: int, found_at: int, widest: int) -> Bar:
    tone = {"margin": "margin", "free": "free"}.get(label, "chosen")
    return Bar(
        label=label,
        value=human_bytes(size) if found is None else f"{human_bytes(size)}, measured {human_bytes(found)}",
        width=percent(min(size, widest - at), widest),
        start=percent(at, widest),
        detail=formula,
        tone=tone,
        other_start=None if found is None else percent(found_at, widest),
        other_width=None if found is None else percent(found, widest),
    )


def ledger_table(memory: Mapping[str, Any], measured: Mapping[str, int]) -> Table:
    rows = []
    for line in memory["ledger"]:
        found = measured.get(line["label"])
        gap = UNKNOWN if found is None or not line["bytes"] else f"{found / line['bytes'] - 1:+.1%}"
        measured_text = UNKNOWN if found is None else f"{found:,}"
        rows.append((line["label"], f"{line['bytes']:,}", measured_text, gap, line["formula"]))
    rows.append(("needed", f"{memory['needed_bytes']:,}", "", "", f"of {memory['budget_bytes']:,} B"))
    return Table("Memory ledger", ("<line", "planned B", "measured B", "difference", "<how"), tuple(rows))


def phase_bars(memory: Mapping[str, Any]) -> Bars | None:
    """Bytes in use by phase, from a report of `edgert doctor --json`; None where it has none."""
    phases: Mapping[str, int] = memory.get("phases") or {}
    planned = memory.get("planned_bytes")
    if not phases:
        return None
    peak = max(phases, key=lambda phase: phases[phase])  # the first that reached it
    widest = max(phases[peak], planned or 0, 1)
    rows = tuple(
        Bar(
            label=phase,
            value=human_bytes(used) + (", the peak" if phase == peak else ""),
            width=percent(used, widest),
            tone="mark" if planned and used > planned else "chosen" if phase == peak else "plain",
        )
        for phase, used in phases.items()
    )
    marks = ((percent(planned, widest), f"planned: {human_bytes(planned)}"),) if planned else ()
    return Bars("Memory in use, by phase", rows, marks)
