"""Drafts on the host's side: which slot has which, how many the next step should make, and what became of them.

Pure bookkeeping and decisions: a drafter itself belongs to the backend. Time is passed in as measured step costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from edgert.policy import choose_drafts

# plain: not drafted for; probe: drafted for although its task is switched off
Role: TypeAlias = Literal["drafted", "probe", "plain"]
# A task's acceptance counts for the last few hundred steps: what came before fades by half over this many.
MEMORY_STEPS = 256
# Steps of a task before its own acceptance outweighs what the plan expected.
TRUST_STEPS = 24
# What is expected of a drafter of which nothing was measured; about what published modules reach.
UNKNOWN_ACCEPTANCE = 0.7
# Stands for a draft that only the device knows yet: the step that makes it was not read.
ON_DEVICE = -1
# Tokens a step are the mean of about so many of a task's latest steps.
LATEST_STEPS = 16
# With drafting off, every n-th request of the task drafts all the same, so that a drafter that wins again is noticed.
PROBE_EVERY = 8


@dataclass
class Acceptance:
    """Per draft position: how often it was verified and accepted; tokens committed by steps that carried drafts."""

    proposed: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0

    def record(self, proposed: int, accepted: int) -> None:
        """One verified step."""
        for counts in (self.proposed, self.reached, self.accepted):
            counts.extend([0] * (proposed - len(counts)))
        for position in range(proposed):
            self.proposed[position] += 1
            self.reached[position] += position <= accepted
            self.accepted[position] += position < accepted
        self.steps += 1
        self.tokens += accepted + 1

    @property
    def rate(self) -> float | None:
        """Accepted ÷ proposed; None before anything was proposed."""
        total = sum(self.proposed)
        return sum(self.accepted) / total if total else None

    @property
    def mean_length(self) -> float | None:
        """Tokens a verified step committed, the bonus token included."""
        return self.tokens / self.steps if self.steps else None

    def to_json(self) -> dict[str, Any]:
        """by_position: accepted ÷ verified, given that the positions before were accepted."""
        return {
            "acceptance": self.rate,
            "by_position": [a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)],
            "mean_accepted_length": self.mean_length,
            "steps": self.steps,
        }


def merged(parts: Iterable[Acceptance]) -> Acceptance:
    """The sum of several."""
    total = Acceptance()
    for part in parts:
        for name in ("proposed", "reached", "accepted"):
            mine, theirs = getattr(total, name), getattr(part, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count
        total.steps += part.steps
        total.tokens += part.tokens
    return total


@dataclass
class _Task:
    """What one task's requests did lately. Fading counts per position; `chosen`: batch → draft length in use."""

    reached: list[float]
    accepted: list[float]
    requests: int = 0
    chosen: dict[int, int] = field(default_factory=dict)


class DraftControl:
    """How many tokens to draft, by task and batch, from what was accepted and what steps cost.

    length      drafts a step at most; 0 = no drafting
    costs_ms    batch → cost of a step with 0..length drafts, drafting included; {} = not measured: always `length`
    expected    acceptance by position that the plan counts on, until a task has shown its own
    threshold   no position is drafted whose acceptance lies below it
    """

    def __init__(
        self,
        length: int,
        *,
        costs_ms: Mapping[int, Sequence[float]] | None = None,
        expected: Sequence[float] = (),
        threshold: float = 0.0,
    ) -> None:
        self.length = length
        self.switched_off = 0
        self.switched_on = 0
        self._costs_ms = dict(costs_ms or {})
        self._expected = [*expected, *[expected[-1] if expected else UNKNOWN_ACCEPTANCE] * length][:length]
        self._threshold = threshold
        self._tasks: dict[str | None, _Task] = {}

    def admit(self, task: str | None) -> Role:
        """What a new request of this task is to the drafter, which must see its prompt from the start or not at all."""
        if not self.length:
            return "plain"
        record = self._task(task)
        record.requests += 1
        off = bool(record.chosen) and not any(record.chosen.values())
        if not off:
            return "drafted"
        return "plain" if record.requests % PROBE_EVERY else "probe"

    def choose(self, task: str | None, batch: int) -> int:
        """Draft length for a request of `task` in a step of `batch` sequences."""
        costs = self._costs_ms.get(batch)
        if not self.length or costs is None:
            return self.length
        record = self._task(task)
        before = record.chosen.get(batch, self.length)
        after = choose_drafts(self._rates(record), costs, before, threshold=self._threshold)
        record.chosen[batch] = after
        self.switched_off += bool(before and not after)
        self.switched_on += bool(after and not before)
        return after

    def record(self, task: str | None, proposed: int, accepted: int) -> None:
        """One verified step of a request of `task`."""
        record = self._task(task)
        fade = 0.5 ** (1 / MEMORY_STEPS)
        for position in range(min(proposed, self.length)):
            if position > accepted:
                break
            record.reached[position] = record.reached[position] * fade + 1
            record.accepted[position] = record.accepted[position] * fade + (position < accepted)

    def lengths(self) -> dict[str, dict[int, int]]:
        """Task → batch → draft length in use, for reports."""
        return {task or "": dict(record.chosen) for task, record in self._tasks.items() if record.chosen}

    def _task(self, task: str | None) -> _Task:
        return self._tasks.setdefault(task, _Task([0.0] * self.length, [0.0] * self.length))

    def _rates(self, record: _Task) -> list[float]:
        return [
            (accepted + expected * TRUST_STEPS) / (reached + TRUST_STEPS)
            for reached, accepted, expected in zip(record.reached, record.accepted, self._expected, strict=True)
        ]


