"""An artifact is whole and in place, or not there: Ctrl-C, kill -9, a full disk, a place that is taken."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from edgebuild import artifact as module
from edgebuild.artifact import ArtifactWriter, canonical_json
from edgebuild.errors import OutputError
from edgert.errors import ArtifactError
from edgert.integrity import check_files
from edgert.manifest import load_manifest
from toy_artifact import make_artifact, toy_manifest, write_files


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_committed_artifact_checks_out_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = make_artifact(tmp_path / "out" / "toy")
    manifest = load_manifest(target)
    check_files(target, manifest)
    assert {entry.path for entry in manifest.files} == {p.name for p in target.iterdir()} - {"manifest.json"}
    assert hidden(target.parent) == []


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = make_artifact(tmp_path / "a" / "toy"), make_artifact(tmp_path / "b c" / "toy")
    assert contents(first) == contents(second)


def test_nothing_in_the_manifest_tells_where_or_when_it_was_built(tmp_path: Path) -> None:
    text = (make_artifact(tmp_path / "toy") / "manifest.json").read_text()
    assert str(tmp_path) not in text


def broken_build(target: Path, error: BaseException, *, needed_bytes: int = 0) -> None:
    with ArtifactWriter(target, needed_bytes=needed_bytes) as writer:
        write_files(writer.directory)
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        broken_build(tmp_path / "toy", error())
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_a_commit_leaves_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "toy") as writer:
        writer.write("file", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_contradicts_itself_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="slots"):
        make_artifact(tmp_path / "toy", slots=1)
    assert list(tmp_path.iterdir()) == []


def test_publishing_before_sealing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not sealed"), ArtifactWriter(tmp_path / "toy") as writer:
        writer.publish()


def test_what_was_added_to_an_artifact_is_kept_beside_the_one_that_replaces_it(tmp_path: Path) -> None:
    def built() -> list[str]:
        with ArtifactWriter(tmp_path / "toy") as writer:
            write_files(writer.directory)
            writer.commit(toy_manifest())
        return [path.name for path in writer.kept]

    assert built() == []
    assert built() == []
    config = tmp_path / "toy" / "scheduler.yaml"
    as_built = config.read_text()
    config.write_text(as_built + "# mine\n")
    assert built() == ["toy.scheduler.yaml"]
    assert config.read_text() == as_built
    assert built() == []
    config.write_text(as_built + "# mine\n")
    (tmp_path / "toy" / "costs.json").write_text("{}")
    assert built() == ["toy.scheduler.yaml", "toy.costs.json"]  # the first has that content already
    config.write_text(as_built + "# another\n")
    assert built() == ["toy.2.scheduler.yaml"]
    assert (tmp_path / "toy.scheduler.yaml").read_text().endswith("# mine\n")
    assert (tmp_path / "toy.2.scheduler.yaml").read_text().endswith("# another\n")
    assert (tmp_path / "toy.costs.json").read_text() == "{}"


def test_an_old_artifact_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = make_artifact(tmp_path / "toy", name="old")
    with pytest.raises(RuntimeError):
        broken_build(target, RuntimeError())
    assert load_manifest(target).name == "old"
    make_artifact(target, name="new")
    assert load_manifest(target).name == "new"
    assert hidden(tmp_path) == []


def test_a_failed_rename_puts_the_old_artifact_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_artifact(tmp_path / "toy", name="old")
    real = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if ".building-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        make_artifact(target, name="new")
    assert load_manifest(target).name == "old"
    assert hidden(tmp_path) == []


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file"):
        make_artifact(tmp_path / "file")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="exists and is not a readable artifact"):
        make_artifact(tmp_path / "home")
    target = make_artifact(tmp_path / "toy")
    (target / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds 'notes\.txt', which is not part of the artifact"):
        make_artifact(target)
    assert (target / "notes.txt").exists()


def test_costs_measured_on_the_device_do_not_stand_in_the_way_of_the_next_build(tmp_path: Path) -> None:
    target = make_artifact(tmp_path / "toy")
    (target / "costs.json").write_text("{}")
    make_artifact(target)
    assert not (target / "costs.json").exists()


def test_an_empty_directory_is_a_free_place(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    load_manifest(make_artifact(tmp_path / "toy"))


def test_a_disk_that_is_too_small_is_refused_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(100, 60, 40))  # noqa: ARG005
    with pytest.raises(OutputError, match=r"needs about \d+ bytes, 40 bytes are free"):
        ArtifactWriter(tmp_path / "toy", needed_bytes=1000).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_told_with_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match=r"needs about \d+ bytes, \d+ bytes are free"):
        broken_build(tmp_path / "toy", full, needed_bytes=1000)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from pathlib import Path
from edgebuild.artifact import ArtifactWriter
from toy_artifact import toy_manifest, write_files
with ArtifactWriter(Path(sys.argv[1])) as writer:
    write_files(writer.directory)
    if sys.argv[2] == "sealed":
        writer.seal(toy_manifest())
    print("ready", flush=True)
    time.sleep(600)
"""


def start(target: Path, stage: str) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target), stage],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": tests},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("stage", ["written", "sealed"])
def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path: Path, stage: str) -> None:
    target = tmp_path / "toy"
    process = start(target, stage)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    assert len(hidden(tmp_path)) == 1
    make_artifact(target)  # the next build of the same target tidies up
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_build_that_is_still_running_is_not_tidied_away(tmp_path: Path) -> None:
    target = tmp_path / "toy"
    process = start(target, "written")
    try:
        make_artifact(target)
        assert len(hidden(tmp_path)) == 1
    finally:
        process.kill()
        process.communicate()


def test_an_artifact_set_aside_by_a_killed_build_gets_its_place_back(tmp_path: Path) -> None:
    target = make_artifact(tmp_path / "toy", name="old")
    target.rename(tmp_path / ".toy.replaced-1")
    with ArtifactWriter(target):
        assert load_manifest(target).name == "old"
    assert load_manifest(target).name == "old"


def test_canonical_json_is_sorted_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == '{\n  "a": "é",\n  "b": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


def test_the_writer_fills_in_the_files(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "toy") as writer:
        write_files(writer.directory)
        sealed = writer.commit(toy_manifest())
    assert load_manifest(tmp_path / "toy") == sealed
