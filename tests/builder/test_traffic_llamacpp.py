"""llama.cpp server logs of every wording: which request had how many tokens, interleaved or not."""

# ruff: noqa: E501  (log lines stand as the server prints them)

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from edgebuild.errors import TrafficError
from edgebuild.traffic import Histogram, read_traffic, source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Write = Callable[[str], Path]

# Lines as the server printed them, by version; see the module's list of where a prompt length may stand.
LLAMA_2026 = """\
0.22.535.286 I slot launch_slot_: id  0 | task 0 | processing task, is_child = 0
0.22.535.300 I slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 750
0.22.535.310 I slot update_slots: id  0 | task 0 | n_past = 848, slot.prompt.tokens.size() = 1369, seq_id = 0
0.22.540.000 I slot launch_slot_: id  1 | task 2 | processing task, is_child = 0
0.22.540.100 I slot update_slots: id  1 | task 2 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 120
0.33.100.000 I slot print_timing: id  0 | task 0 | n_decoded =    172, tg =  12.00 t/s
0.33.282.665 I slot print_timing: id  1 | task 2 | prompt eval time =    90.70 ms /    20 tokens (   10.40 ms per token)
0.33.282.665 I slot print_timing: id  0 | task 0 | prompt eval time =    1590.70 ms /   153 tokens (   10.40 ms per token)
0.33.282.672 I slot print_timing: id  0 | task 0 |        eval time =    9124.60 ms /   774 tokens (   11.79 ms per token)
0.33.282.673 I slot print_timing: id  1 | task 2 |        eval time =     124.60 ms /     8 tokens (   15.58 ms per token)
0.33.282.674 I slot print_timing: id  0 | task 0 |       total time =   10715.30 ms /   927 tokens
0.33.283.075 I slot      release: id  0 | task 0 | stop processing: n_tokens = 1523, truncated = 0
0.33.283.076 I slot      release: id  1 | task 2 | stop processing: n_tokens = 127, truncated = 0
0.33.400.000 I slot launch_slot_: id  0 | task 9 | processing task, is_child = 0
0.33.400.100 I slot update_slots: id  0 | task 9 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 33
0.33.400.200 I slot      release: id  0 | task 9 | stop processing: n_tokens = 33, truncated = 0
"""
LLAMA_EARLY_2026 = """\
slot launch_slot_: id  0 | task 124 | processing task, is_child = 0
slot print_timing: id  0 | task 124 |
prompt eval time =    5093.47 ms /   512 tokens (    3.75 ms per token,   267.01 tokens per second)
       eval time =     319.58 ms /    10 tokens (   31.96 ms per token,    31.29 tokens per second)
      total time =    5413.05 ms /   522 tokens
slot      release: id  0 | task 124 | stop processing: n_tokens = 1369, truncated = 0
srv  update_slots: all slots are idle
slot launch_slot_: id  0 | task -1 | sampler chain: logits -> top-k -> dist
"""
LLAMA_2024_RELEASE_FIRST = """\
Dec 02 12:10:37 box llama-server[24689]: slot launch_slot_: id  0 | task 519 | processing task
Dec 02 12:10:37 box llama-server[24689]: slot update_slots: id  0 | task 519 | new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 339
Dec 02 12:10:37 box llama-server[24689]: slot update_slots: id  0 | task 519 | kv cache rm [0, end)
Dec 02 12:10:46 box llama-server[24689]: slot      release: id  0 | task 519 | stop processing: n_past = 380, truncated = 0
Dec 02 12:10:46 box llama-server[24689]: slot print_timing: id  0 | task 519 |
Dec 02 12:10:46 box llama-server[24689]: prompt eval time =    453.79 ms /   339 tokens (    1.34 ms per token)
Dec 02 12:10:46 box llama-server[24689]:        eval time =    319.58 ms /    42 tokens (    7.61 ms per token)
Dec 02 12:10:47 box llama-server[24689]: slot launch_slot_: id  0 | task 562 | processing task
Dec 02 12:10:47 box llama-server[24689]: slot update_slots: id  0 | task 562 | new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 342
Dec 02 12:10:48 box llama-server[24689]: slot print_timing: id  0 | task 562 |
Dec 02 12:10:48 box llama-server[24689]: [100B blob data]
"""
LLAMA_JANUARY_2024 = """\
all slots are idle and system prompt is empty, clear the KV cache
slot 0 is processing [task id: 0]
slot 1 is processing [task id: 4]
slot 0 : in cache: 100 tokens | to process: 492 tokens
slot 0 : kv cache rm - [100, end)

print_timings: prompt eval time =     232.47 ms /   492 tokens (    0.47 ms per token,  2116.38 tokens per second)
"""
IK_LLAMA = """\
INFO [   launch_slot_with_task] slot is processing task | tid="1365" timestamp=1748008040 id_slot=0 id_task=7
INFO [            update_slots] kv cache rm [p0, end) | tid="1365" timestamp=1748008040 id_slot=0 id_task=7 p0=64
INFO [            update_slots] kv cache rm [p0, end) | tid="1365" timestamp=1748008051 id_slot=0 id_task=7 p0=1088
INFO [           print_timings] prompt eval time     =   25767.00 ms /  2190 tokens (   11.77 ms per token) | tid="1365" id_slot=0 id_task=7 t_prompt_processing=25767.002
INFO [           print_timings] generation eval time =   15701.68 ms /   222 runs   (   70.73 ms per token) | tid="1365" id_slot=0 id_task=7 t_token_generation=15701.681
INFO [            update_slots] slot released | tid="1365" timestamp=1748008081 id_slot=0 id_task=7 n_ctx=32768 n_past=2475
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(content)
        return path

    return write


def same_lengths(histogram: Histogram, requests: list[tuple[int, int]]) -> bool:
    expected = Histogram.from_lengths([p for p, _ in requests], [n for _, n in requests])
    arrays = ("prompt_counts", "output_counts", "decode_context_counts")
    return all(getattr(histogram, key).tolist() == getattr(expected, key).tolist() for key in arrays)


@pytest.mark.parametrize(
    ("log", "requests", "unfinished"),
    [
        (LLAMA_2026, [(750, 774), (120, 8)], 1),
        (LLAMA_EARLY_2026, [(1360, 10)], 0),  # no `new prompt` line: 1369 - 10 + 1
        (LLAMA_2024_RELEASE_FIRST, [(339, 42)], 1),
        (IK_LLAMA, [(64 + 2190, 222)], 0),
    ],
)
def test_llamacpp_server_logs_of_every_wording(write, log, requests, unfinished):
    histogram = read_traffic(write(log))
    assert same_lengths(histogram, requests)
    assert sum(histogram.skipped.values()) == unfinished
    assert histogram.first_skipped.keys() == histogram.skipped.keys()
    assert all(re.fullmatch(r"slot \d+, task \d+", place) for place in histogram.first_skipped.values())


def test_a_2024_log_adds_the_cached_tokens(write):
    log = LLAMA_JANUARY_2024.replace("slot 1 is processing [task id: 4]\n", "")
    log += "print_timings:        eval time =    1232.47 ms /    60 runs   (   20.47 ms per token)\n"
    assert same_lengths(read_traffic(write(log)), [(592, 60)])


def test_a_log_that_begins_with_much_else_is_still_read(write, monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 4096)
    noise = "[INFO] llama_model_loader: - kv  22: tokenizer.ggml.tokens arr[str,49152]\n" * 500
    assert read_traffic(write(noise + LLAMA_2026)).requests == 2


def test_a_shifted_context_tells_no_prompt_length(write):
    log = LLAMA_EARLY_2026.replace("truncated = 0", "truncated = 1")
    with pytest.raises(TrafficError, match=r"no usable request .*without a logged prompt length \(slot 0, task 124\)"):
        read_traffic(write(log))


def lines_of(slot: int, task: int, prompt: int, output: int, named: bool) -> list[str]:
    """What one request logs; `named`: with a `new prompt` line, else only the release tells the prompt."""
    head = f"id  {slot} | task {task} |"
    first = [f"slot update_slots: {head} new prompt, n_ctx_slot = 8192, n_keep = 0, task.n_tokens = {prompt}"]
    return [
        f"slot launch_slot_: {head} processing task, is_child = 0",
        *(first if named else []),
        f"slot print_timing: {head} n_decoded = 7, tg = 12.00 t/s",
        f"slot print_timing: {head} prompt eval time = 90.70 ms / 1 tokens (90.70 ms per token)",
        f"slot print_timing: {head}        eval time = 9124.60 ms / {output} tokens (1.00 ms per token)",
        f"slot      release: {head} stop processing: n_tokens = {prompt + output - 1}, truncated = 0",
    ]


@given(
    requests=st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 900), st.booleans()), min_size=1, max_size=6),
    data=st.data(),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_of_several_slots_may_interleave_anyhow(write, requests, data):
    waiting = [lines_of(slot, 10 + slot, *request) for slot, request in enumerate(requests)]
    log = []
    while waiting:
        at = data.draw(st.integers(0, len(waiting) - 1))
        log.append(waiting[at].pop(0))
        waiting = [lines for lines in waiting if lines]
    histogram = read_traffic(write("\n".join(log)))
    assert same_lengths(histogram, [(prompt, output) for prompt, output, _ in requests])
    assert histogram.skipped == {}


@given(requests=st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 900), st.booleans()), min_size=1, max_size=6))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slot_serves_one_task_after_the_other(write, requests):
    log = [line for task, request in enumerate(requests) for line in lines_of(0, task, *request)]
    assert same_lengths(read_traffic(write("\n".join(log))), [(p, n) for p, n, _ in requests])
