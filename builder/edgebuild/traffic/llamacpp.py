"""llama.cpp server logs, of every wording seen between 2024 and 2026, and its fork ik_llama.cpp.

A request is the lines of one (slot, task). The output length is what `eval time = ... / N tokens` (or `/ N runs`) says.
`prompt eval time = ... / N tokens` counts only the tokens that were evaluated, without those found in the cache, so the
prompt length is taken, in this order, from
  1. `new prompt, ... task.n_tokens = 750` (older: `n_prompt_tokens = 750`);
  2. `in cache: 100 tokens | to process: 650 tokens` (early 2024);
  3. `release: ... n_tokens = 1523` (older: `n_past`), which is prompt + output - 1, unless the context was shifted;
  4. tokens evaluated plus the cached ones that `kv cache rm [p0, end)` names.
A request that none of them covers is skipped and counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from edgebuild.traffic.histogram import HistogramBuilder

Key = tuple[int, int]

_SLOT = re.compile(r"\bid\s+(\d+) \| task (-?\d+) \|")
_SLOT_FIELDS = re.compile(r"\bid_slot=(\d+)\b.*\bid_task=(\d+)")
_SLOT_2024 = re.compile(r"\bslot (\d+) is processing \[task id: (\d+)\]")
_PROMPT = re.compile(r"\bnew prompt\b.*\b(?:task\.n_tokens|n_prompt_tokens) = (\d+)")
_IN_CACHE = re.compile(r"\bslot (\d+) : in cache: (\d+) tokens \| to process: (\d+) tokens")
_CACHED = re.compile(r"\b(?:kv cache rm(?: -)?|memory_seq_rm) \[(?:(\d+)|p0), end\)(?:.*\bp0=(\d+))?")
_TIMING = re.compile(r"(prompt |generation )?\beval time\s*=\s*[\d.]+ ms /\s*(\d+) (?:tokens|runs)")
_RELEASE = re.compile(r"\bstop processing: (?:n_tokens|n_past) = (\d+), truncated = (\d)")
_MARKS = ("eval time", "| task", "id_task=", "[task id:", "in cache:")

NO_OUTPUT = "without a logged output length, cancelled or cut off"
NO_PROMPT = "without a logged prompt length"


@dataclass
class _Request:
    prompt: int | None = None
    evaluated: int | None = None
    cached: int | None = None
    output: int | None = None
    end: int | None = None  # prompt + output - 1
    released: bool = False


class LlamaLog:
    """Takes the lines of a log in order and counts finished requests."""

    def __init__(self, builder: HistogramBuilder) -> None:
        self._builder = builder
        self._open: dict[Key, _Request] = {}
        self._task: dict[int, int] = {}  # slot -> the task that its last line named
        self._current: Key | None = None  # whose timing lines follow, where they carry no slot of their own
        self.seen = 0  # requests that began or ended

    def line(self, text: str) -> None:
        """Take one line of the log."""
        if not any(mark in text for mark in _MARKS):
            return
        key = self._key(text)
        if key is not None and key[1] < 0:
            return  # a line about a slot without a task
        if key is not None:
            self._current = key
            self._task[key[0]] = key[1]
        timing = _TIMING.search(text)
        if timing is not None:
            where = key or self._current
            if where is not None:
                self._timing(where, timing[1] == "prompt ", int(timing[2]))
        elif match := _IN_CACHE.search(text):
            self._in_cache(int(match[1]), int(match[2]), int(match[3]))
        elif key is None:
            return
        elif match := _PROMPT.search(text):
            self._request(key).prompt = int(match[1])
        elif match := _RELEASE.search(text):
            request = self._request(key)
            request.released = True
            if match[2] == "0":
                request.end = int(match[1])
            if request.output is not None:
                self._close(key)
        elif match := _CACHED.search(text):
            request = self._request(key)
            if request.cached is None:  # the first one tells what was reused; later ones follow the chunks
                request.cached = int(match[1] or match[2] or 0)

    def finish(self) -> None:
        """The log has ended: close what is still open."""
        for key in list(self._open):
            self._close(key)

    def _key(self, text: str) -> Key | None:
        match = _SLOT.search(text) or _SLOT_FIELDS.search(text) or _SLOT_2024.search(text)
        return (int(match[1]), int(match[2])) if match else None

    def _request(self, key: Key) -> _Request:
        request = self._open.get(key)
        if request is None:
            for other in [other for other in self._open if other[0] == key[0]]:
                self._close(other)  # a slot serves one task at a time
            request = self._open[key] = _Request()
            self.seen += 1
        return request

    def _timing(self, key: Key, is_prompt: bool, tokens: int) -> None:
        request = self._request(key)
        if is_prompt:
            request.evaluated = tokens
            return
        request.output = tokens
        if request.released:  # some versions print the timings after the release
            self._close(key)

    def _in_cache(self, slot: int, cached: int, processed: int) -> None:
        if slot in self._task:
            self._request((slot, self._task[slot])).prompt = cached + processed

    def _close(self, key: Key) -> None:
        request = self._open.pop(key, None)
        if request is None:
            return
        if self._current == key:
            self._current = None
        place = f"slot {key[0]}, task {key[1]}"  # what its lines in the log can be found by
        if request.output is None:
            self._builder.skip(NO_OUTPUT, 1, place)
            return
        prompt = request.prompt
        if prompt is None and request.end is not None:
            prompt = request.end - request.output + 1
        if prompt is None and request.evaluated is not None and request.cached is not None:
            prompt = request.evaluated + request.cached
        if prompt is None:
            self._builder.skip(NO_PROMPT, 1, place)
            return
        self._builder.add(
            np.array([prompt], np.int64), np.array([request.output], np.int64), where=lambda _at, _of_output: place
        )
