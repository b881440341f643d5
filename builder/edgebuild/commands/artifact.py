"""`edgebuild inspect` and `edgebuild verify`: what an artifact is, and whether it is what it says.

Reads through edgert, as the device will: no rule about artifacts stands here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from edgert.config import CONFIG_NAME, load_config
from edgert.errors import ArtifactError, BackendError, EdgertError, GoldenMismatch
from edgert.manifest import Manifest, load_manifest

GOLDEN_NOT_RUN = 10  # exit code: files are sound, but this host cannot run the engine


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The manifest and the sizes on disk as JSON.")
def inspect(artifact: Path, as_json: bool) -> None:
    """Show what an artifact is: model, device, cells, memory, files. Checks no hashes; `verify` does."""
    manifest = load_manifest(artifact)
    sizes = sizes_on_disk(artifact, manifest)
    if as_json:
        document = {**manifest.to_json(), "sizes": {"files": sizes, "total_bytes": sum(filter(None, sizes.values()))}}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
        return
    _screen(artifact, manifest, sizes)


def sizes_on_disk(artifact: Path, manifest: Manifest) -> dict[str, int | None]:
    """Bytes of each listed file as it lies there; None where it is missing."""
    paths = [(entry.path, artifact / entry.path) for entry in manifest.files]
    return {name: path.stat().st_size if path.is_file() else None for name, path in paths}


def _screen(artifact: Path, manifest: Manifest, sizes: dict[str, int | None]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    model, backend = manifest.model, manifest.backend
    where = ", ".join(backend.compute_capabilities) or "any device"
    state = "complete" if manifest.state == "complete" else "stopped after ONNX; edgebuild resume finishes it"
    vocabulary = f"{model.token_limit:,} of {model.vocabulary_size:,} tokens"
    for label, text in (
        ("artifact", f"{manifest.name}  ({artifact}), {state}"),
        ("model", f"{model.name} ({model.family}), {model.layers} layers, hidden {model.hidden_size}, {vocabulary}"),
        ("backend", f"{backend.name} {backend.version}, {backend.precision}, compute capability: {where}"),
        ("context", _context(artifact, manifest)),
        ("drafts", f"{manifest.draft_length} tokens a step" if manifest.draft_length else "none"),
        ("traffic", f"{manifest.traffic.name}, {manifest.traffic.requests:,} requests"),
        ("attribution", manifest.traffic.attribution or "none"),
        ("built by", f"edgebuild {manifest.edgebuild_version}, " + _joined(manifest.tools)),
    ):
        console.print(f"{label:<12}{text}", soft_wrap=True)
    console.print(_table("cells", ("kind", "batch", "rows", "KV tier"), _cell_rows(manifest)))
    ledger = [(line.label, f"{line.bytes:,}", line.formula) for line in manifest.ledger]
    ledger.append(("total", f"{sum(line.bytes for line in manifest.ledger):,}", f"budget {manifest.budget_bytes:,}"))
    console.print(_table("memory", ("part", "bytes", "how"), ledger))
    files = [(name, "missing" if size is None else f"{size:,}") for name, size in sizes.items()]
    files.append(("total", f"{sum(filter(None, sizes.values())):,}"))
    console.print(_table("files", ("path", "bytes"), files))


def _context(artifact: Path, manifest: Manifest) -> str:
    """What the artifact was built for and, where its scheduler.yaml says less, what is in use."""
    slots = f"each of {manifest.slots} slots" if manifest.slots > 1 else "1 slot"
    built = f"{manifest.context_tokens:,} tokens in {slots}"
    try:
        config = load_config(artifact, manifest)
    except EdgertError as error:  # `verify` fails on it; the rest of the screen is sound
        return f"{built}; not usable as it is: {error}"
    if (config.slots, config.context_tokens) == (manifest.slots, manifest.context_tokens):
        return built
    used = f"{config.slots} slot{'s' if config.slots > 1 else ''}, {config.context_tokens:,} tokens"
    return f"{built}; {CONFIG_NAME} uses {used}"


def _joined(tools: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(tools.items()))


def _cell_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    return [(cell.kind, str(cell.batch), str(cell.query_rows), f"{cell.kv_tier:,}") for cell in manifest.cells]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in ("batch", "rows", "KV tier", "bytes") else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--no-golden", is_flag=True, help="Check the files only; do not open the engine.")
def verify(artifact: Path, no_golden: bool) -> None:
    """Check an artifact: manifest, every hash, schedule, tokenizer, and the engine against its golden vectors.

    Exit codes: 0 all passed; 3 damaged; 4 scheduler.yaml asks for the impossible; 7 the engine's numbers are wrong;
    10 the files are sound, but this host cannot run the engine.
    """
    code = run_verify(artifact, golden=not no_golden)
    if code:
        sys.exit(code)


def run_verify(artifact: Path, *, golden: bool = True) -> int:
    """Print a line per check. Returns 0 or GOLDEN_NOT_RUN; raises what the failed check raised."""
    from edgert.integrity import FileCheck, check_files, require_complete

    def say(what: str, note: str = "") -> None:
        click.echo(f"ok      {what}{f'  ({note})' if note else ''}")

    def file_line(check: FileCheck) -> None:
        say(check.path, f"{check.bytes:,} bytes" + (", edited since the build" if check.status == "edited" else ""))

    manifest = load_manifest(artifact)
    say("manifest.json", f"format {manifest.format_version}, {len(manifest.files)} files")
    check_files(artifact, manifest, on_file=file_line)
    if manifest.state != "complete":
        try:
            require_complete(manifest, artifact)
        except ArtifactError as error:
            click.echo(f"not run golden vectors: {error}")
        return GOLDEN_NOT_RUN

    from edgert.loading import plan_loading

    loading = plan_loading(artifact, {"verify_files": False})
    say("scheduler.yaml", f"{len(loading.cells)} of {len(manifest.cells)} cells in use")
    say("tokenizer", "with a chat template" if loading.text.has_chat_template else "no chat template")
    if not golden:
        click.echo("skipped golden vectors (--no-golden)")
        return 0
    return _run_golden(loading)


def _run_golden(loading: Any) -> int:
    from edgert.loading import open_runtime
    from edgert.selfcheck import run_golden

    try:
        runtime = open_runtime(replace(loading, golden=None))
    except GoldenMismatch:
        raise
    except (BackendError, ArtifactError) as error:  # no library, no device, or another device than it was built for
        click.echo(f"not run golden vectors: {error}")
        click.echo(f"the files are sound; run this on the device to finish the check (exit code {GOLDEN_NOT_RUN})")
        return GOLDEN_NOT_RUN
    report = run_golden(runtime, loading)
    click.echo(
        f"ok      golden vectors  ({report.steps} positions, worst relative error {report.worst_error:.2g}, "
        f"allowed {report.tolerance:g})"
    )
    return 0
