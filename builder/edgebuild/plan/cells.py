"""Which cells to capture: how many chunk sizes, which KV tiers for which batch, under a budget of cells.

Costs are in weight reads: 1.0 is the time to read every weight once, which is what a decode step costs at least.
    decode step        1 + batch x tier x (KV bytes of a position / weight bytes)
    prefill chunk      1 + rows / launch_cost_tokens x (1 + tier x attention share)
The traffic says nothing about concurrency: every number of active sequences from 1 to `slots` is taken to be equally
likely, and a batch runs in the tier of its longest sequence. Plain numbers; no device, no model, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from edgert.cells import Cell

from edgebuild.plan.buckets import Padding
from edgebuild.plan.tiers import TierCost

Counts = npt.NDArray[np.int64]
ShapeKey = tuple[str, int, int]  # kind, batch, rows


@dataclass(frozen=True)
class CostModel:
    """What one launch costs, in weight reads.

    kv_share_per_token   KV bytes of one position / weight bytes
    launch_cost_tokens   prompt tokens that take as long as one weight read
    attention_share      attention flops of one row against one position / weight flops of that row
    """

    kv_share_per_token: float
    launch_cost_tokens: float
    attention_share: float

    def decode(self, batch: int, tier: float) -> float:
        return 1 + batch * tier * self.kv_share_per_token

    def prefill(self, rows: int, tier: float) -> float:
        return 1 + rows / self.launch_cost_tokens * (1 + tier * self.attention_share)


@dataclass(frozen=True)
class PlannedCell:
    """A cell, the launches the traffic gives it, and the weight reads it saves over the next tier up (0: needed)."""

    cell: Cell
    launches: int
    gain: float


@dataclass(frozen=True)
class CellChoice:
    """Chunk sizes, tiers and cells that go together, and their whole cost over the trace in weight reads."""

    chunks: Padding
    tiers: TierCost
    cells: tuple[PlannedCell, ...]
    cost: float


@dataclass(frozen=True)
class CellBudget:
    """Cells at most: of prefill, of decode, and together."""

    prefill: int
    decode: int
    total: int


@dataclass(frozen=True)
class Demand:
    """What is asked of the cells, from the traffic and the limits.

    chunk_tables  entry n-1: the best chunk sizes with at most n sizes
    tier_tables   entry n-1: the best tiers with at most n tiers; all end at the same top tier
    batches       decode batch sizes, ascending
    decode_rows   token rows per sequence of the decode cells, ascending
    """

    prompt_counts: Counts
    context_counts: Counts
    chunk_tables: Sequence[Padding]
    tier_tables: Sequence[TierCost]
    batches: tuple[int, ...]
    decode_rows: tuple[int, ...]
    slots: int
    padding_target: float


def batch_sizes(slots: int, allowed: Sequence[int]) -> tuple[int, ...]:
    """Batch sizes that `slots` sequences can fill; 1 is always among them."""
    return tuple(sorted({1} | {batch for batch in allowed if batch <= slots}))


def choose_cells(demand: Demand, cost: CostModel, budget: CellBudget) -> CellChoice:
    """The cheapest choice of cells within the budget that serves every length.

    Every count of chunk sizes and of tiers is tried; what the mandatory cells leave of the budget goes to the largest
    gain first. Choices within the padding target are preferred. Raises ValueError below two cells.
    """
    demand = _within(demand, budget)
    mandatory = len(demand.batches) * len(demand.decode_rows)
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], CellChoice] = {}
    for chunks in demand.chunk_tables[: min(budget.prefill, budget.total - mandatory)]:
        for tiers in demand.tier_tables:
            key = (chunks.sizes, tiers.tiers)
            if key not in seen:
                choice = _fill(demand, cost, chunks, tiers, budget)
                used = {item.cell.kv_tier for item in choice.cells if item.cell.kind == "decode"}
                if used == set(tiers.tiers):  # else these tiers are not the best of their count: fewer were captured
                    seen[key] = choice
    good = [choice for choice in seen.values() if choice.chunks.fraction <= demand.padding_target]
    return min(good or seen.values(), key=lambda choice: (choice.cost, len(choice.cells)))


def _within(demand: Demand, budget: CellBudget) -> Demand:
    """Drop row variants, then middle batches, until the mandatory cells leave room for the chunk sizes aimed at."""
    if min(budget.total - 1, budget.prefill, budget.decode) < 1:
        raise ValueError(f"{budget}: one prefill and one decode cell are the least that serves anything")
    sizes = next((n for n, p in enumerate(demand.chunk_tables, 1) if p.fraction <= demand.padding_target), 1)
    batches, rows = demand.batches, demand.decode_rows
    for room in (sizes, 1):  # the padding target gives way before batch 1 does
        most = min(budget.decode, budget.total - room)
        while len(batches) * len(rows) > most and (len(batches) > 1 or len(rows) > 1):
            if len(rows) > 1:
                rows = rows[-1:]  # a wide cell runs fewer rows, not the reverse
            else:
                batches = batches[:1] if len(batches) == 2 else (*batches[:-2], batches[-1])
        if len(batches) * len(rows) <= most:
            break
    return replace(demand, batches=batches, decode_rows=rows)


def _fill(demand: Demand, cost: CostModel, chunks: Padding, tiers: TierCost, budget: CellBudget) -> CellChoice:
    """Mandatory cells at the top tier, then lower tiers, largest gain first, at most two tiers a chunk size."""
    top = tiers.tiers[-1]
    ends = chunk_ends(demand.prompt_counts, chunks.sizes)
    taken: dict[ShapeKey, list[int]] = {("prefill", 1, size): [top] for size in chunks.sizes}
    taken.update({("decode", batch, rows): [top] for batch in demand.batches for rows in demand.decode_rows})
    launches = decode_launches(demand)

    def reach(key: ShapeKey, tier: int) -> float:
        """Launches of this shape whose whole reach lies within the tier."""
        kind, batch, rows = key
        if kind == "prefill":
            return float(ends[rows][: tier + 1].sum())
        return launches[batch] * float(_share_within(demand.context_counts, tier)) ** batch

    def saved(key: ShapeKey, tier: int) -> float:
        """Weight reads saved by adding a tier to the ones already taken."""
        kind, batch, rows = key
        above = min(other for other in taken[key] if other > tier)
        below = [other for other in taken[key] if other < tier]
        moved = reach(key, tier) - (reach(key, max(below)) if below else 0.0)
        if kind == "prefill":
            return moved * (cost.prefill(rows, above) - cost.prefill(rows, tier))
        return moved * (cost.decode(batch, above) - cost.decode(batch, tier))

    gains: dict[tuple[ShapeKey, int], float] = {}
    room = {"prefill": budget.prefill - len(chunks.sizes), "decode": budget.decode - len(taken) + len(chunks.sizes)}
    for _ in range(budget.total - len(taken)):
        open_cells = [
            (key, tier)
            for key in taken
            for tier in tiers.tiers
            if room[key[0]] > 0
            and tier not in taken[key]
            and tier >= key[2]
            and (key[0] == "decode" or len(taken[key]) < 2)
        ]
        if not open_cells:
            break
        key, tier = max(open_cells, key=lambda item: (saved(*item), item[0], -item[1]))
        gain = saved(key, tier)
        if gain <= 0:
            break
        room[key[0]] -= 1
        gains[key, tier] = gain
        taken[key].append(tier)
    return _choice(demand, cost, chunks, tiers, taken, gains, reach)


def _choice(
    demand: Demand,
    cost: CostModel,
    chunks: Padding,
    tiers: TierCost,
    taken: dict[ShapeKey, list[int]],
    gains: dict[tuple[ShapeKey, int], float],
    reach: Callable[[ShapeKey, int], float],
) -> CellChoice:
    planned: list[PlannedCell] = []
    total = 0.0
    for key, chosen in taken.items():
        kind, batch, rows = key
        before = 0.0
        for tier in sorted(chosen):
            within = reach(key, tier)
            count, before = within - before, within
            share = count if kind == "prefill" else count / len(demand.decode_rows)
            total += share * (cost.prefill(rows, tier) if kind == "prefill" else cost.decode(batch, tier))
            cell = Cell("prefill" if kind == "prefill" else "decode", batch, rows, tier)
            planned.append(PlannedCell(cell, round(share), gains.get((key, tier), 0.0)))
    return CellChoice(chunks, tiers, tuple(sorted(planned, key=lambda item: item.cell)), total)


def chunk_ends(prompt_counts: Counts, sizes: Sequence[int]) -> dict[int, Counts]:
    """Size -> counts over the position where a chunk's last real row ends (positions read: 1..end)."""
    ordered = np.array(sorted(sizes))
    largest = int(ordered[-1])
    length = prompt_counts.size
    ends = {int(size): np.zeros(length, dtype=np.int64) for size in ordered}
    lengths = np.arange(length)
    tails = lengths % largest
    chosen = ordered[np.searchsorted(ordered, tails)]
    for size in ends:
        tail_of_size = (chosen == size) & (tails > 0)
        ends[size][tail_of_size] += prompt_counts[tail_of_size]
    # a full chunk ends at every multiple of the largest size that a prompt reaches
    at_least = np.cumsum(prompt_counts[::-1])[::-1]
    multiples = np.arange(largest, length, largest)
    ends[largest][multiples] += at_least[multiples]
    return ends


def decode_launches(demand: Demand) -> dict[int, float]:
    """Batch -> decode launches over the trace, when 1..slots active sequences are equally likely.

    `a` active sequences run in the smallest batch that holds them, or in several launches of the largest.
    """
    steps = float(demand.context_counts[1:].sum())
    largest = demand.batches[-1]
    launches = dict.fromkeys(demand.batches, 0.0)
    for active in range(1, demand.slots + 1):
        full, rest = divmod(active, largest)
        launches[largest] += full
        if rest:
            launches[min(batch for batch in demand.batches if batch >= rest)] += 1
    sequences = demand.slots * (demand.slots + 1) / 2
    return {batch: count * steps / sequences for batch, count in launches.items()}


def _share_within(context_counts: Counts, tier: int) -> float:
    total = int(context_counts[1:].sum())
    return float(context_counts[1 : tier + 1].sum()) / total if total else 1.0
