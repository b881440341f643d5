"""KV tiers: how many cache positions a decode cell reads, at the least expected attention cost.

A step at context n runs in the smallest tier >= n and costs in proportion to the tier, not to n (measured: the cost
follows the width given). Objective: the sum over decode steps of their tier. This module knows context lengths only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgebuild.plan.partition import min_cost_partitions

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TierCost:
    """What a list of tiers does to the traffic. Totals over the whole trace.

    tiers            ascending, the last serves the whole context
    used_positions   cache positions the steps needed
    read_positions   cache positions the steps read
    steps_by_tier    decode steps in each tier, beside `tiers`
    """

    tiers: tuple[int, ...]
    used_positions: int
    read_positions: int
    steps_by_tier: tuple[int, ...]

    @property
    def waste_fraction(self) -> float:
        """Positions read in vain / positions read, 0 for no traffic."""
        return 1 - self.used_positions / self.read_positions if self.read_positions else 0.0


def cost_of_tiers(context_counts: Counts, tiers: Sequence[int]) -> TierCost:
    """Measure a list of tiers against the traffic; steps past the last tier cannot run and are not counted."""
    ordered = np.array(sorted(set(tiers)), dtype=np.int64)
    if ordered.size == 0 or ordered[0] < 1:
        raise ValueError(f"KV tiers {list(tiers)}: expected one or more positive numbers")
    counts = context_counts[1 : int(ordered[-1]) + 1]
    contexts = np.arange(1, counts.size + 1)
    chosen = np.searchsorted(ordered, contexts)
    steps = np.bincount(chosen, weights=counts, minlength=ordered.size).astype(np.int64)
    return TierCost(
        tiers=tuple(int(tier) for tier in ordered),
        used_positions=int((contexts * counts).sum()),
        read_positions=int((steps * ordered).sum()),
        steps_by_tier=tuple(int(count) for count in steps),
    )


def choose_tiers(context_counts: Counts, top: int, max_count: int, granularity: int = 64) -> list[TierCost]:
    """The tiers with the least attention cost: entry n-1 uses at most n tiers. The last is always `top`.

    Tiers are multiples of `granularity`, which must divide `top`. A tier that no step of the traffic would use is not
    taken, save the top one, which must serve what the traffic did not show.
    """
    if top % granularity:
        raise ValueError(f"top tier {top} is not a multiple of {granularity}")
    points = top // granularity
    counts = context_counts[1 : top + 1]
    grid = -(-np.arange(1, counts.size + 1) // granularity)
    steps_up_to = np.cumsum(np.bincount(grid, weights=counts, minlength=points + 1).astype(np.int64))
    ends = np.arange(points + 1, dtype=np.int64) * granularity
    cost = ends[None, :] * (steps_up_to[None, :] - steps_up_to[:, None])
    results: list[TierCost] = []
    for _, cuts in min_cost_partitions(cost, max_count):
        measured = cost_of_tiers(context_counts, [cut * granularity for cut in cuts])
        cheaper = not results or measured.read_positions < results[-1].read_positions
        results.append(measured if cheaper else results[-1])
    results.extend([results[-1]] * (max_count - len(results)))
    return results
