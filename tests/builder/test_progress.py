"""Progress lines: what a reader of stderr sees, whatever the names contain."""

from __future__ import annotations

import io

import pytest
from edgebuild.progress import Stages
from rich.console import Console


def stages() -> tuple[Stages, io.StringIO]:
    out = io.StringIO()
    return Stages(Console(file=out, width=40)), out


def test_a_stage_is_a_line_with_its_time_when_it_ends() -> None:
    shown, out = stages()
    with shown.stage("export") as report:
        report(0.5)
        assert out.getvalue() == ""
    assert out.getvalue().startswith("  ✓ export ")
    assert list(shown.seconds) == ["export"]


def test_a_stage_that_fails_says_which_and_lets_the_error_through() -> None:
    shown, out = stages()
    with pytest.raises(ZeroDivisionError), shown.stage("plan"):
        raise ZeroDivisionError
    assert out.getvalue().startswith("  ✗ plan after ")
    assert shown.seconds == {}


def test_brackets_are_text_and_long_lines_are_not_cut() -> None:
    shown, out = stages()
    path = "/a/[bold]/folder [/x] " + "with a long name " * 5
    shown.title("edgebuild", path)
    shown.note(path)
    assert out.getvalue() == f"edgebuild {path}\n    {path}\n"
