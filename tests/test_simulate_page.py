"""docs/simulate.md says what the simulator says today: one line is run again, the others stand on the same code."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from edgebuild.profile.loader import bundled_traffic_names

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
LOST_AT_MOST = 0.02


@pytest.fixture(scope="module")
def simulated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulated", ROOT / "benchmarks" / "simulated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulated"] = module
    spec.loader.exec_module(module)
    return module


def rows(simulated: ModuleType) -> list[str]:
    made = PAGE.split(simulated.BEGIN)[1].split(simulated.END)[0]
    return [
        line for line in made.splitlines() if line.startswith(tuple(f"| {name} " for name in bundled_traffic_names()))
    ]


def test_every_device_traffic_and_load_has_its_line(simulated: ModuleType) -> None:
    assert len(rows(simulated)) == len(simulated.DEVICES) * len(bundled_traffic_names()) * len(simulated.LOADS)


def test_adaptive_loses_nowhere_and_wins_where_load_varies(simulated: ModuleType) -> None:
    for line in rows(simulated):
        gains = [float(text) / 100 for text in re.findall(r"\| ([+-][\d.]+)% ", line)]
        assert len(gains) == 3, line
        assert min(gains) >= -LOST_AT_MOST, line
        if line.startswith("| bursty-long"):
            assert max(gains) > LOST_AT_MOST, line


def test_a_line_comes_out_as_it_stands_there(simulated: ModuleType) -> None:
    device = simulated.DEVICES[-1]
    line = simulated.line(simulated.row(device, "steady-chat", simulated.LOADS[0]))
    assert line in PAGE, f"run python benchmarks/simulated.py: {line}"
