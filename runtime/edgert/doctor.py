"""`edgert doctor ARTIFACT`: whether this device can run this artifact well.

Opens the artifact as an engine would, runs its golden vectors and the KV check, measures each chunk and a few decode
steps, and looks at the sensors before and after. What any of it means is decided in diagnosis.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgert import __version__
from edgert.capture import artifact_states, counts
from edgert.diagnosis import Facts, Finding, findings
from edgert.errors import EdgertError
from edgert.golden import check_golden, load_golden
from edgert.guards.detect import detect_sensors
from edgert.guards.readings import Sensors
from edgert.loading import Loading, Runtime, open_runtime, plan_loading, used_bytes
from edgert.manifest import MANIFEST_NAME, load_manifest
from edgert.probe import StepProbe, copy_bytes_per_s, probe_chunks, probe_steps, read_under_load
from edgert.sidebyside import check_side_by_side
from edgert.tables import memory_table

FORMAT_VERSION = 1  # of the JSON document


def examine(
    directory: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    sensors: Sensors | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Facts:
    """Collect the facts; never raises for what is wrong with the artifact or the device."""
    if not (Path(directory) / MANIFEST_NAME).is_file():
        return Facts((sensors or detect_sensors(gpu=False, once=True)).read(), absent=str(directory))
    try:
        manifest = load_manifest(directory)
    except EdgertError as error:
        return Facts((sensors or detect_sensors(gpu=False, once=True)).read(), failure=error)
    sensors = sensors or detect_sensors(gpu=manifest.backend.name != "onnxruntime", once=True)
    facts = Facts(sensors.read(), sensors.power_mode()[0], manifest)
    try:
        loading = plan_loading(directory, overrides or {})
        facts = replace(facts, config=loading.config)
        runtime = open_runtime(replace(loading, golden=None))
    except EdgertError as error:
        return replace(facts, failure=error)
    try:
        facts = replace(facts, description=runtime.description, memory_phases=runtime.memory_phases)
        facts = replace(facts, memory_parts=runtime.memory_bytes)
        facts = _with_runtime(facts, loading, runtime, clock, sensors)
    except EdgertError as error:
        return replace(facts, failure=error)
    finally:
        runtime.backend.close()
    facts = replace(facts, baseline_bytes=runtime.baseline_bytes)
    if facts.description.get("graphs"):
        return replace(facts, eager_step_ms=_eager_step_ms(loading, clock))
    if manifest.backend.name == "onnxruntime":
        threads = facts.description.get("threads", 1)
        return replace(facts, copy_bytes_per_s=copy_bytes_per_s(int(threads), clock))
    return facts


def _with_runtime(
    facts: Facts, loading: Loading, runtime: Runtime, clock: Callable[[], float], sensors: Sensors
) -> Facts:
    """Golden vectors, KV check, a step of each chunk, decode steps; the memory after each."""
    backend, cells, slots = runtime.backend, loading.cells, runtime.limits.slots
    context, manifest = runtime.limits.context_tokens, loading.manifest
    phases = dict(runtime.memory_phases)

    def mark(phase: str) -> None:
        used = used_bytes(backend)
        if used is not None:
            phases[phase] = used

    golden = load_golden(loading.directory, manifest.model)
    drafts = loading.config.draft_length
    report = check_golden(backend, golden, cells=cells, slots=slots, context_tokens=context, draft_length=drafts)
    mark("checked")
    abreast = check_side_by_side(backend, golden, cells=cells, slots=slots, context_tokens=context)
    chunks = probe_chunks(backend, cells, manifest, clock, mark)
    steps = probe_steps(backend, cells, slots, manifest, clock, mark)
    return replace(
        facts,
        golden=report,
        side_by_side=abreast,
        chunks=chunks,
        steps=steps,
        loaded_reading=read_under_load(backend, cells, slots, sensors, clock),
        memory_phases=phases,
        memory_parts=backend.memory(),
        description=backend.describe(),
    )


def _eager_step_ms(loading: Loading, clock: Callable[[], float]) -> float | None:
    """The first probe without graphs; None where the backend cannot be opened a second time."""
    options = {**loading.options, "enable_cuda_graph": False}
    try:
        config = replace(loading.config, warm_up=False, enable_cuda_graph=False)
        runtime = open_runtime(replace(loading, golden=None, options=options, config=config))
    except EdgertError:
        return None
    try:
        return probe_steps(runtime.backend, loading.cells, runtime.limits.slots, loading.manifest, clock)[0].step_ms
    finally:
        runtime.backend.close()


def to_json(facts: Facts, found: tuple[Finding, ...]) -> dict[str, Any]:
    """Everything as one JSON document; null = unknown."""
    manifest, config = facts.manifest, facts.config
    states = () if manifest is None or config is None else artifact_states(manifest, config, facts.description)
    return {
        "format_version": FORMAT_VERSION,
        "healthy": not found,
        "findings": [asdict(each) for each in found],
        "versions": {
            "edgert": __version__,
            "python": platform.python_version(),
            "edgebuild": manifest and manifest.edgebuild_version,
            "backend": facts.description.get("version"),
            "artifact_backend": manifest and manifest.backend.version,
        },
        "artifact": None
        if manifest is None
        else {
            "name": manifest.name,
            "model": manifest.model.name,
            "identity": manifest.model.identity,
            "backend": manifest.backend.name,
            "precision": manifest.backend.precision,
            "compute_capabilities": list(manifest.backend.compute_capabilities),
        },
        "device": dict(facts.description),
        "cells": [asdict(state) for state in states],
        "reading": asdict(facts.reading),
        "loaded_reading": None if facts.loaded_reading is None else asdict(facts.loaded_reading),
        "power_mode": {"actual": facts.power_mode, "expected": config and config.power_mode},
        "limits": config and {"soft_c": config.soft_temperature_c, "hard_c": config.hard_temperature_c},
        "memory": {
            "planned_bytes": manifest and manifest.planned_bytes,
            "phases": {phase: used - facts.baseline_bytes for phase, used in facts.memory_phases.items()},
            "parts": dict(facts.memory_parts),
        },
        "golden": None if facts.golden is None else asdict(facts.golden),
        "side_by_side": facts.side_by_side,
        "chunks": [_probe(chunk) for chunk in facts.chunks],
        "steps": [_probe(step) for step in facts.steps],
        "eager_step_ms": facts.eager_step_ms,
        "copy_bytes_per_s": facts.copy_bytes_per_s,
    }


def _probe(step: StepProbe) -> dict[str, Any]:
    return {**asdict(step), "bytes_per_s": step.bytes_per_s, "tokens_per_s": step.tokens_per_s}


def render(facts: Facts, found: tuple[Finding, ...]) -> str:
    """The screen."""
    lines = [f"{label:<12}{text}" for label, text in _rows(facts)]
    planned = None if facts.manifest is None else facts.manifest.planned_bytes
    memory = memory_table(facts.memory_phases, planned, facts.baseline_bytes)
    lines += ["", *memory] if memory else []
    if not found:
        return "\n".join([*lines, "", "healthy: nothing found"])
    lines += ["", f"{len(found)} finding{'s' if len(found) > 1 else ''}"]
    for number, each in enumerate(found, 1):
        lines += [f"{number}. {each.symptom}: {each.cause}", f"   next: {each.next_step}"]
    return "\n".join(lines)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    manifest, config, described, reading = facts.manifest, facts.config, facts.description, facts.reading
    rows: list[tuple[str, str]] = []
    if manifest is not None:
        backend = manifest.backend
        targets = ", ".join(backend.compute_capabilities)
        rows.append(("artifact", f"{manifest.name}: {manifest.model.name}, {backend.name} {backend.precision}"
                     + (f", for compute capability {targets}" if targets else "")))  # fmt: skip
        rows.append(
            ("versions", f"edgert {__version__}, built by edgebuild {manifest.edgebuild_version}; {backend.name} "
             f"{described.get('version', 'not opened')} (artifact: {backend.version})")
        )  # fmt: skip
    if described:
        known = ("compute_capability", "driver", "threads")
        parts = [str(described.get("device", "unknown"))]
        parts += [f"{key.replace('_', ' ')} {described[key]}" for key in known if key in described]
        rows.append(("device", ", ".join(parts)))
    rows.append(("sensors", _sensors(facts)))
    if config is not None and config.power_mode is not None:
        rows.append(("power mode", f"{facts.power_mode or 'unknown'}, expected {config.power_mode}"))
    available = "unknown" if reading.memory_available_bytes is None else _mb(reading.memory_available_bytes)
    planned = "" if manifest is None else f", planned {_mb(manifest.planned_bytes)}"
    rows.append(("memory", f"available {available}{planned}"))
    if facts.golden is not None:
        golden = facts.golden
        abreast = f"; {facts.side_by_side} sequences side by side agree" if facts.side_by_side else ""
        rows.append(
            ("golden", f"{golden.steps} steps within {golden.tolerance:g}, worst {golden.worst_error:.2g}{abreast}")
        )
    if "graphs" in described and manifest is not None and config is not None:
        found = counts(artifact_states(manifest, config, described))
        cells = ", ".join(f"{count} {status}" for status, count in found.items())
        rows.append(
            ("graphs", f"{described['graphs']} captured; cells: {cells}; JIT cache {described.get('jit_cache')}")
        )
    if facts.chunks:
        largest = facts.chunks[-1]
        rows.append(("prefill", f"{largest.cell}: {largest.step_ms:.1f} ms, {largest.tokens_per_s:,.0f} tokens/s"))
    rows += [("decode", _step(facts, place)) for place in range(len(facts.steps))]
    return rows


def _sensors(facts: Facts) -> str:
    reading, config = facts.loaded_reading or facts.reading, facts.config
    parts = [reading.sensors]
    if reading.temperature_c is not None:
        parts.append(f"{reading.temperature_c:.1f} °C ({reading.temperature_source})")
    elif config is not None and config.soft_temperature_c is not None:
        parts.append("temperature unknown")
    if config is not None and config.soft_temperature_c is not None:
        parts.append(f"soft limit {config.soft_temperature_c:g} °C")
    if config is not None and config.hard_temperature_c is not None:
        parts.append(f"hard limit {config.hard_temperature_c:g} °C")
    if reading.power_w is not None:
        parts.append(f"{reading.power_w:.1f} W")
    if reading.gpu_clock_mhz is not None:
        most = "" if reading.gpu_clock_max_mhz is None else f" of {reading.gpu_clock_max_mhz:.0f}"
        parts.append(f"{reading.gpu_clock_mhz:.0f}{most} MHz")
    if reading.throttle_reasons is not None:
        parts.append(
            f"throttled by {', '.join(reading.throttle_reasons)}" if reading.throttle_reasons else "no throttling"
        )
    return ", ".join(parts)


def _step(facts: Facts, place: int) -> str:
    step = facts.steps[place]
    text = f"{step.cell}: {step.step_ms:.2f} ms, {step.tokens_per_s:.1f} tokens/s, {step.bytes_per_s / 1e9:.1f} GB/s"
    if facts.copy_bytes_per_s:
        share = step.bytes_per_s / facts.copy_bytes_per_s
        text += f" = {share:.0%} of a memory copy ({facts.copy_bytes_per_s / 1e9:.1f} GB/s)"
    if place == 0 and facts.eager_step_ms is not None:
        text += f"; graphs are {facts.eager_step_ms / step.step_ms:.2f}x as fast as eager"
    return text


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def diagnose(directory: Path, *, overrides: Mapping[str, Any] | None = None) -> tuple[Facts, tuple[Finding, ...]]:
    """The facts and what is wrong with them."""
    facts = examine(directory, overrides=overrides)
    return facts, findings(facts)
