"""JSON traces: Mooncake and OpenAI batch output (one object a line), ShareGPT conversations (an array, or one a line).

Every reader streams: memory is that of one object.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edgebuild.errors import TrafficError
from edgebuild.traffic.histogram import HistogramBuilder
from edgebuild.traffic.source import LONGEST_LINE_BYTES, Source

CountTokens = Callable[[str], int]

BAD_LINE = "not a JSON object"
_BATCH = 65_536  # requests kept before they are counted


class _Pending:
    """Lengths on their way into a builder, in batches."""

    def __init__(self, builder: HistogramBuilder) -> None:
        self.builder = builder
        self._prompts: list[int] = []
        self._outputs: list[int] = []
        self._tasks: list[str] = []

    def add(self, prompt: int, output: int, task: str = "") -> None:
        self._prompts.append(prompt)
        self._outputs.append(output)
        self._tasks.append(task)
        if len(self._prompts) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        kept = self.builder.add(np.array(self._prompts, np.int64), np.array(self._outputs, np.int64))
        for task, keep in zip(self._tasks, kept.tolist(), strict=True):
            if keep and task:
                self.builder.label(task)
        self._prompts, self._outputs, self._tasks = [], [], []


def _length(value: object) -> int | None:
    """A token count, or None for anything else; 12.0 counts as 12, true does not count as 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return int(value) if abs(value) < 1e12 and value == int(value) else None


def objects(source: Source, builder: HistogramBuilder) -> Iterator[dict[str, Any]]:
    """The objects of a file with one JSON object a line; other lines are skipped and counted."""
    for block in source.blocks():
        for line in block.split(b"\n"):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            else:
                builder.skip(BAD_LINE)


def read_mooncake(source: Source, builder: HistogramBuilder) -> None:
    """`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [...]}`; `type` is the task."""
    pending = _Pending(builder)
    for row in objects(source, builder):
        prompt, output = _length(row.get("input_length")), _length(row.get("output_length"))
        if prompt is None or output is None:
            builder.skip("no input_length or output_length")
            continue
        task = row.get("type")
        pending.add(prompt, output, task if isinstance(task, str) else "")
    pending.flush()


def read_openai_batch(source: Source, builder: HistogramBuilder) -> None:
    """Batch output of the chat, completions or responses endpoint: usage stands in `response.body` and may be null."""
    pending = _Pending(builder)
    for row in objects(source, builder):
        response = row.get("response")
        if row.get("error"):
            builder.skip("failed request (error)")
            continue
        if not isinstance(response, dict):
            builder.skip("no response")
            continue
        status = response.get("status_code")
        if status is not None and status != 200:
            builder.skip("failed request (status code)")
            continue
        body = response.get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            builder.skip("no usage in response.body")
            continue
        prompt = _length(usage.get("prompt_tokens", usage.get("input_tokens")))
        output = _length(usage.get("completion_tokens", usage.get("output_tokens")))
        if prompt is None or output is None:
            builder.skip("no token counts in usage")
            continue
        pending.add(prompt, output)
    pending.flush()


def read_sharegpt(source: Source, builder: HistogramBuilder, tokenizer: CountTokens | None, *, array: bool) -> None:
    """ShareGPT conversations. Every answer is one request: its prompt is all text before it in the conversation,
    without the markers that a chat template would add. Needs the tokenizer, since the file holds text."""
    if tokenizer is None:
        raise TrafficError(
            f"{source.path}: ShareGPT JSON holds text, not token counts, and no tokenizer was given",
            hint="pass --tokenizer with the model's folder or its tokenizer.json",
        )
    pending = _Pending(builder)
    rows = array_elements(source) if array else objects(source, builder)
    for row in rows:
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        if not isinstance(turns, list):
            builder.skip("no conversations")
            continue
        before = 0
        for turn in turns:
            text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
            if not isinstance(text, str):
                builder.skip("a turn without text")
                break
            tokens = tokenizer(text)
            if turn.get("from", turn.get("role")) in ("gpt", "assistant", "chatgpt", "bing", "bard"):
                pending.add(before, tokens)
            before += tokens
    pending.flush()


def array_elements(source: Source) -> Iterator[Any]:
    """The elements of one JSON array, decoded one after the other. Raises TrafficError where the text is damaged."""
    decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
    decoder = json.JSONDecoder()
    chunks = source.chunks()
    text, at, ended = "", 0, False
    started = False
    found = 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and not started:
            started, at = True, at + 1  # the opening bracket, which detection saw
            continue
        if at < len(text) and text[at] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, at) if at < len(text) else (None, -1)
        except ValueError:
            end = -1
        if end >= 0 and (end < len(text) or ended):
            found += 1
            yield value
            at = end
            continue
        if ended:
            raise TrafficError(f"{source.path}: the JSON array is cut off or damaged after {found:,} elements")
        text, at = text[at:], 0
        wanted = max(1 << 20, len(text))  # doubled, so that one long element is not decoded again and again
        parts = [text]
        while wanted > 0 and not ended:
            chunk = next(chunks, b"")
            ended = not chunk
            parts.append(decode(chunk, ended))
            wanted -= len(parts[-1])
        text = "".join(parts)
        if len(text) > 2 * LONGEST_LINE_BYTES:
            raise TrafficError(
                f"{source.path}: element {found + 1:,} of the JSON array is damaged or longer than "
                f"{LONGEST_LINE_BYTES >> 20} MiB"
            )
