"""From what edgert.trial printed to what the logbook keeps: medians, spreads, acceptance by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from edgert.bench import BenchRequest
from edgert.figures import FIGURES

from edgebuild.tune.device import conditions
from edgebuild.tune.records import Figures, TaskAcceptance
from edgebuild.tune.winner import middle, spread

TOKENS_PER_MS = "tokens_per_ms"
THROTTLED = "the hardware throttled: "


def samples_of(result: Mapping[str, Any]) -> dict[str, tuple[float | None, ...]]:
    """Each figure of each repeat."""
    return {figure.key: tuple(each[figure.key] for each in result["figures"]) for figure in FIGURES}


def found_in(result: Mapping[str, Any], requests: Sequence[BenchRequest], *, curve: bool) -> dict[str, Any]:
    """Fields of a Trial that the measurement gives. curve: one request ran at a time, so decode times are its own."""
    samples = samples_of(result)
    fields: dict[str, Any] = {
        "figures": None,
        "spread": None,
        "samples": samples,
        "acceptance": _acceptance(result, curve=curve),
        "conditions_loaded": conditions(result["device"]),
        "outputs_sha256": result["outputs_sha256"],
        "warnings": tuple(_warnings(result)),
    }
    if result["figures"]:
        fields["figures"] = Figures(**{figure.key: middle(samples, figure.key) for figure in FIGURES})
        fields["spread"] = Figures(**{figure.key: spread(samples, figure.key) for figure in FIGURES})
    if curve:
        every = [each["all"] for each in result["by_task"] if each.get("all", {}).get("ms")]
        samples[TOKENS_PER_MS] = tuple(each["tokens"] / each["ms"] for each in every)
        fields["step_ms"] = median(each["ms"] / each["steps"] for each in every) if every else None
    if result["output_tokens"] is not None:
        counts = [Counter((*r.prompt_ids, *ids)) for r, ids in zip(requests, result["output_tokens"], strict=True)]
        fields["token_counts"] = tuple(tuple(sorted(each.items())) for each in counts)
    return fields


def _warnings(result: Mapping[str, Any]) -> list[str]:
    """The engine's own, cells that were not captured, and clocks that were held down."""
    found = [str(each) for each in result["warnings"]]
    found += [f"not captured: {each['cell']}: {each['reason']}"[:500] for each in result["fallbacks"]]
    if result["throttle_events"]:
        found.append(THROTTLED + ", ".join(f"{name} ({n} x)" for name, n in sorted(result["throttle_events"].items())))
    return found


def _acceptance(result: Mapping[str, Any], *, curve: bool) -> dict[str, TaskAcceptance]:
    """By task, "" = none. Without drafts every step gives one token."""
    found: dict[str, TaskAcceptance] = {}
    rates = (
        {key.removeprefix("task:") for each in result["by_task"] for key in each if key != "all"} if curve else set()
    )
    for task in sorted({*result["acceptance"], *rates}):
        each = result["acceptance"].get(task)
        parts = [repeat.get(f"task:{task}") for repeat in result["by_task"]]
        speeds = [part["tokens"] / part["ms"] for part in parts if part and part["ms"]]
        found[task] = TaskAcceptance(
            acceptance=each["acceptance"] if each else None,
            by_position=tuple(each["by_position"]) if each else (),
            mean_accepted_length=each["mean_accepted_length"] if each else 1.0,
            steps=each["steps"] if each else 0,
            tokens_per_ms=median(speeds) if curve and speeds else None,
        )
    return found
