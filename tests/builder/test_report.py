"""report.html: self-contained, the same bytes for the same inputs, nothing from outside breaks out of its text, and
what nobody measured is shown as such.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgebuild.errors import ReportError
from edgebuild.report import Evidence, Sources, build_facts, read_sources, render_report
from edgebuild.report.charts import WIDTH, histogram_chart
from edgebuild.report.evidence import pick_trials
from edgebuild.report.memory import measured_lines, waterfall
from edgebuild.report.numbers import UNKNOWN
from edgebuild.report.results import acceptance_bars, acceptance_rows
from edgebuild.tune.logbook import Logbook
from edgebuild.tune.records import Result, Trial
from edgert.capture import CellState
from edgert.costs import StepCosts
from edgert.golden import GoldenReport
from edgert.headroom import Headroom
from edgert.manifest import load_manifest
from edgert.selfcheck import SelfCheck
from hypothesis import given
from hypothesis import strategies as st
from report_toys import CONFIG, DOCTOR, MANIFEST, PLAN, SOURCES, TRAFFIC, bench, full_evidence, trial
from toy_artifact import make_artifact, toy_manifest

PROFILES = Path(__file__).parents[2] / "profiles"


def page_of(evidence: Evidence = Evidence(), sources: Sources = SOURCES) -> str:  # noqa: B008
    return render_report(sources, evidence)


VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags close, and collects what the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads.extend(value or "" for name, value in attrs if name in ("src", "href", "xlink:href"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("evidence", [Evidence(), full_evidence()], ids=["as built", "measured"])
def test_the_page_is_whole_and_loads_nothing(evidence: Evidence) -> None:
    text = page_of(evidence)
    assert text.startswith("<!doctype html>")
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert not page.seen & {"script", "link", "iframe", "img"}
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text


def test_the_page_shows_every_decision() -> None:
    text = page_of()
    for cell in PLAN.cells:
        assert f">{cell.label}</td>" in text
    for line in PLAN.ledger.lines:
        assert line.label in text
    for wanted in (
        "powers of two",
        "uniform steps",
        f"{PLAN.prefill.padding.fraction:.1%}",
        "SmolLM2",
        "1.32.0",
        "ab" * 32,
    ):
        assert wanted in text
    for size in (*PLAN.prefill.chunk_sizes, *PLAN.decode.kv_tiers):
        assert re.search(rf'class="label"[^>]*>{size:,}</text>', text)


def test_what_nobody_measured_is_said_with_the_command_that_measures_it() -> None:
    text = page_of()
    assert text.count("not measured here") >= 6
    assert '<td class="left">not run here</td>' in text
    for command in ("edgert doctor ARTIFACT --json", "edgebuild tune ARTIFACT", "edgebuild verify ARTIFACT"):
        assert command in text
    assert "edgebuild report ARTIFACT --tuning ARTIFACT.tuning.jsonl" in text
    measured = page_of(full_evidence())
    assert "not measured here" not in measured
    assert "not run here" not in measured


def test_measured_memory_is_shown_beside_the_plan_and_by_phase() -> None:
    text = page_of(full_evidence())
    assert "269 MB, measured 271 MB" in text
    assert "in use, by phase" in text
    assert "900 MB, the peak" in text
    assert "prefill-512" in text
    built = page_of(Evidence(build={"memory": {"weights": 271_000_000}}))
    assert "269 MB, measured 271 MB" in built


def test_a_drafters_cache_is_told_apart_from_the_models() -> None:
    found = measured_lines({"kv_cache": 1000, "session": 5}, {"KV cache": 900, "drafter KV cache": 100})
    assert found == {"KV cache": 900, "drafter KV cache": 100}


def test_cells_are_shown_with_their_capture_and_the_reason() -> None:
    text = page_of(full_evidence())
    assert ">captured</td>" in text
    assert "eager: operation not permitted: dynamic allocation" in text


def test_acceptance_is_shown_by_task_and_position_from_every_source() -> None:
    text = page_of(full_evidence())
    for wanted in (
        "tuning, trial 4",
        "drafter&#39;s card, held out",
        "code, position 1",
        "position 3",
        "threshold: 60%",
    ):
        assert wanted in text


def test_a_card_that_holds_acceptance_alone_is_shown_with_what_it_does_not_say() -> None:
    entry = {"acceptance": [0.6, 0.5]}
    evidence = Evidence(build={"acceptance": {"held_out": {"chat": entry}}})
    assert acceptance_rows(evidence) == [("drafter's card, held out", "chat", (0.6, 0.5), None, None)]
    (bars,) = acceptance_bars(evidence, None)
    assert bars.rows[0].detail == f"{UNKNOWN} tokens a step, {UNKNOWN} steps"


def test_draft_lengths_are_compared_and_the_picked_one_is_said() -> None:
    text = page_of(full_evidence())
    assert "2 drafts a step" in text
    assert "0.150 ± 0.005" in text
    assert "2 was picked: most tokens a ms." in text


def test_the_mechanisms_are_compared_one_after_the_other() -> None:
    text = page_of(full_evidence())
    order = [
        text.index(f">{label}<") for label in ("all three off", "+ chunked prefill", "+ CUDA graphs", "+ drafting")
    ]
    assert order == sorted(order)
    assert "100.0 ± 2.0" in text
    assert "tokens/s (higher is better)" in text
    assert "longest gap ms (lower is better)" in text
    assert "enable_mtp: false → true" in text
    assert "62 °C, 1,020 MHz, MAXN" in text


def test_headroom_says_what_it_costs() -> None:
    text = page_of(full_evidence())
    assert "250.0 output tokens/s were measured (trial 4 of the tuning log). With 20% kept free" in text
    assert "count on 200.0: that costs 50.0 tokens/s" in text
    assert "of the most" in page_of(Evidence(benches=(("evening", bench()),)))
    costs = replace(SOURCES, headroom=Headroom(3, 4, 80.0, 100.0))
    assert "3 of 4 slots are admitted, 80.0 instead of 100.0 tokens/s (by costs.json)" in page_of(sources=costs)


@pytest.mark.parametrize(("change", "used"), [({}, True), ({"model": "f" * 64}, False), ({"cells": 1}, False)])
def test_costs_that_a_load_leaves_out_say_nothing_of_the_headroom(
    tmp_path: Path, change: dict[str, Any], used: bool
) -> None:
    artifact = make_artifact(tmp_path / "toy")
    (artifact / "plan.json").write_text("{}")
    (artifact / "traffic.yaml").write_text((PROFILES / "traffic" / "steady-chat.yaml").read_text())
    manifest = load_manifest(artifact)
    costs = StepCosts(
        "measured", "here", "onnxruntime", "1", manifest.model.identity, "written", 0, 0.0,
        dict.fromkeys(manifest.cells, (2.0,)),
    )  # fmt: skip
    if "model" in change:
        costs = replace(costs, model=change["model"])
    if "cells" in change:
        costs = replace(costs, cells={cell: (2.0,) for cell in manifest.cells[:1]})
    (artifact / "costs.json").write_text(costs.dump())
    assert (read_sources(artifact, manifest).headroom is not None) == used
    assert "edgebuild simulate ARTIFACT --traffic FILE --measure" in page_of()


def test_another_power_mode_and_every_finding_are_warned_of_at_the_top() -> None:
    text = page_of(full_evidence())
    assert 'role="alert"' in text
    assert "power mode 15W, the artifact was planned for MAXN" in text
    assert "capture failed: 1 cells run eager" in text
    assert 'role="alert"' not in page_of()
    seen = page_of(Evidence(doctor={**DOCTOR, "findings": [], "power_mode": {"actual": "15W", "expected": "MAXN"}}))
    assert "power mode 15W, the artifact was planned for MAXN" in seen
    assert "power mode 15W" in page_of(Evidence(trials=(trial(1, "baseline", 100.0, power_mode="15W"),)))


def test_the_golden_check_is_shown() -> None:
    golden = {"steps": 12, "worst_error": 3.2e-6, "tolerance": 1e-3}
    text = page_of(Evidence(build={"golden": golden}))
    assert "12 steps compared with the reference: worst relative error 3.2e-06, allowed 0.001" in text


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert page_of(full_evidence()) == page_of(full_evidence())


def test_a_plan_of_another_version_is_refused_by_name() -> None:
    plan = {key: value for key, value in SOURCES.plan.items() if key != "prefill_decode_ratio"}
    with pytest.raises(ReportError, match="has no 'prefill_decode_ratio'"):
        page_of(sources=replace(SOURCES, plan=plan))


def test_names_from_outside_are_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    manifest = {**MANIFEST, "name": hostile, "model": {**MANIFEST["model"], "name": hostile}}
    traffic = replace(TRAFFIC, name=hostile, attribution=hostile, skipped={hostile: 3})
    plan = {**SOURCES.plan, "device": hostile, "notes": [hostile]}
    finding = {"symptom": hostile, "cause": hostile, "next_step": hostile}
    doctor = {**DOCTOR, "findings": [finding], "device": {"device": hostile}, "cells": []}
    evidence = Evidence(doctor=doctor, benches=((hostile, {**bench(), "warnings": [hostile]}),), notes=(hostile,))
    assert "<script" not in page_of(evidence, Sources(manifest, plan, traffic, CONFIG))


def test_the_waterfall_has_no_gap_and_ends_at_the_device() -> None:
    rows = waterfall(PLAN.to_json()["memory"], {}).rows
    for before, after in itertools.pairwise(rows):
        assert after.start == pytest.approx(before.start + before.width, abs=0.03)
    assert rows[-1].start + rows[-1].width == pytest.approx(100, abs=0.03)


@given(
    st.dictionaries(st.integers(1, 20_000), st.integers(1, 1000), max_size=20),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=12, unique=True).map(sorted),
    st.integers(1, 30_000),
)
def test_charts_stay_inside_their_frame_and_count_everything(
    counts: dict[int, int], marks: list[int], longest: int
) -> None:
    values = np.zeros(max(counts, default=1) + 1, np.int64)
    for length, count in counts.items():
        values[length] = count
    chart = histogram_chart("prompts", values, "requests", longest, marks)
    assert all(bar.x >= 0 and bar.x + bar.width <= WIDTH and bar.y >= 0 for bar in chart.columns)
    assert all(0 <= mark.x <= WIDTH for mark in chart.marks)
    shown = sum(int(bar.title.split(": ")[1].split()[0].replace(",", "")) for bar in chart.columns)
    beyond = int(chart.beyond.split()[0].replace(",", "")) if chart.beyond else 0
    assert shown + beyond == sum(counts.values())


def line(number: int, step: str, **artifact: str) -> Trial:
    """A trial of a given artifact."""
    made = trial(number, step, 100.0 + number)
    return made.model_copy(update={"artifact": made.artifact.model_copy(update=artifact)})


def ended(trials: tuple[Trial, ...], chosen: int) -> Result:
    """The end of a run over these trials."""
    first = trials[0]
    return Result(
        format_version=1,
        kind="result",
        artifact=first.artifact,
        device=first.device,
        versions={},
        workload=first.workload,
        settings={},
        baseline=first.number,
        trial=chosen,
        steps=tuple(each.number for each in trials),
        figures=first.figures,
        curve=None,
        draft_vocabulary=None,
        soak=None,
        notes=(),
        at="2026-11-30T00:00:00Z",
    )


IDENTITY = "ab" * 32


def test_the_last_run_of_this_artifact_is_drawn_and_no_other() -> None:
    theirs = line(1, "baseline", sha256="7" * 64)
    old = (line(2, "baseline"), line(3, "mtp"))
    new = (line(4, "baseline"), line(5, "cuda_graph"))
    book = Logbook((theirs, *old, ended(old, 3), *new, ended(new, 5), line(6, "soak")))
    trials, result, notes = pick_trials(book, "1" * 64, IDENTITY, Path("tuning.jsonl"))
    assert result is not None
    assert ([each.number for each in trials], result.trial, notes) == ([4, 5, 6], 5, ())


def test_a_run_that_has_not_ended_is_drawn_as_far_as_it_came() -> None:
    book = Logbook((line(1, "baseline"), line(2, "chunked_prefill")), torn_bytes=7)
    trials, result, notes = pick_trials(book, "1" * 64, IDENTITY, Path("tuning.jsonl"))
    assert ([each.number for each in trials], result) == ([1, 2], None)
    assert notes == ("The logbook's last line was half written (7 bytes) and is left out.",)


def test_a_resumed_build_keeps_what_the_first_half_measured(tmp_path: Path) -> None:
    manifest = toy_manifest()
    (tmp_path / "decoder.weights").write_bytes(b"x" * 100)
    card = {"acceptance": {"held_out": {"code": {"acceptance": [0.6], "mean_accepted_length": 1.6, "steps": 9}}}}
    first = build_facts(tmp_path, manifest, None, card)
    assert first["memory"] == {"weights": 100}
    assert (first["golden"], first["cells"]) == (None, [])
    (tmp_path / "build.json").write_text(json.dumps(first))
    checked = SelfCheck(GoldenReport(12, 1e-3, 1e-2), {"weights": 90, "session": 5}, (CellState("c", "captured", ""),))
    second = build_facts(tmp_path, manifest, checked, {})
    assert second["acceptance"] == card["acceptance"]
    assert second["memory"] == {"weights": 90}
    assert second["golden"]["steps"] == 12
    assert second["cells"] == [{"cell": "c", "status": "captured", "reason": ""}]
    assert SelfCheck.from_json(json.loads(json.dumps(asdict(checked)))) == checked


def test_a_doctor_that_did_not_get_far_leaves_the_rest_as_it_was() -> None:
    finding = {"symptom": "garbled or repeated output", "cause": "golden vectors differ", "next_step": "rebuild"}
    early = {
        "format_version": 1,
        "findings": [finding],
        "device": {},
        "cells": [],
        "golden": None,
        "reading": {},
        "loaded_reading": None,
        "chunks": [],
        "steps": [],
        "power_mode": {"actual": None, "expected": None},
        "memory": {"planned_bytes": 5, "phases": {}, "parts": {}},
    }
    text = page_of(Evidence(build={"memory": {"weights": 271_000_000}}, doctor=early))
    assert "golden vectors differ; next: rebuild" in text
    assert "269 MB, measured 271 MB" in text
    assert "Memory in use, by phase" in text
    assert "not run here" in text
