"""`edgebuild tune`: what this artifact does best on this device and traffic, one change at a time."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote

import click

from edgebuild.commands.numbers import FiniteRange


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--traffic",
    type=click.Path(path_type=Path),
    required=True,
    help='Your prompts (JSON lines: {"prompt": ..., "max_tokens": ..., "task": ...}), or a trace or histogram.',
)
@click.option("--profile", "profile_name", help="Device profile: acceptance threshold, drift limit and slo.")
@click.option(
    "--requests", type=click.IntRange(min=1, max=100_000), help="Of the file.  [default: own prompts all, 16]"
)
@click.option("--concurrency", type=click.IntRange(min=1, max=4096), help="At a time.  [default: as the trace says]")
@click.option("--repeats", type=click.IntRange(min=2, max=100), default=3, show_default=True, help="Of each trial.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the drawn lengths.")
@click.option("--slo-ttft-ms", type=FiniteRange(min=0, min_open=True), help="With a limit, goodput decides.")
@click.option("--slo-tpot-ms", type=FiniteRange(min=0, min_open=True), help="With a limit, goodput decides.")
@click.option(
    "--soak-minutes",
    type=FiniteRange(min=0, max=10_000),
    default=10.0,
    show_default=True,
    help="How long the winner must hold steady; 0 = no soak.",
)
@click.option("--trial-timeout-s", type=FiniteRange(min=1), help="A trial that takes longer has failed.")
@click.option("--logbook", type=click.Path(path_type=Path), help="JSON lines.  [default: ARTIFACT.tuning.jsonl]")
@click.option(
    "--output", type=click.Path(path_type=Path), help="The configuration.  [default: ARTIFACT.scheduler.yaml]"
)
@click.option("--apply", "apply_", is_flag=True, help="Put configuration and costs into the artifact.")
@click.option("--fresh", is_flag=True, help="Measure everything again; old lines stay in the logbook.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print result and trials as JSON.")
def tune(
    artifact: Path,
    traffic: Path,
    profile_name: str | None,
    requests: int | None,
    concurrency: int | None,
    repeats: int,
    seed: int,
    slo_ttft_ms: float | None,
    slo_tpot_ms: float | None,
    soak_minutes: float,
    trial_timeout_s: float | None,
    logbook: Path | None,
    output: Path | None,
    apply_: bool,
    fresh: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure ARTIFACT on this device with your requests, change by change, and write the best scheduler.yaml.

    From everything off: chunked prefill, CUDA graphs, MTP, then chunk size, KV tiers, prefill:decode ratio and draft
    length. A change stays where it wins beyond the spread of its repeats. Every trial is a line of the logbook; the
    same command continues a run that was interrupted. In the end what each cell costs is measured for costs.json. The
    artifact is left alone without --apply.

    Exit codes: 0 done; 11 the baseline failed, no settings held steady, or the logbook cannot be used; 130 interrupted.
    """
    from functools import partial

    from edgert.config import CONFIG_NAME
    from edgert.costs import COSTS_NAME
    from edgert.errors import EdgertError

    from edgebuild.errors import OutputError
    from edgebuild.files import require_writable
    from edgebuild.profile import load_profile
    from edgebuild.progress import Stages
    from edgebuild.tune import session
    from edgebuild.tune.runner import run_process
    from edgebuild.tune.table import print_result

    stages = Stages(quiet=quiet)
    path = artifact if artifact.name not in ("", "..") else artifact.resolve()
    book = logbook or path.parent / f"{path.name}.tuning.jsonl"
    config = output or path.parent / f"{path.name}.{CONFIG_NAME}"
    costs_file = path / COSTS_NAME if apply_ else config.with_name(f"{path.name}.{COSTS_NAME}")
    stages.title("edgebuild tune", f"{artifact} → {book}")
    require_writable(config, hint="give another --output")
    if apply_:
        require_writable(path / CONFIG_NAME, hint="leave --apply out")
    profile = load_profile(profile_name) if profile_name else None
    if profile is not None:
        slo_ttft_ms = profile.slo.ttft_ms if slo_ttft_ms is None else slo_ttft_ms
        slo_tpot_ms = profile.slo.tpot_ms if slo_tpot_ms is None else slo_tpot_ms
    ask = session.Ask(traffic, requests, concurrency, repeats, seed, soak_minutes, slo_ttft_ms, slo_tpot_ms)
    setup = session.prepare(path, ask, profile, stages)
    try:
        result, trials = session.tune(
            setup,
            book,
            stages,
            runner=partial(run_process, timeout_s=trial_timeout_s),
            look=session.sensor_look(setup.manifest.backend.name),
            now=time.monotonic,
            at=session.utc_now,
            fresh=fresh,
        )
    except KeyboardInterrupt:
        stages.note(f"{book} is whole: the same command goes on from there")
        raise
    session.write_config(setup, result, trials, config)
    if apply_:
        session.write_config(setup, result, trials, path / CONFIG_NAME)
    try:
        kept = f"for later builds on this device: {session.remember(result)}"
    except OutputError as error:  # a read-only home: --tuning names the logbook then
        kept = f"not kept for later builds: {error.args[0]}"
    costs, measured = None, str(costs_file)
    try:
        session.write_costs(setup, result, costs_file, stages)
        costs = costs_file
    except EdgertError as error:  # what was tuned stands without them
        measured = f"not measured: {error}"
    if as_json:
        click.echo(session.document(result, trials, book, config, costs), nl=False)
        return
    from rich.console import Console

    print_result(Console(highlight=False), result, trials)
    click.echo(f"logbook   {book}")
    click.echo(f"config    {config}" + (f"  (and in {path})" if apply_ else ""))
    click.echo(f"costs     {measured}")
    click.echo(f"kept      {kept}")
    click.echo(f"to see it:\n  edgebuild report {quote(str(path))} --tuning {quote(str(book))}")
    if not apply_:
        click.echo(f"to use it:\n  cp {quote(str(config))} {quote(str(path / CONFIG_NAME))}")
        if costs is not None:
            click.echo(f"  cp {quote(str(costs))} {quote(str(path / COSTS_NAME))}")
