"""What every trial runs: the user's own prompts, or edgebuild's prompts at the lengths of the user's traffic.

A file of prompts is one JSON object a line: `prompt` (text), `chat` or `messages` (a conversation) or `prompt_ids`,
perhaps `max_tokens` and `task`; or the requests of an OpenAI batch file. Everything else is a trace of lengths, in any
format that `edgebuild traffic` reads.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgert.bench import BenchRequest, Draws, read_lengths
from edgert.errors import EdgertError
from edgert.text import TextCodec

from edgebuild.errors import TrafficError
from edgebuild.traffic import read_traffic
from edgebuild.traffic.histogram import Counts
from edgebuild.train.prompts import built_in
from edgebuild.tune.records import Workload

DEFAULT_REQUESTS = 16
DEFAULT_MAX_TOKENS = 128
CURVE_PROMPTS_PER_TASK = 3
CURVE_OUTPUT_TOKENS = 64
MOST_PROMPT_BYTES = 64 << 20
PROMPT_KEYS = ("prompt", "text", "chat", "messages", "prompt_ids", "body")


@dataclass(frozen=True)
class Work:
    """requests: of every trial. curve: of the draft curve, one at a time. record: what the logbook says of them."""

    requests: tuple[BenchRequest, ...]
    curve: tuple[BenchRequest, ...]
    record: Workload


@dataclass(frozen=True)
class Shape:
    """How the requests are run. limits: what goodput counts by, part of what makes two workloads the same."""

    requests: int | None
    concurrency: int
    concurrency_source: str
    repeats: int
    seed: int
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None


def make_work(path: Path, codec: TextCodec, shape: Shape, *, context_tokens: int) -> Work:
    """The requests of a tuning run. Raises TrafficError or TrafficFileError."""
    if is_prompts(path):
        own = read_own(path, codec, context_tokens)
        requests = own if shape.requests is None else own[: shape.requests]
        curve, prompts = requests, "own"
    else:
        count = DEFAULT_REQUESTS if shape.requests is None else shape.requests
        requests = at_lengths(lengths(path), codec, count, context_tokens, shape.seed)
        curve, prompts = curve_prompts(codec, context_tokens), "built-in"
    concurrency = min(shape.concurrency, len(requests))
    identity = json.dumps(
        [[asdict(each) for each in (*requests, *curve)], concurrency, shape.repeats, shape.slo_ttft_ms,
         shape.slo_tpot_ms],
        separators=(",", ":"),
    )  # fmt: skip
    record = Workload(
        sha256=hashlib.sha256(identity.encode()).hexdigest(),
        traffic=path.stem,
        requests=len(requests),
        prompt_tokens=sum(len(each.prompt_ids) for each in requests),
        output_tokens=sum(each.output_tokens for each in requests),
        concurrency=concurrency,
        concurrency_source=shape.concurrency_source,
        repeats=shape.repeats,
        seed=shape.seed,
        prompts=prompts,  # type: ignore[arg-type]
        tasks=tuple(sorted({each.task or "" for each in requests})),
    )
    return Work(tuple(requests), tuple(curve), record)


def is_prompts(path: Path) -> bool:
    """Whether a file holds prompts: JSON lines of which the first has one."""
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return False
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        value = json.loads(first)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and any(key in value for key in PROMPT_KEYS) and "response" not in value


def read_own(path: Path, codec: TextCodec, context_tokens: int) -> list[BenchRequest]:
    """The requests of a prompts file; too long ones are cut at the front, as a chat that outgrew its context."""
    if path.stat().st_size > MOST_PROMPT_BYTES:
        raise TrafficError(f"{path}: {path.stat().st_size:,} bytes, at most {MOST_PROMPT_BYTES:,} are read")
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrafficError(f"{where}: not JSON: {error}", hint="one request a line") from None
        if not isinstance(entry, dict):
            raise TrafficError(f"{where}: expected an object", hint='such as {"prompt": "...", "max_tokens": 64}')
        found.append(_own(entry, where, codec, context_tokens))
    if not found:
        raise TrafficError(f"{path}: no request")
    return found


def _own(entry: Mapping[str, Any], where: str, codec: TextCodec, context_tokens: int) -> BenchRequest:
    body = entry["body"] if isinstance(entry.get("body"), dict) else entry
    try:
        ids = _ids(body, codec)
    except EdgertError as error:
        raise TrafficError(f"{where}: {error}") from None
    if not ids:
        raise TrafficError(f"{where}: no prompt", hint="expected one of: prompt, chat, messages, prompt_ids")
    most = body.get("max_tokens", body.get("max_completion_tokens", DEFAULT_MAX_TOKENS))
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise TrafficError(f"{where}: max_tokens is {json.dumps(most)[:40]}: expected a whole number from 1")
    task = entry.get("task", body.get("task"))
    if task is not None and not isinstance(task, str):
        raise TrafficError(f"{where}: task is {json.dumps(task)[:40]}: expected a text")
    output = min(most, max(context_tokens - len(ids), context_tokens // 4, 1))
    kept = ids[-(context_tokens - output) :]
    return BenchRequest(kept, output, (kept, output) != (ids, most), task, ignore_eos=False)


def _ids(body: Mapping[str, Any], codec: TextCodec) -> tuple[int, ...]:
    messages = body.get("chat", body.get("messages"))
    if messages is not None:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return tuple(codec.encode_chat(messages))
    prompt = body.get("prompt", body.get("text"))
    if isinstance(prompt, str):
        return tuple(codec.encode(prompt))
    ids = body.get("prompt_ids", prompt)
    if isinstance(ids, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids
    ):
        return tuple(ids)
    return ()


def lengths(path: Path) -> Draws:
    """(prompt, output) lengths of a trace: pairs where the runtime's bench can read it, else drawn independently."""
    if path.suffix.lower() in (".csv", ".yaml", ".yml"):
        try:
            return read_lengths(path)
        except EdgertError:
            pass  # another CSV: the builder knows more formats
    histogram = read_traffic(path)
    prompt, output = _sampler(histogram.prompt_counts), _sampler(histogram.output_counts)
    return Draws(histogram.name, lambda rng: (prompt(rng), output(rng)))


