"""Artifacts that the end-to-end tests share, each built once a session, each through another door of the builder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from command_line import Ran, run, write_profile
from toy_gguf import write_gguf


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a space in its name, holding a trace and nothing else yet. Not a working directory."""
    folder = tmp_path_factory.mktemp("e2e") / "a workshop"
    folder.mkdir()
    drawn = random.Random(0)
    rows = [f"2023-11-16 18:15:46.6805900,{drawn.randint(1, 200)},{drawn.randint(1, 50)}" for _ in range(400)]
    (folder / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return folder


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with spaces and brackets in its path, far from every input."""
    folder = tmp_path_factory.mktemp("elsewhere") / "another working [directory]"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def llama_build(workshop: Path, elsewhere: Path, toy_llama: Path) -> tuple[Path, Ran]:
    """The form on the design card: nothing but a profile, which names model and traffic beside itself."""
    (workshop / "llama").symlink_to(toy_llama)
    profile = write_profile(workshop, "everything", "cpu", "model: llama", "traffic: trace.csv")
    return elsewhere / "llama artifact", run(
        ["edgebuild", "--profile", profile, "--output", "llama artifact"], cwd=elsewhere
    )


@pytest.fixture(scope="session")
def llama_artifact(llama_build: tuple[Path, Ran]) -> Path:
    artifact, ran = llama_build
    assert ran.code == 0, ran.err
    return artifact


@pytest.fixture(scope="session")
def toy_cpu(workshop: Path) -> Path:
    """A cpu profile that names neither model nor traffic of its own."""
    return write_profile(workshop, "toy-cpu", "cpu")


@pytest.fixture(scope="session")
def qwen3_build(workshop: Path, elsewhere: Path, toy_cpu: Path, toy_qwen3: Path) -> tuple[Path, Ran]:
    """`build` by its name, everything as an option, the result as JSON."""
    artifact = elsewhere / "qwen3"
    options = ["--model", toy_qwen3, "--traffic", workshop / "trace.csv", "--output", artifact, "--json"]
    return artifact, run(["edgebuild", "build", "--profile", toy_cpu, *options], cwd=elsewhere)


@pytest.fixture(scope="session")
def qwen3_artifact(qwen3_build: tuple[Path, Ran]) -> Path:
    artifact, ran = qwen3_build
    assert ran.code == 0, ran.err
    return artifact


@pytest.fixture(scope="session")
def toy_file(workshop: Path, toy_llama: Path) -> Path:
    """The toy Llama as a GGUF of 8-bit blocks."""
    return write_gguf(toy_llama, workshop / "toy-llama.Q8_0.gguf", stored_as="Q8_0")


@pytest.fixture(scope="session")
def gguf_build(workshop: Path, elsewhere: Path, toy_cpu: Path, toy_file: Path) -> tuple[Path, Ran]:
    """A GGUF without a command and without an output: the default place is artifacts/MODEL-PROFILE."""
    ran = run(
        ["edgebuild", "--profile", toy_cpu, "--model", toy_file, "--traffic", workshop / "trace.csv"], cwd=elsewhere
    )
    return elsewhere / "artifacts" / "toy-llama.Q8_0-toy-cpu", ran


@pytest.fixture(scope="session")
def gguf_artifact(gguf_build: tuple[Path, Ran]) -> Path:
    artifact, ran = gguf_build
    assert ran.code == 0, ran.err
    return artifact
