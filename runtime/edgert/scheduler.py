"""What to launch next: a pure function from the queues to a StepPlan. Deciding changes nothing; the worker commits.

One prefill chunk, then at least one decode step while somebody decodes (how many, and how large a chunk: edgert.tempo),
so the longest gap between two tokens of a stream is one chunk plus one step. Without chunked prefill a prompt's chunks
run back to back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from edgert.cells import Cell
from edgert.costs import StepCosts
from edgert.drafting import DraftBook
from edgert.errors import ConfigError
from edgert.policy import (
    DecodeCandidate,
    PrefillCandidate,
    Ratio,
    Window,
    choose_decode_window,
    choose_prefill,
    choose_prefill_cell,
)
from edgert.requests import Decoding, Prefilling
from edgert.tempo import Load, Rules, Targets, Tempo, decide, first_tempo, owed


@dataclass(frozen=True)
class Limits:
    """What does not change while the engine runs.

    cells            what may be launched
    slots            slots allocated, reserved ones included
    context_tokens   prompt and output positions of one sequence
    any_first_slot   see backends.base.Backend
    chunked_prefill  False: nothing decodes between the chunks of a prompt
    adaptive         False: chunk size, ratio and draft length stay as they are configured
    draft_length     drafts a step at most that the backend makes
    costs            what each cell costs here, None = unknown; targets: latencies to keep. For edgert.tempo
    """

    cells: tuple[Cell, ...]
    slots: int
    context_tokens: int
    any_first_slot: bool = True
    chunked_prefill: bool = True
    ratio: Ratio = field(default_factory=Ratio)
    adaptive: bool = True
    draft_length: int = 0
    costs: StepCosts | None = None
    targets: Targets = field(default_factory=Targets)

    def __post_init__(self) -> None:
        """Every length 1..context_tokens must be servable in every slot, or a request could get stuck half-way."""
        for kind in ("prefill", "decode"):
            tiers = [cell.kv_tier for cell in self.cells if cell.kind == kind and self._reaches(cell)]
            if max(tiers, default=0) < self.context_tokens:
                raise ConfigError(
                    f"no {kind} cell that reaches every slot serves {self.context_tokens} positions; "
                    f"the largest tier is {max(tiers, default=0)}",
                    hint="lower context_tokens or add the cell to the plan",
                )

    def _reaches(self, cell: Cell) -> bool:
        floating = self.any_first_slot or cell.batch == 1
        return cell.batch <= self.slots and (floating or cell.batch == self.slots)

    @cached_property
    def rules(self) -> Rules:
        """What edgert.tempo decides by."""
        decode = [cell for cell in self.cells if cell.kind == "decode" and self._reaches(cell)]
        return Rules(
            chunks=tuple(sorted({cell.query_rows for cell in self.cells if cell.kind == "prefill"})),
            batches=tuple(sorted({cell.batch for cell in decode})),
            rows=min(cell.query_rows for cell in decode),
            adaptive=self.adaptive,
            ratio=self.ratio,
            draft_length=self.draft_length,
            costs=self.costs,
            targets=self.targets,
        )

    @cached_property
    def decode_cells(self) -> tuple[Cell, ...]:
        """The cheapest first, which is where a decode window is found soonest."""
        decode = [cell for cell in self.cells if cell.kind == "decode"]
        return tuple(sorted(decode, key=lambda cell: (cell.batch, cell.kv_tier, cell.query_rows)))

    @cached_property
    def prefill_cells(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.kind == "prefill")

    @cached_property
    def at_rest(self) -> Tempo:
        """The tempo while no prompt is read."""
        return first_tempo(self.rules)


@dataclass(frozen=True)
class Pace:
    """The scheduler's whole memory.

    decode_steps  launched since the last chunk
    unbroken      slot whose prompt runs back to back (chunked_prefill off)
    chunk_rows    size of the last chunk, 0 = none yet
    tempo         the decision that holds, None = none was needed
    """

    decode_steps: int = 0
    unbroken: int | None = None
    chunk_rows: int = 0
    tempo: Tempo | None = None


@dataclass(frozen=True)
class Crowd:
    """What is outside of the slots. waiting: requests without one, and their prompt tokens.

    oldest_ms     how long ago the oldest request without a first token arrived
    slots         slots that sequences may use; active_slots: those that the guards let be active
    tokens_per_step   that each decoding sequence gets from a step lately, the mean over them
    """

    waiting: int = 0
    waiting_tokens: int = 0
    oldest_ms: float = 0.0
    slots: int = 1
    active_slots: int = 1
    tokens_per_step: float = 1.0


NOBODY = Crowd()


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk: prompt tokens [start, start + tokens) of the request in `slot`."""

    cell: Cell
    slot: int
    start: int
    tokens: int
    pace: Pace


