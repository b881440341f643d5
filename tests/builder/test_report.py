"""report.html: self-contained, the same bytes for the same inputs, and nothing from outside breaks out of its text."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from edgebuild.plan import plan_for
from edgebuild.report import WIDTH, histogram_chart, render_report, waterfall
from hypothesis import given
from hypothesis import strategies as st
from toy_plan import SMOLLM2, histogram, limits

TRAFFIC = histogram([(374, 44), (1500, 200), (90, 12), (800, 300)] * 20)
PLAN = plan_for(limits(), TRAFFIC, SMOLLM2)
MANIFEST: dict[str, Any] = {
    "name": "smollm2-bench",
    "edgebuild_version": "0.1.0",
    "tools": {"torch": "2.13.0", "onnx": "1.20.0"},
    "model": {
        "family": "llama",
        "name": "SmolLM2-135M-Instruct",
        "identity": "ab" * 32,
        "layers": 30,
        "hidden_size": 576,
        "vocabulary_size": 49152,
    },
    "source": [{"file": "model.gguf", "bytes": 91_727_296, "sha256": "cd" * 32}],
    "backend": {"name": "onnxruntime", "version": "1.32.0", "compute_capabilities": [], "precision": "float32"},
}
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


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = render_report(MANIFEST, PLAN, TRAFFIC)
    assert text.startswith("<!doctype html>")
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert not page.seen & {"script", "link", "iframe", "img"}
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text


def test_the_page_shows_every_decision() -> None:
    text = render_report(MANIFEST, PLAN, TRAFFIC)
    for cell in PLAN.cells:
        assert f"<td>{cell.label}</td>" in text
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
    assert "edgebuild verify" in text


def test_measured_memory_and_the_golden_check_are_shown_beside_the_plan() -> None:
    golden = {"steps": 12, "worst_error": 3.2e-6, "tolerance": 1e-3}
    text = render_report(MANIFEST, PLAN, TRAFFIC, {"weights": 271_000_000, "golden": golden})
    assert "269 MB planned, 271 MB measured" in text
    assert "12 steps compared with the reference: worst relative error 3.2e-06, allowed 0.001" in text


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert render_report(MANIFEST, PLAN, TRAFFIC, {"weights": 1}) == render_report(
        MANIFEST, PLAN, TRAFFIC, {"weights": 1}
    )


def test_names_from_outside_are_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    manifest = {**MANIFEST, "name": hostile, "model": {**MANIFEST["model"], "name": hostile}}
    traffic = replace(TRAFFIC, name=hostile, attribution=hostile, skipped={hostile: 3})
    text = render_report(manifest, plan_for(limits(device=hostile), traffic, SMOLLM2), traffic)
    assert "<script" not in text


def test_the_waterfall_has_no_gap_and_ends_at_the_device() -> None:
    steps = waterfall(PLAN, {})
    for before, after in itertools.pairwise(steps):
        assert after.start == pytest.approx(before.start + before.width, abs=0.02)
    assert steps[-1].start + steps[-1].width == pytest.approx(100, abs=0.02)


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
    assert all(bar.x >= 0 and bar.x + bar.width <= WIDTH and bar.y >= 0 for bar in chart.bars)
    assert all(0 <= mark.x <= WIDTH for mark in chart.marks)
    shown = sum(int(bar.title.split(": ")[1].split()[0].replace(",", "")) for bar in chart.bars)
    beyond = int(chart.beyond.split()[0].replace(",", "")) if chart.beyond else 0
    assert shown + beyond == sum(counts.values())
