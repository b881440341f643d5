"""What is simulated: the scheduler's limits, the true costs, the slots, and how drafts fare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgert.costs import StepCosts
from edgert.drafting import DraftControl
from edgert.scheduler import Limits
from edgert.stepcosts import drafting_cells


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
    """As edgert.loading makes it: by the costs of the cells at a short context."""
    limits, length = setting.limits, setting.limits.draft_length
    by_batch = {
        batch: tuple(setting.costs.step_ms(cell, cell.query_rows, drafts) for drafts, cell in enumerate(taken))
        for batch, taken in drafting_cells(limits.cells, limits.slots, length).items()
    }
    return DraftControl(length, costs_ms=by_batch, threshold=setting.threshold)
