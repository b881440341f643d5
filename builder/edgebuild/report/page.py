"""report.html: one self-contained page: what was decided for this traffic and device, why, and what came of it.

Puts the parts together for templates/report.html.j2: no script, no network, no date. The same inputs give the same
bytes. Measures nothing; what nobody measured is shown as such, with the command that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgert.config import RuntimeConfig, load_config
from edgert.costs import COSTS_NAME, load_costs
from edgert.guards.policy import power_mode_warning
from edgert.headroom import Headroom, headroom_of
from edgert.loading import limits_of
from edgert.manifest_records import Manifest

from edgebuild.errors import ReportError
from edgebuild.report.charts import BASE, HEIGHT, LEFT, WIDTH, histogram_chart, padding_bars
from edgebuild.report.evidence import Evidence, read_object
from edgebuild.report.memory import ledger_table, measured_lines, phase_bars, waterfall
from edgebuild.report.numbers import Missing, Table, known
from edgebuild.report.results import (
    ablation_bars,
    acceptance_bars,
    bench_table,
    cell_table,
    curve_bars,
    headroom_text,
    tuning_table,
)
from edgebuild.scheduler_config import template_environment
from edgebuild.traffic import Histogram, read_traffic

DOCTOR = "edgert doctor ARTIFACT --json > doctor.json"
WITH_DOCTOR = "edgebuild report ARTIFACT --doctor doctor.json"
COSTS = ("edgebuild simulate ARTIFACT --traffic FILE --measure", "edgebuild report ARTIFACT")
TUNE = ("edgebuild tune ARTIFACT --traffic FILE", "edgebuild report ARTIFACT --tuning ARTIFACT.tuning.jsonl")


@dataclass(frozen=True)
class Sources:
    """An artifact's own data. plan: plan.json. config: scheduler.yaml as it is now.

    headroom  what the throughput that is left free costs, by costs.json; None where nobody measured costs
    """

    manifest: Mapping[str, Any]
    plan: Mapping[str, Any]
    histogram: Histogram
    config: RuntimeConfig
    headroom: Headroom | None = None


def read_sources(artifact: Path, manifest: Manifest) -> Sources:
    """Raises ReportError, TrafficError or ConfigError."""
    plan, config = read_object(artifact / "plan.json"), load_config(artifact, manifest)
    histogram = read_traffic(artifact / "traffic.yaml")
    if not (artifact / COSTS_NAME).is_file():
        return Sources(manifest.to_json(), plan, histogram, config)
    costs, cells = load_costs(artifact / COSTS_NAME), config.select_cells(manifest)
    if costs.model not in ("", manifest.model.identity) or costs.missing(cells):  # a load leaves them out too
        return Sources(manifest.to_json(), plan, histogram, config)
    rules = replace(limits_of(config, cells, config.slots, any_first_slot=False), costs=costs).rules
    headroom = headroom_of(rules, config)
    return Sources(manifest.to_json(), plan, histogram, config, headroom)


def render_report(sources: Sources, evidence: Evidence = Evidence()) -> str:  # noqa: B008  (frozen and empty)
    """The page. Raises ReportError for a plan.json of another edgebuild."""
    try:
        context = _context(sources, evidence)
    except (KeyError, TypeError, IndexError) as error:
        raise ReportError(
            f"plan.json or a measurement has no {error}: it is of another version", hint="rebuild, or measure again"
        ) from error
    return template_environment(autoescape=True).get_template("report.html.j2").render(context)


def _context(sources: Sources, evidence: Evidence) -> dict[str, Any]:
    plan, doctor = sources.plan, evidence.doctor
    memory = plan["memory"]
    ledger = {line["label"]: int(line["bytes"]) for line in memory["ledger"]}
    parts = (doctor.get("memory") or {}).get("parts") or {}
    measured = {**(evidence.build.get("memory") or {}), **measured_lines(parts, ledger)}
    states = doctor.get("cells") or evidence.build.get("cells") or ()
    padding, waste = padding_bars(plan)
    return {
        "manifest": sources.manifest,
        "plan": plan,
        "config": sources.config,
        "view": (WIDTH, HEIGHT, LEFT, BASE),
        "summary": _summary(sources),
        "warnings": _warnings(sources, evidence),
        "charts": _charts(sources),
        "padding": padding,
        "waste": waste,
        "waterfall": waterfall(memory, measured),
        "ledger": ledger_table(memory, measured),
        "phases": phase_bars(doctor.get("memory") or {}) or Missing("Memory in use, by phase", (DOCTOR, WITH_DOCTOR)),
        "cells": cell_table(plan, states),
        "cells_missing": None if states else Missing("Capture status", (DOCTOR, WITH_DOCTOR)),
        "acceptance": _acceptance(sources, evidence),
        "ablation": ablation_bars(evidence) or Missing("What each mechanism gives", TUNE),
        "benches": bench_table(evidence.benches) if evidence.benches else None,
        "headroom": _headroom(sources, evidence),
        "tuning": tuning_table(evidence.trials) if evidence.trials else Missing("Tuning log", TUNE),
        "golden": doctor.get("golden") or evidence.build.get("golden"),
        "speed": _speed(doctor),
        "device": _device(sources, evidence),
        "attribution": sources.histogram.attribution,
        "skipped": sorted(sources.histogram.skipped.items()),
        "notes": (*plan["notes"], *evidence.notes),
    }


def _summary(sources: Sources) -> list[tuple[str, str]]:
    plan, config = sources.plan, sources.config
    chunks = ", ".join(map(str, plan["prefill"]["chunk_sizes"]))
    draft = plan["draft"]["length"]
    return [
        ("slots", f"{config.slots} of {config.context_tokens:,} tokens"),
        ("chunks", chunks),
        ("cells", f"{len(plan['prefill']['cells']) + len(plan['decode']['cells'])}"),
        ("drafts a step", f"{draft}" if draft else "none"),
        ("prefill : decode", f"1 : {plan['prefill_decode_ratio']['start']}"),
    ]


def _charts(sources: Sources) -> tuple[Any, Any]:
    plan, histogram = sources.plan, sources.histogram
    chunks, context = plan["prefill"]["chunk_sizes"], plan["context_tokens"]
    repeats = range(2 * chunks[-1], context, chunks[-1])
    prompts = histogram_chart(
        "Prompts by length, and the chunk sizes", histogram.prompt_counts, "requests", context, chunks, repeats
    )
    steps = histogram_chart(
        "Decode steps by context, and the KV tiers",
        histogram.decode_context_counts,
        "steps",
        context,
        plan["decode"]["kv_tiers"],
    )
    return prompts, steps


def _warnings(sources: Sources, evidence: Evidence) -> list[str]:
    """Findings of the doctor, and the power mode wherever somebody saw another one than the plan's."""
    findings = evidence.doctor.get("findings", ())
    found = [f"{each['symptom']}: {each['cause']}; next: {each['next_step']}" for each in findings]
    modes = {(evidence.doctor.get("power_mode") or {}).get("actual"), *(trial.power_mode for trial in evidence.trials)}
    sentences = [power_mode_warning(sources.config.power_mode, mode) for mode in sorted(filter(None, modes))]
    said = [warning for _, report in evidence.benches for warning in report.get("warnings") or ()]
    said += [warning for trial in evidence.trials for warning in trial.warnings]
    new = [sentence for sentence in (*filter(None, sentences), *said) if not any(sentence in each for each in found)]
    return list(dict.fromkeys([*found, *new]))


