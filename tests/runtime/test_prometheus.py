"""The metrics text: a strict reading of the format, the documented names, and that unknown is left out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from edgert.engine import Engine
from edgert.guards.guard import Guard, GuardLimits
from edgert.guards.readings import DeviceReading, Rail
from edgert.metrics import Counters, EngineSnapshot, prometheus_text
from edgert.prometheus import families
from fakes import make_runtime
from hypothesis import given
from hypothesis import strategies as st

DOCS = Path(__file__).resolve().parents[2] / "docs/metrics.md"
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
LABEL = re.compile(rf'({NAME})="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')


class FullSensors:
    name = "full"

    def read(self) -> DeviceReading:
        return DeviceReading(
            "full",
            temperature_c=61.5,
            temperature_source="tj-thermal",
            power_w=14.25,
            rails=(Rail("VDD_GPU_SOC", 6.5), Rail("VDD_CPU_CV", 2.25)),
            gpu_clock_mhz=1020.0,
            memory_clock_mhz=3199.0,
            throttle_reasons=("sw_power_cap",),
            memory_available_bytes=5_000_000_000,
            memory_total_bytes=8_000_000_000,
        )

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return "15W", ()


def snapshot(**changes: object) -> EngineSnapshot:
    """An engine that has served two requests, on a device that tells everything."""
    limits = GuardLimits(4, 85.0, 95.0, power_mode="MAXN")
    runtime = make_runtime(guard=lambda now_s: Guard(FullSensors(), limits, now_s))
    with Engine(lambda: runtime) as engine:
        engine.complete([1, 2, 3], max_tokens=6)
        engine.complete([4] * 70, max_tokens=3, task="chat")
        taken = engine.metrics()
    return replace(taken, **changes)  # type: ignore[arg-type]


def parse(text: str) -> dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]]:
    """family → kind and samples by labels (histograms: the sample's name is a label). Raises on any fault."""
    assert text.endswith("\n")
    found: dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]] = {}
    current = helped = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            helped = line.split(" ")[2]
            assert helped not in found, f"{helped} stands twice"
            continue
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current == helped
            assert kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == current.endswith("_total")
            found[current] = (kind, {})
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels, value = match[1], match[2], float(match[3])
        pairs = []
        rest = labels or ""
        while rest:
            label = LABEL.match(rest)
            assert label, line
            pairs.append((label[1], label[2]))
            rest = rest[label.end() :]
        if found[current][0] == "histogram":
            assert name in {f"{current}_bucket", f"{current}_sum", f"{current}_count"}
            pairs.append(("", name.removeprefix(current)))
        else:
            assert name == current
        assert tuple(pairs) not in found[current][1], f"{line} stands twice"
        found[current][1][tuple(pairs)] = value
    return found


def full() -> EngineSnapshot:
    return snapshot(
        draft_proposed_by_task={("chat", 1): 10, ("chat", 2): 10, ("", 1): 4},
        draft_accepted_by_task={("chat", 1): 9, ("chat", 2): 5, ("", 1): 0},
        draft_lengths={"chat": {1: 3, 4: 0}},
        memory_planned_bytes=1_000_000,
        graph_launches=120,
        eager_launches=3,
    )


def test_the_documented_names_are_the_emitted_ones() -> None:
    documented = re.findall(r"^\| `(edgert_\w+)(?:\{([\w,]+)\})?` \| (\w+) \|", DOCS.read_text(), re.MULTILINE)
    emitted = parse(prometheus_text(full()))
    assert [name for name, _, _ in documented] == list(emitted)
    for name, labels, kind in documented:
        assert emitted[name][0] == kind
        if kind != "histogram":
            given_labels = [pair[0] for pair in next(iter(emitted[name][1]))]
            assert given_labels == [label for label in labels.split(",") if label], name


def test_values_are_the_snapshots() -> None:
    taken = full()
    text = parse(prometheus_text(taken))

    def value(name: str, **labels: str) -> float:
        return text[name][1][tuple(labels.items())]

    assert value("edgert_output_tokens_total") == 9
    assert value("edgert_prompt_tokens_total") == 73
    assert value("edgert_requests_finished_total", reason="length") == 2
    assert value("edgert_draft_accepted_total", task="chat", position="2") == 5
    assert value("edgert_eager_launches_total") == 3
    assert value("edgert_device_temperature_celsius", sensor="tj-thermal") == 61.5
    assert value("edgert_gpu_clock_hertz") == 1.02e9
    assert value("edgert_rail_power_watts", rail="VDD_CPU_CV") == 2.25
    assert value("edgert_throttle_events_total", reason="sw_power_cap") == 1
    assert sum(text["edgert_cell_launches_total"][1].values()) == sum(taken.launches.values())
    assert value("edgert_memory_phase_bytes", phase="prefill-64") > 0
    assert value("edgert_memory_phase_bytes", phase="decode-1") > 0
    assert value("edgert_draft_length", task="chat", batch="1") == 3
    assert value("edgert_memory_planned_bytes") == 1_000_000
    assert value("edgert_power_mode_mismatch") == 1


def test_histograms_are_cumulative_and_count_what_was_served() -> None:
    text = parse(prometheus_text(snapshot()))
    for name, count in (
        ("edgert_queue_wait_seconds", 2),
        ("edgert_time_to_first_token_seconds", 2),
        ("edgert_time_per_output_token_seconds", 2),
        ("edgert_inter_token_latency_seconds", 5 + 2),
    ):
        samples = text[name][1]
        buckets = [value for labels, value in samples.items() if ("", "_bucket") in labels]
        assert buckets == sorted(buckets)
        assert samples[(("le", "+Inf"), ("", "_bucket"))] == samples[(("", "_count"),)] == buckets[-1] == count


def test_what_is_unknown_is_left_out_and_never_zero() -> None:
    blind = parse(prometheus_text(snapshot(device=None, graph_launches=None, eager_launches=None, power_mode=None)))
    gone = {each.name for each in families(full())} - set(blind)
    assert {
        "edgert_device_temperature_celsius",
        "edgert_device_power_watts",
        "edgert_gpu_clock_hertz",
        "edgert_memory_clock_hertz",
        "edgert_device_memory_available_bytes",
        "edgert_eager_launches_total",
        "edgert_draft_accepted_total",
        "edgert_power_mode_mismatch",
    } <= gone


@given(st.text(max_size=30))
def test_any_task_label_keeps_the_format(task: str) -> None:
    text = prometheus_text(replace(BASE, draft_proposed_by_task={(task, 1): 1}))
    samples = parse(text)["edgert_draft_proposed_total"][1]
    assert list(samples.values()) == [1.0]


BASE = snapshot()


def test_tokens_of_one_step_share_a_moment() -> None:
    counters = Counters()
    counters.delivered(1, 0.0, None, 0.5)
    counters.delivered(3, 0.0, 0.5, 0.75)
    counters.delivered(0, 0.0, 0.75, 9.0)
    itl, ttft = counters.itl.snapshot(), counters.ttft.snapshot()
    assert (itl.count, itl.sum_s, itl.max_s) == (3, 0.25, 0.25)
    assert (ttft.count, ttft.sum_s, counters.output_tokens) == (1, 0.5, 4)


def test_a_snapshot_does_not_change_any_more() -> None:
    with Engine(make_runtime) as engine:
        before = engine.metrics()
        engine.complete([1, 2], max_tokens=5)
        assert before.output_tokens == before.itl.count == 0
        with pytest.raises(AttributeError):
            before.waiting = 3  # type: ignore[misc]
        assert engine.metrics().itl.count == 4
