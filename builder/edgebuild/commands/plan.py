"""`edgebuild plan`: everything decided, nothing built. Prints the plan for people, or as JSON. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgebuild.commands.planning import planning_options, with_tuning
from edgebuild.errors import CheckpointError, ProfileError

if TYPE_CHECKING:
    from edgebuild.models.config import ModelConfig
    from edgebuild.plan import Plan
    from edgebuild.profile import Profile


@click.command()
@click.option("--profile", "profile_name", required=True, help="Device profile: a file, or the name of a bundled one.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Checkpoint: folder (config.json is enough), config.json or GGUF file.",
)
@click.option("--traffic", type=click.Path(path_type=Path), help="Trace or histogram.")
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    profile_name: str,
    model: Path | None,
    traffic: Path | None,
    mtp: Path | None,
    draft_vocabulary: int | None,
    max_cells: int | None,
    costs_file: Path | None,
    tuning: Path | None,
    no_tuning: bool,
    as_json: bool,
) -> None:
    """Decide chunk sizes, KV tiers, cells, memory and draft length; build nothing."""
    from edgert.costs import load_costs

    from edgebuild.build import model_name
    from edgebuild.drafter import planned_drafter
    from edgebuild.models.support import refuse_backend
    from edgebuild.plan import ModelShape, make_plan
    from edgebuild.profile import load_profile
    from edgebuild.traffic import read_traffic

    profile = load_profile(profile_name)
    if mtp is not None:
        profile = profile.with_drafter(mtp, vocabulary=draft_vocabulary)
    checkpoint = given(model, profile, "model")
    said: list[str] = []
    profile, tuned = with_tuning(profile, model_name(checkpoint), tuning, no_tuning, said.append)
    config = model_config(checkpoint)
    refuse_backend(profile.backend, config, profile.limits.max_chunk)
    histogram = read_traffic(given(traffic, profile, "traffic"))
    drafter = planned_drafter(profile, config)
    costs = None if costs_file is None else load_costs(costs_file)
    made = make_plan(profile, histogram, ModelShape.from_config(config), max_cells, drafter, tuned, costs)
    made = replace(made, notes=(*said, *made.notes))
    if as_json:
        click.echo(json.dumps(made.to_json(), indent=2))
    else:
        show_plan(made)


def model_config(path: Path) -> ModelConfig:
    """The configuration of a checkpoint: a GGUF file, a folder of which only config.json need be there, or such a file
    itself, by whatever name."""
    from edgebuild.models.config import ModelConfig

    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}", hint="name a folder with a config.json") from error
        except ValueError as error:
            raise CheckpointError(f"{file}: not JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{file}: expected a JSON object")
        return ModelConfig.from_hf(config)
    from edgebuild.checkpoint import open_checkpoint

    return ModelConfig.from_hf(open_checkpoint(path).config)


def given(option: Path | None, profile: Profile, key: str) -> Path:
    """The option, else what the profile names."""
    path: Path | None = option or getattr(profile, key)
    if path is None:
        raise ProfileError(f"no {key} is given", hint=f"add --{key}, or write `{key}:` into the profile")
    return path


def show_plan(plan: Plan) -> None:
    """Print a plan for people: chunk sizes, tiers, cells, memory, notes."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    limits, prefill, decode = plan.limits, plan.prefill, plan.decode
    console.print(
        f"[bold]Plan for {limits.device}[/] ({limits.backend}, {limits.precision}): {plan.slots} slots of "
        f"{plan.context_tokens:,} tokens, traffic {escape(plan.traffic.name)} ({plan.traffic.requests:,} requests)",
        soft_wrap=True,
    )

    table = Table(title="Prefill chunks", title_justify="left")
    for name in ("chunk size", "chunks", "share"):
        table.add_column(name, justify="right")
    total = max(1, prefill.padding.launches)
    for size, chunks in zip(prefill.padding.sizes, prefill.padding.chunks_by_size, strict=True):
        table.add_row(f"{size:,}", f"{chunks:,}", f"{chunks / total:.1%}")
    console.print(table)

    table = Table(title="Padding of prefill rows, waste of KV reads", title_justify="left")
    for name in ("choice", "chunk sizes", "padding", "KV tiers", "waste"):
        table.add_column(name)
    for name, padding, tiers in (
        ("this plan", prefill.padding, decode.tiers),
        ("powers of two", prefill.powers_of_two, decode.powers_of_two),
        ("uniform steps", prefill.uniform, decode.uniform),
    ):
        sizes, reads = " ".join(map(str, padding.sizes)), " ".join(map(str, tiers.tiers))
        table.add_row(name, sizes, f"{padding.fraction:.1%}", reads, f"{tiers.waste_fraction:.1%}")
    console.print(table)

    table = Table(title=f"{len(plan.cells)} cells", title_justify="left")
    for name in ("cell", "launches", "saves (weight reads)"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for item in plan.planned_cells:
        table.add_row(item.cell.label, f"{item.launches:,}", f"{item.gain:,.0f}" if item.gain else "needed")
    console.print(table)

    table = Table(title="Memory", title_justify="left")
    for name in ("line", "MB", "of the device", "formula"):
        table.add_column(name, justify="right" if name in ("MB", "of the device") else "left")
    for line in plan.ledger.lines:
        table.add_row(
            line.label, f"{line.bytes / 1e6:,.0f}", f"{line.bytes / plan.ledger.device_bytes:.1%}", line.formula
        )
    free = plan.ledger.headroom_bytes
    table.add_row("free", f"{free / 1e6:,.0f}", f"{free / plan.ledger.device_bytes:.1%}", "what the ledger leaves")
    console.print(table)
    console.print(f"draft length {plan.draft.length}: {plan.draft.reason}", soft_wrap=True)
    console.print(f"prefill:decode 1:{plan.ratio.start}: {plan.ratio.reason}", soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
