"""Smooth streams: chunk size and decode steps a chunk for a p95 gap near a stream's gap alone (slo.itl_p95_ratio).

Two ways: chunks after which enough tokens follow that fewer than one gap in twenty holds one, or chunks so small that a
gap with one in it is still within the ratio. The better for the first token of the longest prompt is taken. Pure; times
of steps come from outside, measured or estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from edgert.config import MAX_RATIO
from edgert.costs import StepCosts
from edgert.policy import smooth_steps

from edgebuild.errors import SimulationError
from edgebuild.plan.cells import CostModel
from edgebuild.plan.memory import largest_true


@dataclass(frozen=True)
class Times:
    """chunk_ms(rows, end): a chunk that ends at position `end`; step_ms(batch, length): a decode step."""

    chunk_ms: Callable[[int, int], float]
    step_ms: Callable[[int, int], float]
    source: str


@dataclass(frozen=True)
class Wanted:
    """ratio: p95 of a stream's gaps ÷ its gap alone. streams: that decode at once at most beside a prompt.

    batch    sequences of one decode step at most
    context  where a chunk ends at most; prompt: the longest of the traffic; length: of a usual stream
    """

    ratio: float
    streams: int
    batch: int
    context: int
    prompt: int
    length: int

    @property
    def rounds(self) -> int:
        """Decode steps that give every stream a token."""
        return max(1, -(-self.streams // self.batch))


def estimated_times(cost: CostModel, weights_ms: float) -> Times:
    """Floors, from the plan's cost model."""
    return Times(
        lambda rows, end: weights_ms * cost.prefill(rows, end),
        lambda batch, length: weights_ms * cost.decode(batch, length),
        "estimated from peak bandwidth, so at least that",
    )


def measured_times(costs: StepCosts) -> Times:
    """From costs.json. Linear between measured chunk sizes, level below them and as before past them; never falling.

    Raises SimulationError where it has no chunk or no decode step of one sequence.
    """
    chunks = sorted({cell.query_rows for cell in costs.cells if cell.kind == "prefill"})
    plain = [cell for cell in costs.cells if cell.kind == "decode"]
    batches = sorted({cell.batch for cell in plain})
    if not chunks or 1 not in batches:
        raise SimulationError(
            f"the costs of {costs.device} are of no chunk, or of no decode step of one sequence",
            hint="measure an artifact: edgebuild simulate ARTIFACT --measure",
        )
    rows_of = {batch: min(cell.query_rows for cell in plain if cell.batch == batch) for batch in batches}

    def chunk_ms(rows: int, end: int) -> float:
        known = [costs.shape_ms("prefill", 1, size, end) or 0.0 for size in chunks]
        rising = list(accumulate(known, max))
        if rows <= chunks[-1]:
            return float(np.interp(rows, chunks, rising))
        if len(chunks) == 1:
            return rising[0] * rows / chunks[0]
        slope = (rising[-1] - rising[-2]) / (chunks[-1] - chunks[-2])
        return rising[-1] + slope * (rows - chunks[-1])

    def step_ms(batch: int, length: int) -> float:
        size = next((size for size in batches if size >= batch), batches[-1])
        return costs.shape_ms("decode", size, rows_of[size], length) or 0.0

    return Times(chunk_ms, step_ms, f"{costs.source} costs of {costs.device}")


def is_smooth(times: Times, wanted: Wanted, rows: int) -> bool:
    """Whether a gap with a chunk of `rows` in it is within the ratio: one stream, the shortest step, the last chunk."""
    step = times.step_ms(1, 1)
    return times.chunk_ms(rows, wanted.context) + step <= wanted.ratio * step


def least_steps(times: Times, wanted: Wanted, rows: int) -> int:
    """The fewest decode steps after each chunk of `rows` that keep the ratio for every stream."""
    return 1 if is_smooth(times, wanted, rows) else smooth_steps(wanted.rounds)


def read_ms(times: Times, wanted: Wanted, rows: int, steps: int) -> float:
    """The longest prompt in chunks of `rows`, `steps` decode steps of one stream between them."""
    chunks = -(-wanted.prompt // rows)
    prefill = sum(times.chunk_ms(min(rows, wanted.prompt - at * rows), (at + 1) * rows) for at in range(chunks))
    return prefill + (chunks - 1) * steps * times.step_ms(1, wanted.length)


def smooth_chunk(times: Times, wanted: Wanted, most: int, least: int, ordinary: Callable[[int], int]) -> int:
    """The largest chunk to plan: `most`, or the largest smooth one from `least` on where that reads the prompt sooner.

    ordinary: rows → decode steps after such a chunk without this target
    """
    rows = largest_true(range(1, most + 1), lambda size: is_smooth(times, wanted, size))
    if rows >= most or rows < least:
        return most
    after_large = max(ordinary(most), least_steps(times, wanted, most))
    small, large = read_ms(times, wanted, rows, ordinary(rows)), read_ms(times, wanted, most, after_large)
    return rows if small < large else most


def smooth_ratio(times: Times, wanted: Wanted, chunk: int, start: int, bounds: tuple[int, int]) -> tuple[int, int, int]:
    """(start, low, high): the ordinary ones raised to what the target needs, within what scheduler.yaml may say.

    low counts for one batch of streams: where more decode, the runtime adds its rounds by itself.
    """
    low, high = bounds
    needed = min(MAX_RATIO, least_steps(times, wanted, chunk))
    floor = 1 if is_smooth(times, wanted, chunk) else smooth_steps(1)
    start, low = max(start, needed), max(low, floor)
    return max(start, low), low, max(high, start, low)


def smooth_note(times: Times, wanted: Wanted, chunk: int, steps: int, most: int, ordinary: Callable[[int], int]) -> str:
    """What was chosen, why, and what it costs. most: the largest chunk without the target."""
    step = times.step_ms(1, 1)
    gap = (times.chunk_ms(chunk, wanted.context) + step) / step
    with_ms, without_ms = read_ms(times, wanted, chunk, steps), read_ms(times, wanted, most, ordinary(most))
    if is_smooth(times, wanted, chunk):
        how = f"a gap with a {chunk}-row chunk in it is {gap:.2f} x a step at most"
        how += f", so chunks end at {chunk} rows and 1:{steps} stays" if chunk < most else f", so 1:{steps} stays"
    else:
        how = (
            f"1:{steps}, so that fewer than one gap in twenty holds a chunk (with one of {chunk} rows in it a gap is "
            f"up to {gap:.1f} x a step, and no chunk small enough for it reads a prompt sooner)"
        )
    price = (
        f"the longest prompt of the traffic, {wanted.prompt:,} tokens, then takes {with_ms:,.0f} ms beside one stream; "
        f"{without_ms:,.0f} without this target (chunks of {most}, 1:{ordinary(most)})"
    )
    short = least_steps(times, wanted, chunk) > MAX_RATIO
    held = f"; 1:{MAX_RATIO} keeps it for {(MAX_RATIO - 1) // 20 * wanted.batch} streams at most" if short else ""
    return f"slo.itl_p95_ratio {wanted.ratio:g}: {how}{held}; {price}; {times.source}"
