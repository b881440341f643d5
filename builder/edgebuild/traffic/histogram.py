"""The traffic histogram: three exact counts over token lengths, which is all that the plan needs to know of a trace.

Memory is bounded by the longest request, never by the number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgebuild.traffic.skipped import NEGATIVE, NO_OUTPUT, NO_PROMPT

Counts = npt.NDArray[np.int64]
Where = Callable[[int, bool], str]  # (request, of its output?) -> where it stands and which length it has

# A longer "length" is a misread column or a damaged row; it would also make the arrays grow without bound.
LONGEST_TOKENS = 1 << 22
TOO_LONG = f"longer than {LONGEST_TOKENS:,} tokens"


@dataclass(frozen=True, eq=False)
class Histogram:
    """What a trace says about lengths.

    name                    where it came from, for people
    source_sha256           hash of the trace file; a histogram file keeps the hash of the trace that it was made from
    attribution             licence and origin, or ""
    requests                requests counted
    skipped                 reason -> rows that were left out
    prompt_counts           [longest prompt + 1] requests with exactly this many prompt tokens
    output_counts           [longest output + 1] requests with exactly this many output tokens
    decode_context_counts   [longest prompt + output + 1] decode steps taken at exactly this context length
    tasks                   task label -> requests, empty when the trace has none
    burstiness              shape of the gamma process that its arrivals resemble (1 = Poisson); None = not known
    first_skipped           reason -> where the first row left out for it stands and what it holds; known after reading
                            a trace, kept in no file, and no part of what makes two histograms equal
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
    burstiness: float | None = None
    first_skipped: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_lengths(
        cls, prompts: Iterable[int], outputs: Iterable[int], *, name: str = "requests", source_sha256: str = ""
    ) -> Histogram:
        """A histogram of requests that are at hand; request i has prompts[i] prompt and outputs[i] output tokens.

        Raises ValueError for lengths below 1, above LONGEST_TOKENS, or two sequences of unequal length.
        """
        builder = HistogramBuilder()
        builder.add(np.fromiter(prompts, np.int64), np.fromiter(outputs, np.int64))
        if builder.skipped:
            raise ValueError(f"lengths out of range: {dict(builder.skipped)}")
        return builder.finish(name=name, source_sha256=source_sha256, attribution="")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        plain = ("name", "source_sha256", "attribution", "requests", "burstiness")
        arrays = ("prompt_counts", "output_counts", "decode_context_counts")
        return (
            all(getattr(self, key) == getattr(other, key) for key in plain)
            and dict(self.skipped) == dict(other.skipped)
            and dict(self.tasks) == dict(other.tasks)
            and all(np.array_equal(getattr(self, key), getattr(other, key)) for key in arrays)
        )

    def problems(self) -> list[str]:
        """What contradicts itself in these counts; empty when they can be of one trace."""
        found = []
        lengths = np.arange(self.output_counts.size, dtype=np.int64)
        generated = int((lengths * self.output_counts).sum())
        for key in ("prompt_counts", "output_counts", "decode_context_counts"):
            counts = getattr(self, key)
            if counts.size and int(counts.min()) < 0:
                found.append(f"{key} has a negative count")
        for key in ("prompt_counts", "output_counts"):
            counts = getattr(self, key)
            if int(counts.sum()) != self.requests:
                found.append(f"{key} sums to {int(counts.sum()):,}, expected {self.requests:,} requests")
            if counts.size and counts[0]:
                found.append(f"{key} counts {int(counts[0])} requests of length 0")
        if int(self.decode_context_counts.sum()) != generated:
            steps = int(self.decode_context_counts.sum())
            found.append(f"decode_context_counts sums to {steps:,} steps, expected {generated:,} output tokens")
        if self.tasks and sum(self.tasks.values()) > self.requests:
            found.append(f"tasks sum to {sum(self.tasks.values()):,}, more than {self.requests:,} requests")
        return found

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests together."""
        return int((np.arange(self.prompt_counts.size, dtype=np.int64) * self.prompt_counts).sum())

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests together."""
        return int((np.arange(self.output_counts.size, dtype=np.int64) * self.output_counts).sum())


