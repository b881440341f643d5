"""The histogram: counts by difference arrays equal brute force, the file is exact both ways, percentiles are ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from edgebuild.errors import TrafficError
from edgebuild.traffic import Histogram, HistogramBuilder, dump_histogram, read_traffic
from edgebuild.traffic.histogram import LONGEST_TOKENS, percentile
from edgebuild.traffic.histogram_file import parse_histogram
from edgebuild.traffic.picture import bar, log_bins, save_picture, text_bars
from edgebuild.traffic.skipped import skipped_text
from hypothesis import given, settings
from hypothesis import strategies as st

REQUESTS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=40)
TEXT = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=30)


def of(requests: list[tuple[int, int]]) -> Histogram:
    return Histogram.from_lengths([p for p, _ in requests], [n for _, n in requests])


@given(REQUESTS)
@settings(deadline=None)
def test_decode_contexts_equal_brute_force(requests):
    histogram = of(requests)
    expected = np.zeros(max(p + n for p, n in requests) + 1, np.int64)
    for prompt, output in requests:
        for context in range(prompt, prompt + output):
            expected[context] += 1
    assert np.array_equal(histogram.decode_context_counts, expected)
    assert histogram.prompt_counts.size == max(p for p, _ in requests) + 1
    assert histogram.output_counts.size == max(n for _, n in requests) + 1
    assert histogram.prompt_tokens == sum(p for p, _ in requests)
    assert histogram.output_tokens == sum(n for _, n in requests)
    assert histogram.problems() == []


@given(REQUESTS, st.integers(1, 7))
@settings(deadline=None)
def test_blocks_do_not_matter(requests, size):
    builder = HistogramBuilder()
    for first in range(0, len(requests), size):
        block = np.array(requests[first : first + size], np.int64)
        builder.add(block[:, 0], block[:, 1])
    assert builder.finish(name="requests", source_sha256="", attribution="") == of(requests)


@given(REQUESTS, TEXT, TEXT, st.dictionaries(TEXT, st.integers(0, 10**9), max_size=3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_file_gives_the_same_histogram_back(requests, name, attribution, skipped, tasks):
    histogram = dataclasses.replace(
        of(requests),
        name=name,
        attribution=attribution,
        source_sha256="ab" * 32,
        skipped=skipped,
        tasks={"chat": len(requests)} if tasks else {},
    )
    again = parse_histogram(dump_histogram(histogram), "there", "not used")
    assert again == histogram
    assert dump_histogram(again) == dump_histogram(histogram)


def test_equality_sees_every_field():
    one = of([(3, 4)])
    assert one == of([(3, 4)])
    assert one != of([(4, 3)])
    assert one != dataclasses.replace(one, name="other")
    assert one != dataclasses.replace(one, skipped={"bad": 1})
    assert one != "a histogram"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("edgebuild_traffic: 1", "edgebuild_traffic: 2", "reads version 1"),
        ("requests: 2", "requests: 3", "sums to 2, expected 3"),
        ("3:1 5:1", "3:1 5:2", "sums to 3"),
        ("3:1 5:1", "5:1 3:1", "rising"),
        ("3:1 5:1", "3:1 6:1", "rising, below 6"),
        ("3:1 5:1", "3:1 5:x", "expected length:count"),
        ("3:1 5:1", "3:1 5:99999999999999999999", "expected length:count"),
        ("size: 6", "size: 99999999999", "at most"),
        ("size: 6", "size: -1", "whole number"),
        ("skipped: {}", "skipped: [1]", "names with counts"),
        ("skipped: {}", "skiped: {}", "unknown fields: ['skiped']"),
        ("name: requests", "name: 5", "expected a text"),
        ("skipped: {}", "skipped: {", "not YAML"),
        ("skipped: {}", "skipped: !!bool x", "not YAML"),
        ("name: requests", "name: !!timestamp x", "not YAML"),
        ("name: requests", 'name: "a\\nb"', "name has characters that do not print"),
        ("attribution: ''", "attribution: " + 5000 * "x", "5,000 characters, at most 4,096"),
    ],
)
def test_a_damaged_histogram_file_is_refused_with_the_reason(tmp_path, old, new, told):
    text = dump_histogram(of([(3, 2), (5, 2)]))
    assert old in text
    path = tmp_path / "h.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TrafficError) as caught:
        read_traffic(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_without_a_source_hash_is_hashed_itself(tmp_path):
    path = tmp_path / "h.yaml"
    path.write_text(dump_histogram(of([(3, 2)])))
    assert len(read_traffic(path).source_sha256) == 64


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.floats(0, 100))
@settings(deadline=None)
def test_percentiles_are_numpys_inverted_cdf(lengths, percent):
    counts = np.bincount(lengths)
    assert percentile(counts, percent) == np.percentile(lengths, percent, method="inverted_cdf")


def test_a_percentile_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        percentile(np.zeros(3, np.int64), 50)
    with pytest.raises(ValueError, match=r"0\.\.100"):
        percentile(np.ones(3, np.int64), 101)


def test_lengths_out_of_range_are_skipped_by_reason():
    builder = HistogramBuilder()
    prompts = np.array([0, 5, -1, 7, LONGEST_TOKENS + 1], np.int64)
    outputs = np.array([3, 0, 2, 2, 5], np.int64)
    assert builder.add(prompts, outputs).tolist() == [False, False, False, True, False]
    assert builder.requests == 1
    assert builder.first_skipped == {}, "nobody said where the rows stand"
    assert builder.skipped == {
        "with no prompt tokens": 1,
        "negative": 1,
        "with no output tokens": 1,
        f"longer than {LONGEST_TOKENS:,} tokens": 1,
    }
    with pytest.raises(ValueError, match="out of range"):
        Histogram.from_lengths([0], [1])
    with pytest.raises(ValueError, match="2 prompt lengths and 1 output"):
        Histogram.from_lengths([1, 2], [1])


@given(st.lists(st.lists(st.tuples(*[st.sampled_from([-3, 0, 7, LONGEST_TOKENS + 1])] * 2)), max_size=4))
@settings(deadline=None)
def test_the_first_request_of_each_reason_is_the_one_named(blocks):
    builder = HistogramBuilder()
    expected: dict[str, str] = {}
    for number, block in enumerate(blocks):
        pairs = np.array(block, np.int64).reshape(-1, 2)
        builder.add(pairs[:, 0], pairs[:, 1], lambda at, of_output, number=number: f"{number} {at} {int(of_output)}")
        for at, pair in enumerate(block):
            for reason, tells in (
                ("negative", [tokens < 0 for tokens in pair]),
                ("with no prompt tokens", [pair[0] == 0, False]),
                ("with no output tokens", [False, pair[1] == 0]),
                (f"longer than {LONGEST_TOKENS:,} tokens", [tokens > LONGEST_TOKENS for tokens in pair]),
            ):
                if any(tells):
                    expected.setdefault(reason, f"{number} {at} {tells.index(True)}")
                    break
    assert builder.first_skipped == expected
    assert builder.requests + sum(builder.skipped.values()) == sum(len(block) for block in blocks)


@given(
    st.dictionaries(
        st.sampled_from(["negative", "with no output tokens", "without x"]), st.integers(1, 3000), min_size=1
    )
)
def test_the_line_on_skipped_rows_adds_up_and_is_plural_for_more_than_one(skipped):
    told = skipped_text(skipped, {"negative": "line 7"})
    total = sum(skipped.values())
    assert told.startswith(f"skipped {total:,} row{'s' * (total > 1)}: ")
    parts = told.split(": ", 1)[1].split(", ")
    assert len(parts) == len(skipped)
    for reason, rows in skipped.items():
        number = f"{rows:,} " if len(skipped) > 1 else ""
        assert number + reason + (" (line 7)" if reason == "negative" else "") in parts
    counts = [skipped[reason] for part in parts for reason in skipped if reason in part]
    assert counts == sorted(counts, reverse=True)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=60), st.sampled_from([1, 3, 6]))
@settings(deadline=None)
def test_bins_hold_every_request_once(lengths, per_octave):
    edges, totals = log_bins(np.bincount(lengths), per_octave)
    assert (np.diff(edges) > 0).all()
    assert edges[0] <= min(lengths)
    assert edges[-1] > max(lengths)
    assert np.array_equal(totals, np.histogram(lengths, bins=edges)[0])
    assert totals.sum() == len(lengths)


def test_bars_show_anything_above_zero():
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 1) == "▌"
    assert bar(1e-9, 4) == "▏"
    assert bar(0.0, 4) == ""
    assert len(text_bars(np.bincount([1, 2, 5]))) == 3


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_written(tmp_path, suffix):
    path = tmp_path / f"h{suffix}"
    save_picture(of([(5, 1), (700, 30), (700, 31)]), path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


def test_a_picture_of_one_length_is_written(tmp_path):
    save_picture(of([(512, 1)]), tmp_path / "h.png")
    assert (tmp_path / "h.png").stat().st_size > 1000


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(TrafficError, match=r"\.png"):
        save_picture(of([(5, 1)]), tmp_path / "h.gif")