def _acceptance(sources: Sources, evidence: Evidence) -> Any:
    if not sources.plan["draft"]["length"]:
        return None
    threshold = sources.config.mtp_acceptance_threshold
    charts = acceptance_bars(evidence, threshold or None)
    curve = () if evidence.curve is None else (curve_bars(evidence.curve),)
    return (*curve, *charts) or Missing("Acceptance by task and position", TUNE)


def _headroom(sources: Sources, evidence: Evidence) -> str | Missing | None:
    """What keeping throughput free costs: by costs.json, and of what was measured."""
    fraction = sources.config.throughput_headroom_fraction
    if not fraction:
        return None
    said = [] if sources.headroom is None else [f"{sources.headroom.describe(fraction, 'by costs.json')}."]
    text = " ".join(filter(None, [*said, headroom_text(fraction, evidence)]))
    return text or Missing(f"What {fraction:.0%} of the throughput kept free costs", COSTS)


def _speed(doctor: Mapping[str, Any]) -> Table | Missing:
    """A step of each chunk size, and of one sequence and of many."""
    steps = [*(doctor.get("chunks") or ()), *(doctor.get("steps") or ())]
    if not steps:
        return Missing("Time of a step", (DOCTOR, WITH_DOCTOR))
    rows = tuple(
        (step["cell"], f"{step['step_ms']:,.2f}", f"{step['tokens_per_s']:,.0f}", f"{step['bytes_per_s'] / 1e9:,.1f}")
        for step in steps
    )
    return Table("Time of a step, one at a time", ("<cell", "ms", "tokens/s", "GB/s read"), rows)


