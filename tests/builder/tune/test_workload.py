"""What a trial runs: the user's prompts as they are, or built-in ones at the lengths of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toys
from edgebuild.errors import TrafficError
from edgebuild.tune.workload import Shape, Work, make_work
from edgert.text import TextCodec

CONTEXT = 128


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(toys.byte_level_tokenizer(300), chat_template=toys.CHATML)


def work(path: Path, codec: TextCodec, **changes: Any) -> Work:
    fields: dict[str, Any] = {
        "requests": None, "concurrency": 4, "concurrency_source": "a test", "repeats": 3, "seed": 0
    }  # fmt: skip
    return make_work(path, codec, Shape(**{**fields, **changes}), context_tokens=CONTEXT)


def prompts(folder: Path, *lines: Any) -> Path:
    path = folder / "own.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_own_prompts_run_as_they_are_and_end_where_the_model_ends(tmp_path: Path, codec: TextCodec) -> None:
    path = prompts(
        tmp_path,
        {"prompt": "hello", "max_tokens": 5, "task": "chat"},
        {"chat": "hello"},
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 7},
        {"prompt_ids": [5, 6, 7]},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 9}},
    )  # fmt: skip
    made = work(path, codec)
    first, chat, messages, ids, batch = made.requests
    assert first.prompt_ids == tuple(codec.encode("hello"))
    assert (first.output_tokens, first.task, first.ignore_eos) == (5, "chat", False)
    assert chat.prompt_ids == messages.prompt_ids == batch.prompt_ids == tuple(
        codec.encode_chat([{"role": "user", "content": "hello"}])
    )  # fmt: skip
    assert ids.prompt_ids == (5, 6, 7)
    assert (messages.output_tokens, batch.output_tokens) == (7, 9)
    assert made.curve == made.requests
    assert (made.record.prompts, made.record.requests, made.record.concurrency) == ("own", 5, 4)
    assert len(work(path, codec, requests=2).requests) == 2


def test_a_prompt_that_outgrew_the_context_keeps_its_end(tmp_path: Path, codec: TextCodec) -> None:
    whole = work(prompts(tmp_path, {"prompt_ids": list(range(100)), "max_tokens": 4096}), codec).requests[0]
    assert (len(whole.prompt_ids), whole.output_tokens) == (96, 32)  # a quarter of the context is for the answer
    made = work(prompts(tmp_path, {"prompt_ids": list(range(200)), "max_tokens": 20}), codec)
    assert made.requests[0].prompt_ids == tuple(range(92, 200))
    assert made.requests[0].clipped


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "own.jsonl:2: not JSON"),
        ("[1]", "own.jsonl:2: expected an object"),
        ({"task": "x"}, "own.jsonl:2: no prompt"),
        ({"prompt": ""}, "own.jsonl:2: no prompt"),
        ({"prompt_ids": [1, -1]}, "own.jsonl:2: no prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens is true"),
        ({"prompt": "x", "task": 3}, "task is 3"),
        ({"messages": [{"role": 3}]}, "own.jsonl:2: "),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, codec: TextCodec, line: Any, words: str) -> None:
    with pytest.raises(TrafficError) as caught:
        work(prompts(tmp_path, {"prompt": "fine"}, line), codec)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["trace.csv", "mooncake.jsonl", "trace.yaml"])
def test_a_trace_gives_the_lengths_and_built_in_prompts_the_text(tmp_path: Path, codec: TextCodec, name: str) -> None:
    path = tmp_path / name
    path.write_text(
        {
            "trace.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15,60,9\n2023-11-16 18:15,500,9\n",
            "mooncake.jsonl": '{"timestamp": 1, "input_length": 60, "output_length": 9}\n' * 3,
            "trace.yaml": "edgebuild_traffic: 1\nname: t\nsource_sha256: ''\nattribution: ''\nrequests: 2\n"
            'prompt_counts: {size: 61, counts: "60:2"}\noutput_counts: {size: 10, counts: "9:2"}\n'
            'decode_context_changes: {size: 70, changes: "60:2 69:-2"}\n',
        }[name]
    )
    made = work(path, codec, requests=20)
    assert {len(each.prompt_ids) for each in made.requests} <= {60, CONTEXT - 1}
    assert all(each.ignore_eos for each in made.requests)  # the trace says how long the output is
    assert all(len(each.prompt_ids) + each.output_tokens <= CONTEXT for each in made.requests)
    assert {each.task for each in made.curve} == {"chat", "code", "json", "story", "extraction"}
    assert not any(each.ignore_eos for each in made.curve)  # acceptance past the end of an answer means nothing
    assert made.record.prompts == "built-in"


def test_the_same_question_has_the_same_identity_and_another_has_another(tmp_path: Path, codec: TextCodec) -> None:
    path = prompts(tmp_path, {"prompt": "one"}, {"prompt": "two"})
    same = work(path, codec).record.sha256
    assert work(path, codec).record.sha256 == same
    changes: list[dict[str, Any]] = [{"requests": 1}, {"concurrency": 1}, {"repeats": 4}, {"slo_ttft_ms": 5.0}]
    others = {work(path, codec, **change).record.sha256 for change in changes}
    assert len(others | {same}) == len(changes) + 1
