"""`edgebuild build` (also plain `edgebuild --profile ...`) and `edgebuild resume`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgebuild.commands.planning import planning_options, with_tuning

if TYPE_CHECKING:
    from edgebuild.build import Built


@click.command()
@click.option("--profile", "profile_name", required=True, help="Device profile: a file, or the name of a bundled one.")
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint: folder or GGUF file.")
@click.option("--traffic", type=click.Path(path_type=Path), help="Trace or histogram.")
@click.option("--output", type=click.Path(path_type=Path), help="Artifact.  [default: artifacts/MODEL-PROFILE]")
@planning_options
@click.option("--no-engine", is_flag=True, help="Stop after ONNX; `edgebuild resume` on the device does the rest.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(
    profile_name: str,
    model: Path | None,
    traffic: Path | None,
    output: Path | None,
    mtp: Path | None,
    draft_vocabulary: int | None,
    max_cells: int | None,
    costs_file: Path | None,
    tuning: Path | None,
    no_tuning: bool,
    no_engine: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compile a model for one device and one kind of traffic.

    Model and traffic may stand in the profile. Where the engine cannot be built on this machine, the build stops after
    ONNX and prints the command that finishes it on the device.
    """
    from edgert.costs import load_costs

    from edgebuild.build import build as run
    from edgebuild.build import model_name
    from edgebuild.commands.plan import given
    from edgebuild.profile import load_profile
    from edgebuild.progress import Stages
    from edgebuild.traffic import read_traffic

    stages = Stages(quiet=quiet)
    profile = load_profile(profile_name)
    if mtp is not None:
        profile = profile.with_drafter(mtp, vocabulary=draft_vocabulary)
    checkpoint = given(model, profile, "model")
    source = given(traffic, profile, "traffic")
    profile, tuned = with_tuning(profile, model_name(checkpoint), tuning, no_tuning, stages.note)
    costs = None if costs_file is None else load_costs(costs_file)
    target = output or Path("artifacts") / f"{model_name(checkpoint)}-{profile.name}"
    stages.title("edgebuild", f"{checkpoint.name} for {profile.name} → {target}")
    with stages.stage("traffic"):
        histogram = read_traffic(source)
    built = run(
        profile, checkpoint, histogram, target, stages,
        max_cells=max_cells, engine=not no_engine, tuned=tuned, costs=costs,
    )  # fmt: skip
    _finish(built, stages.seconds, as_json)


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint, where decoder.weights did not come along.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def resume(artifact: Path, model: Path | None, quiet: bool, as_json: bool) -> None:
    """Finish an ARTIFACT that stopped after ONNX: build its engine on this machine.

    The artifact may come without decoder.weights: they are written again from the checkpoint, and must have the hash
    that the artifact lists.
    """
    from edgebuild.build import resume as run
    from edgebuild.progress import Stages

    stages = Stages(quiet=quiet)
    _finish(run(artifact, stages, model=model), stages.seconds, as_json)


def _finish(built: Built, seconds: dict[str, float], as_json: bool) -> None:
    """Say where the artifact is, what was checked, and what to do next."""
    golden = built.golden
    if as_json:
        document = {
            "artifact": str(built.path),
            "state": built.manifest.state,
            "golden": None if golden is None else {"steps": golden.steps, "worst_error": golden.worst_error},
            "not_checked": built.not_checked,
            "next_step": built.next_step,
            "seconds": seconds,
        }
        click.echo(json.dumps(document, indent=2))
        return
    total = sum(entry.bytes for entry in built.manifest.files)
    click.echo(f"artifact  {built.path}  ({total / 1e6:,.0f} MB, {len(built.manifest.cells)} cells)")
    click.echo(f"report    {built.path / 'report.html'}")
    if golden is not None:
        click.echo(f"golden    {golden.steps} steps agree with the reference, worst error {golden.worst_error:.1e}")
    else:
        click.echo(f"golden    not run: {built.not_checked}")
    if built.next_step is not None:
        click.echo(f"to finish it on the device:\n  {built.next_step}")
    elif golden is not None:
        click.echo(f"try it:\n  edgert chat {shlex.quote(str(built.path))}")
