"""Prefill chunk sizes: which compiled shapes a prompt is cut into, at the least expected cost.

A prompt of L tokens is floor(L / c) chunks of the largest size c and a tail; the tail is padded to the smallest size
that holds it (no tail, no chunk). The objective, in tokens:

    expected cost = padded tokens + launch_cost_tokens * launches

where `launch_cost_tokens` is what one more launch costs, expressed as the prompt tokens that take as long: without it
the answer would always be "many tiny chunks". For a given c the launches do not depend on the sizes, so the sizes
minimise padding exactly; c is then tried over every candidate. This module knows lengths only, no device and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgebuild.plan.partition import UNREACHABLE, min_cost_partitions

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Padding:
    """What a list of chunk sizes does to the traffic. Totals over the whole trace.

    sizes           ascending, the last is the largest chunk
    real_tokens     prompt tokens
    padded_tokens   rows computed for nothing
    launches        chunks run
    chunks_by_size  chunks run at each size, beside `sizes`
    """

    sizes: tuple[int, ...]
    real_tokens: int
    padded_tokens: int
    launches: int
    chunks_by_size: tuple[int, ...]

    @property
    def fraction(self) -> float:
        """Padded / (padded + real), 0 for no traffic."""
        total = self.padded_tokens + self.real_tokens
        return self.padded_tokens / total if total else 0.0

    def cost_tokens(self, launch_cost_tokens: float) -> float:
        """The objective: padded tokens plus launches at their price in tokens."""
        return self.padded_tokens + launch_cost_tokens * self.launches


def tail_counts(prompt_counts: Counts, largest: int) -> tuple[Counts, int]:
    """Prompts by tail length L mod c, shape [c], and the number of full chunks run over the whole trace."""
    lengths = np.arange(prompt_counts.size)
    tails = np.zeros(largest, dtype=np.int64)
    np.add.at(tails, lengths % largest, prompt_counts)
    return tails, int(((lengths // largest) * prompt_counts).sum())


def padding_of(prompt_counts: Counts, sizes: Sequence[int]) -> Padding:
    """Measure a list of sizes against the traffic; the sizes may come from anywhere."""
    ordered = np.array(sorted(set(sizes)), dtype=np.int64)
    if ordered.size == 0 or ordered[0] < 1:
        raise ValueError(f"chunk sizes {list(sizes)}: expected one or more positive numbers")
    largest = int(ordered[-1])
    tails, full_chunks = tail_counts(prompt_counts, largest)
    tail_lengths = np.arange(1, largest)
    chosen = np.searchsorted(ordered, tail_lengths)  # index of the smallest size that holds the tail
    padded = int(((ordered[chosen] - tail_lengths) * tails[1:]).sum())
    by_size = np.bincount(chosen, weights=tails[1:], minlength=ordered.size).astype(np.int64)
    by_size[-1] += full_chunks
    return Padding(
        sizes=tuple(int(size) for size in ordered),
        real_tokens=int((np.arange(prompt_counts.size) * prompt_counts).sum()),
        padded_tokens=padded,
        launches=int(by_size.sum()),
        chunks_by_size=tuple(int(count) for count in by_size),
    )


def best_sizes(
    prompt_counts: Counts, largest: int, max_count: int, granularity: int = 1, smallest: int = 1
) -> list[Padding]:
    """The sizes with the least padding for a given largest chunk: entry n-1 uses at most n sizes.

    Sizes are multiples of `granularity`, which must divide `largest`, and at least `smallest`.
    """
    if largest % granularity:
        raise ValueError(f"largest chunk {largest} is not a multiple of {granularity}")
    tails, _ = tail_counts(prompt_counts, largest)
    points = largest // granularity
    # tail t lies at grid point ceil(t / granularity); a tail of 0 runs no chunk and weighs nothing
    lengths = np.arange(1, largest)
    grid = -(-lengths // granularity)
    requests = np.bincount(grid, weights=tails[1:], minlength=points + 1).astype(np.int64)
    tokens = np.bincount(grid, weights=tails[1:] * lengths, minlength=points + 1).astype(np.int64)
    requests_up_to, tokens_up_to = np.cumsum(requests), np.cumsum(tokens)
    ends = np.arange(points + 1, dtype=np.int64) * granularity
    # cost[i, j]: every tail in (i, j] is padded to j
    cost = ends[None, :] * (requests_up_to[None, :] - requests_up_to[:, None]) - (
        tokens_up_to[None, :] - tokens_up_to[:, None]
    )
    cost[:, (ends < smallest) & (ends < largest)] = UNREACHABLE
    results: list[Padding] = []
    for total, cuts in min_cost_partitions(cost, max_count):
        if total >= UNREACHABLE:
            break  # fewer sizes fit between the smallest and the largest than are allowed
        measured = padding_of(prompt_counts, [cut * granularity for cut in cuts])
        # a size that buys nothing is not taken: fewer sizes, same padding
        results.append(results[-1] if results and results[-1].padded_tokens <= measured.padded_tokens else measured)
    results.extend([results[-1]] * (max_count - len(results)))
    return results


def choose_chunks(
    prompt_counts: Counts,
    candidates: Iterable[int],
    max_count: int,
    launch_cost_tokens: float,
    granularity: int = 1,
    smallest: int = 1,
) -> list[Padding]:
    """The best sizes over every candidate for the largest chunk: entry n-1 uses at most n sizes.

    Equal costs go to the smaller largest chunk, which needs less scratch and delays decode less.
    """
    ordered = sorted(set(candidates))
    if not ordered:
        raise ValueError("no candidate for the largest chunk")
    tables = [best_sizes(prompt_counts, largest, max_count, granularity, smallest) for largest in ordered]
    return [
        min((table[n] for table in tables), key=lambda p: p.cost_tokens(launch_cost_tokens)) for n in range(max_count)
    ]


def powers_of_two(largest: int, count: int) -> tuple[int, ...]:
    """The usual list: `count` powers of two, ascending; the last is the first one that is >= the largest chunk."""
    top = 1 << (largest - 1).bit_length()
    return tuple(sorted({max(1, top >> step) for step in range(count)}))


def uniform_steps(largest: int, count: int, granularity: int = 1) -> tuple[int, ...]:
    """The other usual list: `count` equal steps up to the largest chunk, rounded up to the granularity."""
    sizes = {min(largest, -(-(largest * step) // (count * granularity)) * granularity) for step in range(1, count + 1)}
    return tuple(sorted(sizes))
