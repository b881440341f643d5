"""`edgert doctor`: each complaint that can be provoked is provoked, and named with its cause and a next step.

The artifact is files only; the backend behind it is the fake one, so that a capture can fail and heat can come.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_artifact
from edgert import cli
from edgert.diagnosis import SYMPTOM_OF_FAILURE, Facts, Finding, findings, running_findings
from edgert.doctor import examine, render, to_json
from edgert.engine import Engine
from edgert.errors import BackendError
from edgert.guards.guard import Guard, GuardLimits
from edgert.guards.readings import DeviceReading
from edgert.metrics import EngineSnapshot
from edgert.probe import copy_bytes_per_s, step_bytes
from fakes import FakeBackend, make_runtime, toy_logits
from toy_artifact import make_artifact, toy_manifest

TROUBLESHOOTING = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"
GB = 1_000_000_000


def fake_golden() -> dict[str, Any]:
    """What the fake backend's logits are for two steps."""
    prompt = [1, 5, 6]
    steps = []
    for tokens in (prompt, [*prompt, 7]):
        logits = toy_logits(np.array(tokens))
        order = [int(token) for token in np.argsort(-logits, kind="stable")[:5]]
        steps.append(
            {
                "token": 7,
                "position": len(tokens) - 1,
                "top_ids": order,
                "indices": [0, 5],
                "values": [float(logits[0]), float(logits[5])],
                "norm": float(np.linalg.norm(logits)),
            }
        )
    return {"format_version": 1, "tolerance": 0.001, "cases": [{"prompt_ids": prompt, "steps": steps}]}


class Sensed:
    name = "fake"

    def __init__(self, reading: DeviceReading, mode: str | None = None) -> None:
        self._reading, self._mode = reading, mode

    def read(self) -> DeviceReading:
        return self._reading

    def power_mode(self) -> tuple[str | None, tuple[str, ...]]:
        return self._mode, ()


COOL = DeviceReading(
    "fake",
    temperature_c=50.0,
    temperature_source="tj-thermal",
    throttle_reasons=(),
    memory_available_bytes=5 * GB,
    memory_total_bytes=8 * GB,
)


class Described(FakeBackend):
    """A FakeBackend that says more of itself."""

    said: Mapping[str, Any] = {}
    used: int | None = None

    def describe(self) -> dict[str, Any]:
        return {"backend": "fake", "version": "1", "device": "toy", "threads": 1, **self.said}

    def memory(self) -> dict[str, int]:
        return super().memory() | ({} if self.used is None else {"device_used": self.used})


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(toy_artifact, "toy_golden", fake_golden)
    return make_artifact(tmp_path / "toy")


Look = Callable[..., tuple[Facts, tuple[Finding, ...]]]


@pytest.fixture
def look(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Examine the artifact on a backend and sensors of the test's making."""
    monkeypatch.setattr("edgert.probe.PROBE_S", 0.0)
    monkeypatch.setattr("edgert.doctor.copy_bytes_per_s", lambda _threads, _clock: 10e9)

    def examine_it(
        reading: DeviceReading = COOL,
        mode: str | None = None,
        said: Mapping[str, Any] | None = None,
        used: int | None = 700_000,
        **overrides: Any,
    ) -> tuple[Facts, tuple[Finding, ...]]:
        kind = type("Told", (Described,), {"said": said or {}, "used": used})
        monkeypatch.setattr(
            "edgert.loading.resolve", lambda _name: lambda setup: kind(setup.cells, setup.slots, setup.cache_tokens)
        )
        facts = examine(artifact, overrides=overrides, sensors=Sensed(reading, mode))
        return facts, findings(facts)

    return examine_it


def only(found: tuple[Finding, ...], symptom: str) -> Finding:
    (one,) = found
    assert one.symptom == symptom
    assert one.next_step
    return one


def test_a_healthy_device_has_no_findings_and_one_screen(look: Look) -> None:
    facts, found = look()
    assert found == ()
    assert facts.golden is not None
    assert facts.golden.steps == 2
    assert [step.batch for step in facts.steps] == [1, 4]
    screen = render(facts, found)
    assert screen.endswith("healthy: nothing found")
    assert len(screen.splitlines()) <= 24
    assert "of a memory copy (10.0 GB/s)" in screen
    document = to_json(facts, found)
    assert json.loads(json.dumps(document))["healthy"] is True


def test_garbled_output_is_a_golden_mismatch(look: Look, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakes.toy_logits", lambda tokens: toy_logits(tokens[:-1]))
    facts, found = look()
    assert only(found, "garbled output").cause
    assert facts.golden is None
    assert artifact.exists()


def test_a_changed_file_is_named(look: Look, artifact: Path) -> None:
    (artifact / "decoder.weights").write_bytes(b"x" * (artifact / "decoder.weights").stat().st_size)
    assert "decoder.weights" in only(look()[1], "damaged artifact").cause


def test_no_artifact_is_a_finding_and_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path / "none")]) == 1
    assert "damaged artifact" in capsys.readouterr().out