def percentile(counts: Counts, percent: float) -> int:
    """Nearest-rank percentile of a count array. Raises ValueError for an empty one or a percent outside 0..100."""
    total = int(counts.sum())
    if total == 0:
        raise ValueError("a percentile of nothing: the counts are all zero")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}: expected 0..100")
    rank = max(1, int(np.ceil(total * percent / 100.0)))
    return int(np.searchsorted(np.cumsum(counts), rank))


class HistogramBuilder:
    """Collects requests block by block. A request (p, n) decodes once at each context p .. p + n - 1, which is two
    entries of a difference array, whatever n is."""

    def __init__(self) -> None:
        self._prompts: Counts = np.zeros(0, np.int64)
        self._outputs: Counts = np.zeros(0, np.int64)
        self._changes: Counts = np.zeros(0, np.int64)  # [context] decode steps here minus decode steps one below
        self.requests = 0
        self.skipped: dict[str, int] = {}
        self.first_skipped: dict[str, str] = {}
        self.tasks: dict[str, int] = {}

    def skip(self, reason: str, rows: int = 1, first: str = "") -> None:
        """Count rows that are left out. `first` says where the first of them stands; that of the first call is kept."""
        if rows:
            self.skipped[reason] = self.skipped.get(reason, 0) + rows
            if first:
                self.first_skipped.setdefault(reason, first)

    def label(self, task: str, requests: int = 1) -> None:
        """Count requests of one task."""
        self.tasks[task] = self.tasks.get(task, 0) + requests

    def add(self, prompts: Counts, outputs: Counts, where: Where | None = None) -> npt.NDArray[np.bool_]:
        """Count requests; returns which of them were counted. Lengths out of range are skipped by reason, and `where`
        is asked for the first request of each reason."""
        if prompts.shape != outputs.shape:
            raise ValueError(f"{prompts.size} prompt lengths and {outputs.size} output lengths")
        kept: npt.NDArray[np.bool_] = (prompts >= 1) & (outputs >= 1)
        kept &= (prompts <= LONGEST_TOKENS) & (outputs <= LONGEST_TOKENS)
        if not kept.all():
            self._skip_out_of_range(prompts, outputs, where)
            prompts, outputs = prompts[kept], outputs[kept]
        if prompts.size:
            self.requests += int(prompts.size)
            self._prompts = _plus(self._prompts, np.bincount(prompts), 1)
            self._outputs = _plus(self._outputs, np.bincount(outputs), 1)
            self._changes = _plus(self._changes, np.bincount(prompts), 1)
            self._changes = _plus(self._changes, np.bincount(prompts + outputs), -1)
        return kept

    def _skip_out_of_range(self, prompts: Counts, outputs: Counts, where: Where | None) -> None:
        """Count every request out of range under the first reason that it gives."""
        left = np.ones(prompts.size, np.bool_)
        nothing = np.zeros(prompts.size, np.bool_)
        for reason, of_prompt, of_output in (
            (NEGATIVE, prompts < 0, outputs < 0),
            (NO_PROMPT, prompts == 0, nothing),
            (NO_OUTPUT, nothing, outputs == 0),
            (TOO_LONG, prompts > LONGEST_TOKENS, outputs > LONGEST_TOKENS),
        ):
            here = left & (of_prompt | of_output)
            left &= ~here
            if here.any():
                first = int(here.argmax())
                told = where(first, not of_prompt[first]) if where and reason not in self.first_skipped else ""
                self.skip(reason, int(here.sum()), told)

    def finish(self, *, name: str, source_sha256: str, attribution: str) -> Histogram:
        """The histogram of everything added so far."""
        return Histogram(
            name=name,
            source_sha256=source_sha256,
            attribution=attribution,
            requests=self.requests,
            skipped=dict(self.skipped),
            prompt_counts=self._prompts,
            output_counts=self._outputs,
            decode_context_counts=np.cumsum(self._changes),
            tasks=dict(self.tasks),
            first_skipped=dict(self.first_skipped),
        )


def _plus(total: Counts, part: npt.NDArray[np.int64], sign: int) -> Counts:
    """total + sign * part, grown to the longer of the two; `total` is changed in place where it is long enough."""
    if part.size > total.size:
        total = np.concatenate([total, np.zeros(part.size - total.size, np.int64)])
    total[: part.size] += sign * part
    return total
