"""The memory ledger of a TensorRT plan against engines whose memory was read on an H200: benchmarks/ledger.py."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def ledger() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("ledger")


@pytest.mark.parametrize("shape", ["smollm2", "0.6b", "4b"])
def test_planned_memory_is_within_a_tenth_or_50_mb_of_what_the_engine_took(ledger: Any, shape: str) -> None:
    (case,) = [case for case in ledger.cases() if case.shape == shape]
    for row in ledger.rows_of(case):
        near = abs(row["difference_mb"]) <= max(50, 0.1 * row["actual_mb"])
        assert near, row


def test_the_result_file_is_todays_ledger(ledger: Any) -> None:
    recorded = json.loads((BENCHMARKS / "results" / "ledger.json").read_text())["rows"]
    assert recorded == [row for case in ledger.cases() for row in ledger.rows_of(case)], "run benchmarks/ledger.py"


@pytest.mark.parametrize("name", ["prefill-smollm2", "prefill-0.6b"])
def test_scratch_of_every_measured_chunk_cell_is_within_a_tenth(ledger: Any, name: str) -> None:
    cells = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["scratch_bytes_by_cell"]
    shape = ledger.SHAPES[name.removeprefix("prefill-")]
    model = ledger.ModelShape.from_config(ledger.ModelConfig.from_hf(shape.config()))
    from edgebuild.plan.memory import engine_scratch_bytes

    for label, actual in cells.items():
        if label.startswith("prefill-"):
            rows, tier = (int(part) for part in label.removeprefix("prefill-").split("@"))
            planned = engine_scratch_bytes(model, rows, tier, 1, 1, 2)
            assert abs(planned - actual) <= max(0.1 * actual, 3e6), (label, planned, actual)
