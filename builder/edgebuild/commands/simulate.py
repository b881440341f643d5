"""`edgebuild simulate`: what an artifact's scheduler makes of a traffic, fixed against adaptive, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgebuild.commands.numbers import FiniteRange

if TYPE_CHECKING:
    from edgebuild.simulate.records import Run
    from edgebuild.simulate.study import Study

SLO_HELP = "A request is good within it, and the policy keeps to it.  [default: the artifact's target]"


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--traffic",
    help="Trace with times, list of requests (arrival_s, prompt_tokens, output_tokens), histogram, or the name of a "
    "bundled one.  [default: the artifact's histogram]",
)
@click.option(
    "--policy", type=click.Choice(["fixed", "adaptive", "both"]), default="both", show_default=True, help="To simulate."
)
@click.option("--rate", type=FiniteRange(min=0, min_open=True), help="Requests a second; stretches a trace.")
@click.option(
    "--load",
    type=FiniteRange(min=0, min_open=True, max=10),
    help="Rate as a share of what the device can serve.  [default: 0.7 where there are no times]",
)
@click.option("--concurrency", type=click.IntRange(min=1), help="So many at any time instead, as `edgert bench` does.")
@click.option(
    "--burstiness",
    type=FiniteRange(min=0.01, max=100),
    help="Shape of the gamma process of arrivals: 1 = Poisson, 0.2 = in bursts.  [default: the histogram's, or 1]",
)
@click.option("--requests", type=click.IntRange(min=1), help="At most; of a histogram.  [default: the trace's, 1000]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of lengths, times and drafts.")
@click.option("--costs", "costs_file", type=click.Path(path_type=Path), help="costs.json from another place.")
@click.option("--measure", is_flag=True, help="Measure every cell here first and write costs.json into the artifact.")
@click.option("--profile", "profile_name", help="Estimate the costs for this device instead.")
@click.option("--slo-ttft-ms", type=FiniteRange(min=0, min_open=True), help=SLO_HELP)
@click.option("--slo-itl-ms", type=FiniteRange(min=0, min_open=True), help=f"Longest gap. {SLO_HELP}")
@click.option("--slo-tpot-ms", type=FiniteRange(min=0, min_open=True), help=f"Time per token. {SLO_HELP}")
@click.option("--picture", type=click.Path(path_type=Path), help="Write the curves as one HTML page.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def simulate(
    artifact: Path,
    traffic: str | None,
    policy: str,
    rate: float | None,
    load: float | None,
    concurrency: int | None,
    burstiness: float | None,
    requests: int | None,
    seed: int,
    costs_file: Path | None,
    measure: bool,
    profile_name: str | None,
    slo_ttft_ms: float | None,
    slo_itl_ms: float | None,
    slo_tpot_ms: float | None,
    picture: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Replay a traffic against ARTIFACT's scheduler in virtual time.

    The scheduler is the runtime's own; a step takes what its cell costs: as measured on the device (--measure, once),
    as in --costs, or as estimated from a device profile. Needs no device but for --measure.
    """
    from edgert.costs import COSTS_NAME
    from edgert.tempo import Targets

    from edgebuild.errors import SimulationError
    from edgebuild.profile.loader import find_traffic
    from edgebuild.simulate.artifact import find_costs, read_subject
    from edgebuild.simulate.artifact import measure as measure_here
    from edgebuild.simulate.study import Ask, study
    from edgebuild.simulate.summary import Slo

    if sum(value is not None for value in (rate, load, concurrency)) > 1:
        raise SimulationError("--rate, --load and --concurrency each say how requests come", hint="give one of them")
    if measure and (costs_file or profile_name):
        raise SimulationError("--measure, --costs and --profile each say where costs come from", hint="give one")
    subject = read_subject(artifact)
    if measure:
        with _bar("measuring cells", quiet) as report:
            costs = measure_here(artifact, report)
        if not quiet:
            click.echo(f"wrote {artifact / COSTS_NAME}: edgert schedules and admits by it from now on", err=True)
    else:
        costs = find_costs(subject, file=costs_file, profile_name=profile_name)
    config = subject.config
    slo = Slo(
        config.ttft_target_ms if slo_ttft_ms is None else slo_ttft_ms,
        config.itl_target_ms if slo_itl_ms is None else slo_itl_ms,
        (config.tpot_target_ms or subject.tpot_ms) if slo_tpot_ms is None else slo_tpot_ms,
    )
    ask = Ask(
        traffic=subject.directory / "traffic.yaml" if traffic is None else find_traffic(traffic),
        policies=("fixed", "adaptive") if policy == "both" else (policy,),
        rate=rate,
        load=load,
        concurrency=concurrency,
        burstiness=burstiness,
        requests=requests,
        seed=seed,
        slo=slo,
        targets=Targets(
            slo.ttft_ms,
            slo.itl_ms,
            config.itl_p95_ratio,
            config.tpot_target_ms if slo_tpot_ms is None else slo_tpot_ms,
        ),
    )
    with _bar("simulating", quiet) as report:
        made = study(subject, costs, ask, report)
    if as_json:
        click.echo(json.dumps(made.to_json(), indent=2, allow_nan=False))
    else:
        _show(made)
    if picture is not None:
        _draw(picture, made, as_json)


@contextmanager
def _bar(what: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _show(made: Study) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from edgebuild.simulate.picture import arrivals_line, over_time

    console = Console(highlight=False)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    say(made.title, "bold")
    say(made.costs_line, "yellow" if made.costs.source == "estimate" else "")
    head, *rows = made.table()
    table = Table()
    for column in head:
        table.add_column(column, justify="left" if column == head[0] else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    runs: Mapping[str, Run] = made.runs
    highest = max(each.ttft_ms for run in runs.values() for each in run.outcomes)
    first = next(iter(runs.values()))
    say(f"{'requests':>10} {arrivals_line(first)}")
    for name, run in runs.items():
        say(f"{name:>10} {over_time(run, highest)}")
    say(f"{'':>10} worst time to first token over {first.outcomes[-1].arrival.at_s:,.0f} s; full = {highest:,.0f} ms")
    for note in made.notes:
        say(note, "dim")


def _draw(path: Path, made: Study, as_json: bool) -> None:
    from edgebuild.errors import OutputError
    from edgebuild.files import write_whole
    from edgebuild.simulate.picture import page

    try:
        write_whole(path, page(made.title, made.runs, made.table(), (made.costs_line, *made.notes)))
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from error
    click.echo(f"wrote {path}", err=as_json)
