"""The same inputs give the same bytes, whatever the process, the hash seed, the directory and the time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from command_line import run
from edgert.integrity import sha256_file


def hashes(artifact: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(artifact.iterdir())}


def test_a_second_build_elsewhere_and_later_is_the_same_in_every_byte(
    llama_artifact: Path, workshop: Path, toy_llama: Path, tmp_path: Path
) -> None:
    """Copied inputs in another folder, another process, other file times, another hash seed."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    shutil.copytree(toy_llama, inputs / "llama")
    for name in ("trace.csv", "everything.yaml"):
        shutil.copyfile(workshop / name, inputs / name)
    for path in inputs.rglob("*"):
        os.utime(path, (1e9, 1e9))
    ran = run(["edgebuild", "--profile", "everything.yaml", "--output", "again"], cwd=inputs, PYTHONHASHSEED="17")
    assert ran.code == 0, ran.err
    assert hashes(inputs / "again") == hashes(llama_artifact)
