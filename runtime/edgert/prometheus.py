"""An EngineSnapshot in Prometheus' text format (version 0.0.4). The names are an interface: docs/metrics.md lists them.

Unknown values are left out, never written as 0. Knows no server: the caller returns the text from its own endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edgert.guards.policy import power_mode_warning
from edgert.histogram import HistogramSnapshot

if TYPE_CHECKING:
    from edgert.metrics import EngineSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """One metric: its samples by labels, or a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[tuple[Labels, float], ...] = ()
    histogram: HistogramSnapshot | None = None


def prometheus_text(snapshot: EngineSnapshot) -> str:
    """The whole exposition, families in a fixed order; a family without a known value is left out."""
    lines: list[str] = []
    for family in families(snapshot):
        body = list(_histogram(family) if family.histogram is not None else _samples(family))
        if body:
            lines += [f"# HELP {family.name} {_escape_help(family.help)}", f"# TYPE {family.name} {family.kind}", *body]
    return "\n".join(lines) + "\n"


def families(snapshot: EngineSnapshot) -> Iterator[Family]:
    """Every metric there is, those without a known value included."""
    s, device = snapshot, snapshot.device

    def counter(name: str, text: str, value: float | None) -> Family:
        return Family(name, "counter", text, _one(value))

    def gauge(name: str, text: str, value: float | None) -> Family:
        return Family(name, "gauge", text, _one(value))

    def labelled(
        name: str, kind: Literal["counter", "gauge"], text: str, label: str, values: Mapping[str, float]
    ) -> Family:
        return Family(name, kind, text, tuple(({label: key}, value) for key, value in sorted(values.items())))

    yield gauge("edgert_ready", "1 while requests are taken.", float(s.state == "ready"))
    yield gauge("edgert_requests_waiting", "Requests without a slot.", s.waiting)
    yield gauge("edgert_requests_prefilling", "Requests whose prompt is being read.", s.prefilling)
    yield gauge("edgert_requests_decoding", "Requests that produce tokens.", s.decoding)
    yield gauge("edgert_slots", "Sequences that can be held at once.", s.slots)
    yield gauge("edgert_slots_free", "Slots without a sequence.", s.free_slots)
    yield gauge("edgert_slots_limit", "Slots that the thermal guard lets be active now.", s.slot_limit)
    for name, meaning, value in (
        ("edgert_prefill_chunk_limit_tokens", "Largest prefill chunk that may be launched now.", s.chunk_limit),
        ("edgert_decode_steps_per_chunk", "Decode steps that a full prefill chunk owes now.", s.steps_per_chunk),
        ("edgert_draft_limit", "Drafts a step at most now.", s.draft_limit),
    ):
        yield gauge(name, meaning, value)
    yield gauge("edgert_admission_open", "0 while a guard lets nothing new start.", float(s.admission_open))
    yield labelled("edgert_requests_finished_total", "counter", "Requests by finish reason.", "reason", s.finished)
    yield counter("edgert_requests_rejected_total", "Requests refused before they were queued.", s.rejected)
    yield counter("edgert_prompt_tokens_total", "Prompt tokens launched.", s.prompt_tokens)
    yield counter("edgert_prompt_padding_tokens_total", "Prefill rows that carried no token.", s.padded_prompt_tokens)
    yield counter("edgert_output_tokens_total", "Tokens delivered.", s.output_tokens)
    yield counter("edgert_decode_rows_total", "Batch rows launched in decode.", s.decode_rows)
    yield counter("edgert_decode_idle_rows_total", "Decode rows that were padding.", s.idle_rows)
    yield counter(
        "edgert_decode_discarded_rows_total", "Decode results of requests that had ended meanwhile.", s.discarded_rows
    )
    for name, text, by in (
        ("edgert_draft_proposed_total", "Drafts verified, by task and position.", s.draft_proposed_by_task),
        ("edgert_draft_accepted_total", "Drafts accepted, by task and position.", s.draft_accepted_by_task),
    ):
        cells = sorted(by.items())
        samples = tuple(({"task": task, "position": str(at)}, float(count)) for (task, at), count in cells)
        yield Family(name, "counter", text, samples)
    lengths = [(task, batch, k) for task, by in s.draft_lengths.items() for batch, k in by.items()]
    yield Family(
        "edgert_draft_length",
        "gauge",
        "Tokens drafted a step now, by task and batch.",
        tuple(({"task": task, "batch": str(batch)}, float(k)) for task, batch, k in sorted(lengths)),
    )
    yield labelled("edgert_cell_launches_total", "counter", "Steps by cell.", "cell", s.launches)
    yield counter("edgert_graph_launches_total", "Steps that replayed a captured graph.", s.graph_launches)
    yield counter("edgert_eager_launches_total", "Steps that ran eager.", s.eager_launches)
    for name, text, histogram in (
        ("edgert_queue_wait_seconds", "From arrival to a slot.", s.queue_wait),
        ("edgert_time_to_first_token_seconds", "TTFT: first token - arrival.", s.ttft),
        ("edgert_time_per_output_token_seconds", "TPOT: (latency - TTFT) / (tokens - 1).", s.tpot),
        ("edgert_inter_token_latency_seconds", "ITL: gaps between two tokens of a stream.", s.itl),
    ):
        yield Family(name, "histogram", text, histogram=histogram)
    yield gauge("edgert_longest_gap_seconds", "Longest gap between two tokens of a stream so far.", s.itl.max_s)
    yield labelled("edgert_memory_bytes", "gauge", "Memory held, by part.", "part", s.memory_bytes)
    yield labelled("edgert_memory_phase_bytes", "gauge", "Most memory seen in a phase.", "phase", s.memory_phases)
    yield gauge("edgert_memory_baseline_bytes", "Of those, in use before the load.", s.memory_baseline_bytes)
    yield gauge("edgert_memory_planned_bytes", "What the plan expects of the load alone.", s.memory_planned_bytes)
    temperature = None if device is None else device.temperature_c
    source = (device.temperature_source if device else None) or "unknown"
    yield Family(
        "edgert_device_temperature_celsius",
        "gauge",
        "The temperature that the limits count against.",
        () if temperature is None else (({"sensor": source}, temperature),),
    )
    yield gauge(
        "edgert_device_power_watts", "Power of the board or module.", None if device is None else device.power_w
    )
    rails = () if device is None else tuple(({"rail": rail.name}, rail.power_w) for rail in device.rails)
    yield Family("edgert_rail_power_watts", "gauge", "Power of one supply rail.", rails)
    yield gauge("edgert_gpu_clock_hertz", "GPU clock now.", _hertz(None if device is None else device.gpu_clock_mhz))
    yield gauge(
        "edgert_memory_clock_hertz", "Memory clock now.", _hertz(None if device is None else device.memory_clock_mhz)
    )
    yield gauge(
        "edgert_device_memory_available_bytes",
        "Memory that can still be taken (MemAvailable on unified memory).",
        None if device is None else device.memory_available_bytes,
    )
    yield gauge(
        "edgert_device_memory_total_bytes",
        "Memory of the device.",
        None if device is None else device.memory_total_bytes,
    )
    yield labelled(
        "edgert_throttle_events_total", "counter", "Times the hardware began to throttle.", "reason", s.throttle_events
    )
    warning = power_mode_warning(s.expected_power_mode, s.power_mode)
    unknown = s.expected_power_mode is None or s.power_mode is None
    yield gauge(
        "edgert_power_mode_mismatch",
        "1 where the device is in another power mode than the plan's.",
        None if unknown else float(warning is not None),
    )
    yield counter("edgert_guard_changes_total", "Changes of what the thermal guard allows.", s.guard_changes)


def _one(value: float | None) -> tuple[tuple[Labels, float], ...]:
    return () if value is None else (({}, value),)


def _hertz(mhz: float | None) -> float | None:
    return None if mhz is None else mhz * 1e6


def _samples(family: Family) -> Iterator[str]:
    for labels, value in family.samples:
        yield f"{family.name}{_labels(labels)} {_number(value)}"


def _histogram(family: Family) -> Iterator[str]:
    histogram = family.histogram
    if histogram is None:
        return
    running = 0
    for bound, count in zip((*histogram.bounds_s, float("inf")), histogram.counts, strict=True):
        running += count
        yield f"{family.name}_bucket{_labels({'le': _number(bound)})} {running}"
    yield f"{family.name}_sum {_number(histogram.sum_s)}"
    yield f"{family.name}_count {running}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
