"""The logbook: what is written is read back, a cut-off line is forgiven, anything else is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edgebuild.errors import TuningError
from edgebuild.tune.logbook import LogbookWriter, read_logbook
from edgebuild.tune.records import Result, Trial
from edgebuild.tune.session import last_result, remember, remembered
from toy_artifact import make_artifact
from toy_tuning import FakeDevice, make_setup, run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A logbook of a whole run."""
    folder = tmp_path_factory.mktemp("logbook")
    run(make_setup(make_artifact(folder / "toy"), folder), folder / "tuning.jsonl", FakeDevice())
    return folder / "tuning.jsonl"


@pytest.fixture
def book(written: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tuning.jsonl"
    path.write_bytes(written.read_bytes())
    return path


def test_what_is_written_is_read_back(book: Path, tmp_path: Path) -> None:
    lines = read_logbook(book).lines
    assert {type(line) for line in lines} == {Trial, Result}
    with LogbookWriter(tmp_path / "copy.jsonl") as writer:
        for line in lines:
            writer.append(line)
    assert (tmp_path / "copy.jsonl").read_bytes() == book.read_bytes()
    assert read_logbook(tmp_path / "copy.jsonl").lines == lines


def test_a_file_cut_at_any_byte_of_its_last_line_still_holds_the_others(book: Path) -> None:
    data = book.read_bytes()
    start = data.rindex(b"\n", 0, len(data) - 1) + 1
    whole = len(read_logbook(book).lines)
    for end in (start, start + 1, (start + len(data)) // 2, len(data) - 1):
        book.write_bytes(data[:end])
        found = read_logbook(book)
        assert (len(found.lines), found.torn_bytes) == (whole - 1, end - start)
        with LogbookWriter(book) as writer:
            assert writer.torn_bytes == end - start
        assert book.read_bytes() == data[:start]


@pytest.mark.parametrize(
    "content", [b"a thesis, without a newline", b'{"prompt": "mine"}\n{"prompt": "the last"}', b'{"prompt": "one"}']
)
def test_a_file_that_is_no_logbook_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    for _ in range(2):  # the lock is let go as well
        with pytest.raises(TuningError, match=r"mine.txt.*another --logbook"), LogbookWriter(path):
            pass
    assert path.read_bytes() == content


def test_one_long_torn_line_is_cut_off_whole(tmp_path: Path) -> None:
    book = tmp_path / "book.jsonl"
    book.write_bytes(b'{"format_version":1,"kind":"' + b"t" * 200_000)
    with LogbookWriter(book) as writer:
        assert writer.torn_bytes == 200_028
    assert book.read_bytes() == b""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(figures={**d["figures"], "tpot_ms": "fast"}), "figures.tpot_ms"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d.pop("device"), "device"),
        (lambda d: d.update(verdict="maybe"), "verdict"),
        (lambda d: d.update(format_version=2), "format_version is 2"),
        (lambda d: d.update(kind="guess"), "kind is 'guess': expected one of trial, result"),
        (lambda d: d["artifact"].update(sha256="x"), "artifact.sha256"),
        (lambda d: d.update(number=True), "number"),
    ],
)
def test_a_line_that_is_wrong_is_refused_by_place(book: Path, change: object, words: str) -> None:
    lines = book.read_text().splitlines()
    document = json.loads(lines[1])
    change(document)  # type: ignore[operator]
    lines[1] = json.dumps(document)
    book.write_text("\n".join(lines) + "\n")
    with pytest.raises(TuningError) as caught:
        read_logbook(book)
    assert f"{book.name}:2: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("line", [b"", b"[1]", b"{", b'{"kind": NaN', b"\xff\xfe", b"[" * 5000])
def test_a_line_that_is_no_record_is_refused(book: Path, line: bytes) -> None:
    data = book.read_bytes()
    book.write_bytes(line + b"\n" + data)
    with pytest.raises(TuningError, match=r"tuning.jsonl:1: "):
        read_logbook(book)


def test_two_runs_do_not_write_at_once(tmp_path: Path) -> None:
    with (
        LogbookWriter(tmp_path / "book.jsonl"),
        pytest.raises(TuningError, match="another tuning run"),
        LogbookWriter(tmp_path / "book.jsonl"),
    ):
        pass
    with LogbookWriter(tmp_path / "book.jsonl"):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuningError, match="cannot be written"), LogbookWriter(tmp_path / "file" / "book.jsonl"):
        pass
    with pytest.raises(TuningError, match="cannot be read"):
        read_logbook(tmp_path / "none.jsonl")


def test_the_result_is_kept_by_device_for_later_builds(book: Path, tmp_path: Path) -> None:
    result = last_result(book)
    path = remember(result, tmp_path / "kept")
    assert path == remembered(result.device.identity, result.artifact.model, "onnxruntime", tmp_path / "kept")
    assert last_result(path) == result


def test_a_logbook_without_a_result_says_so(book: Path) -> None:
    book.write_text("".join(book.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(TuningError, match="no finished tuning run"):
        last_result(book)
