"""The README is true: its commands run as written, those that need a device parse, its Python example runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import SCRIPTS, environment
from edgebuild.profile import load_profile

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEVICES = ("rtx", "orin")  # profiles whose engines other tests build; a real Jetson is needed to finish the second


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(README) if found == language]


def commands() -> list[str]:
    lines = [line for kind in ("console", "bash") for text in blocks(kind) for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def needs_a_device(line: str) -> bool:
    words = shlex.split(line)
    return words[:2] == ["edgebuild", "resume"] or any(f"--profile {name} " in f"{line} " for name in DEVICES)


COMMANDS = [line for line in commands() if not line.startswith("make ")]
LONG = [line for line in COMMANDS if line.startswith("edgebuild train-mtp ")]  # trained for real in test_train_mtp.py
HERE = [line for line in COMMANDS if not needs_a_device(line) and line not in LONG]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, toy_llama: Path, workshop: Path) -> Path:
    """A folder as the README's reader has it: a trace and a model under the names used there."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "requests.csv").symlink_to(workshop / "trace.csv")
    (folder / "my-model").symlink_to(toy_llama)
    return folder


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment(PATH=path), input="/exit\n", capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(desk: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every command that this machine can run, once, in the README's order: later ones use what earlier ones made."""
    return {line: shell(line, desk) for line in HERE}


def test_there_are_commands_and_one_example() -> None:
    assert len(HERE) >= 8
    assert len(blocks("python")) == 1
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 15


def test_the_profile_of_the_readme_is_one(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "small.yaml").write_text(text)
    profile, base = load_profile(tmp_path / "small.yaml"), load_profile("cpu")
    assert (profile.name, profile.limits.slots, profile.limits.context_tokens) == ("small", 2, 1024)
    assert profile.device == base.device


@pytest.mark.parametrize("line", HERE)
def test_a_command_of_the_readme_runs(results: dict[str, subprocess.CompletedProcess[str]], line: str) -> None:
    assert results[line].returncode == 0, results[line].stderr
    assert "Traceback" not in results[line].stderr


@pytest.mark.parametrize("line", [line for line in COMMANDS if needs_a_device(line)])
def test_a_command_for_a_device_parses(line: str) -> None:
    from edgebuild.commands.build import build, resume

    program, *words = shlex.split(line)
    assert program == "edgebuild"
    if words[0] == "resume":
        assert resume.make_context("resume", words[1:]).params["artifact"]
    else:
        assert build.make_context("build", words).params["profile_name"] in DEVICES


@pytest.mark.parametrize("line", LONG)
def test_a_command_that_takes_long_parses(line: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgebuild.commands.train import train_mtp

    monkeypatch.chdir(desk)
    assert train_mtp.make_context("train-mtp", shlex.split(line)[2:]).params["output"] == Path("my-head.safetensors")


def test_the_python_example_runs_as_it_stands(results: dict[str, subprocess.CompletedProcess[str]], desk: Path) -> None:
    assert results
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]], cwd=desk, env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cancelled" in done.stdout
    assert done.stdout.count("length") + done.stdout.count("stop") == 2


@pytest.mark.parametrize("line", sorted({line for line in commands() if line.startswith("make ")}))
def test_a_make_command_names_a_target(line: str) -> None:
    done = subprocess.run(
        ["make", "-n", *shlex.split(line)[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_and_paths_in_the_documents_exist(document: str) -> None:
    path = REPOSITORY / document
    text = path.read_text(encoding="utf-8")
    links = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in filter(None, links):
        assert (path.parent / target).exists(), target
    named = re.findall(r"`((?:builder|runtime|tests|profiles|templates|docs|benchmarks)/[\w./-]+)`", text)
    for name in named:
        assert (REPOSITORY / name).exists(), name
