"""`edgert doctor`: each complaint that can be provoked is provoked, and named with its cause and a next step.

The artifact is files only; the backend behind it is the fake one, so that a capture can fail and heat can come. The
complaints about an engine at work are in test_running_findings.py.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_artifact
from edgert import cli
from edgert.backends.base import Setup, StepInputs
from edgert.diagnosis import SYMPTOM_OF_FAILURE, Facts, Finding, findings
from edgert.doctor import examine, render, to_json
from edgert.errors import BackendError, EdgertError
from edgert.guards.readings import DeviceReading
from edgert.probe import copy_bytes_per_s, step_bytes
from fakes import FakeBackend, toy_logits
from symptoms import COOL, Sensed, named
from toy_artifact import make_artifact, toy_manifest

TROUBLESHOOTING = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"


def fake_golden() -> dict[str, Any]:
    """What the fake backend's logits are: two prompts, two steps each."""
    cases = [fake_case([1, 5, 6]), fake_case([9, 8, 4, 3, 2])]
    return {"format_version": 1, "tolerance": 0.001, "cases": cases}


def fake_case(prompt: list[int]) -> dict[str, Any]:
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
    return {"prompt_ids": prompt, "steps": steps}


class Described(FakeBackend):
    """A FakeBackend that says more of itself. grown: bytes that a chunk of so many rows takes for good."""

    said: Mapping[str, Any] = {}
    used: int | None = None
    grown: Mapping[int, int] = {}

    def launch(self, step: StepInputs) -> Any:
        if step.cell.kind == "prefill" and self.used is not None and not step.valid.any():
            self.used += self.grown.get(step.cell.query_rows, 0)
        return super().launch(step)

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
        *readings: DeviceReading,
        mode: str | None = None,
        said: Mapping[str, Any] | None = None,
        used: int | None = 700_000,
        grown: Mapping[int, int] | None = None,
        kind: type[Described] = Described,
        **overrides: Any,
    ) -> tuple[Facts, tuple[Finding, ...]]:
        kind = type("Told", (kind,), {"said": said or {}, "used": used, "grown": grown or {}})
        monkeypatch.setattr(
            "edgert.loading.resolve", lambda _name: lambda setup: kind(setup.cells, setup.slots, setup.cache_tokens)
        )
        facts = examine(artifact, overrides=overrides, sensors=Sensed(*(readings or (COOL,)), mode=mode))
        return facts, findings(facts)

    return examine_it


def test_a_healthy_device_has_no_findings_and_one_screen(look: Look) -> None:
    facts, found = look()
    assert found == ()
    assert facts.golden is not None
    assert facts.golden.steps == 4
    assert facts.side_by_side == 4
    assert [step.batch for step in facts.steps] == [1, 4]
    assert [chunk.rows for chunk in facts.chunks] == [16, 64]
    screen = render(facts, found)
    assert screen.endswith("healthy: nothing found")
    assert len(screen.splitlines()) <= 24
    assert "4 sequences side by side agree" in screen
    assert "of a memory copy (10.0 GB/s)" in screen
    document = to_json(facts, found)
    assert json.loads(json.dumps(document))["healthy"] is True
    assert {each["status"] for each in document["cells"]} == {"direct"}
    assert list(document["memory"]["phases"]) == [
        "opened", "warmed_up", "checked", "prefill-16", "prefill-64", "decode-1", "decode-4",
    ]  # fmt: skip


