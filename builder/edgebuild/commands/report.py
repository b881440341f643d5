"""`edgebuild report`: draws an artifact's report again, from what is known by now."""

from __future__ import annotations

from pathlib import Path

import click
from edgert.integrity import check_files
from edgert.manifest import load_manifest

from edgebuild.errors import OutputError
from edgebuild.files import write_whole

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--doctor", type=FILE, help="Output of `edgert doctor ARTIFACT --json`: memory, capture, speed, device.")
@click.option("--tuning", type=FILE, help="Logbook of `edgebuild tune`: trials, ablation, acceptance.")
@click.option("--bench", "benches", type=FILE, multiple=True, help="Output of `edgert bench --json`; repeatable.")
@click.option("--output", type=FILE, help="Where to write it.  [default: ARTIFACT.report.html, beside the artifact]")
def report(
    artifact: Path, doctor: Path | None, tuning: Path | None, benches: tuple[Path, ...], output: Path | None
) -> None:
    """Draw the report of ARTIFACT with what was measured since the build.

    The report inside the artifact stays as it is: an artifact is not changed after the build.
    """
    from edgebuild.report import gather, read_sources, render_report

    manifest = load_manifest(artifact)
    check_files(artifact, manifest, "sizes")
    sources = read_sources(artifact, manifest)
    evidence = gather(artifact, manifest.model.identity, doctor=doctor, benches=benches, tuning=tuning)
    resolved = artifact.resolve()
    target = output or resolved.with_name(f"{resolved.name}.report.html")
    if target.resolve().is_relative_to(resolved):
        raise OutputError(f"{target}: inside the artifact, which is hashed", hint="give an --output outside of it")
    _write(target, render_report(sources, evidence))
    click.echo(f"wrote {target}")


def _write(target: Path, text: str) -> None:
    """Whole or not at all. Raises OutputError."""
    try:
        write_whole(target, text)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror or error}") from None