class DraftBook:
    """The drafts that the backend made, by slot, and which slots its drafter has followed from the first token on."""

    def __init__(self, control: DraftControl) -> None:
        self.control = control
        self.by_task: dict[str | None, Acceptance] = {}
        self._followed: dict[int, Role] = {}
        self._drafts: dict[int, tuple[int, ...]] = {}
        self._made: dict[int, list[int]] = {}  # by slot: drafts that each unread step makes, oldest first
        self._gained: dict[str | None, float] = {}  # by task: tokens a verified step committed lately

    def admit(self, slot: int, task: str | None) -> None:
        """A new request takes the slot."""
        self.release(slot)
        role = self.control.admit(task)
        if role != "plain":
            self._followed[slot] = role

    def release(self, slot: int) -> None:
        for by_slot in (self._followed, self._drafts, self._made):
            by_slot.pop(slot, None)

    def follows(self, slot: int) -> bool:
        return slot in self._followed

    def wanted(self, slot: int, task: str | None, batch: int, limit: int) -> int:
        """Drafts that a step should make for this slot. limit: those that could still be verified after the step."""
        if slot not in self._followed:
            return 0
        length = self.control.choose(task, batch)
        return min(max(length, 1) if self._followed[slot] == "probe" else length, limit)

    def launched(self, slot: int, *, primed: bool, made: int | None) -> None:
        """The slot takes part in a step; one that the drafter does not see leaves a gap in its cache for good.

        made: drafts that the step makes for the slot; None = nothing of it is read (a chunk inside a prompt).
        """
        self._drafts.pop(slot, None)
        if made is not None:
            self._made.setdefault(slot, []).append(made)
        if not primed:
            self._followed.pop(slot, None)

    def collected(self, slot: int, drafts: Sequence[int]) -> None:
        """The slot's oldest step was read. Its drafts are of use unless a later step has verified them already."""
        unread = self._made[slot]
        unread.pop(0)
        if slot in self._followed and not unread:
            self._drafts[slot] = tuple(drafts)

    def proposal(self, slot: int, limit: int) -> tuple[int, ...]:
        """What the next step verifies: tokens, or ON_DEVICE for each while the step that makes them is unread."""
        if unread := self._made.get(slot):
            return (ON_DEVICE,) * min(unread[-1], limit)
        return self._drafts.get(slot, ())[:limit]

    def verified(self, task: str | None, proposed: int, accepted: int) -> None:
        self.by_task.setdefault(task, Acceptance()).record(proposed, accepted)
        self.control.record(task, proposed, accepted)
        before = self._gained.get(task, 1.0)
        self._gained[task] = before + (1 + accepted - before) / LATEST_STEPS

    def tokens_per_step(self, slot: int, task: str | None) -> float:
        """That a sequence gets lately; 1 while nothing is drafted for it."""
        return self._gained.get(task, 1.0) if slot in self._followed else 1.0
