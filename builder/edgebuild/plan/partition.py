"""Cut an ordered grid into intervals at the least total cost, exactly, by dynamic programming.

This module knows a cost matrix and nothing of tokens: chunk sizes and KV tiers are both this problem.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

UNREACHABLE = np.int64(2**62)


def min_cost_partitions(cost: Ints, max_count: int) -> list[tuple[int, tuple[int, ...]]]:
    """The best cuts of grid points 1..m into k intervals, for every k from 1 to min(max_count, m).

    cost       [m + 1, m + 1] integers >= 0; cost[i, j] with i < j is the price of one interval that covers i+1..j
    returns    entry k-1 = (total cost, the k right ends ascending; the last is m)

    best_k(j) = min over i < j of best_{k-1}(i) + cost[i, j]; integers, hence exact. O(k m^2), each k one numpy pass.
    """
    points = cost.shape[0] - 1
    if points < 1 or max_count < 1:
        raise ValueError(f"a partition needs at least one point and one interval, got {points} and {max_count}")
    starts, ends = np.indices(cost.shape)
    priced = np.where(starts < ends, cost, UNREACHABLE)
    best = priced[0].copy()  # one interval from the origin to each j
    origins: list[Ints] = []
    results: list[tuple[int, tuple[int, ...]]] = [(int(best[points]), (points,))]
    for count in range(2, min(max_count, points) + 1):
        reachable = np.where(best < UNREACHABLE, best, 0)[:, None] + priced
        reachable[best >= UNREACHABLE] = UNREACHABLE
        origin = np.argmin(reachable, axis=0)
        best = np.minimum(reachable[origin, np.arange(points + 1)], UNREACHABLE)
        origins.append(origin.astype(np.int64))
        results.append((int(best[points]), _trace_back(origins, points, count)))
    return results


def _trace_back(origins: list[Ints], points: int, count: int) -> tuple[int, ...]:
    ends = [points]
    for step in range(count - 2, -1, -1):
        ends.append(int(origins[step][ends[-1]]))
    return tuple(reversed(ends))
