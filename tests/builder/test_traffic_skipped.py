"""Rows that a trace reader leaves out: told apart by what is wrong, the first of each kind with its place and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from edgebuild.traffic import Histogram, read_traffic, source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traffic_blocks import assert_block_ends_do_not_matter

Write = Callable[..., Path]

DAMAGED = (  # lines 3 and 6 are blank; line 10 is good
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "a,374,44\n"
    "\n"
    "b,abc,44\n"
    "c,10.5,44\n"
    "\n"
    "d,5,-7\n"
    "e,5,\n"
    "f,1234567890,3\n"
    "g,396,109\n"
    "h,0,3\n"
    "i,5000000,3\n"
    "j,7,0\n"
    "k,7,8"
)
DAMAGED_FIRST = {
    "not a whole number": "line 4: contexttokens 'abc'",
    "negative": "line 7: generatedtokens '-7'",
    "without generatedtokens": "line 8",
    "of more than 9 digits": "line 9: contexttokens '1234567890'",
    "with no prompt tokens": "line 11: contexttokens 0",
    "longer than 4,194,304 tokens": "line 12: contexttokens 5000000",
    "with no output tokens": "line 13: generatedtokens 0",
}
DAMAGED_JSON = (
    '{"input_length": 374, "output_length": 44}\n'
    "\n"
    '{"input_length": 396, "output_length": 109}\n'
    "\n"
    '{"input_length": 5, "output_length": -2}\n'
    '{"input_length": 0, "output_length": 2}\n'
    '{"input_length": 5, "output_length": 2.5}\n'
    '{"input_length": 5}\n'
    '{"input_length": 1e13, "output_length": 1}\n'
    '{"input_length": 5, "output_length": 1e7}\n'
    '{"input_length": "5", "output_length": 1}\n'
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(content, newline="")
        return path

    return write


def lengths(histogram: Histogram) -> tuple[list[int], list[int]]:
    """Prompt lengths and output lengths of all requests, each in rising order."""
    prompts, outputs = (
        np.repeat(np.arange(counts.size), counts).tolist()
        for counts in (histogram.prompt_counts, histogram.output_counts)
    )
    return prompts, outputs


@pytest.mark.parametrize("quoted", [False, True])
def test_the_first_bad_row_of_each_reason_is_named(write, quoted):
    content = DAMAGED.replace("k,7", '"k",7') if quoted else DAMAGED
    histogram = read_traffic(write(content))
    assert histogram.skipped == {**dict.fromkeys(DAMAGED_FIRST, 1), "not a whole number": 2}
    assert histogram.first_skipped == DAMAGED_FIRST
    assert lengths(histogram) == ([7, 374, 396], [8, 44, 109])


@pytest.mark.parametrize(
    ("row", "reason", "place"),
    [
        ("5,44", "without generatedtokens", "line 3: 2 of 4 fields"),
        ("5", "without contexttokens", "line 3: 1 of 4 fields"),
        ("x,5,44", "with fewer fields than the header", "line 3: 3 of 4 fields"),
        ("x,5,44,note,more", "with more fields than the header", "line 3: 5 of 4 fields"),
        ("x, ,44,note", "without contexttokens", "line 3"),
        ("x,5,1e3,note", "not a whole number", "line 3: generatedtokens '1e3'"),
        ("x,-5.0,-1,note", "negative", "line 3: contexttokens '-5.0'"),
        ("x,\x1b[31m,1,note", "not a whole number", r"line 3: contexttokens '\x1b[31m'"),
    ],
)
def test_a_bad_row_is_told_by_what_is_wrong_with_it(write, row, reason, place):
    histogram = read_traffic(write(f"t,ContextTokens,GeneratedTokens,note\nx,3,4,n\n{row}\nx,3,4,n\n"))
    assert histogram.first_skipped == {reason: place}
    assert histogram.skipped == {reason: 1}
    assert lengths(histogram) == ([3, 3], [4, 4])


def test_a_long_value_is_cut(write):
    found = read_traffic(write(f"ContextTokens,GeneratedTokens\n3,4\n{'z' * 5000},4\n")).first_skipped
    assert found == {"not a whole number": f"line 3: contexttokens '{'z' * 39}…"}


def test_a_quoted_field_over_two_lines_counts_as_two_lines(write):
    histogram = read_traffic(write('t,ContextTokens,GeneratedTokens\n"x\ny",3,4\n"x\ny",no,4\nz,3,-4\n'))
    assert histogram.first_skipped == {
        "not a whole number": "line 4: contexttokens 'no'",
        "negative": "line 6: generatedtokens '-4'",
    }


def test_a_number_padded_more_than_numpy_looks_for_is_counted(write):
    content = f"ContextTokens,GeneratedTokens\n{' ' * 30}5,6{' ' * 30}\n3,4\n"
    assert lengths(read_traffic(write(content))) == ([3, 5], [4, 6])


def test_the_first_bad_row_is_found_in_a_later_block(write, monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 4096)
    rows = ["x,374,44"] * 5000
    rows[4321] = "x,374,n/a"
    rows[4900] = "x,374,??"
    histogram = read_traffic(write("\n".join(["t,ContextTokens,GeneratedTokens", *rows])))
    assert histogram.first_skipped == {"not a whole number": "line 4,323: generatedtokens 'n/a'"}
    assert histogram.skipped == {"not a whole number": 2}


def test_damaged_json_rows_are_told_apart(write):
    histogram = read_traffic(write(DAMAGED_JSON))
    assert lengths(histogram) == ([374, 396], [44, 109])
    assert histogram.skipped == {
        "negative": 1,
        "with no prompt tokens": 1,
        "not a whole number": 2,
        "without output_length": 1,
        "longer than 4,194,304 tokens": 2,
    }
    assert histogram.first_skipped == {
        "negative": "line 5: output_length -2",
        "with no prompt tokens": "line 6: input_length 0",
        "not a whole number": "line 7: output_length 2.5",
        "without output_length": "line 8",
        "longer than 4,194,304 tokens": "line 9: input_length 10000000000000.0",
    }


@given(st.integers(1, 64), st.sampled_from([DAMAGED, DAMAGED.replace("\n", "\r\n"), DAMAGED_JSON]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_places_do_not_depend_on_where_blocks_end(write, size, content):
    assert_block_ends_do_not_matter(write(content), size)


@pytest.mark.parametrize(
    ("usage", "reason", "found"),
    [
        ({"prompt_tokens": 5}, "without completion_tokens", ""),
        ({"input_tokens": 5}, "without completion_tokens", ""),
        ({"input_tokens": 5, "output_tokens": "6"}, "not a whole number", ": output_tokens '6'"),
        ({"input_tokens": 5, "output_tokens": 6, "completion_tokens": [6]}, "not a whole number",
         ": completion_tokens […]"),
        ({"prompt_tokens": {"a": 1}, "completion_tokens": 6}, "not a whole number", ": prompt_tokens {…}"),
        ({"prompt_tokens": 5, "completion_tokens": -1e14}, "negative", ": completion_tokens -100000000000000.0"),
        ({"prompt_tokens": 5, "completion_tokens": float("nan")}, "not a whole number", ": completion_tokens nan"),
        ({"prompt_tokens": 5, "completion_tokens": None, "output_tokens": 4}, "without completion_tokens", ""),
        ({"prompt_tokens": 5, "output_tokens": -4}, "negative", ": output tokens -4"),
    ],
)  # fmt: skip
def test_a_usage_without_lengths_names_the_field_that_was_read(write, usage, reason, found):
    good = {"prompt_tokens": 3, "completion_tokens": 4}
    rows = [{"custom_id": "a", "response": {"status_code": 200, "body": {"usage": each}}} for each in (good, usage)]
    histogram = read_traffic(write("\n".join(json.dumps(row) for row in rows)))
    assert histogram.first_skipped == {reason: f"line 2{found}"}
    assert histogram.skipped == {reason: 1}


def test_a_turn_without_text_is_named(write):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "gpt", "value": 3}]
    rows = [{"conversations": []}, {"conversations": turns}]
    histogram = read_traffic(write(json.dumps(rows)), tokenizer=len)
    assert histogram.first_skipped["with a turn without text"] == "record 2, turn 3"
