"""`--tuning` and `--no-tuning`, which `build` and `plan` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from edgebuild.plan import Tuned
    from edgebuild.profile import Profile

Command = TypeVar("Command", bound=Callable[..., Any])


def tuning_options(command: Command) -> Command:
    """The two options."""
    file = click.option(
        "--tuning",
        type=click.Path(path_type=Path),
        help="Logbook of `edgebuild tune`: measured goes over estimated.  [default: what was tuned on this device]",
    )
    off = click.option("--no-tuning", is_flag=True, help="Do not look for a tuning run of this device.")
    return file(off(command))


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
