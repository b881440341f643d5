"""`edgebuild traffic`: tables, JSON, files."""

from __future__ import annotations

import json
from pathlib import Path
from struct import pack

import pytest
from click.testing import CliRunner
from edgebuild.checkpoint import open_checkpoint
from edgebuild.commands.traffic import traffic
from edgebuild.errors import CheckpointError, TrafficError
from edgebuild.profile.loader import bundled_traffic
from edgebuild.traffic import read_traffic
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from toy_gguf import write_gguf

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,100,10\nx,300,20\nx,5,0\n"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(traffic, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_the_table_shows_lengths_and_what_was_skipped(trace):
    shown = run(trace)
    assert "2 requests" in shown
    assert "300" in shown
    assert "skipped 1 row: with no output tokens (line 4: generatedtokens 0)\n" in shown


def test_one_request_is_no_plural(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("Request tokens,Response tokens,Log Type\n5,6,API log\n")
    shown = run(path)
    assert "trace: 1 request\n" in "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"
    assert "task API log: 1 request\n" in shown


def test_every_reason_stands_on_one_line_the_most_frequent_first(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("t,ContextTokens,GeneratedTokens\nx,100,10\nx,abc,1\nx,7,-1\nx,[b]7,1\nx,1.5,2\nx,7\n")
    told = (
        "skipped 5 rows: 3 not a whole number (line 3: contexttokens 'abc'), "
        "1 negative (line 4: generatedtokens '-1'), 1 without generatedtokens (line 7: 2 of 3 fields)\n"
    )
    assert told in run(path)


def test_a_histogram_file_keeps_the_counts_and_no_value_of_the_trace(tmp_path):
    path, output = tmp_path / "trace.csv", tmp_path / "h.yaml"
    path.write_text("t,ContextTokens,GeneratedTokens\nx,100,10\nx,secret,1\n")
    run(path, "--output", output)
    assert "secret" not in output.read_text()
    assert "skipped 1 row: not a whole number\n" in run(output)


def test_json_is_all_that_stdout_carries(trace, tmp_path):
    output = tmp_path / "h.yaml"
    data = json.loads(run(trace, "--json", "--output", output, "--name", "mine", "--attribution", "me"))
    assert data["requests"] == 2
    assert data["prompt_tokens"] == {
        "p10": 100,
        "p50": 100,
        "p90": 300,
        "p99": 300,
        "max": 300,
        "mean": 200,
        "total": 400,
    }
    assert data["skipped"] == {"with no output tokens": 1}
    assert data["first_skipped"] == {"with no output tokens": "line 4: generatedtokens 0"}
    again = read_traffic(output)
    assert (again.name, again.attribution, again.requests) == ("mine", "me", 2)
    assert again.source_sha256 == read_traffic(trace).source_sha256


def test_a_picture_is_drawn(trace, tmp_path):
    run(trace, "--picture", tmp_path / "h.svg")
    drawn = (tmp_path / "h.svg").read_text()
    assert drawn.startswith("<?xml")
    assert drawn.count("<path") > 20


@pytest.mark.parametrize("as_folder", [True, False])
def test_sharegpt_is_counted_with_a_real_tokenizer(tmp_path, as_folder):
    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "share"
    turns = [{"from": "human", "value": "one two, three"}, {"from": "gpt", "value": "two"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    place = tmp_path if as_folder else tmp_path / "tokenizer.json"
    assert json.loads(run(path, "--json", "--tokenizer", place))["prompt_tokens"]["max"] == 4


TEXTS = ("Hello, world 2024", "  über\n\nwords ", "<|im_start|>user", "")


def share(path: Path) -> Path:
    """Conversations whose answers are TEXTS, as a ShareGPT file."""
    rows = [
        {"conversations": [{"from": "human", "value": text + "?"}, {"from": "gpt", "value": text}]} for text in TEXTS
    ]
    path.write_text(json.dumps(rows))
    return path


def test_a_gguf_counts_as_the_tokenizer_that_it_was_made_from(toy_llama, tmp_path):
    trace = share(tmp_path / "share")
    model = tmp_path / "model"
    model.mkdir()
    gguf = write_gguf(toy_llama, model / "toy.gguf")
    expected = json.loads(run(trace, "--json", "--tokenizer", toy_llama))
    assert expected["requests"] == 3
    for place in (toy_llama / "tokenizer.json", gguf, model):
        assert json.loads(run(trace, "--json", "--tokenizer", place)) == expected


def test_a_gguf_of_an_architecture_that_cannot_be_built_still_counts(toy_llama, tmp_path):
    gguf = write_gguf(toy_llama, tmp_path / "toy.gguf")
    gguf.write_bytes(gguf.read_bytes().replace(b"general.architecture" + pack("<IQ", 8, 5) + b"llama",
                                               b"general.architecture" + pack("<IQ", 8, 5) + b"mamba"))  # fmt: skip
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        open_checkpoint(gguf)
    assert json.loads(run(share(tmp_path / "share"), "--json", "--tokenizer", gguf))["requests"] == 3


def test_a_damaged_gguf_is_an_error(toy_llama, trace, tmp_path):
    gguf = write_gguf(toy_llama, tmp_path / "toy.gguf")
    gguf.write_bytes(gguf.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"toy\.gguf"):
        run(trace, "--tokenizer", gguf)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such tokenizer"),
        (b"a,b\n1,2\n", "neither a GGUF nor a tokenizer.json"),
        (b"\x80\xff\x00" * 50, "neither a GGUF nor a tokenizer.json"),
        (b'{"a": "\xff"}', "neither a GGUF nor a tokenizer.json"),
        (b"", "neither a GGUF nor a tokenizer.json"),
        (b'{"model_type": "llama"}', "JSON, but not a tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_told_what_is_accepted(trace, tmp_path, content, told):
    place = tmp_path / "model"
    if content is not None:
        place.write_bytes(content)
    with pytest.raises(TrafficError, match=told) as caught:
        run(trace, "--tokenizer", place)
    message = str(caught.value)
    assert message.startswith(str(place))
    assert "\n" not in message
    assert "a GGUF file, a tokenizer.json, or a folder with one of them" in message


def test_a_folder_without_a_tokenizer_or_with_two_models_is_told(trace, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(TrafficError, match=r"holds no tokenizer\.json and no GGUF"):
        run(trace, "--tokenizer", folder)
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF")
    with pytest.raises(TrafficError, match="holds 2 GGUF files"):
        run(trace, "--tokenizer", folder)


def test_a_bundled_histogram_is_read_by_its_name_and_another_name_is_not(tmp_path):
    shown = json.loads(run("steady-chat", "--output", tmp_path / "mine.yaml", "--json"))
    assert shown["name"] == "steady-chat"
    assert read_traffic(tmp_path / "mine.yaml") == read_traffic(bundled_traffic("steady-chat"))
    with pytest.raises(TrafficError, match="stedy-chat: neither a file nor a bundled traffic") as refused:
        run("stedy-chat")
    assert "did you mean steady-chat?" in str(refused.value.hint)


def test_an_output_that_cannot_be_written_leaves_nothing(trace, tmp_path):
    with pytest.raises(TrafficError, match="No such file"):
        run(trace, "--output", tmp_path / "no" / "h.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.csv"]


def test_a_name_that_no_artifact_can_carry_is_refused_before_a_build(trace):
    with pytest.raises(TrafficError, match="--name: name has characters that do not print"):
        run(trace, "--name", "two\nlines")
