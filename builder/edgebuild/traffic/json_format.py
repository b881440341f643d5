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
from edgebuild.traffic.histogram import TOO_LONG, HistogramBuilder
from edgebuild.traffic.skipped import NEGATIVE, NOT_WHOLE, shown, without
from edgebuild.traffic.source import LONGEST_LINE_BYTES, Source

CountTokens = Callable[[str], int]

BAD_LINE = "not a JSON object"
_BATCH = 65_536  # requests kept before they are counted


class _Pending:
    """Lengths on their way into a builder, in batches.

    unit    what a place counts: "line" or "record"
    names   the fields of both lengths
    """

    def __init__(self, builder: HistogramBuilder, names: tuple[str, str], unit: str = "line") -> None:
        self.builder = builder
        self._names = names
        self._unit = unit
        self._places: list[int] = []
        self._prompts: list[int] = []
        self._outputs: list[int] = []
        self._tasks: list[str] = []

    def add(self, place: int, prompt: int, output: int, task: str = "") -> None:
        self._places.append(place)
        self._prompts.append(prompt)
        self._outputs.append(output)
        self._tasks.append(task)
        if len(self._prompts) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        kept = self.builder.add(np.array(self._prompts, np.int64), np.array(self._outputs, np.int64), where=self._where)
        for task, keep in zip(self._tasks, kept.tolist(), strict=True):
            if keep and task:
                self.builder.label(task)
        self._places, self._prompts, self._outputs, self._tasks = [], [], [], []

    def _where(self, at: int, of_output: bool) -> str:
        value = (self._outputs if of_output else self._prompts)[at]
        return f"{self._unit} {self._places[at]:,}: {shown(self._names[of_output], value)}"


def _length(value: object) -> int | None:
    """A token count, or None for anything else; 12.0 counts as 12, true does not count as 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return int(value) if abs(value) < 1e12 and value == int(value) else None


def _skip_no_length(builder: HistogramBuilder, line: int, row: dict[str, Any], keys: tuple[str, str]) -> None:
    """Skip an object in which `_length` finds no count under one of the two keys, the first of which is named."""
    key = next(key for key in keys if _length(row.get(key)) is None)
    value = row.get(key)
    if value is None:
        builder.skip(without(key), 1, f"line {line:,}")
        return
    reason = NOT_WHOLE
    if isinstance(value, (int, float)) and abs(value) >= 1e12:
        reason = TOO_LONG if value > 0 else NEGATIVE
    builder.skip(reason, 1, f"line {line:,}: {shown(key, value)}")


def objects(source: Source, builder: HistogramBuilder) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object, for a file with one JSON object a line; other lines are skipped and counted."""
    number = 0
    for block in source.blocks():
        for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), number + 1):  # noqa: B020
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield number, value
            else:
                builder.skip(BAD_LINE, 1, f"line {number:,}: {line[:60].decode('utf-8', 'replace').strip()!r}")


def read_mooncake(source: Source, builder: HistogramBuilder) -> None:
    """`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [...]}`; `type` is the task."""
    keys = ("input_length", "output_length")
    pending = _Pending(builder, keys)
    for line, row in objects(source, builder):
        prompt, output = _length(row.get("input_length")), _length(row.get("output_length"))
        if prompt is None or output is None:
            _skip_no_length(builder, line, row, keys)
            continue
        task = row.get("type")
        pending.add(line, prompt, output, task if isinstance(task, str) else "")
    pending.flush()


def read_openai_batch(source: Source, builder: HistogramBuilder) -> None:
    """Batch output of the chat, completions or responses endpoint: usage stands in `response.body` and may be null."""
    pending = _Pending(builder, ("prompt tokens", "output tokens"))
    for line, row in objects(source, builder):
        response = row.get("response")
        if error := row.get("error"):
            code = error.get("code") or error if isinstance(error, dict) else error
            builder.skip("failed, with an error", 1, f"line {line:,}: {shown('error', code)}")
            continue
        if not isinstance(response, dict):
            builder.skip(without("response"), 1, f"line {line:,}")
            continue
        status = response.get("status_code")
        if status is not None and status != 200:
            builder.skip("failed, with a status code", 1, f"line {line:,}: {shown('status_code', status)}")
            continue
        body = response.get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            builder.skip(without("usage in response.body"), 1, f"line {line:,}")
            continue
        prompt = _length(usage.get("prompt_tokens", usage.get("input_tokens")))
        output = _length(usage.get("completion_tokens", usage.get("output_tokens")))
        if prompt is None or output is None:
            keys = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
            read, written = (newer if newer in usage and older not in usage else older for older, newer in keys)
            _skip_no_length(builder, line, usage, (read, written))
            continue
        pending.add(line, prompt, output)
    pending.flush()


def read_sharegpt(source: Source, builder: HistogramBuilder, tokenizer: CountTokens | None, *, array: bool) -> None:
    """ShareGPT conversations. Every answer is one request: its prompt is all text before it in the conversation,
    without the markers that a chat template would add. Needs the tokenizer, since the file holds text."""
    if tokenizer is None:
        raise TrafficError(
            f"{source.path}: ShareGPT JSON holds text, not token counts, and no tokenizer was given",
            hint="pass --tokenizer with the model: its GGUF, its folder or its tokenizer.json",
        )
    unit = "record" if array else "line"
    pending = _Pending(builder, ("prompt tokens", "output tokens"), unit)
    rows: Iterator[tuple[int, Any]] = enumerate(array_elements(source), 1) if array else objects(source, builder)
    for place, row in rows:
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        if not isinstance(turns, list):
            builder.skip(without("conversations"), 1, f"{unit} {place:,}")
            continue
        before = 0
        for number, turn in enumerate(turns, 1):
            text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
            if not isinstance(text, str):
                builder.skip("with a turn without text", 1, f"{unit} {place:,}, turn {number:,}")
                break
            tokens = tokenizer(text)
            if turn.get("from", turn.get("role")) in ("gpt", "assistant", "chatgpt", "bing", "bard"):
                pending.add(place, before, tokens)
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
