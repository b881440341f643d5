"""A trace with times says how many requests run at once; without times, or costs, nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edgebuild.tune.concurrency import of_traffic
from toy_artifact import make_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy whose plan names a device, from which costs can be estimated."""
    made = make_artifact(tmp_path_factory.mktemp("concurrency") / "toy")
    (made / "plan.json").write_text(json.dumps({"device": "cpu"}))
    return made


def trace(folder: Path, every_s: float, count: int = 60) -> Path:
    path = folder / "trace.csv"
    rows = [f"{number * every_s},100,40" for number in range(count)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


def test_faster_arrivals_mean_more_at_a_time(artifact: Path, tmp_path: Path) -> None:
    alone = of_traffic(trace(tmp_path, 100.0), artifact, 4)
    crowd = of_traffic(trace(tmp_path, 1e-6), artifact, 4)
    assert alone is not None
    assert crowd is not None
    assert (alone[0], crowd[0]) == (1, 4)
    assert "0.01 requests/s of the trace" in alone[1]
    assert "there are 4 slots" in crowd[1]


def test_without_times_or_costs_it_is_unknown(artifact: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"prompt": "no trace at all"}\n')
    assert of_traffic(lengths, artifact, 4) is None
    assert of_traffic(trace(tmp_path, 0.0), artifact, 4) is None
    assert of_traffic(trace(tmp_path, 1.0), make_artifact(tmp_path / "without a plan"), 4) is None
