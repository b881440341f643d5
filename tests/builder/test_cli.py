"""The entry point of edgebuild: which exit code and which line each kind of failure gets."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import command
from edgebuild import cli
from edgebuild.errors import DoesNotFit
from edgert.errors import GoldenMismatch
from toy_artifact import make_artifact


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `edgebuild profiles` with a command that raises `error`; returns the exit code."""

    def command(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: click.Command("profiles", callback=command))
    monkeypatch.setattr(sys, "argv", ["edgebuild", "profiles"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DoesNotFit("too large", hint="take a smaller one"), 6, "edgebuild: too large (take a smaller one)\n"),
        (GoldenMismatch("wrong numbers"), 7, "edgebuild: wrong numbers\n"),
        (KeyboardInterrupt(), 130, "edgebuild: interrupted\n"),
        (RuntimeError("a\nb"), 1, "edgebuild: RuntimeError: a b (EDGEBUILD_DEBUG=1 shows where)\n"),
    ],
)
def test_every_failure_is_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error, monkeypatch) == code
    assert capsys.readouterr().err.lstrip("\n") == line


def test_the_traceback_of_what_nobody_expected_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEBUILD_DEBUG", "1")
    with pytest.raises(RuntimeError, match="here"):
        failing(RuntimeError("here"), monkeypatch)


def test_options_without_a_command_mean_build(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(_: Any, __: Any, name: str) -> click.Command:
        asked.append(name)
        return click.Command(name, params=[click.Option(["--profile"])], callback=lambda **_: None)

    monkeypatch.setattr(cli.LazyGroup, "get_command", get)
    monkeypatch.setattr(sys, "argv", ["edgebuild", "--profile", "orin.yaml"])
    cli.main()
    assert set(asked) == {"build"}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("insepct", "'insepct' (did you mean inspect?)"),
        ("Verify", "'Verify' (did you mean verify?)"),
        ("frobnicate", "'frobnicate'."),
    ],
)
def test_a_mistyped_command_names_the_nearest(
    typed: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["edgebuild", typed, "x"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"Error: No such command {says}\n")


def test_a_terminal_without_utf8_shows_a_mark_where_a_character_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of profiles has dashes, and every table a frame."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["edgebuild", "profiles", "list"])
    cli.main()
    screen.flush()
    assert b"orin-nano" in screen.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_goes_away_is_quiet(options: list[str], tmp_path: Path) -> None:
    """`edgebuild inspect ARTIFACT | head`."""
    artifact = make_artifact(tmp_path / "toy")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        ran = subprocess.run(command("edgebuild", "inspect", artifact, *options), stdout=pipe, stderr=subprocess.PIPE)
    assert (ran.returncode, ran.stderr) == (141, b"")
