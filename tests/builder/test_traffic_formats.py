"""Trace formats: told by content, never by column order or file name; what is left out is counted by reason."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from edgebuild.errors import TrafficError
from edgebuild.profile import bundled_traffic
from edgebuild.traffic import KNOWN_FORMATS, Histogram, csv_format, read_traffic, source
from edgebuild.traffic.histogram import percentile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traffic_blocks import assert_block_ends_do_not_matter

Write = Callable[..., Path]

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"  # the real file's last line has no end either
)
AZURE_2025 = (
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    "2024-10-15 00:00:00.0000000,3,374,44\n"
    "2024-10-15 00:00:00.1000000,0,396,109\n"
    "2024-10-15 00:00:00.2000000,1,879,55\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,374,44,418,Conversation log\n"
    "45,ChatGPT,64,0,64,Conversation log\n"
    "50,GPT-4,396,109,505,API log\n"
    "51,GPT-4,879,55,934,API log\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": 27482 + i, "input_length": p, "output_length": n, "hash_ids": list(range(14))}) + "\n"
    for i, (p, n) in enumerate([(374, 44), (396, 109), (879, 55)])
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def same_lengths(histogram: Histogram, requests: Iterable[tuple[int, int]]) -> bool:
    pairs = list(requests)
    expected = Histogram.from_lengths([p for p, _ in pairs], [n for _, n in pairs])
    arrays = ("prompt_counts", "output_counts", "decode_context_counts")
    return all(getattr(histogram, key).tolist() == getattr(expected, key).tolist() for key in arrays)


THREE = [(374, 44), (396, 109), (879, 55)]


@pytest.mark.parametrize("name", ["trace", "trace.csv", "AzureLLMInferenceTrace.csv", "notes.jsonl", "x.yaml"])
@pytest.mark.parametrize("content", [AZURE_2023, AZURE_2025, BURSTGPT, MOONCAKE])
def test_the_content_tells_the_format_and_the_name_does_not(write, content, name):
    assert same_lengths(read_traffic(write(content, name)), THREE)


@pytest.mark.parametrize("content", [AZURE_2023, AZURE_2025, BURSTGPT])
@pytest.mark.parametrize("change", ["crlf", "lf", "no last end", "bom", "quotes", "blank lines", "spaces", "gzip"])
def test_the_same_trace_written_another_way_reads_the_same(write, content, change):
    lines = content.replace("\r", "").strip().split("\n")
    text = "\n".join(lines) + "\n"
    if change == "crlf":
        text = "\r\n".join(lines) + "\r\n"
    elif change == "no last end":
        text = text[:-1]
    elif change == "bom":
        text = "\ufeff" + text
    elif change == "quotes":
        text = "\n".join(",".join(f'"{field}"' for field in line.split(",")) for line in lines)
    elif change == "blank lines":
        text = "\n\n".join(lines) + "\n\n\n"
    elif change == "spaces":
        text = "\n".join(line.replace(",", " , ") for line in lines)
    data = gzip.compress(text.encode()) if change == "gzip" else text.encode()
    assert same_lengths(read_traffic(write(data)), THREE)


def test_burstgpt_failures_are_counted_and_the_log_type_is_the_task(write):
    histogram = read_traffic(write(BURSTGPT))
    assert histogram.requests == 3
    assert histogram.skipped == {"failed, with 0 response tokens": 1}
    assert histogram.first_skipped == {"failed, with 0 response tokens": "line 3: response tokens 0"}
    assert histogram.tasks == {"Conversation log": 1, "API log": 2}


def test_newer_burstgpt_columns_are_passed_over(write):
    content = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
    )
    assert same_lengths(read_traffic(write(content)), [(906, 446)])


@given(
    order=st.permutations(range(5)),
    rows=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 900)), min_size=1, max_size=20),
    quoted=st.booleans(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_columns_may_stand_in_any_order(write, order, rows, quoted):
    if not any(prompt and output for prompt, output in rows):
        rows = [*rows, (1, 1)]
    header = ["TIMESTAMP", "ContextTokens", "GeneratedTokens", "NumImages", "Remark"]
    table = [header] + [["2023-11-16 18:15:46.6805900", str(p), str(n), "7", "x"] for p, n in rows]
    if quoted:
        table[-1][4] = '"a, ""b"""'
    histogram = read_traffic(write("\n".join(",".join(row[i] for i in order) for row in table)))
    assert same_lengths(histogram, [(p, n) for p, n in rows if p and n])
    assert histogram.requests + sum(histogram.skipped.values()) == len(rows)


CELL = st.one_of(
    st.integers(0, 10**10).map(str),
    st.sampled_from(
        [
            "",
            " ",
            "-5",
            "12.5",
            "1e3",
            "nan",
            "abc",
            " 12",
            "12 ",
            "+3",
            "0012",
            "12.0",
            ".0",
            "1.00",
            "٣.0",
            "\r",
            "7\r",
            "١٢",
            "9" * 30,
            '"7"',
            '""',
        ]
    ),
)


