"""`edgebuild traffic`: tables, JSON, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from edgebuild.commands.traffic import traffic
from edgebuild.errors import TrafficError
from edgebuild.traffic import read_traffic
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

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
    assert "skipped 1 rows: no output tokens" in shown


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
    assert data["skipped"] == {"no output tokens": 1}
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


def test_a_wrong_tokenizer_is_an_error(trace, tmp_path):
    for place, told in ((tmp_path / "none", "no such tokenizer"), (trace, "not a tokenizer")):
        with pytest.raises(TrafficError, match=told):
            run(trace, "--tokenizer", place)


def test_an_output_that_cannot_be_written_leaves_nothing(trace, tmp_path):
    with pytest.raises(TrafficError, match="No such file"):
        run(trace, "--output", tmp_path / "no" / "h.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.csv"]


def test_a_name_that_no_artifact_can_carry_is_refused_before_a_build(trace):
    with pytest.raises(TrafficError, match="--name: name has characters that do not print"):
        run(trace, "--name", "two\nlines")
