"""A request and the four states it passes through: Waiting → Prefilling → Decoding → Finished.

Each state is its own frozen type and holds only what that state has: there is no token to sample from while a prompt
is half read. This module knows neither cells nor backends nor text.

Step outcomes may be unknown for a while (a backend with run_ahead): "launched" facts move when a step is launched,
"collected" facts when its result is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from edgert.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """What was asked, checked and complete.

    id              counts up from 0 in one engine: order of arrival
    prompt_ids      at least one token
    params          as given
    seed            the seed in use (params.seed, or the one drawn)
    stop_token_ids  the model's end-of-sequence tokens (unless ignored) and the caller's
    task            label for metrics, e.g. "chat"; free text
    arrival_s       engine clock
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    task: str | None
    arrival_s: float


@dataclass(frozen=True)
class Waiting:
    """In the queue, without a slot."""

    request: Request

    def admit(self, slot: int) -> Prefilling:
        return Prefilling(self.request, slot)


@dataclass(frozen=True)
class Prefilling:
    """Owns a slot; some of the prompt is not launched yet.

    launched     prompt tokens in chunks launched so far; exact, since every row of a chunk is committed
    passed_over  chunks in a row that went to other requests while this one waited
    """

    request: Request
    slot: int
    launched: int = 0
    passed_over: int = 0

    @property
    def remaining(self) -> int:
        return len(self.request.prompt_ids) - self.launched

    def chunk(self, tokens: int, number: int) -> Prefilling | Decoding:
        """After a chunk of `tokens` prompt tokens was launched; the last one samples the first output token.

        number: counts the engine's launches.
        """
        if not 0 < tokens <= self.remaining:
            raise ValueError(f"a chunk of {tokens} tokens, {self.remaining} remain")
        if tokens < self.remaining:
            return replace(self, launched=self.launched + tokens, passed_over=0)
        length = len(self.request.prompt_ids)
        return Decoding(self.request, self.slot, length, last_launch=number, in_flight=(InFlight(0, 0),))

    def passed(self) -> Prefilling:
        return replace(self, passed_over=self.passed_over + 1)


@dataclass(frozen=True)
class InFlight:
    """One launched, uncollected step of a decoding request.

    rows    cache rows it is sure to commit: 1 in decode; 0 for the last prefill chunk, which `length` holds already
    drafts  further rows that it may commit
    """

    rows: int
    drafts: int


@dataclass(frozen=True)
class Decoding:
    """Owns a slot, the whole prompt is launched.

    length       cache positions committed by the steps collected so far (and by the prefill)
    outputs      output tokens collected
    token        the last token collected, which the next step starts from; None while only the device has it
    in_flight    steps launched and not collected, oldest first
    last_launch  number of the launch this sequence last took part in
    """

    request: Request
    slot: int
    length: int
    last_launch: int
    outputs: int = 0
    token: int | None = None
    in_flight: tuple[InFlight, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether length and output position after the steps in flight are known: none of them carries drafts."""
        return all(step.drafts == 0 for step in self.in_flight)

    @property
    def launched_length(self) -> int:
        """Cache positions committed after the steps in flight; exact when `certain`, else the least possible."""
        return self.length + sum(step.rows for step in self.in_flight)

    @property
    def longest_length(self) -> int:
        """`launched_length` if every draft in flight is accepted."""
        return self.launched_length + sum(step.drafts for step in self.in_flight)

    @property
    def launched_outputs(self) -> int:
        """Output tokens after the steps in flight; exact when `certain`, else the least possible."""
        return self.outputs + len(self.in_flight)

    def launch(self, drafts: int, number: int) -> Decoding:
        return replace(self, in_flight=(*self.in_flight, InFlight(1, drafts)), last_launch=number)

    def collect(self, accepted: int, token: int) -> Decoding:
        """After the oldest step in flight was read: `accepted` drafts committed, `token` sampled last."""
        oldest, *rest = self.in_flight
        if not 0 <= accepted <= oldest.drafts:
            raise ValueError(f"{accepted} drafts accepted of {oldest.drafts}")
        return replace(
            self,
            length=self.length + oldest.rows + accepted,
            outputs=self.outputs + 1 + accepted,
            token=token,
            in_flight=tuple(rest),
        )


@dataclass(frozen=True)
class Finished:
    """Owns nothing. `error` is set when `reason` is "error"."""

    request: Request
    reason: FinishReason
    error: Exception | None = None


State: TypeAlias = Waiting | Prefilling | Decoding | Finished
