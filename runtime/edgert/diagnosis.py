"""From facts to findings: what is wrong, why, and what to do next. Pure; `doctor` collects the facts of a fresh load,
`running_findings` reads the metrics of an engine at work. docs/troubleshooting.md has a row for each symptom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgert.config import RuntimeConfig
from edgert.errors import EdgertError
from edgert.golden import GoldenReport
from edgert.guards.policy import memory_refusal, power_mode_warning
from edgert.guards.readings import DeviceReading
from edgert.manifest_records import Manifest
from edgert.metrics import EngineSnapshot
from edgert.probe import StepProbe

# Planned against measured memory: what is more than this past the plan is worth a look.
PEAK_TOLERANCE = 0.10
PEAK_TOLERANCE_BYTES = 50_000_000
LEAST_WAIT_S = 0.05  # for a slot, on average: shorter is nothing that anybody notices
LEAST_DRAFTS = 50  # verified drafts before an acceptance says anything
LEAST_CLOCK = 0.7  # of the largest clock, while steps run: below it somebody holds it down
CLOCK_STEP = "let the clocks follow the load (sudo jetson_clocks on a Jetson), or check supply and cooling"
# Launches before shares of padding say anything, and the share from which they cost too much.
LEAST_LAUNCHES = 50
KINDS = ("prefill", "decode")
PADDING_SHARE, IDLE_SHARE = 0.5, 0.5


@dataclass(frozen=True)
class Finding:
    """symptom: one of the keys of docs/troubleshooting.md."""

    symptom: str
    cause: str
    next_step: str


@dataclass(frozen=True)
class Facts:
    """What a doctor saw; None or empty where it did not get so far.

    absent         there is no artifact here: the path as it was given
    failure        why the artifact could not be opened or did not pass its golden check
    loaded_reading the sensors while steps ran, None where none ran
    description    Backend.describe() after warm-up
    memory_phases  bytes in use by phase; memory_parts: by what holds them, as the backend says
    baseline_bytes in use before the load, to be taken off those (a process has its interpreter)
    side_by_side   sequences that ran at once and agreed with their references
    chunks, steps  measured prefill chunks and decode steps
    eager_step_ms  the first probe again, with graphs off
    """

    reading: DeviceReading
    power_mode: str | None = None
    manifest: Manifest | None = None
    config: RuntimeConfig | None = None
    absent: str | None = None
    failure: EdgertError | None = None
    loaded_reading: DeviceReading | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    memory_phases: Mapping[str, int] = field(default_factory=dict)
    memory_parts: Mapping[str, int] = field(default_factory=dict)
    baseline_bytes: int = 0
    golden: GoldenReport | None = None
    side_by_side: int = 0
    chunks: tuple[StepProbe, ...] = ()
    steps: tuple[StepProbe, ...] = ()
    eager_step_ms: float | None = None
    copy_bytes_per_s: float | None = None


SYMPTOM_OF_FAILURE = {
    "UnfinishedArtifact": "unfinished artifact",
    "ArtifactError": "damaged artifact",
    "GoldenMismatch": "garbled or repeated output",
    "KvWriteError": "garbled or repeated output",
    "ConfigError": "impossible configuration",
    "BackendError": "backend does not start",
}


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Everything that is wrong, most fundamental first; () = healthy."""
    return (*_failure(facts), *_device(facts), *_configuration(facts), *_capture(facts), *_memory(facts))


