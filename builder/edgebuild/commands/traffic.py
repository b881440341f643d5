"""`edgebuild traffic`: a trace into a histogram, with a table, bars and a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from edgebuild.errors import TrafficError
from edgebuild.files import write_whole
from edgebuild.profile.loader import find_traffic
from edgebuild.traffic import KNOWN_FORMATS, Histogram, dump_histogram, read_traffic
from edgebuild.traffic.histogram import percentile
from edgebuild.traffic.histogram_file import shown_text
from edgebuild.traffic.picture import save_picture, text_bars
from edgebuild.traffic.skipped import skipped_text
from edgebuild.traffic.tokens import token_counter

PERCENTS = (10, 50, 90, 99, 100)
LONG_READ_BYTES = 16 << 20


@click.command(epilog="\b\nFormats:\n" + "\n".join(f"  {each}" for each in KNOWN_FORMATS))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Write the histogram as YAML; a profile can name it.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw it: FILE.png or FILE.svg.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="The model that counts tokens, for ShareGPT: a GGUF, a tokenizer.json, or a folder with one of them "
    "(a checkpoint, an artifact).",
)
@click.option("--name", help="Name of the histogram.  [default: the file's name]")
@click.option("--attribution", help="Licence and origin of the trace, kept in the histogram.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def traffic(
    file: Path,
    output: Path | None,
    picture: Path | None,
    tokenizer: Path | None,
    name: str | None,
    attribution: str | None,
    as_json: bool,
) -> None:
    """Read a trace FILE and show what it says about prompt and output lengths. The name of a bundled one will do too.

    The format is told by the content: Azure, BurstGPT, Mooncake, OpenAI batch output, llama.cpp server log, ShareGPT,
    or a histogram written by this command.
    """
    console = Console(stderr=as_json)
    file = find_traffic(file)
    with _progress(file, console) as progress:
        count = None if tokenizer is None else token_counter(tokenizer)
        histogram = read_traffic(file, tokenizer=count, progress=progress)
    histogram = _renamed(histogram, name, attribution)
    if output is not None:
        _write(output, dump_histogram(histogram))
    if picture is not None:
        save_picture(histogram, picture)
    if as_json:
        click.echo(json.dumps(summary(histogram), indent=2))
    else:
        _show(histogram, console)
    for path in (output, picture):
        if path is not None:
            console.print(Text(f"wrote {path}"), soft_wrap=True)


def summary(histogram: Histogram) -> dict[str, Any]:
    """The histogram in numbers, for `--json`."""

    def of(counts: Any, total: int) -> dict[str, float]:
        shown: dict[str, float] = {f"p{percent}": percentile(counts, percent) for percent in PERCENTS[:-1]}
        return {**shown, "max": percentile(counts, 100), "mean": round(total / histogram.requests, 2), "total": total}

    contexts = histogram.decode_context_counts
    return {
        "name": histogram.name,
        "source_sha256": histogram.source_sha256,
        "attribution": histogram.attribution,
        "requests": histogram.requests,
        "skipped": dict(histogram.skipped),
        "first_skipped": dict(histogram.first_skipped),
        "tasks": dict(histogram.tasks),
        "prompt_tokens": of(histogram.prompt_counts, histogram.prompt_tokens),
        "output_tokens": of(histogram.output_counts, histogram.output_tokens),
        "decode_context_tokens": {
            **{f"p{percent}": percentile(contexts, percent) for percent in PERCENTS[:-1]},
            "max": percentile(contexts, 100),
        },
    }


def _show(histogram: Histogram, console: Console) -> None:
    table = Table(title=Text(f"{histogram.name}: {_requests(histogram.requests)}"), title_justify="left")
    table.add_column("tokens")
    for percent in PERCENTS:
        table.add_column("max" if percent == 100 else f"p{percent}", justify="right")
    for label, counts in (
        ("prompt", histogram.prompt_counts),
        ("output", histogram.output_counts),
        ("context, over decode steps", histogram.decode_context_counts),
    ):
        table.add_row(label, *(f"{percentile(counts, percent):,}" for percent in PERCENTS))
    console.print(table)
    for label, counts in (("prompt", histogram.prompt_counts), ("output", histogram.output_counts)):
        console.print(Text(f"{label} tokens, share of requests"))
        for line in text_bars(counts):
            console.print(Text("  " + line), soft_wrap=True)
    for task, requests in sorted(histogram.tasks.items(), key=lambda item: -item[1]):
        console.print(Text(f"task {task}: {_requests(requests)}"))
    if any(histogram.skipped.values()):
        told = skipped_text(histogram.skipped, histogram.first_skipped)
        console.print(Text(told, style="yellow"), soft_wrap=True)
    if histogram.attribution:
        console.print(Text(histogram.attribution, style="dim"))


def _requests(number: int) -> str:
    return f"{number:,} {'request' if number == 1 else 'requests'}"


def _renamed(histogram: Histogram, name: str | None, attribution: str | None) -> Histogram:
    changes: dict[str, Any] = {}
    if name is not None:
        changes["name"] = shown_text(name, "name", "--name")
    if attribution is not None:
        changes["attribution"] = shown_text(attribution, "attribution", "--attribution")
    return dataclasses.replace(histogram, **changes)


def _write(path: Path, text: str) -> None:
    """Write a file so that it is either whole or not there."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise TrafficError(f"{path}: {error.strerror or error}") from error


@contextmanager
def _progress(file: Path, console: Console) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for a long read on a terminal; nothing for a short one or when nobody watches."""
    if not console.is_terminal or not file.is_file() or file.stat().st_size < LONG_READ_BYTES:
        yield None
        return
    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(file.name, total=file.stat().st_size)
        yield lambda done, total: bars.update(task, completed=done, total=total)
