"""What `build` and `plan` both ask that a plan is made by: drafter, cells, measured costs, a tuning run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from edgebuild.plan import Tuned
    from edgebuild.profile import Profile

Command = TypeVar("Command", bound=Callable[..., Any])


OPTIONS = (
    click.option(
        "--mtp", type=click.Path(path_type=Path), help="MTP head that drafts; 3 tokens where the profile says 0."
    ),
    click.option("--draft-vocabulary", type=click.IntRange(min=1), help="Most used tokens that may be drafted."),
    click.option(
        "--max-cells", type=click.IntRange(min=2), help="Captured cells at most, prefill and decode together."
    ),
    click.option(
        "--costs",
        "costs_file",
        type=click.Path(path_type=Path),
        help="costs.json of an earlier build for this device: slo.itl_p95_ratio goes by it.",
    ),
    click.option(
        "--tuning",
        type=click.Path(path_type=Path),
        help="Logbook of `edgebuild tune`: measured goes over estimated.  [default: what was tuned on this device]",
    ),
    click.option("--no-tuning", is_flag=True, help="Do not look for a tuning run of this device."),
)


def planning_options(command: Command) -> Command:
    """The options, in this order in --help."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def with_tuning(
    profile: Profile, model: str, tuning: Path | None, no_tuning: bool, say: Callable[[str], None]
) -> tuple[Profile, Tuned | None]:
    """The profile and the measured numbers to build by; None where there are none. Raises TuningError."""
    from edgebuild.tune.for_build import apply_vocabulary, found_tuning, given_tuning, tuned_from

    if tuning is not None and no_tuning:
        raise click.UsageError("--tuning and --no-tuning exclude each other")
    if no_tuning:
        return profile, None
    result = given_tuning(tuning, profile, model) if tuning is not None else found_tuning(profile, model, say)
    if result is None:
        return profile, None
    tuned = tuned_from(result)
    return apply_vocabulary(profile, tuned, say), tuned