@dataclass(frozen=True)
class DecodePlan:
    """One decode step for `slots`, in the window that starts at first_slot. drafts: slot → tokens to verify."""

    cell: Cell
    first_slot: int
    slots: tuple[int, ...]
    drafts: dict[int, tuple[int, ...]]
    pace: Pace


@dataclass(frozen=True)
class CollectPlan:
    """Nothing can be launched until the oldest step in flight is read."""


StepPlan: TypeAlias = PrefillPlan | DecodePlan | CollectPlan


def plan_step(
    limits: Limits,
    pace: Pace,
    prefilling: Sequence[Prefilling],
    decoding: Sequence[Decoding],
    *,
    crowd: Crowd = NOBODY,
    drafts: dict[int, tuple[int, ...]] | None = None,
) -> StepPlan | None:
    """The next step, or None when there is nothing to do.

    drafts  slot → proposed tokens, for decoding slots whose last token the host knows, and for those in flight that
            may be launched again unread (`runs_on`)
    """
    ready = [each for each in decoding if can_decode(each, limits.context_tokens)]
    blocked = any(not each.certain and each.slot not in (drafts or {}) for each in ready)
    chunk_next = bool(prefilling)
    if prefilling or limits.draft_length:
        load = load_of(limits, prefilling, ready, crowd)
        pace = replace(pace, tempo=decide(limits.rules, load, pace.tempo or limits.at_rest))
        if prefilling and ready and pace.unbroken is None:
            chunk_next = pace.decode_steps >= owed(limits.rules, pace.tempo or limits.at_rest, pace.chunk_rows, load)
    elif pace.tempo is not None:
        pace = replace(pace, tempo=None)
    if chunk_next:
        return _plan_chunk(limits, pace, prefilling)
    if ready and not blocked:
        return _plan_decode(limits, pace, ready, drafts or {})
    return CollectPlan() if any(each.in_flight for each in decoding) else None


def load_of(limits: Limits, prefilling: Sequence[Prefilling], ready: Sequence[Decoding], crowd: Crowd) -> Load:
    """The queues in numbers."""
    largest = limits.rules.chunks[-1]
    return Load(
        decoding=len(ready),
        prefilling=len(prefilling),
        waiting=crowd.waiting,
        backlog_tokens=crowd.waiting_tokens + sum(each.remaining for each in prefilling),
        oldest_ms=crowd.oldest_ms,
        remaining=min((each.remaining for each in prefilling), default=0),
        prompt_end=max((each.launched + min(largest, each.remaining) for each in prefilling), default=0),
        length=max((each.launched_length for each in ready), default=0),
        slots=crowd.slots,
        active_slots=crowd.active_slots,
        tokens_per_step=crowd.tokens_per_step,
    )


def can_decode(state: Decoding, context_tokens: int) -> bool:
    """Whether one more step can yield a token that is wanted: room in the context, fewer than max_tokens launched."""
    return state.launched_outputs < state.request.params.max_tokens and state.launched_length < context_tokens


def runs_on(state: Decoding, context_tokens: int) -> bool:
    """Whether a step may follow those in flight before they are read.

    While drafts are undecided only the device knows where the sequence ends: there must be room for all of them, and
    nothing may be drawn, since the numbers to draw with belong to positions.
    """
    return state.certain or (state.request.params.temperature == 0 and state.longest_length < context_tokens)


