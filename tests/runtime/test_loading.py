"""What is refused before a backend is opened, and what the machine's memory has to do with it."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
from edgert.config import default_config
from edgert.engine import Engine
from edgert.errors import ArtifactError, BackendError, ConfigError
from edgert.hostmemory import available_bytes, resident_bytes
from edgert.loading import plan_loading, require_memory
from edgert.manifest import LedgerLine, load_manifest
from edgert.manifest_rules import check_consistency
from fakes import make_runtime
from toy_artifact import make_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "toy")


def test_an_artifact_is_read_and_checked_without_a_backend(artifact: Path) -> None:
    loading = plan_loading(artifact, {"threads": 3, "enable_cuda_graph": False})
    assert loading.config.enable_cuda_graph is False
    assert loading.options == {"enable_cuda_graph": False, "threads": 3}
    assert set(loading.cells) == set(loading.manifest.cells)


def test_a_flipped_byte_is_found_unless_only_sizes_are_asked_for(artifact: Path) -> None:
    weights = artifact / "decoder.weights"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"decoder\.weights: SHA-256"):
        plan_loading(artifact, {})
    assert plan_loading(artifact, {"verify_files": False}).manifest.name


def test_drafting_without_a_drafter_is_refused_and_not_ignored(artifact: Path) -> None:
    with pytest.raises(ConfigError, match="this artifact has no drafter"):
        plan_loading(artifact, {"enable_mtp": True, "mtp_num_heads": 2})


def test_a_manifest_with_a_drafter_lists_its_file(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match="'following' is missing"):
        check_consistency(replace(load_manifest(artifact), draft_length=2, draft_vocabulary=100))


def test_a_load_that_needs_more_than_is_available_stops_with_both_numbers(artifact: Path) -> None:
    manifest = replace(
        load_manifest(artifact),
        ledger=(
            LedgerLine("weights", 600_000_000, ""),
            LedgerLine("weight copies", 700_000_000, ""),
            LedgerLine("margin", 900_000_000, ""),
        ),
    )
    config = default_config(manifest)
    require_memory(manifest, config, 600_000_000)
    require_memory(manifest, config, None)
    with pytest.raises(BackendError, match="needs 600 MB, 599 MB are available"):
        require_memory(manifest, config, 599_000_000)
    on_gpu = replace(manifest, backend=replace(manifest.backend, name="tensorrt"))
    require_memory(on_gpu, config, 1)


def test_available_counts_and_not_free_and_unknown_is_none(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000000 kB\nMemFree: 400000 kB\nMemAvailable: 5000000 kB\n")
    assert available_bytes(meminfo) == 5_000_000 * 1024
    meminfo.write_text("MemFree: 400000 kB\n")
    assert available_bytes(meminfo) is None
    assert available_bytes(tmp_path / "absent") is None
    assert resident_bytes(tmp_path / "absent") is None


def test_a_handle_keeps_its_engine_alive_until_it_has_ended() -> None:
    handle = Engine(make_runtime).submit([1, 2, 3], max_tokens=40)
    gc.collect()
    assert handle.result(30).finish_reason == "length"


@pytest.mark.parametrize("value", ["no", 0, None])
def test_an_option_that_is_neither_true_nor_false_is_refused(artifact: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"verify_files is {value!r}: expected True or False"):
        plan_loading(artifact, {"verify_files": value})
