"""A small seeded share of tests/fuzz_artifact.py: 400 mutations, every one refused before a backend is opened."""

from __future__ import annotations

from pathlib import Path

from artifact_mutations import MUTATIONS
from fuzz_artifact import run
from toy_artifact import make_artifact


def test_every_mutation_is_refused_cleanly(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "toy")
    result = run(artifact, tmp_path, count=400, seed=20)
    assert result.failures == []
    assert sum(result.refused.values()) == 400
    assert set(result.refused) == {mutation.__name__ for mutation in MUTATIONS}