def drafts_allowed(state: Decoding, context_tokens: int) -> int:
    """Drafts worth verifying: accepted ones and the bonus token must stay within max_tokens and the context."""
    tokens_left = state.request.params.max_tokens - state.launched_outputs
    return max(0, min(tokens_left - 1, context_tokens - state.longest_length - 1))


def propose(limits: Limits, decoding: Sequence[Decoding], drafts: DraftBook) -> dict[int, tuple[int, ...]]:
    """What the next step verifies of the backend's drafts, for `plan_step`."""
    return {
        state.slot: drafts.proposal(state.slot, drafts_allowed(state, limits.context_tokens))
        for state in decoding
        if runs_on(state, limits.context_tokens)
    }


def drafts_wanted(limits: Limits, after: Decoding, tempo: Tempo | None) -> int:
    """Drafts worth making in the step that leads to `after`: what the one behind it can verify, by the tempo."""
    left = after.request.params.max_tokens - after.launched_outputs - 1
    limit = max(0, min(left, limits.context_tokens - after.longest_length - 1))
    return limit if tempo is None or not limits.draft_length else min(limit, tempo.drafts)


def tokens_per_step(decoding: Sequence[Decoding], drafts: DraftBook) -> float:
    """For `Crowd`: the mean over the decoding sequences, 1 where there is none."""
    gained = [drafts.tokens_per_step(each.slot, each.request.task) for each in decoding]
    return sum(gained) / len(gained) if gained else 1.0


def _plan_chunk(limits: Limits, pace: Pace, prefilling: Sequence[Prefilling]) -> PrefillPlan:
    by_slot = {each.slot: each for each in prefilling}
    if pace.unbroken in by_slot:
        chosen = by_slot[pace.unbroken]
    else:
        candidates = [
            PrefillCandidate(each.slot, each.remaining, each.passed_over, each.request.id) for each in prefilling
        ]
        chosen = by_slot[choose_prefill(candidates).slot]
    most = pace.tempo.chunk_rows if pace.tempo is not None and limits.chunked_prefill else None
    cell = choose_prefill_cell(limits.prefill_cells, chosen.launched, chosen.remaining, most)
    if cell is None:
        raise ConfigError(f"no prefill cell reaches position {chosen.launched} of a prompt")
    tokens = min(cell.query_rows, chosen.remaining)
    more = not limits.chunked_prefill and tokens < chosen.remaining
    after = Pace(0, chosen.slot if more else None, cell.query_rows, pace.tempo)
    return PrefillPlan(cell, chosen.slot, chosen.launched, tokens, after)


def _plan_decode(
    limits: Limits, pace: Pace, ready: Sequence[Decoding], proposed: dict[int, tuple[int, ...]]
) -> DecodePlan | CollectPlan:
    drafts = {each.slot: proposed.get(each.slot, ())[: drafts_allowed(each, limits.context_tokens)] for each in ready}

    def window(drafts: dict[int, tuple[int, ...]]) -> Window | None:
        candidates = [
            DecodeCandidate(each.slot, each.longest_length, 1 + len(drafts.get(each.slot, ())), each.last_launch)
            for each in ready
        ]
        return choose_decode_window(
            limits.decode_cells, candidates, slots=limits.slots, any_first_slot=limits.any_first_slot
        )

    chosen = window(drafts)
    if chosen is None or len(chosen.slots) < len(ready):
        # Drafts must not cost anybody a step: drop them where no cell has rows enough for all.
        drafts = {}
        chosen = window(drafts)
    if chosen is None:
        longest = max(each.longest_length for each in ready)
        raise ConfigError(f"no decode cell serves a sequence of {longest} positions")
    window_slots = range(chosen.first_slot, chosen.first_slot + chosen.cell.batch)
    if any(not each.certain and each.slot in window_slots and each.slot not in chosen.slots for each in ready):
        return CollectPlan()  # its idle row would be padded where accepted drafts may stand
    kept = {slot: tokens for slot, tokens in drafts.items() if slot in chosen.slots and tokens}
    return DecodePlan(
        chosen.cell, chosen.first_slot, chosen.slots, kept, replace(pace, decode_steps=pace.decode_steps + 1)
    )