def test_an_impossible_configuration_is_named_with_its_line(look: Look, artifact: Path) -> None:
    path = artifact / "scheduler.yaml"
    path.write_text(path.read_text().replace("kv_tiers: [128, 256]", "kv_tiers: [128]"))
    assert "kv_tiers" in only(look()[1], "impossible configuration").cause


def test_a_backend_that_does_not_open_says_what_it_said(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object) -> None:
        raise BackendError("built for compute capability 8.7, this device has 9.0", hint="rebuild for 9.0")

    monkeypatch.setattr(FakeBackend, "warm_up", refuse)
    found = only(look()[1], "backend does not start")
    assert (found.cause, found.next_step) == (
        "built for compute capability 8.7, this device has 9.0",
        "rebuild for 9.0",
    )


@pytest.mark.parametrize(
    ("overrides", "symptom"),
    [
        ({"warm_up": False}, "first token slow"),
        ({"enable_chunked_prefill": False}, "long gaps"),
        ({"graph_batch_sizes": [1, 2]}, "throughput collapses with concurrency"),
    ],
)
def test_a_configuration_that_causes_a_complaint_is_named(
    look: Look, overrides: Mapping[str, Any], symptom: str
) -> None:
    assert next(iter(overrides)).split("_")[-1] in only(look(**overrides)[1], symptom).next_step


def test_a_failed_capture_is_named_with_the_cell_and_the_reason(look: Look) -> None:
    reason = "operation not permitted when stream is capturing: dynamic allocation"
    fallbacks = [{"cell": f"decode-{batch}x1@128", "first_slot": 0, "reason": reason} for batch in (1, 2)]
    facts, found = look(said={"graphs": 6, "fallbacks": fallbacks, "jit_cache": "warm"})
    cause = next(each for each in found if each.symptom == "capture failed").cause
    assert "2 cells run eager (decode-1x1@128, decode-2x1@128)" in cause
    assert "dynamic allocation" in cause
    assert "6 captured, 2 run eager" in render(facts, found)
    assert facts.eager_step_ms is not None


def test_graphs_that_gain_nothing_are_named(look: Look) -> None:
    facts, _ = look()
    slower = replace(facts, eager_step_ms=facts.steps[0].step_ms / 2)
    assert "graphs gain nothing" in only(findings(slower), "slow decode").cause
    assert findings(replace(facts, eager_step_ms=facts.steps[0].step_ms * 2)) == ()


def test_a_memory_peak_is_named_with_its_phase(look: Look) -> None:
    found = only(look(used=900_000_000)[1], "memory peak")
    assert re.search(r"900 MB .* in phase \w+; the plan says 1 MB", found.cause)


def test_memory_that_does_not_reach_the_margin_is_named(look: Look) -> None:
    short = replace(COOL, memory_available_bytes=500_000_000)
    assert "500 MB" in only(look(short)[1], "requests wait or are refused for memory").cause


def test_heat_throttling_and_power_mode_are_named(look: Look) -> None:
    limits = {"soft_temperature_c": 85.0, "hard_temperature_c": 95.0}
    assert "86.0 °C (tj-thermal)" in only(look(replace(COOL, temperature_c=86.0), **limits)[1], "latency drifts").cause
    slowed = replace(COOL, throttle_reasons=("hw_thermal_slowdown",))
    assert "hw_thermal_slowdown" in only(look(slowed)[1], "latency drifts").cause
    blind = replace(COOL, temperature_c=None, notes=("thermal zone tj-thermal: Resource temporarily unavailable",))
    assert "unavailable" in only(look(blind, **limits)[1], "thermal guard is blind").cause
    mode = only(look(mode="15W", power_mode="MAXN_SUPER")[1], "wrong power mode")
    assert "15W" in mode.cause
    assert "MAXN_SUPER" in mode.cause
    assert look(mode="MAXN_SUPER", power_mode="MAXN_SUPER")[1] == ()