@given(st.lists(st.lists(CELL, min_size=1, max_size=4).map(",".join), min_size=1, max_size=12), st.integers(0, 12))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_whole_blocks_and_single_rows_agree_on_any_damage(write, lines, good_at):
    lines.insert(good_at, "now,5,6")
    path = write("t,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    fast = read_traffic(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_format._Rows, "_take_fast", lambda _self, _block: False)
        slow = read_traffic(path)
    assert fast == slow
    assert fast.first_skipped == slow.first_skipped
    rows = "\n".join(lines).replace("\r", "\n").split("\n")
    assert fast.requests + sum(fast.skipped.values()) == sum(1 for row in rows if row)


@given(st.integers(1, 64), st.sampled_from([AZURE_2023, AZURE_2025, BURSTGPT, MOONCAKE]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_block_ends_may_fall_anywhere(write, size, content):
    assert_block_ends_do_not_matter(write(content), size)


def test_a_length_column_that_stands_twice_is_refused(write):
    with pytest.raises(TrafficError, match="'contexttokens' stands 2 times"):
        read_traffic(write("ContextTokens,contexttokens ,GeneratedTokens\n1,2,3\n"))


def test_an_endless_field_is_a_bad_row(write):
    histogram = read_traffic(write('t,ContextTokens,GeneratedTokens\n"' + "x" * 200_000 + '",1,2\n"y",3,4\n'))
    assert same_lengths(histogram, [(3, 4)])
    assert histogram.skipped == {csv_format.NOT_CSV: 1}
    assert histogram.first_skipped[csv_format.NOT_CSV].startswith("line 2: field larger than field limit")


def test_line_ends_of_an_old_mac_are_line_ends(write):
    assert same_lengths(read_traffic(write(AZURE_2023.replace("\r\n", "\r"))), THREE)


def test_a_first_line_longer_than_a_block_is_still_recognised(write, monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 64)
    row = {"hash_ids": list(range(500)), "input_length": 374, "output_length": 44}
    assert same_lengths(read_traffic(write(json.dumps(row))), [(374, 44)])


def test_mooncake_rows_without_lengths_are_counted(write):
    content = (
        MOONCAKE + '{"timestamp": 1}\nnot json\n{"input_length": true, "output_length": 3}\n[1]\n'
        '{"input_length": 10, "output_length": 2, "type": "text"}\n'
    )
    histogram = read_traffic(write(content))
    assert same_lengths(histogram, [*THREE, (10, 2)])
    assert histogram.skipped == {"without input_length": 1, "not a whole number": 1, "not a JSON object": 2}
    assert histogram.first_skipped == {
        "without input_length": "line 4",
        "not a JSON object": "line 5: 'not json'",
        "not a whole number": "line 6: input_length True",
    }
    assert histogram.tasks == {"text": 1}


def batch(custom_id: str, response: object, error: object = None) -> str:
    return json.dumps({"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": error}) + "\n"


def test_openai_batch_output(write):
    def ok(usage: object) -> object:
        return {"status_code": 200, "request_id": "r", "body": {"object": "chat.completion", "usage": usage}}

    content = (
        batch("0", None, {"code": "batch_expired", "message": "..."})
        + batch("1", ok({"prompt_tokens": 374, "completion_tokens": 44, "total_tokens": 418}))
        + batch("2", ok({"input_tokens": 396, "output_tokens": 109}))  # the responses endpoint
        + batch("3", ok(None))
        + batch("4", {"status_code": 429, "body": {"error": {}}})
        + batch("5", ok({"prompt_tokens": 9, "total_tokens": 9}))  # embeddings
        + batch("6", None)
        + batch("7", {"status_code": 200, "body": None})
    )
    histogram = read_traffic(write(content))
    assert same_lengths(histogram, [(374, 44), (396, 109)])
    assert histogram.skipped == {
        "failed, with an error": 1,
        "without usage in response.body": 2,
        "failed, with a status code": 1,
        "without completion_tokens": 1,
        "without response": 1,
    }
    assert histogram.first_skipped == {
        "failed, with an error": "line 1: error 'batch_expired'",
        "without usage in response.body": "line 4",
        "failed, with a status code": "line 5: status_code 429",
        "without completion_tokens": "line 6",
        "without response": "line 7",
    }


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "unasked"}]},
    {"id": "c", "conversations": []},
    {"id": "d"},
    {
        "id": "e",
        "conversations": [
            {"from": "human", "value": 'a ] } " b'},
            {"from": "gpt", "value": "c"},
            {"from": "human", "value": "d é 🙂"},
            {"from": "gpt", "value": "f g h"},
        ],
    },
]


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("form", ["compact", "indented", "lines"])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_sharegpt_counts_every_answer_with_all_text_before_it(write, monkeypatch, form, block):
    if form == "lines":
        content = "\n".join(json.dumps(row) for row in SHAREGPT)
    else:
        content = json.dumps(SHAREGPT, indent=2 if form == "indented" else None, ensure_ascii=False)
    path = write(content)
    monkeypatch.setattr(source, "BLOCK_BYTES", max(block, 120 if form == "lines" else 8))
    histogram = read_traffic(path, tokenizer=words)
    assert same_lengths(histogram, [(2, 1), (5, 1), (9, 3)])
    assert histogram.skipped == {"without conversations": 1, "with no prompt tokens": 1}
    unit = "line" if form == "lines" else "record"
    assert histogram.first_skipped == {
        "without conversations": f"{unit} 4",
        "with no prompt tokens": f"{unit} 2: prompt tokens 0",
    }


