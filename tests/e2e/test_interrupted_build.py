"""Builds that end too early: Ctrl-C, kill −9, a full disk. Nothing that looks finished, and the next build tidies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from command_line import command, environment, run, write_profile
from edgebuild.engine.targets import sdk_available


class Running:
    """A build in a process group of its own, as a terminal has it; its stderr is read line by line."""

    def __init__(self, folder: Path, profile: Path) -> None:
        line = command("edgebuild", "--profile", profile, "--output", folder / "out")
        self.process = subprocess.Popen(
            line, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.seen: list[str] = []

    @property
    def stderr(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    def until(self, text: str) -> None:
        """Read stderr up to a line that holds `text`."""
        for line in self.stderr:
            self.seen.append(line)
            if text in line:
                return
        pytest.fail(f"the build ended before {text!r}: {''.join(self.seen)}")

    def signal(self, number: signal.Signals) -> None:
        """To the whole group, as a terminal's Ctrl-C."""
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        self.seen += list(self.stderr)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.stderr.close()
        return self.process.wait(), "".join(self.seen)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the artifact goes: empty before."""
    return tmp_path


@pytest.fixture
def profile(workshop: Path, llama_artifact: Path) -> Path:
    assert llama_artifact.is_dir()  # its profile lies in the workshop
    return workshop / "everything.yaml"


@pytest.mark.parametrize(
    "moment", ["edgebuild llama", "✓ plan", "✓ export", "✓ hashes"],
    ids=["while reading", "while exporting", "while recording", "while checking"],
)  # fmt: skip
def test_ctrl_c_leaves_nothing_and_says_so(folder: Path, profile: Path, moment: str) -> None:
    running = Running(folder, profile)
    running.until(moment)
    running.signal(signal.SIGINT)
    code, err = running.end()
    assert code == 130, err
    assert err.rstrip().endswith("edgebuild: interrupted")
    assert "Traceback" not in err
    assert list(folder.iterdir()) == []


def test_ctrl_c_in_the_middle_of_the_export(folder: Path, profile: Path) -> None:
    running = Running(folder, profile)
    running.until("✓ plan")
    time.sleep(3)  # torch is imported and the graph is being traced
    running.signal(signal.SIGINT)
    code, err = running.end()
    assert code == 130, err
    assert "Traceback" not in err
    assert "✗ export" in err
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not sdk_available("tensorrt-rtx"), reason="the rtx extra (tensorrt-rtx) is not installed")
def test_ctrl_c_in_the_middle_of_an_engine_build(folder: Path, workshop: Path, toy_llama: Path) -> None:
    """TensorRT calls back into Python from C++, which swallows what is raised there."""
    lines = [f"model: {toy_llama}", "traffic: trace.csv"]
    running = Running(folder, write_profile(workshop, "interrupted-rtx", "rtx", *lines))
    running.until("✓ source hashes")
    time.sleep(1.5)
    running.signal(signal.SIGINT)
    code, err = running.end()
    assert code == 130, err
    assert "✗ tensorrt-rtx engine" in err
    assert "Traceback" not in err
    assert list(folder.iterdir()) == []


def test_ctrl_c_while_an_artifact_is_replaced_keeps_the_old_one(
    folder: Path, profile: Path, llama_artifact: Path
) -> None:
    shutil.copytree(llama_artifact, folder / "out")
    running = Running(folder, profile)
    running.until("✓ plan")
    running.signal(signal.SIGINT)
    assert running.end()[0] == 130
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert run(["edgebuild", "verify", folder / "out", "--no-golden"]).code == 0


def test_a_killed_build_leaves_nothing_that_looks_finished_and_the_next_one_tidies(
    folder: Path, profile: Path, llama_artifact: Path
) -> None:
    running = Running(folder, profile)
    running.until("✓ export")
    running.signal(signal.SIGKILL)
    assert running.end()[0] == -signal.SIGKILL
    left = [path.name for path in folder.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".out.building-")
    assert run(["edgert", "generate", folder / "out", "--prompt", "a"]).code == 3
    again = run(["edgebuild", "--profile", profile, "--output", folder / "out"])
    assert again.code == 0, again.err
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert (folder / "out" / "manifest.json").read_bytes() == (llama_artifact / "manifest.json").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for a toy build and not much more."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system needs the right to mount one: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_during_the_build(small_disk: Path, profile: Path) -> None:
    running = Running(small_disk, profile)
    running.until("✓ plan")
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 65536))
    code, err = running.end()
    assert code == 9, err
    lines = [line for line in err.splitlines() if line.startswith("edgebuild: ")]
    assert len(lines) == 1, err
    assert "bytes are free" in lines[0]
    assert "Traceback" not in err
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_disk_that_is_too_small_is_noticed_before_the_export(small_disk: Path, profile: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 1_000_000))
    ran = run(["edgebuild", "--profile", profile, "--output", small_disk / "out"])
    assert ran.code == 9
    assert "bytes are free" in ran.error_line
    assert "export" not in ran.err
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
