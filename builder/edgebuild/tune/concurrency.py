"""How many requests are in flight at a time, where a trace says when they arrived: its replay in virtual time.

Little's law on the simulator's outcomes. Without times, or without costs, nobody knows: None.
"""

from __future__ import annotations

from pathlib import Path

from edgert.errors import EdgertError

from edgebuild.errors import EdgebuildError
from edgebuild.simulate.arrivals import read_arrivals
from edgebuild.simulate.artifact import replay

MOST_ARRIVALS = 1000


def of_traffic(path: Path, artifact: Path, slots: int) -> tuple[int, str] | None:
    """Requests at a time, 1 to `slots`, and why so many."""
    try:
        arrivals, _ = read_arrivals(path, requests=MOST_ARRIVALS)
        if len(arrivals) < 2 or arrivals[-1].at_s <= 0:
            return None
        run = replay(artifact, arrivals)
    except (EdgebuildError, EdgertError):
        return None
    served = [each for each in run.outcomes if each.tokens]
    if not served or run.end_s <= 0:
        return None
    flying = sum(each.last_s - each.arrival.at_s for each in served) / run.end_s
    rate = (len(arrivals) - 1) / arrivals[-1].at_s
    source = f"{rate:.3g} requests/s of the trace keep {flying:.1f} in flight (simulated), there are {slots} slots"
    return min(max(round(flying), 1), slots), source
