"""The loop that owns the backend: take in commands, plan, launch, collect, commit. One thread runs it, nobody else.

`step()` is the whole engine. It knows states, slots and plans; it does not know text, files or threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgert.backends.base import Backend, StepInputs, StepOutputs, Ticket
from edgert.cells import Cell
from edgert.drafting import DraftBook, DraftControl
from edgert.errors import MemoryShort
from edgert.guards.guard import Guard
from edgert.handles import Completion
from edgert.metrics import Counters
from edgert.output import Output
from edgert.requests import Decoding, Finished, FinishReason, Prefilling, Request, Waiting
from edgert.scheduler import (
    CollectPlan,
    Crowd,
    DecodePlan,
    Limits,
    Pace,
    PrefillPlan,
    drafts_allowed,
    drafts_wanted,
    plan_step,
    propose,
    tokens_per_step,
)
from edgert.slots import SlotTable
from edgert.step import cut, decode_inputs, prefill_inputs, read_row
from edgert.tempo import Tempo

# How long a request waits for memory that nothing of ours will give back, because nothing of ours runs.
MEMORY_PATIENCE_S = 5.0


class Drafter(Protocol):
    """Proposes tokens on the host, e.g. by prompt lookup. A drafter on the device belongs to the backend."""

    def propose(self, request: Request, outputs: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens that may follow prompt and outputs."""


@dataclass(frozen=True)
class Launched:
    """A step in flight. rows: batch row → the request that took part; samples: whether its tokens count; drafts: batch
    row → how many of the drafts that the backend makes after this step are wanted."""

    step: StepInputs
    ticket: Ticket
    rows: dict[int, int]
    samples: bool
    drafts: dict[int, int] = field(default_factory=dict)


