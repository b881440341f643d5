"""costs.json: exact in both directions, strict, and what is looked up between what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgert.cells import Cell
from edgert.costs import StepCosts, load_costs, parse_costs, require_costs
from edgert.errors import ArtifactError, ConfigError
from edgert.headroom import slots_within
from edgert.measure import device_label, measure_costs, quick_costs, stored_costs
from edgert.tempo import Rules
from fakes import FakeBackend, make_cells, make_runtime
from hypothesis import given
from hypothesis import strategies as st

SMALL, LARGE = Cell("decode", 2, 1, 128), Cell("decode", 2, 1, 512)
COSTS = StepCosts(
    "measured", "a device, 2 threads", "onnxruntime", "1.2", "a" * 64, "tier", 1, 0.25,
    {SMALL: (2.0, 3.0), LARGE: (6.0, 8.0), Cell("prefill", 1, 64, 512): (10.0,)}, note="how",
)  # fmt: skip


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(COSTS.dump())
    assert load_costs(tmp_path / "costs.json") == COSTS
    assert COSTS.dump() == load_costs(tmp_path / "costs.json").dump()


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"format_version": 2}, "format_version"),
        ({"source": "guess"}, "one of measured, estimate"),
        ({"reads": 1}, "one of tier, written"),
        ({"host_ms": -1}, "a number from 0"),
        ({"run_ahead": True}, "a whole number"),
        ({"device": "a\nb"}, "without control characters"),
        ({"cells": []}, "0 entries"),
        ({"made_on": "2026-11-30"}, "unknown key"),
        ({"cells": [{"kind": "decode", "batch": 1, "query_rows": 1, "kv_tier": 64, "ms": [0]}]}, "a number from 1e-06"),
        ({"cells": [{"kind": "decode", "batch": 1, "query_rows": 9, "kv_tier": 4, "ms": [1]}]}, "a cell"),
        ({"cells": [COSTS.to_json()["cells"][0]] * 2}, "each cell once"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ArtifactError, match=pattern):
        parse_costs(json.dumps({**COSTS.to_json(), **change}).encode())


@pytest.mark.parametrize(
    "content", [b"", b'{"format_version"', b"\xff\xfe", COSTS.dump().replace("0.25", "NaN").encode(), None]
)
def test_what_helps_against_a_damaged_file_is_to_measure_again(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"costs\.json.*\(measure again: edgebuild simulate") as caught:
        load_costs(path)
    assert "rebuild" not in str(caught.value)


def test_a_cost_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decode-2x1@128: \(0,\) are not milliseconds"):
        replace(COSTS, cells={SMALL: (0,)})


@given(st.integers(1, 512), st.integers(0, 3))
def test_a_backend_that_reads_what_is_written_pays_between_the_tiers(written: int, drafts: int) -> None:
    by_tier, by_length = COSTS, replace(COSTS, reads="written")
    k = min(drafts, 1)
    assert by_tier.step_ms(LARGE, written, drafts) == COSTS.cells[LARGE][k]
    low, high = COSTS.cells[SMALL][k], COSTS.cells[LARGE][k]
    cost = by_length.step_ms(LARGE, written, drafts)
    if written >= 128:
        assert cost == pytest.approx(low + (high - low) * (written - 128) / 384)
    else:
        assert low / 2 <= cost <= low
    assert by_length.shape_ms("decode", 2, 1, written, drafts) == pytest.approx(cost)
    assert by_tier.shape_ms("decode", 2, 1, written, drafts) == (low if written <= 128 else high)
    assert by_tier.shape_ms("decode", 4, 1, written) is None


def test_cells_without_a_cost_are_named() -> None:
    require_costs(COSTS, [SMALL])
    with pytest.raises(ConfigError, match=r"no cost is known of 1 of 2 cells: decode-4x1@64"):
        require_costs(COSTS, [SMALL, Cell("decode", 4, 1, 64)])


def virtual(context: int = 512, **options: Any) -> Any:
    cells = make_cells(context, chunks=(16, 64, 256), tiers=(256, context))
    runtime = make_runtime(context=context, cells=cells, **options)
    backend = runtime.backend
    assert isinstance(backend, FakeBackend)
    backend.cost_s = lambda cell: 1e-3 * (2 + 0.1 * cell.batch * cell.query_rows + 0.01 * cell.kv_tier)
    return runtime, backend


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_every_cell_is_measured_and_its_slots_are_left_clean(run_ahead: int) -> None:
    runtime, backend = virtual(run_ahead=run_ahead)
    calls: list[tuple[int, int]] = []
    costs = measure_costs(runtime, lambda: backend.now_s, model="m", progress=lambda done, of: calls.append((done, of)))
    assert set(costs.cells) == set(runtime.limits.cells)
    for cell, (ms,) in costs.cells.items():
        assert ms == pytest.approx(1e3 * backend.cost_s(cell))
    assert (costs.run_ahead, costs.model, costs.source) == (run_ahead, "m", "measured")
    assert costs.host_ms == pytest.approx(0.0, abs=1e-9)
    assert calls[-1] == (len(costs.cells), len(costs.cells))
    assert (backend.device_length == 0).all()
    assert (backend.state == 0).all()


def test_the_host_takes_what_a_step_lasts_beyond_its_cell() -> None:
    runtime, backend = virtual()
    looks = iter(range(10**6))  # each look at the clock takes 0.2 ms; the worker looks when it commits, too
    measured = measure_costs(runtime, lambda: backend.now_s + 2e-4 * next(looks), model="m")
    assert 0.15 < measured.host_ms < 0.8


def test_a_quick_measurement_goes_on_along_the_line() -> None:
    runtime, backend = virtual()
    backend.cost_s = lambda cell: 1e-3 * (100 + 2 * cell.query_rows)
    costs = quick_costs(backend, runtime.limits.cells, 4, runtime.cache_tokens, lambda: backend.now_s)
    assert costs.shape_ms("prefill", 1, 256, 10) == pytest.approx(100 + 2 * 256)
    assert not any(launch.step.cell.query_rows == 256 for launch in backend.launches)


def test_stored_costs_are_taken_for_their_model_and_device_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, backend = virtual()
    cells = runtime.limits.cells
    assert stored_costs(tmp_path, "m", backend, cells) is None
    costs = measure_costs(runtime, lambda: backend.now_s, model="m")
    (tmp_path / "costs.json").write_text(costs.dump())
    assert stored_costs(tmp_path, "m", backend, cells) == load_costs(tmp_path / "costs.json")
    assert caplog.messages == []
    assert stored_costs(tmp_path, "another", backend, cells) is None
    assert stored_costs(tmp_path, "m", backend, (*cells, Cell("decode", 8, 1, 64))) is None
    (tmp_path / "costs.json").write_text("{}")
    assert stored_costs(tmp_path, "m", backend, cells) is None
    assert len(caplog.messages) == 3
    assert all("costs.json is not used" in message for message in caplog.messages)


def test_a_device_is_named_with_what_its_speed_depends_on(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    assert device_label({"device": "cpu", "threads": 2}, tmp_path) == "cpu, 2 threads"
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert device_label({"device": "cpu", "threads": 2}, tmp_path) == "Some CPU @ 2 GHz, 2 threads"
    (tmp_path / "proc/device-tree/model").write_text("Some Board\0")
    assert device_label({"device": "cpu", "threads": 2}, tmp_path) == "Some Board, 2 threads"
    assert device_label({"device": "H200", "driver": "580"}) == "H200, driver 580"


@pytest.mark.parametrize(
    ("step_ms", "fraction", "slots"),
    [
        ({1: 10.0, 2: 11.0, 4: 12.0}, 0.0, 4),
        ({1: 10.0, 2: 11.0, 4: 12.0}, 0.2, 3),  # 250 of 333 tokens/s
        ({1: 10.0, 2: 11.0, 4: 12.0}, 0.3, 2),
        ({1: 10.0, 2: 20.0}, 0.2, 2),  # a batch gains nothing: not below half of the slots
    ],
)
def test_headroom_admits_as_many_as_leave_it_free(step_ms: dict[int, float], fraction: float, slots: int) -> None:
    cells = {Cell("decode", batch, 1, 64): (ms,) for batch, ms in step_ms.items()}
    costs = StepCosts("measured", "", "fake", "", "", "tier", 0, 0.0, cells)
    rules = Rules((16,), tuple(step_ms), costs=costs)
    headroom = slots_within(rules, 4, fraction)
    assert headroom.slots == slots
    largest = max(step_ms)
    assert headroom.all_tokens_per_s == pytest.approx(largest / step_ms[largest] * 1e3)
    assert slots_within(Rules((16,), (1, 2, 4)), 4, fraction).slots == 4


def test_what_headroom_costs_is_said() -> None:
    cells = {Cell("decode", batch, 1, 64): (ms,) for batch, ms in {1: 10.0, 2: 11.0, 4: 12.0}.items()}
    rules = Rules((16,), (1, 2, 4), costs=StepCosts("measured", "", "fake", "", "", "tier", 0, 0.0, cells))
    assert slots_within(rules, 4, 0.2).describe(0.2, "measured") == (
        "headroom 20%: 3 of 4 slots are admitted, 250.0 instead of 333.3 tokens/s (measured)"
    )
    assert "no step costs are known" in slots_within(Rules((16,)), 4, 0.2).describe(0.2, "")
