"""`edgebuild profiles`: the bundled profiles, one of them in full, and the JSON Schema for editors."""

from __future__ import annotations

import json

import click
from rich import box
from rich.console import Console
from rich.table import Table

from edgebuild.profile import Profile, bundled_names, json_schema, load_profile
from edgebuild.profile.units import human_bytes


@click.group()
def profiles() -> None:
    """Device profiles: list them, show one, print the JSON Schema."""


@profiles.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_profiles(as_json: bool) -> None:
    """The profiles that ship with edgebuild."""
    loaded = {name: load_profile(name) for name in bundled_names()}
    if as_json:
        click.echo(json.dumps([_plain(profile) for profile in loaded.values()], indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("name", "backend", "precision", "memory", "GB/s", "CC", "power mode"):
        table.add_column(column, justify="right" if column in ("memory", "GB/s", "CC") else "left", no_wrap=True)
    console = Console()
    roomy = console.width >= 110
    if roomy:
        table.add_column("description")
    for name, profile in loaded.items():
        device = profile.device
        table.add_row(
            name,
            profile.backend,
            profile.precision,
            human_bytes(device.memory_bytes),
            f"{device.bandwidth_gb_per_s:g}",
            device.compute_capability or "–",
            device.power_mode or "–",
            *([profile.description] if roomy else []),
        )
    console.print(table)


@profiles.command()
@click.argument("name")
def show(name: str) -> None:
    """Everything that profile NAME (or a file) says, defaults included, as YAML that can be saved and edited."""
    import yaml

    plain = _plain(load_profile(name))
    click.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110), nl=False)


@profiles.command()
def schema() -> None:
    """JSON Schema of a profile file."""
    click.echo(json.dumps(json_schema(), indent=2))


def _plain(profile: Profile) -> dict[str, object]:
    plain: dict[str, object] = profile.model_dump(mode="json")
    return plain
