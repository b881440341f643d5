"""The JIT cache: keyed, whole or absent, damaged never used."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from edgert.backends import trt_cache
from edgert.backends.trt_cache import CacheKey

KEY = CacheKey("NVIDIA H200", "9.0", 13000, "1.6.1.120", "ab" * 32)


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    path = tmp_path / "models" / "demo"
    path.mkdir(parents=True)
    return path


def test_what_was_stored_comes_back_from_beside_the_artifact(artifact: Path) -> None:
    assert trt_cache.load(artifact, KEY) is None
    path = trt_cache.store(artifact, KEY, b"kernels" * 1000)
    assert path is not None
    assert path.parent == artifact.parent / "demo.cache"
    assert trt_cache.load(artifact, KEY) == b"kernels" * 1000
    assert not list(artifact.iterdir())


@pytest.mark.parametrize(
    "change",
    [{"driver": 13010}, {"device": "NVIDIA H100"}, {"tensorrt": "1.7.0"}, {"plan": "cd" * 32}],
    ids=lambda change: next(iter(change)),
)
def test_another_device_driver_version_or_plan_has_another_cache(artifact: Path, change: dict[str, str]) -> None:
    trt_cache.store(artifact, KEY, b"kernels")
    assert trt_cache.load(artifact, replace(KEY, **change)) is None


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:0], lambda b: b[:-9] + b"x" * 9, lambda b: b"y" + b])
def test_a_damaged_cache_is_warned_about_and_not_used(
    artifact: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    path = trt_cache.store(artifact, KEY, b"kernels" * 100)
    assert path is not None
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert trt_cache.load(artifact, KEY) is None
    assert "damaged" in caplog.text
    assert not path.exists()


def test_a_folder_that_cannot_be_written_moves_the_cache_to_the_user(artifact: Path) -> None:
    (artifact.parent / "demo.cache").write_text("a file where the folder would be")
    path = trt_cache.store(artifact, KEY, b"kernels")
    assert path is not None
    assert artifact.parent not in path.parents
    assert trt_cache.load(artifact, KEY) == b"kernels"