class Worker:
    """Queues, slots and the steps in flight. Every method is called on the thread that owns the backend."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        slots: SlotTable,
        *,
        token_limit: int,
        clock: Callable[[], float],
        drafter: Drafter | None = None,
        draft_control: DraftControl | None = None,
        guard: Guard | None = None,
        admitted: int | None = None,
    ) -> None:
        """drafter: on the host. draft_control: the backend has a drafter, and this says how much it drafts. guard: is
        asked before anything is admitted. admitted: sequences that run at once at most, None = as many as slots."""
        self.counters = Counters()
        self.guard = guard
        self.last_cell: Cell | None = None  # of the latest launch
        self.on_end: Callable[[], None] = _nothing  # called when a request has ended, before its caller knows
        self._short_since: float | None = None
        self.drafts = DraftBook(draft_control or DraftControl(0))
        self._backend = backend
        self._limits = limits
        self._slots = slots
        self._token_limit = token_limit
        self._clock = clock
        self._drafter = drafter
        self._admitted = slots.usable if admitted is None else admitted
        self._pace = Pace()
        self._launches = 0
        self._waiting: deque[Waiting] = deque()
        self._active: dict[int, Prefilling | Decoding] = {}  # by slot
        self._outputs: dict[int, Output] = {}  # by request id
        self._flying: deque[Launched] = deque()

    def add(self, output: Output) -> None:
        """Put a request at the end of the queue."""
        self._outputs[output.request.id] = output
        self._waiting.append(Waiting(output.request))

    def cancel(self, request_id: int) -> None:
        """End a request wherever it is; its slot is free at once, a step of it in flight is discarded."""
        if request_id in self._outputs:
            self._end(Finished(self._outputs[request_id].request, "cancelled"))

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active or self._flying)

    @property
    def held(self) -> bool:
        """Requests wait for a guard and nothing runs: a step changes nothing before the guard looks again."""
        refused = self.guard is not None and self.guard.verdict.refusal is not None
        return refused and bool(self._waiting) and not self._active and not self._flying

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def tempo(self) -> Tempo:
        """The latest decision; while no prompt is read, the one that holds then."""
        return self._pace.tempo or self._limits.at_rest

    @property
    def queues(self) -> tuple[int, int, int, int]:
        """Waiting, prefilling, decoding, free slots."""
        prefilling = sum(isinstance(state, Prefilling) for state in self._active.values())
        return len(self._waiting), prefilling, len(self._active) - prefilling, self._slots.free

    def step(self) -> None:
        """One turn: admit, plan, launch; collect what the backend does not let run ahead; commit what came."""
        self._admit()
        prefilling = [state for state in self._active.values() if isinstance(state, Prefilling)]
        decoding = [state for state in self._active.values() if isinstance(state, Decoding)]
        plan = plan_step(
            self._limits,
            self._pace,
            prefilling,
            decoding,
            crowd=self._crowd(prefilling, decoding),
            drafts=self._propose(decoding),
        )
        if isinstance(plan, PrefillPlan):
            self._launch_chunk(plan, prefilling)
        elif isinstance(plan, DecodePlan):
            self._launch_decode(plan)
        nothing_to_launch = plan is None or isinstance(plan, CollectPlan)
        while self._flying and (nothing_to_launch or len(self._flying) > self._backend.run_ahead):
            self._collect()
            nothing_to_launch = False

    def _crowd(self, prefilling: Sequence[Prefilling], decoding: Sequence[Decoding]) -> Crowd:
        """What the tempo depends on beside the slots; only looked up where a prompt is read, or drafts may be cut."""
        slots = self._slots.usable
        active = slots if self.guard is None else self.guard.verdict.active_slots
        if not prefilling:
            return Crowd(slots=slots, active_slots=active)
        # requests with a slot arrived before those without
        oldest_s = min(each.request.arrival_s for each in prefilling)
        return Crowd(
            waiting=len(self._waiting),
            waiting_tokens=sum(len(each.request.prompt_ids) for each in self._waiting),
            oldest_ms=(self._clock() - oldest_s) * 1e3,
            slots=slots,
            active_slots=active,
            tokens_per_step=tokens_per_step(decoding, self.drafts),
        )

    def fail(self, error: Exception) -> None:
        """End every request with `error`; the backend is not touched again."""
        self._flying.clear()
        self._end_all("error", error)

    def stop(self) -> None:
        """End every request as cancelled and wait for the steps in flight."""
        self._end_all("cancelled", None)
        while self._flying:
            self._flying.popleft().ticket.result()

    def _end_all(self, reason: FinishReason, error: Exception | None) -> None:
        for output in tuple(self._outputs.values()):
            self._end(Finished(output.request, reason, error))

    def _admit(self) -> None:
        """Give waiting requests their slots, as far as the guard lets: it never touches what runs."""
        active = self._slots.usable if self.guard is None else self._ask(self.guard)
        active = min(active, self._admitted)
        while self._waiting and self._slots.free and len(self._active) < active:
            waiting = self._waiting.popleft()
            slot = self._slots.take(waiting.request.id)
            self._backend.reset_slot(slot)
            self.drafts.admit(slot, waiting.request.task)
            self._active[slot] = waiting.admit(slot)
            now = self._clock()
            self._outputs[waiting.request.id].admitted_s = now
            self.counters.queue_wait.observe(now - waiting.request.arrival_s)

    def _ask(self, guard: Guard) -> int:
        """Sequences that may be active. What waits for memory that nothing of ours could give back is refused."""
        now = self._clock()
        verdict = guard.poll(now)
        if not verdict.memory_short or self._active or self._flying or not self._waiting:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= MEMORY_PATIENCE_S:
            error = MemoryShort(f"not admitted: {verdict.refusal}", hint="free memory on this machine, or try later")
            for waiting in tuple(self._waiting):
                self._end(Finished(waiting.request, "error", error))
        return 0 if verdict.refusal is not None else verdict.active_slots

    def _propose(self, decoding: Sequence[Decoding]) -> dict[int, tuple[int, ...]]:
        if self._drafter is None:
            return propose(self._limits, decoding, self.drafts)
        proposals = {}
        for state in decoding:
            limit = drafts_allowed(state, self._limits.context_tokens)
            if limit and not state.in_flight:
                outputs = self._outputs[state.request.id].tokens
                proposals[state.slot] = tuple(self._drafter.propose(state.request, outputs, limit))[:limit]
        return proposals

    def _launch_chunk(self, plan: PrefillPlan, prefilling: Sequence[Prefilling]) -> None:
        self._pace = plan.pace
        for each in prefilling:
            if each.slot != plan.slot:
                self._active[each.slot] = each.passed()
            else:
                after = each.chunk(plan.tokens, self._launches + 1)
                wanted = self._wanted(after, 1) if isinstance(after, Decoding) else 0
                prime = self.drafts.follows(plan.slot) and (wanted > 0 or isinstance(after, Prefilling))
                step = prefill_inputs(plan, each, prime=prime, draft_length=wanted)
                self._active[plan.slot] = after
                self._launch(step, {0: each.request.id}, samples=isinstance(after, Decoding), drafts={0: wanted})
        self.counters.prompt_tokens += plan.tokens
        self.counters.padded_prompt_tokens += plan.cell.query_rows - plan.tokens

    def _launch_decode(self, plan: DecodePlan) -> None:
        self._pace = plan.pace
        states = {slot: state for slot, state in self._active.items() if isinstance(state, Decoding)}
        step = decode_inputs(plan, states, self._slots.written)
        wanted: dict[int, int] = {}
        for slot in plan.slots:
            after = states[slot].launch(len(plan.drafts.get(slot, ())), self._launches + 1)
            self._active[slot] = after
            wanted[slot - plan.first_slot] = self._wanted(after, plan.cell.batch)
        if length := max(wanted.values()):
            step = replace(step, prime=True, draft_length=length)
        rows = {slot - plan.first_slot: states[slot].request.id for slot in plan.slots}
        self._launch(step, rows, samples=True, drafts=wanted)
        self.counters.decode_rows += plan.cell.batch
        self.counters.idle_rows += plan.cell.batch - len(plan.slots)

    def _wanted(self, after: Decoding, batch: int) -> int:
        """Drafts for the step that follows the one just planned, as many as that one could still verify."""
        limit = drafts_wanted(self._limits, after, self._pace.tempo)
        return self.drafts.wanted(after.slot, after.request.task, batch, limit)

    def _launch(self, step: StepInputs, rows: dict[int, int], *, samples: bool, drafts: dict[int, int]) -> None:
        owners = {step.first_slot + row: request_id for row, request_id in rows.items()}
        self._slots.check(step, owners)
        ticket = self._backend.launch(step)
        self._launches += 1
        for row in rows:
            proposed = int(step.valid[row] - step.forced[row])
            self._slots.launched(step.first_slot + row, int(step.forced[row]), proposed)
            made = drafts.get(row, 0) if samples else None
            self.drafts.launched(step.first_slot + row, primed=step.prime, made=made)
        self._flying.append(Launched(step, ticket, rows, samples, drafts))
        self.counters.launches[step.cell.label] += 1
        self.last_cell = step.cell

    def _collect(self) -> None:
        """Read the oldest step in flight. Rows whose request has ended meanwhile are discarded."""
        launched = self._flying.popleft()
        outputs = launched.ticket.result()
        if not launched.samples:
            return
        for row, request_id in launched.rows.items():
            state = self._active.get(launched.step.first_slot + row)
            if isinstance(state, Decoding) and state.request.id == request_id:
                made = () if outputs.drafts is None else outputs.drafts[row, : launched.drafts.get(row, 0)].tolist()
                self.drafts.collected(state.slot, made)
                self._commit(state, launched.step, outputs, row)
            else:
                self.counters.discarded_rows += 1

    def _commit(self, state: Decoding, step: StepInputs, outputs: StepOutputs, row: int) -> None:
        outcome = read_row(step, outputs, row, self._token_limit)
        drafts = int(step.valid[row] - step.forced[row])
        if drafts:
            self._slots.settle(state.slot, outcome.accepted)
        output = self._outputs[state.request.id]
        output.draft_proposed += drafts
        output.draft_accepted += outcome.accepted
        if drafts:
            output.draft_steps += 1
            self.drafts.verified(state.request.task, drafts, outcome.accepted)
        self.counters.draft_proposed += drafts
        self.counters.draft_accepted += outcome.accepted
        tokens, at_stop_token = cut(state.request, state.outputs, outcome.tokens)
        after = state.collect(outcome.accepted, outcome.tokens[-1])
        self._active[state.slot] = after
        before, now = output.latest_s, self._clock()
        matched = output.push(tokens, ends_with_stop_token=at_stop_token, now_s=now)
        self.counters.delivered(len(tokens), state.request.arrival_s, before, now)
        if at_stop_token or matched:
            self._end(Finished(state.request, "stop"), matched=matched)
        elif after.outputs >= state.request.params.max_tokens or after.length >= self._limits.context_tokens:
            self._end(Finished(state.request, "length"))
        else:
            output.send()

    def _end(self, finished: Finished, *, matched: bool = False) -> None:
        request = finished.request
        self._waiting = deque(each for each in self._waiting if each.request.id != request.id)
        for slot, state in tuple(self._active.items()):
            if state.request.id == request.id:
                del self._active[slot]
                self._slots.release(slot, request.id)
                self.drafts.release(slot)
        output = self._outputs.pop(request.id)
        self.counters.finished[finished.reason] += 1
        output.finish(
            finished.reason, matched=matched, now_s=self._clock(), error=finished.error, before=self._completed
        )

    def _completed(self, completion: Completion) -> None:
        if completion.metrics.tpot_ms is not None:
            self.counters.tpot.observe(completion.metrics.tpot_ms / 1e3)
        self.on_end()


def _nothing() -> None:
    """No observer."""
