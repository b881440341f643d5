"""The traffic histogram: three exact counts over token lengths, which is all that the plan needs to know of a trace.

Memory is bounded by the longest request, never by the number of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Histogram:
    """What a trace says about lengths.

    name                    where it came from, for people
    source_sha256           hash of the trace file (of the histogram file when read from one)
    attribution             licence and origin, or ""
    requests                requests counted
    skipped                 reason -> rows that were left out
    prompt_counts           [longest prompt + 1] requests with exactly this many prompt tokens
    output_counts           [longest output + 1] requests with exactly this many output tokens
    decode_context_counts   [longest prompt + output + 1] decode steps taken at exactly this context length
    tasks                   task label -> requests, empty when the trace has none
    """

    name: str
    source_sha256: str
    attribution: str
    requests: int
    skipped: Mapping[str, int]
    prompt_counts: Counts
    output_counts: Counts
    decode_context_counts: Counts
    tasks: Mapping[str, int] = field(default_factory=dict)
