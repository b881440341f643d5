"""What `edgebuild tune` prints in the end: readable in a narrow terminal too."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from edgebuild.tune.search import Setup
from edgebuild.tune.table import print_result
from rich.console import Console
from toy_artifact import make_artifact
from toy_tuning import FakeDevice, make_setup, run


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return make_setup(make_artifact(tmp_path / "toy"), tmp_path)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_is_broken_in_a_narrow_terminal(setup: Setup, tmp_path: Path, width: int) -> None:
    result, trials = run(setup, tmp_path / "book.jsonl", FakeDevice())
    out = io.StringIO()
    print_result(Console(file=out, width=width), result, trials)
    said = out.getvalue()
    assert "…" not in said
    for trial in trials:
        if trial.figures is not None and trial.verdict != "measured":
            shown = f"{trial.figures.output_tokens_per_s:,.1f}"
            assert re.search(rf"(?<![\d.,]){re.escape(shown)}(?![\d.,])", said), shown
    if width == 80:  # the words have room too
        assert re.search(r"^ *baseline .*baseline *$", said, re.MULTILINE)
        assert "prefill: decode" in said
        assert max(len(line.rstrip()) for line in said.splitlines() if " baseline " in line) <= 80