def test_the_command_prints_findings_and_exits_with_1(
    look: Look, artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look()
    monkeypatch.setattr("edgert.doctor.detect_sensors", lambda **_: Sensed(COOL))
    assert cli.main(["doctor", str(artifact)]) == 0
    assert "healthy" in capsys.readouterr().out
    path = artifact / "scheduler.yaml"
    path.write_text(path.read_text().replace("warm_up: true", "warm_up: false"))
    assert cli.main(["doctor", str(artifact), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is False
    assert document["findings"][0]["symptom"] == "first token slow"
    assert cli.main(["doctor", str(artifact)]) == 1
    assert "1 finding\n1. first token slow: warm_up is false" in capsys.readouterr().out


def test_bytes_of_a_step_are_weights_and_the_tiers_share_of_the_cache() -> None:
    manifest = toy_manifest()
    cells = {cell.label: cell for cell in manifest.decode_cells}
    assert step_bytes(manifest, cells["decode-1x1@256"]) == 4096 + 4 * 2 * 16 * 4 * 256
    assert step_bytes(manifest, cells["decode-4x1@128"]) == 4096 + 4 * 4 * 2 * 16 * 4 * 128


def test_a_copy_is_timed_by_the_clock_it_is_given() -> None:
    ticks = iter(range(100))
    assert copy_bytes_per_s(2, lambda: float(next(ticks)), size=1 << 20) == 2 << 20


# --- a running engine ---


def served(**changes: Any) -> EngineSnapshot:
    with Engine(make_runtime) as engine:
        engine.complete([1, 2, 3], max_tokens=4)
        return replace(engine.metrics(), **changes)


def test_a_quiet_engine_has_no_findings() -> None:
    assert running_findings(served()) == ()


def test_low_acceptance_is_named_by_task() -> None:
    taken = served(
        draft_proposed_by_task={("chat", 1): 100, ("chat", 2): 100, ("code", 1): 100},
        draft_accepted_by_task={("chat", 1): 50, ("chat", 2): 20, ("code", 1): 90},
    )
    assert "task chat: 70 of 200 drafts accepted (35%)" in only(running_findings(taken), "acceptance low").cause


def test_a_first_token_that_waits_for_a_slot_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgert")
    backend: list[FakeBackend] = []

    def open_() -> Any:
        runtime = make_runtime(slots=1, cost_s=lambda _cell: 0.05)
        assert isinstance(runtime.backend, FakeBackend)
        backend.append(runtime.backend)
        return runtime

    with Engine(open_, clock=lambda: backend[0].now_s if backend else 0.0) as engine:
        for handle in [engine.submit([1, 2, 3], max_tokens=30) for _ in range(6)]:
            handle.result(30)
        cause = only(running_findings(engine.metrics()), "first token slow").cause
    assert "s for a slot on average" in cause
    assert f"first token slow: {cause}; next: more slots" in caplog.text, "the log has it when the engine closes"


def test_eager_steps_heat_and_a_closed_door_are_named() -> None:
    assert "3 of 100" in only(running_findings(served(graph_launches=97, eager_launches=3)), "capture failed").cause
    hot = Sensed(replace(COOL, temperature_c=96.0, throttle_reasons=("hw_slowdown",)))
    limits = GuardLimits(4, 85.0, 95.0)
    with Engine(lambda: make_runtime(guard=lambda now_s: Guard(hot, limits, now_s))) as engine:
        found = running_findings(engine.metrics())
    assert [each.symptom for each in found] == ["latency drifts", "requests wait or are refused"]
    assert "1 of 4 slots may be active at 96.0 °C; the hardware throttled: hw_slowdown 1 times" in found[0].cause


def test_every_symptom_has_its_row_in_the_troubleshooting_page() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", TROUBLESHOOTING.read_text(), re.MULTILINE)
    source = (Path(__file__).resolve().parents[2] / "runtime/edgert/diagnosis.py").read_text()
    named = {*re.findall(r"Finding\(\s*\"([^\"]+)\"", source), *SYMPTOM_OF_FAILURE.values(), "does not load"}
    assert set(rows) == named
    assert len(rows) == len(set(rows))