def test_sharegpt_without_a_tokenizer_says_what_is_missing(write):
    with pytest.raises(TrafficError, match=r"no tokenizer.*--tokenizer"):
        read_traffic(write(json.dumps(SHAREGPT)))


def test_a_sharegpt_file_cut_in_half_is_refused(write):
    with pytest.raises(TrafficError, match="cut off or damaged after 4 elements"):
        read_traffic(write(json.dumps(SHAREGPT)[:-40]), tokenizer=words)


def test_a_throughput_log_is_refused_with_what_is_missing(write):
    line = (
        "INFO 03-19 07:08:57 [loggers.py:259] Engine 000: Avg prompt throughput: 2.3 tokens/s, Avg generation "
        "throughput: 0.5 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%\n"
    )
    with pytest.raises(TrafficError) as caught:
        read_traffic(write("INFO started\n" + line * 3))
    message = str(caught.value)
    assert "3 lines of 'Avg prompt throughput'" in message
    assert "the prompt tokens and the output tokens of each request are missing" in message
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"time,tokens\n1,2\n", "time,tokens"),
        (b"{\n", "{"),
        (b"[1, 2]", "[1, 2]"),
        (b'{"a": 1}\n', '{"a": 1}'),
        (b"\x00\x01\x02" * 100, "binary data"),
        (b"a: 1\n", "a: 1"),
    ],
)
def test_an_unknown_format_lists_the_known_ones_and_what_was_seen(write, content, seen):
    path = write(content)
    with pytest.raises(TrafficError) as caught:
        read_traffic(path)
    assert seen in str(caught.value)
    assert all(known.split(" (")[0] in str(caught.value) for known in KNOWN_FORMATS)
    assert len(str(caught.value)) - len(str(path)) < 400, "one line that can be read"


@pytest.mark.parametrize(
    "content", ["", "\n\n", AZURE_2023.split("\r\n")[0], AZURE_2023.split("\r\n")[0] + "\nx,0,0\nx,y,z\n"]
)
def test_a_trace_without_a_usable_request_is_an_error(write, content):
    with pytest.raises(TrafficError, match=r"empty|no usable request"):
        read_traffic(write(content))


def test_what_was_skipped_is_in_the_error(write):
    with pytest.raises(TrafficError, match="no usable request") as caught:
        read_traffic(write("ContextTokens,GeneratedTokens\n5,0\n6,0\n,\n"))
    told = "skipped 3 rows: 2 with no output tokens (line 2: generatedtokens 0), 1 without contexttokens (line 4)"
    assert str(caught.value).endswith(told)


def test_a_missing_file_a_folder_and_a_cut_gzip_are_errors(write, tmp_path):
    with pytest.raises(TrafficError, match="No such file"):
        read_traffic(tmp_path / "nothing.csv")
    with pytest.raises(TrafficError, match="folder"):
        read_traffic(tmp_path)
    with pytest.raises(TrafficError, match="cannot read it to the end"):
        read_traffic(write(gzip.compress(AZURE_2023.encode())[:-12]))


def test_progress_ends_at_the_file_size_and_the_hash_is_the_files(write):
    import hashlib

    path = write(AZURE_2023)
    calls: list[tuple[int, int]] = []
    histogram = read_traffic(path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(AZURE_2023), len(AZURE_2023))
    assert histogram.source_sha256 == hashlib.sha256(AZURE_2023.encode()).hexdigest()


def azure_trace() -> Path | None:
    """The real trace, which is not part of the project: where $EDGEBUILD_AZURE_TRACE says."""
    path = os.environ.get("EDGEBUILD_AZURE_TRACE")
    return Path(path) if path else None


def test_the_real_azure_trace_is_what_was_bundled():
    path = azure_trace()
    if path is None:
        pytest.skip("the Azure 2023 trace is not here: set EDGEBUILD_AZURE_TRACE to AzureLLMInferenceTrace_conv.csv")
    real, shipped = read_traffic(path), read_traffic(bundled_traffic())
    assert real.requests == 19_366
    assert [percentile(real.prompt_counts, p) for p in (10, 50, 99, 100)] == [207, 1020, 4142, 14050]
    assert [percentile(real.output_counts, p) for p in (10, 50, 90, 99, 100)] == [54, 129, 424, 601, 1000]
    assert shipped.source_sha256 == real.source_sha256
    for key in ("prompt_counts", "output_counts", "decode_context_counts"):
        assert getattr(shipped, key).tolist() == getattr(real, key).tolist()


def test_the_bundled_histogram_carries_its_licence():
    text = bundled_traffic().read_text()
    assert "CC BY 4.0" in read_traffic(bundled_traffic()).attribution
    assert "Azure/AzurePublicDataset" in text