def test_a_backend_can_show_phases_of_its_own_warm_up(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiling(Described):
        on_phase: Callable[[str], None]

        def warm_up(self) -> None:
            self.used = 5_000_000
            self.on_phase("compiled")

    def open_(setup: Setup) -> Compiling:
        backend = Compiling(setup.cells, setup.slots, setup.cache_tokens)
        backend.used, backend.on_phase = 1_000_000, setup.on_phase
        return backend

    monkeypatch.setattr("edgert.loading.resolve", lambda _name: open_)
    monkeypatch.setattr("edgert.probe.PROBE_S", 0.0)
    monkeypatch.setattr("edgert.doctor.copy_bytes_per_s", lambda _threads, _clock: 10e9)
    phases = examine(artifact, sensors=Sensed(COOL)).memory_phases
    assert list(phases)[:3] == ["opened", "compiled", "warmed_up"]
    assert (phases["opened"], phases["compiled"]) == (1_000_000, 5_000_000)


class Mixed(Described):
    """A batch whose rows all read what the first one holds, as a wrong stride does."""

    def launch(self, step: StepInputs) -> Any:
        if step.cell.batch > 1:
            self.cache[:] = self.cache[:1]
        return super().launch(step)


def test_sequences_that_read_each_others_cache_are_found_by_the_kv_check(look: Look) -> None:
    """In slot 0 alone, where the golden vectors run, nothing shows."""
    facts, found = look(kind=Mixed)
    assert "4 sequences side by side disturb each other, slot 1" in named(found, "garbled or repeated output").cause
    assert facts.golden is None or facts.golden.steps == 4


def test_garbled_output_is_a_golden_mismatch(look: Look, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakes.toy_logits", lambda tokens: toy_logits(tokens[:-1]))
    facts, found = look()
    assert named(found, "garbled or repeated output").cause
    assert facts.golden is None
    assert artifact.exists()


def test_a_changed_file_is_named(look: Look, artifact: Path) -> None:
    (artifact / "decoder.weights").write_bytes(b"x" * (artifact / "decoder.weights").stat().st_size)
    assert "decoder.weights" in named(look()[1], "damaged artifact").cause


def test_an_artifact_without_its_engine_is_unfinished_not_damaged(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "toy", state="onnx")
    found = named(findings(examine(path, sensors=Sensed(COOL))), "unfinished artifact")
    assert "edgebuild resume" in found.next_step


def test_no_artifact_is_a_finding_and_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path / "none")]) == 1
    assert f"no artifact at {tmp_path / 'none'}" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    facts = examine(tmp_path / "empty", sensors=Sensed(COOL))
    assert str(tmp_path / "empty") in named(findings(facts), "no artifact").cause


def test_an_impossible_configuration_is_named_with_its_line(look: Look, artifact: Path) -> None:
    path = artifact / "scheduler.yaml"
    path.write_text(path.read_text().replace("kv_tiers: [128, 256]", "kv_tiers: [128]"))
    assert "kv_tiers" in named(look()[1], "impossible configuration").cause


def test_a_backend_that_does_not_open_says_what_it_said(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object) -> None:
        raise BackendError("built for compute capability 8.7, this device has 9.0", hint="rebuild for 9.0")

    monkeypatch.setattr(FakeBackend, "warm_up", refuse)
    found = named(look()[1], "backend does not start")
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
    assert next(iter(overrides)).split("_")[-1] in named(look(**overrides)[1], symptom).next_step


def test_steps_that_cannot_keep_the_targets_are_named(look: Look) -> None:
    facts, _ = look()
    assert facts.config is not None
    slow = tuple(replace(chunk, step_ms=900.0) for chunk in facts.chunks)
    first = replace(facts, chunks=slow, config=replace(facts.config, ttft_target_ms=500.0))
    cause = named(findings(first), "first token slow").cause
    assert cause == "one chunk of 64 rows takes 900 ms, ttft_target_ms is 500"
    gaps = replace(facts, chunks=slow, config=replace(facts.config, itl_target_ms=500.0, adaptive=False))
    assert "a chunk of 64 rows and a decode step take 90" in named(findings(gaps), "long gaps").cause
    chosen = replace(gaps, config=replace(facts.config, itl_target_ms=500.0, adaptive=True))
    assert findings(chosen) == (), "adaptive chooses smaller chunks by itself"


def test_a_failed_capture_is_named_with_the_cell_and_the_reason(look: Look) -> None:
    reason = "operation not permitted when stream is capturing: dynamic allocation"
    fallbacks = [{"cell": "decode-2x1@128", "first_slot": 0, "reason": reason}]
    fallbacks += [{"cell": "decode-1x1@128", "first_slot": slot, "reason": reason} for slot in (1, 3)]
    facts, found = look(said={"graphs": 6, "fallbacks": fallbacks, "jit_cache": "warm"})
    cause = next(each for each in found if each.symptom == "capture failed").cause
    assert "2 cells run eager (decode-2x1@128, decode-1x1@128)" in cause
    assert "dynamic allocation" in cause
    assert "6 captured; cells: 8 captured, 1 partly, 1 eager" in render(facts, found)
    states = {each["cell"]: each for each in to_json(facts, found)["cells"]}
    assert states["decode-2x1@128"] == {"cell": "decode-2x1@128", "status": "eager", "reason": reason}
    assert states["decode-4x1@128"]["status"] == "captured"
    assert states["decode-1x1@128"]["reason"] == f"not at slots 1, 3: {reason}"
    assert facts.eager_step_ms is not None