def _sampler(counts: Counts) -> Callable[[random.Random], int]:
    totals = counts.cumsum()
    return lambda rng: int(totals.searchsorted(rng.randrange(int(totals[-1])), side="right"))


def at_lengths(draws: Draws, codec: TextCodec, count: int, context_tokens: int, seed: int) -> list[BenchRequest]:
    """Requests of the drawn lengths: each ends with a built-in prompt of its task, text of other prompts before it."""
    rng = random.Random(seed)
    prompts = built_in("held_out", max(2, -(-count // 4)), seed=seed)
    filler = [token for prompt in built_in("train", 40, seed=seed) for token in codec.encode(prompt.text + "\n")]
    requests = []
    for number in range(count):
        prompt, output = draws.draw(rng)
        kept_prompt = max(1, min(prompt, context_tokens - 1))
        kept_output = max(1, min(output, context_tokens - kept_prompt))
        asked = prompts[number % len(prompts)]
        ids = encoded(asked.text, codec)
        start = rng.randrange(len(filler))
        missing = max(0, kept_prompt - len(ids))
        before = (filler * (2 + missing // len(filler)))[start : start + missing]
        clipped = (kept_prompt, kept_output) != (prompt, output)
        requests.append(BenchRequest((*before, *ids)[-kept_prompt:], kept_output, clipped, asked.task))
    return requests


def curve_prompts(codec: TextCodec, context_tokens: int) -> list[BenchRequest]:
    """Built-in held-out prompts by task, as a chat would send them."""
    output = min(CURVE_OUTPUT_TOKENS, context_tokens // 2)
    return [
        BenchRequest(encoded(each.text, codec)[-(context_tokens - output) :], output, task=each.task, ignore_eos=False)
        for each in built_in("held_out", CURVE_PROMPTS_PER_TASK)
    ]


def encoded(text: str, codec: TextCodec) -> tuple[int, ...]:
    """A user's message through the chat template, where there is one."""
    if codec.has_chat_template:
        return tuple(codec.encode_chat([{"role": "user", "content": text}]))
    return tuple(codec.encode(text))


def as_job(requests: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    """Requests as edgert.trial takes them."""
    return [
        {
            "prompt_ids": list(each.prompt_ids),
            "output_tokens": each.output_tokens,
            "task": each.task,
            "ignore_eos": each.ignore_eos,
        }
        for each in requests
    ]
