"""A packed plan gives back what went in, however it is read; what is no plan or a damaged one is refused by name."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from edgert.backends import trt_plan
from edgert.backends.trt_plan import PackedPlan, is_packed, pack_plan, stream_reader
from edgert.errors import ArtifactError
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 1 << 16  # instead of 4 MiB, so that small files have several
WEIGHTS = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float16).tobytes()
TEXT = b"__device__ __forceinline__ half2 kernel(const half2* a, int n);\n" * 2048


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_plan, "BLOCK_BYTES", BLOCK)


def content(weights: int, text: int) -> bytes:
    return b"ftrt" + WEIGHTS[:weights] + TEXT[:text] + WEIGHTS[: weights // 2]


@settings(max_examples=40, deadline=None)
@given(
    weights=st.integers(0, len(WEIGHTS)),
    text=st.integers(0, len(TEXT)),
    reads=st.lists(st.tuples(st.integers(0, 1 << 18), st.integers(1, 1 << 18)), max_size=8),
)
def test_every_stretch_of_a_packed_plan_is_that_of_the_plan(
    tmp_path_factory: pytest.TempPathFactory, weights: int, text: int, reads: list[tuple[int, int]]
) -> None:
    plan, path = content(weights, text), tmp_path_factory.mktemp("plan") / "decoder.plan"
    assert pack_plan(plan, path) == path.stat().st_size
    packed = PackedPlan(path)
    assert packed.size == len(plan)
    for offset, count in [(0, len(plan)), *reads]:
        part = packed.read(offset, count)
        assert part == plan[offset : offset + len(part)]
        assert len(part) == max(0, min(count, len(plan) - offset, BLOCK - offset % BLOCK))
    packed.close()


def test_text_shrinks_and_weights_are_stored_and_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    plan = b"ftrt" + WEIGHTS[: BLOCK - 4] + TEXT[:BLOCK] + WEIGHTS[:BLOCK]
    size = pack_plan(plan, tmp_path / "a.plan")
    assert size < 2 * BLOCK + BLOCK // 10
    pack_plan(plan, tmp_path / "b.plan")
    assert (tmp_path / "a.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.plan") as archive:
        ways = [block.compress_type for block in archive.infolist()]
    assert ways == [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED]


class _Reads:
    """The base class of TensorRT's reader, as far as a reader needs it."""


FAKE = SimpleNamespace(IStreamReaderV2=_Reads, SeekPosition=SimpleNamespace(SET="set", CUR="cur", END="end"))


def test_the_reader_reads_on_seeks_and_keeps_an_error(tmp_path: Path) -> None:
    plan, path = content(BLOCK * 2, BLOCK), tmp_path / "decoder.plan"
    pack_plan(plan, path)
    errors: list[Exception] = []
    packed = PackedPlan(path)
    reader = stream_reader(FAKE, packed, errors)
    got = b""
    while part := reader.read(1 << 20, 0):
        got += part
    assert got == plan
    assert reader.seek(10, "set")
    assert reader.read(3, 0) == plan[10:13]
    assert reader.seek(4, "cur")
    assert reader.read(2, 0) == plan[17:19]
    assert reader.seek(-5, "end")
    assert plan[-5:].startswith(reader.read(50, 0))
    assert not reader.seek(1, "end")
    assert not reader.seek(-1, "set")
    assert not errors
    packed.close()

    damaged = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        text = next(block for block in archive.infolist() if block.compress_type == zipfile.ZIP_DEFLATED)
    damaged[text.header_offset + 60] ^= 255
    path.write_bytes(damaged)
    packed = PackedPlan(path)
    reader = stream_reader(FAKE, packed, errors)
    reader.seek(int(text.filename) * BLOCK, "set")
    assert reader.read(10, 0) == b""
    assert isinstance(errors[0], ArtifactError)
    assert "decoder.plan is damaged" in str(errors[0])
    assert packed.read(0, 10) == plan[:10]  # what is whole is still read
    packed.close()


def test_pages_that_were_read_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("resident pages are read from /proc, which this system has not")
    monkeypatch.setattr(trt_plan, "BLOCK_BYTES", 4 << 20)
    noise = np.random.default_rng(1).integers(0, 256, 64 << 20, np.uint8)
    noise[:4] = np.frombuffer(b"ftrt", np.uint8)
    pack_plan(noise, tmp_path / "decoder.plan")

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))

    packed, offset, before, most = PackedPlan(tmp_path / "decoder.plan"), 0, mapped(), 0
    while part := packed.read(offset, 1 << 30):
        assert np.array_equal(np.frombuffer(part, np.uint8), noise[offset : offset + len(part)])
        offset, most = offset + len(part), max(most, mapped() - before)
    packed.close()
    assert offset == len(noise)
    assert most < len(noise) // 2


def test_a_plan_as_tensorrt_wrote_it_is_told_from_a_packed_one_and_from_other_files(tmp_path: Path) -> None:
    path = tmp_path / "decoder.plan"
    path.write_bytes(content(100, 0))
    assert not is_packed(path)
    path.unlink()
    pack_plan(content(100, 0), path)
    assert is_packed(path)
    path.write_bytes(b"<html>")
    with pytest.raises(ArtifactError, match=r"decoder\.plan is not a TensorRT plan"):
        is_packed(path)


@pytest.mark.parametrize("kind", ["cut short", "not a plan", "empty", "blocks of other sizes", "shifted index"])
def test_a_file_that_only_looks_packed_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "decoder.plan"
    if kind == "blocks of other sizes":
        with zipfile.ZipFile(path, "w") as archive:
            for name in "ab":
                archive.writestr(name, b"ftrt")
    elif kind == "empty":
        zipfile.ZipFile(path, "w").close()
    else:
        pack_plan(b"no plan at all" if kind == "not a plan" else content(BLOCK * 2, 0), path)
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[: BLOCK * 2])
    if kind == "shifted index":
        # the last 22 bytes say where the index lies; zipfile thinks that something stands before the archive
        record = bytearray(path.read_bytes())
        place = len(record) - 22 + 16
        record[place : place + 4] = (int.from_bytes(record[place : place + 4], "little") + 5000).to_bytes(4, "little")
        path.write_bytes(record)
    with pytest.raises(ArtifactError, match=r"decoder\.plan"):
        PackedPlan(path)
