"""Real TensorRT-RTX engine builds, on a machine that needs no GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from edgebuild.engine.shapes import engine_shape
from edgebuild.engine.targets import BuildPlace, can_build_here, sdk_available, target_names
from edgebuild.engine.tensorrt import EngineBuild, build_engine
from edgebuild.errors import EngineError
from edgert.backends import trt_module
from edgert.cells import Cell
from edgert.errors import BackendError
from toy_onnx import CACHE, HEAD_DIM, KV_HEADS, write_toy_decoder

needs_rtx = pytest.mark.skipif(
    not sdk_available("tensorrt-rtx"), reason="the rtx extra (tensorrt-rtx) is not installed"
)
CELLS = (Cell("decode", 1, 1, 128), Cell("decode", 2, 1, 256), Cell("prefill", 1, 64, 128), Cell("prefill", 1, 16, 256))


@dataclass(frozen=True)
class Target:
    backend: str
    compute_capability: str | None = None


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineBuild, int]:
    directory = tmp_path_factory.mktemp("engine")
    weight_bytes = write_toy_decoder(directory / "decoder.onnx")
    built = build_engine(
        directory / "decoder.onnx", directory / "decoder.plan", CELLS, compute_capabilities=["8.9", "12.0"]
    )
    return built, weight_bytes


@needs_rtx
def test_an_engine_with_one_profile_per_cell_is_built_without_a_gpu(build: tuple[EngineBuild, int]) -> None:
    built, weight_bytes = build
    assert built.plan_bytes == built.path.stat().st_size > weight_bytes
    assert built.cells == CELLS
    assert built.shapes == tuple(engine_shape(cell) for cell in CELLS)
    assert built.capabilities == ("SM89", "SM120")
    assert built.version == trt_module.version("tensorrt-rtx")
    assert built.path.read_bytes()[1:4] == b"trt"  # the magic that opens a plan


@needs_rtx
def test_every_cache_output_is_paired_with_the_input_it_updates_in_place(build: tuple[EngineBuild, int]) -> None:
    built, _ = build
    assert set(built.aliased) == {(f"{state}.{i}.out", f"{state}.{i}") for state in ("key", "value") for i in (0, 1)}
    shapes = {tensor.name: tensor.shape for tensor in built.inputs}
    assert shapes["key.0"] == (-1, KV_HEADS, CACHE, HEAD_DIM)


@needs_rtx
def test_constants_are_counted_once(build: tuple[EngineBuild, int]) -> None:
    built, weight_bytes = build
    assert weight_bytes * 0.98 <= built.weight_bytes <= weight_bytes * 1.1


@needs_rtx
def test_two_row_profiles_do_not_store_the_weights_twice(tmp_path: Path) -> None:
    write_toy_decoder(tmp_path / "decoder.onnx")
    sizes = {}
    for rows in (1, 2):
        built = build_engine(
            tmp_path / "decoder.onnx", tmp_path / f"{rows}.plan", [CELLS[0], CELLS[2]], min_matrix_rows=rows
        )
        sizes[rows] = built.plan_bytes
    assert sizes[2] < sizes[1]


@needs_rtx
def test_a_file_is_parsed_from_another_directory_with_spaces_in_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "a directory with spaces"
    directory.mkdir()
    write_toy_decoder(directory / "my decoder.onnx")
    monkeypatch.chdir(tmp_path)
    relative = Path(os.path.relpath(directory / "my decoder.onnx"))
    assert build_engine(relative, tmp_path / "out.plan", CELLS[:1]).plan_bytes > 0


@needs_rtx
def test_an_unknown_operator_is_named_with_its_node(tmp_path: Path) -> None:
    write_toy_decoder(tmp_path / "decoder.onnx", unknown_operator=True)
    with pytest.raises(EngineError, match=r"Frobnicate.*node_frobnicated"):
        build_engine(tmp_path / "decoder.onnx", tmp_path / "decoder.plan", CELLS[:1])
    assert not (tmp_path / "decoder.plan").exists()


@needs_rtx
def test_a_file_that_is_not_onnx_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "decoder.onnx").write_bytes(b"not a protobuf at all" * 10)
    with pytest.raises(EngineError, match=r"decoder\.onnx"):
        build_engine(tmp_path / "decoder.onnx", tmp_path / "decoder.plan", CELLS[:1])


@needs_rtx
def test_external_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    write_toy_decoder(tmp_path / "decoder.onnx")
    (tmp_path / "decoder.weights").unlink()
    with pytest.raises(EngineError, match=r"decoder\.(weights|onnx)"):
        build_engine(tmp_path / "decoder.onnx", tmp_path / "decoder.plan", CELLS[:1])


@needs_rtx
def test_a_build_can_be_stopped_and_leaves_no_plan(tmp_path: Path) -> None:
    write_toy_decoder(tmp_path / "decoder.onnx")
    seen: list[tuple[str, int, int]] = []

    def stop_at_once(phase: str, done: int, total: int) -> bool:
        seen.append((phase, done, total))
        return False

    with pytest.raises(EngineError, match="stopped on request"):
        build_engine(tmp_path / "decoder.onnx", tmp_path / "decoder.plan", CELLS[:1], progress=stop_at_once)
    assert seen
    assert not (tmp_path / "decoder.plan").exists()


def test_a_build_without_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no cells"):
        build_engine(tmp_path / "decoder.onnx", tmp_path / "decoder.plan", [])


def test_classic_tensorrt_stops_before_the_engine_when_its_module_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trt_module.MODULES, "tensorrt", ("a_module_that_does_not_exist", "install it"))
    place = can_build_here(Target("tensorrt", "8.7"))
    assert not place.possible
    assert place.next_step is not None
    assert "resume" in place.next_step
    with pytest.raises(BackendError, match="install it"):
        trt_module.load("tensorrt")


def test_onnxruntime_needs_no_engine() -> None:
    assert can_build_here(Target("onnxruntime")) == BuildPlace(
        True, "the onnxruntime backend runs the ONNX file itself: no engine to build"
    )


@needs_rtx
def test_rtx_engines_can_be_built_on_any_machine() -> None:
    assert can_build_here(Target("tensorrt-rtx", "12.0")).possible


def test_target_names_refuse_a_capability_that_the_library_does_not_know() -> None:
    known = ["SM80", "SM89", "SM120"]
    assert target_names(["8.9", "12.0", "8.9"], known) == ("SM89", "SM120")
    assert target_names(["9.0"], known) == ("SM80",)
    with pytest.raises(EngineError, match=r"10\.0 \(it knows 8\.0, 8\.9, 12\.0\)"):
        target_names(["10.0"], known)


def test_an_unknown_flavour_is_refused() -> None:
    with pytest.raises(BackendError, match="flavour"):
        trt_module.load("tensorflow")
