"""From a file to a histogram: the format is told by the header or the first object, never by the file's name.

To add a format: CSV, one line in `csv_format.CSV_FORMATS`; anything else, a reader and a line in `_detect`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from edgebuild.errors import TrafficError
from edgebuild.traffic.csv_format import CSV_FORMATS, find_csv_format, read_csv
from edgebuild.traffic.histogram import Histogram, HistogramBuilder
from edgebuild.traffic.histogram_file import MARK, parse_histogram
from edgebuild.traffic.json_format import CountTokens, read_mooncake, read_openai_batch, read_sharegpt
from edgebuild.traffic.llamacpp import LlamaLog
from edgebuild.traffic.skipped import skipped_text
from edgebuild.traffic.source import Progress, Source

KNOWN_FORMATS = (
    *(f"{form.name} (columns {', '.join((*form.also, form.prompt, form.output))})" for form in CSV_FORMATS),
    "Mooncake JSONL (input_length, output_length)",
    "OpenAI batch output JSONL (response.body.usage)",
    "ShareGPT JSON (conversations; needs a tokenizer)",
    "llama.cpp server log (eval time = ... / N tokens)",
    f"edgebuild histogram YAML ({MARK}: 1)",
)

_HISTOGRAM = re.compile(rb"^" + MARK.encode() + rb"\s*:", re.MULTILINE)

Reader = Callable[[Source, HistogramBuilder], None]


def read_traffic(
    path: Path | str, *, tokenizer: CountTokens | None = None, progress: Progress | None = None
) -> Histogram:
    """Read a trace into a histogram, in one pass and in memory that does not grow with the trace.

    tokenizer  text -> number of tokens, for traces that hold text (ShareGPT)
    progress   called with (bytes read, bytes in the file)

    Raises TrafficError for an unknown format, a trace without per-request lengths, or one without a usable request.
    """
    path = Path(path)
    if path.is_dir():
        raise TrafficError(f"{path} is a folder", hint="name one trace file")
    with Source(path, progress) as source:
        head = source.head()
        if not head.strip():
            raise TrafficError(f"{path}: the file is empty")
        first = _first_line(head)
        if _HISTOGRAM.search(head):
            text = b"".join(source.chunks()).decode("utf-8", "replace")
            return parse_histogram(text, str(path), source.sha256())
        builder = HistogramBuilder()
        reader = _detect(head, tokenizer)
        if reader is not None:
            reader(source, builder)
        else:
            _read_log(source, builder, first)
        if builder.requests == 0:
            told = skipped_text(builder.skipped, builder.first_skipped) if builder.skipped else "it has no rows"
            raise TrafficError(f"{path}: no usable request in this trace: {told}")
        return builder.finish(name=path.name.split(".")[0], source_sha256=source.sha256(), attribution="")


def _first_line(head: bytes) -> bytes:
    """The first line that is neither blank nor a comment, shortened to what detection needs."""
    for line in head.split(b"\n"):
        if line.strip() and not line.startswith(b"#"):
            return line.strip()
    return b""


def _detect(head: bytes, tokenizer: CountTokens | None) -> Reader | None:
    """The reader for a file that begins like this, or None when only a log is possible."""
    start = head.lstrip()[:1]
    if start == b"[" and _is_json_array(head):
        return lambda source, builder: read_sharegpt(source, builder, tokenizer, array=True)
    if start == b"{":
        keys = _first_keys(head)
        if {"input_length", "output_length"} <= keys:
            return read_mooncake
        if "response" in keys and keys & {"custom_id", "error"}:
            return read_openai_batch
        if keys & {"conversations", "conversation"}:
            return lambda source, builder: read_sharegpt(source, builder, tokenizer, array=False)
    form = find_csv_format(head)
    if form is not None:
        return lambda source, builder: read_csv(source, form, builder)
    return None


def _is_json_array(head: bytes) -> bool:
    """Whether text that begins with a bracket is an array of objects, and not a log line such as `[INFO] ...`."""
    return head.lstrip()[1:].lstrip()[:1] in (b"{", b"]")


def _first_keys(head: bytes) -> set[str]:
    """Keys of the first JSON object of a file with one object a line; empty when the line is not one."""
    for line in head.split(b"\n"):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return set(value)
    return set()


def _read_log(source: Source, builder: HistogramBuilder, first: bytes) -> None:
    """The last resort: a llama.cpp log may begin with anything. Says what the file is instead when it is none."""
    log = LlamaLog(builder)
    throughput = 0
    binary = b"\0" in source.head()
    for block in source.blocks() if not binary else ():
        throughput += block.count(b"Avg prompt throughput")
        if b"eval time" not in block and b"slot" not in block:
            continue
        for line in block.decode("utf-8", "replace").splitlines():
            log.line(line)
    log.finish()
    if log.seen:
        return
    if throughput:
        raise TrafficError(
            f"{source.path}: a throughput log ({throughput:,} lines of 'Avg prompt throughput') has no lengths: the "
            "prompt tokens and the output tokens of each request are missing",
            hint="log the usage of every response (prompt_tokens, completion_tokens) and give that file instead",
        )
    seen = "binary data" if binary else repr(first[:60].decode("utf-8", "replace"))
    raise TrafficError(
        f"{source.path}: unknown trace format; it begins with {seen}",
        hint=f"known: {', '.join(name.split(' (')[0] for name in KNOWN_FORMATS)}; edgebuild traffic --help says more",
    )