def failure_findings(error: BaseException) -> tuple[Finding, ...]:
    """What an error that ends a load, or an engine at work, is called; its own words, and its own next step."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    symptom = next((SYMPTOM_OF_FAILURE[kind] for kind in kinds if kind in SYMPTOM_OF_FAILURE), "does not load")
    default = "build the artifact again, on or for this device"
    if "KvWriteError" in kinds:
        default = "stopped before anything wrong was written: load again, and report it with this line"
    return (Finding(symptom, Exception.__str__(error), getattr(error, "hint", None) or default),)


def _failure(facts: Facts) -> Iterator[Finding]:
    if facts.absent is not None:
        yield Finding(
            "no artifact",
            f"no artifact at {facts.absent}: a directory with a manifest.json is expected",
            "give the directory that edgebuild wrote",
        )
    if facts.failure is not None:
        yield from failure_findings(facts.failure)


def _device(facts: Facts) -> Iterator[Finding]:
    reading, config = facts.reading, facts.config
    reasons = {*(reading.throttle_reasons or ()), *(_loaded(facts).throttle_reasons or ())}
    if reasons:
        yield Finding(
            "latency drifts",
            f"the hardware holds its clocks down now: {', '.join(sorted(reasons))}",
            "improve cooling or supply, or lower slots and soft_temperature_c in scheduler.yaml",
        )
    elif facts.loaded_reading is not None and (slow := slow_clock(facts.loaded_reading)):
        yield Finding("latency drifts", f"while steps run {slow}", CLOCK_STEP)
    if config is None:
        return
    mode = power_mode_warning(config.power_mode, facts.power_mode)
    if mode:
        yield Finding("wrong power mode", mode, f"sudo nvpmodel -m <id of {config.power_mode}>, or plan for this mode")
    reading = _loaded(facts)
    soft, hard, now = config.soft_temperature_c, config.hard_temperature_c, reading.temperature_c
    if now is None and (soft is not None or hard is not None):
        why = "; ".join(reading.notes) or "this machine has no such sensor"
        yield Finding(
            "thermal guard is blind",
            f"no temperature can be read ({why}): half of the slots stay inactive",
            "make the sensor readable (pip install nvidia-ml-py on a GPU), or set both limits to null",
        )
    limit = soft if soft is not None else hard
    if now is not None and limit is not None and now >= limit:
        yield Finding(
            "latency drifts",
            f"{now:.1f} °C ({reading.temperature_source}) is at or above the limit of {limit:g} °C: the guard takes "
            "slots away",
            "improve cooling, wait, or use a lower power mode",
        )


def _loaded(facts: Facts) -> DeviceReading:
    return facts.loaded_reading or facts.reading


def slow_clock(reading: DeviceReading) -> str | None:
    """The sentence for a GPU clock far below what the power mode allows, of a device that is at work; None: it is not,
    or nobody knows."""
    now, most = reading.gpu_clock_mhz, reading.gpu_clock_max_mhz
    if now is None or most is None or now >= LEAST_CLOCK * most:
        return None
    return f"the GPU clock is {now:.0f} MHz of {most:.0f} MHz"


def _configuration(facts: Facts) -> Iterator[Finding]:
    config, manifest = facts.config, facts.manifest
    if config is None or manifest is None:
        return
    if not config.warm_up:
        yield Finding(
            "first token slow",
            "warm_up is false: the first request of every shape pays for its preparation",
            "set warm_up: true in scheduler.yaml",
        )
    if not config.enable_chunked_prefill:
        yield Finding(
            "long gaps",
            "enable_chunked_prefill is false: streams stand still while a prompt is read",
            "set enable_chunked_prefill: true in scheduler.yaml",
        )
    if config.graph_batch_sizes[-1] < config.slots:
        yield Finding(
            "throughput collapses with concurrency",
            f"the largest decode batch is {config.graph_batch_sizes[-1]}, {config.slots} sequences take turns in it",
            "add a batch size to graph_batch_sizes, or rebuild with one as large as slots",
        )
    yield from _targets(facts, config)
    if not config.enable_cuda_graph and manifest.backend.name != "onnxruntime":
        yield Finding(
            "slow decode",
            "enable_cuda_graph is false: every step pays for all of its launches",
            "set enable_cuda_graph: true in scheduler.yaml",
        )


def _targets(facts: Facts, config: RuntimeConfig) -> Iterator[Finding]:
    """Measured steps against the times that scheduler.yaml aims at."""
    if not facts.chunks:
        return
    chunk = facts.chunks[-1]
    ttft_ms, itl_ms = config.ttft_target_ms, config.itl_target_ms
    if ttft_ms is not None and chunk.step_ms > ttft_ms:
        yield Finding(
            "first token slow",
            f"one chunk of {chunk.rows} rows takes {chunk.step_ms:,.0f} ms, ttft_target_ms is {ttft_ms:g}",
            "smaller chunks do not help here: raise the target, or take a smaller model or a faster device",
        )
    gap_ms = chunk.step_ms + max((step.step_ms for step in facts.steps), default=0.0)
    if itl_ms is not None and gap_ms > itl_ms and not config.adaptive:
        yield Finding(
            "long gaps",
            f"a chunk of {chunk.rows} rows and a decode step take {gap_ms:,.0f} ms, itl_target_ms is {itl_ms:g}",
            "lower max_prefill_chunk_size, or set adaptive: true, which chooses among the captured chunks",
        )


def _capture(facts: Facts) -> Iterator[Finding]:
    fallbacks = facts.description.get("fallbacks") or []
    reasons: dict[str, list[str]] = {}
    for each in fallbacks:
        cells = reasons.setdefault(str(each["reason"]), [])
        if each["cell"] not in cells:  # one of a single sequence is captured for each slot
            cells.append(str(each["cell"]))
    for reason, cells in reasons.items():
        yield Finding(
            "capture failed",
            f"{len(cells)} cells run eager ({', '.join(cells[:3])}{' ...' if len(cells) > 3 else ''}): {reason}",
            "free device memory or raise graph_memory_bytes; a dynamic allocation needs a rebuild with another form",
        )
    if facts.eager_step_ms is not None and facts.steps and facts.eager_step_ms < facts.steps[0].step_ms:
        yield Finding(
            "slow decode",
            f"graphs gain nothing: {facts.steps[0].step_ms:.2f} ms with, {facts.eager_step_ms:.2f} ms without",
            "run again on an idle device; if it stays so, set enable_cuda_graph: false",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    config, manifest, reading = facts.config, facts.manifest, facts.reading
    if config is not None:
        refusal = memory_refusal(
            reading.memory_available_bytes, reading.memory_total_bytes, config.memory_margin_fraction
        )
        if refusal:
            yield Finding(
                "requests wait or are refused for memory",
                refusal,
                "end other processes, or lower slots in scheduler.yaml",
            )
    if manifest is not None:
        yield from _peak(facts.memory_phases, facts.baseline_bytes, manifest.planned_bytes)


def _peak(phases: Mapping[str, int], baseline_bytes: int, planned: int | None) -> Iterator[Finding]:
    """More in use than planned, and in which phase first."""
    if not phases or planned is None:
        return
    phase = max(phases, key=lambda each: phases[each])
    used = phases[phase] - baseline_bytes
    if used > planned * (1 + PEAK_TOLERANCE) + PEAK_TOLERANCE_BYTES:
        yield Finding(
            "memory peak",
            f"{used / 1e6:,.0f} MB in use at its peak, in phase {phase}; the plan says {planned / 1e6:,.0f} MB",
            "compare the ledger's lines with `memory`; fewer cells, smaller chunks or fewer slots need less",
        )


def running_findings(snapshot: EngineSnapshot, *, acceptance_threshold: float = 0.6) -> tuple[Finding, ...]:
    """What the metrics of a running engine say is wrong."""
    return tuple(_running(snapshot, acceptance_threshold))


def _running(snapshot: EngineSnapshot, acceptance_threshold: float) -> Iterator[Finding]:
    wait, ttft = snapshot.queue_wait, snapshot.ttft
    waited_s = wait.sum_s / wait.count if wait.count else 0.0
    if ttft.count and waited_s > max(LEAST_WAIT_S, 0.5 * ttft.sum_s / ttft.count):
        yield Finding(
            "first token slow",
            f"requests wait {waited_s:.2f} s for a slot on average, "
            f"of {ttft.sum_s / ttft.count:.2f} s to the first token",
            "more slots, fewer concurrent requests, or shorter outputs",
        )
    yield from _padding(snapshot)
    yield from _peak(snapshot.memory_phases, snapshot.memory_baseline_bytes, snapshot.memory_planned_bytes)
    if snapshot.eager_launches and snapshot.graph_launches:
        yield Finding(
            "capture failed",
            f"{snapshot.eager_launches} of {snapshot.eager_launches + snapshot.graph_launches} steps ran eager",
            "edgert doctor names the cells and the reasons",
        )
    totals: dict[str, list[int]] = {}
    for by, place in ((snapshot.draft_proposed_by_task, 0), (snapshot.draft_accepted_by_task, 1)):
        for (task, _), count in by.items():
            totals.setdefault(task, [0, 0])[place] += count
    for task, (proposed, accepted) in sorted(totals.items()):
        if proposed >= LEAST_DRAFTS and accepted < acceptance_threshold * proposed:
            yield Finding(
                "acceptance low",
                f"task {task or '(none)'}: {accepted} of {proposed} drafts accepted ({accepted / proposed:.0%})",
                "train the drafter on this task's traffic, or draft fewer tokens for it",
            )
    if snapshot.slot_limit < snapshot.slots or snapshot.throttle_events:
        reading = snapshot.device
        temperature = None if reading is None else reading.temperature_c
        events = ", ".join(f"{reason} {count} times" for reason, count in sorted(snapshot.throttle_events.items()))
        yield Finding(
            "latency drifts",
            f"{snapshot.slot_limit} of {snapshot.slots} slots may be active at "
            f"{'an unknown temperature' if temperature is None else f'{temperature:.1f} °C'}"
            + (f"; the hardware throttled: {events}" if events else ""),
            "improve cooling, or plan for fewer slots",
        )
    elif snapshot.decoding and snapshot.device is not None and (slow := slow_clock(snapshot.device)):
        yield Finding("latency drifts", f"while tokens are made {slow}", CLOCK_STEP)
    if not snapshot.admission_open:
        yield Finding(
            "requests wait or are refused",
            "a guard lets nothing new start: the hard temperature limit, or the memory margin",
            "the log of edgert.guards has the reading",
        )


def _padding(snapshot: EngineSnapshot) -> Iterator[Finding]:
    """Rows that carry nothing: the traffic is not the one that was planned for."""
    by_kind = {kind: [n for cell, n in snapshot.launches.items() if cell.startswith(kind)] for kind in KINDS}
    rows = snapshot.prompt_tokens + snapshot.padded_prompt_tokens
    padded = snapshot.padded_prompt_tokens / rows if rows else 0.0
    if sum(by_kind["prefill"]) >= LEAST_LAUNCHES and padded > PADDING_SHARE:
        yield Finding(
            "first token slow",
            f"{padded:.0%} of the prefill rows were padding: prompts are shorter than the chunks were chosen for",
            "plan for this traffic (edgebuild traffic, then rebuild), or add a smaller chunk to graph_bucket_sizes",
        )
    idle = snapshot.idle_rows / snapshot.decode_rows if snapshot.decode_rows else 0.0
    if sum(by_kind["decode"]) >= LEAST_LAUNCHES and idle > IDLE_SHARE:
        yield Finding(
            "throughput collapses with concurrency",
            f"{idle:.0%} of the decode rows were idle: batches are larger than the sequences that run",
            "add a smaller batch to graph_batch_sizes, or rebuild with one",
        )