def _device(sources: Sources, evidence: Evidence) -> list[tuple[str, str]]:
    """What the page knows of planned and seen device, and of versions."""
    manifest, config, doctor = sources.manifest, sources.config, evidence.doctor
    backend = manifest["backend"]
    targets = ", ".join(backend["compute_capabilities"])
    rows = [
        ("planned for", f"{sources.plan['device']}" + (f", compute capability {targets}" if targets else "")),
        ("power mode", _power_mode(config.power_mode, doctor)),
        ("temperature limits", _limits(config)),
    ]
    seen = doctor.get("device") or {}
    if seen:
        shown = [str(seen.get("device", "unknown"))]
        keys = ("compute_capability", "driver", "threads")
        shown += [f"{key.replace('_', ' ')} {seen[key]}" for key in keys if key in seen]
        rows.append(("measured on", ", ".join(shown)))
        rows.append(("sensors", _reading(doctor.get("loaded_reading") or doctor.get("reading") or {})))
    elif evidence.trials:
        rows.append(("measured on", evidence.trials[-1].device.name))
    rows += [
        ("backend", f"{backend['name']} {backend['version']}, {backend['precision']}"),
        ("edgebuild", manifest["edgebuild_version"]),
        *((name, version) for name, version in sorted(manifest["tools"].items())),
    ]
    return rows


def _power_mode(expected: str | None, doctor: Mapping[str, Any]) -> str:
    actual = (doctor.get("power_mode") or {}).get("actual")
    seen = f"measured in {actual}" if actual else "not measured here" if not doctor else "the device names none"
    return f"{expected or 'none named'} in the plan, {seen}"


def _limits(config: RuntimeConfig) -> str:
    soft, hard = config.soft_temperature_c, config.hard_temperature_c
    if soft is None and hard is None:
        return "none"
    return f"soft {known(soft, 'g', ' °C')}, hard {known(hard, 'g', ' °C')}"


def _reading(reading: Mapping[str, Any]) -> str:
    parts = [
        known(reading.get("temperature_c"), ".1f", " °C"),
        known(reading.get("power_w"), ".1f", " W"),
        known(reading.get("gpu_clock_mhz"), ",.0f", " MHz"),
    ]
    reasons = reading.get("throttle_reasons")
    parts.append("" if reasons is None else f"throttled: {', '.join(reasons)}" if reasons else "not throttled")
    said = [part for part in parts if part and part != "—"]
    return ", ".join([str(reading.get("sensors", "none")), *said])
