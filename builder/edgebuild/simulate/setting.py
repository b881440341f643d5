"""What is simulated: the scheduler's limits, the true costs, the slots, and how drafts fare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgert.costs import StepCosts
from edgert.drafting import DraftControl
from edgert.scheduler import Limits
from edgert.stepcosts import step_costs_of


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    limits      as the runtime makes them from scheduler.yaml; limits.costs is what the policy knows
    costs       what steps really cost; usually the same
    slots       sequences at once
    acceptance  by draft position, given the one before; () = nothing is drafted
    threshold   mtp_acceptance_threshold
    admitted    sequences that run at once at most, for headroom; None = as many as slots
    active      sequences that may be active at a time (a guard's verdict), in seconds of virtual time; None = all
    """

    limits: Limits
    costs: StepCosts
    slots: int
    acceptance: tuple[float, ...] = ()
    threshold: float = 0.0
    admitted: int | None = None
    active: Callable[[float], int] | None = None


def draft_control(setting: Setting) -> DraftControl:
    """As edgert.loading makes it from the same costs."""
    limits, length = setting.limits, setting.limits.draft_length
    by_batch = step_costs_of(setting.costs, limits.cells, limits.slots, length)
    return DraftControl(length, costs_ms=by_batch, threshold=setting.threshold)