def test_graphs_that_gain_nothing_are_named(look: Look) -> None:
    facts, _ = look()
    slower = replace(facts, eager_step_ms=facts.steps[0].step_ms / 2)
    assert "graphs gain nothing" in named(findings(slower), "slow decode").cause
    assert findings(replace(facts, eager_step_ms=facts.steps[0].step_ms * 2)) == ()


def test_a_memory_peak_is_named_with_its_phase(look: Look) -> None:
    found = named(look(used=900_000_000)[1], "memory peak")
    assert re.search(r"900 MB .* in phase \w+; the plan says 1 MB", found.cause)
    facts, found_later = look(grown={64: 300_000_000})
    cause = named(found_later, "memory peak").cause
    assert "301 MB in use at its peak, in phase prefill-64" in cause
    assert re.search(r"^prefill-64 +301 +\+300 .* peak$", render(facts, found_later), re.MULTILINE)


def test_memory_that_does_not_reach_the_margin_is_named(look: Look) -> None:
    short = replace(COOL, memory_available_bytes=500_000_000)
    assert "500 MB" in named(look(short)[1], "requests wait or are refused for memory").cause


def test_heat_throttling_and_power_mode_are_named(look: Look) -> None:
    limits = {"soft_temperature_c": 85.0, "hard_temperature_c": 95.0}
    assert "86.0 °C (tj-thermal)" in named(look(replace(COOL, temperature_c=86.0), **limits)[1], "latency drifts").cause
    slowed = replace(COOL, throttle_reasons=("hw_thermal_slowdown",))
    assert "hw_thermal_slowdown" in named(look(slowed)[1], "latency drifts").cause
    blind = replace(COOL, temperature_c=None, notes=("thermal zone tj-thermal: Resource temporarily unavailable",))
    assert "unavailable" in named(look(blind, **limits)[1], "thermal guard is blind").cause
    held = replace(COOL, gpu_clock_mhz=306.0, gpu_clock_max_mhz=1020.0)
    assert look(held, COOL)[1] == (), "an idle clock is low"
    full = replace(held, gpu_clock_mhz=1020.0)
    assert look(COOL, held, held, full)[1] == (), "a governor takes a moment to follow the load"
    cause = named(look(COOL, held)[1], "latency drifts").cause
    assert cause == "while steps run the GPU clock is 306 MHz of 1020 MHz"
    mode = named(look(mode="15W", power_mode="MAXN_SUPER")[1], "wrong power mode")
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


def test_an_error_that_has_no_name_of_its_own_is_still_a_finding(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object) -> None:
        raise EdgertError("the moon is in the wrong place", hint="wait")

    monkeypatch.setattr(FakeBackend, "warm_up", refuse)
    assert named(look()[1], "does not load").next_step == "wait"


def test_every_row_of_the_troubleshooting_page_is_named_by_the_tool_and_provoked_by_a_test() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \| (.+) \| (.+) \|$", TROUBLESHOOTING.read_text(), re.MULTILINE)
    symptoms = [row[0] for row in rows]
    assert len(symptoms) == len(set(symptoms))
    assert all(cell.strip() for row in rows for cell in row)
    source = (Path(__file__).resolve().parents[2] / "runtime/edgert/diagnosis.py").read_text()
    tool = {*re.findall(r"Finding\(\s*\"([^\"]+)\"", source), *SYMPTOM_OF_FAILURE.values(), "does not load"}
    assert set(symptoms) == tool
    assert set(symptoms) <= provoked()


def provoked() -> set[str]:
    """Every text in a test that calls `named`, which fails unless the tool gave that name."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                texts = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(isinstance(call, ast.Name) and call.id == "named" for call in calls):
                    found |= {text for text in texts if isinstance(text, str)}
    return found
