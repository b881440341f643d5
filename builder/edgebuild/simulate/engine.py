"""The discrete-event loop: the runtime's queue, slots and device in virtual time, its own plan_step in between.

It takes the turns that edgert.worker.Worker takes: admit, plan, launch, collect, commit; states, scheduler, tempo and
draft control are the runtime's. Only tokens are missing: outputs end at their length, drafts are accepted by chance.
While nothing but the lengths of the running streams changes, turns are taken in a tight loop; `bulk=False` plans each.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edgert.cells import Cell
from edgert.costs import require_costs
from edgert.drafting import DraftBook
from edgert.requests import Decoding, InFlight, Prefilling, Request, Waiting
from edgert.sampling import SamplingParams
from edgert.scheduler import (
    CollectPlan,
    Crowd,
    DecodePlan,
    Pace,
    PrefillPlan,
    drafts_wanted,
    plan_step,
    propose,
    tokens_per_step,
)

from edgebuild.simulate.records import Arrival, Gaps, Outcome, Run
from edgebuild.simulate.setting import Setting, draft_control

PROGRESS_TURNS = 2000
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Flight:
    """A step on the device. rows: slot → request id; drafts: slot → (verified, drafts made for the next step)."""

    end_s: float
    rows: dict[int, int]
    samples: bool
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)


def simulate(
    setting: Setting,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    bulk: bool = True,
) -> Run:
    """Serve every arrival. Raises ConfigError when a cell has no cost.

    concurrency  so many requests at any time, in the order given, each when one before it ends, as `edgert bench` does;
                 the arrivals' times are not looked at. None: requests come when they come
    progress     called with (requests finished, requests)
    """
    require_costs(setting.costs, [cell for cell in setting.limits.cells if cell.batch <= setting.limits.slots])
    if concurrency is not None:
        arrivals = [replace(each, at_s=0.0) for each in arrivals]
    return _Loop(setting, arrivals, seed, progress, bulk, concurrency).run()


class _Loop:
    def __init__(
        self,
        setting: Setting,
        arrivals: Sequence[Arrival],
        seed: int,
        progress: Progress | None,
        bulk: bool,
        concurrency: int | None,
    ) -> None:
        self.setting = setting
        self.limits = setting.limits
        self.costs = setting.costs
        self.arrivals = sorted(arrivals, key=lambda each: each.at_s)
        self.progress = progress
        self.bulk = bulk
        self.concurrency = concurrency
        self.random = random.Random(seed)
        self.drafts = DraftBook(draft_control(setting))
        self.drafting = self.drafts.control.length > 0
        self.run_ahead = setting.costs.run_ahead
        self.host_s = setting.costs.host_ms / 1e3 if self.run_ahead == 0 else 0.0
        self.now_s = 0.0
        self.device_s = 0.0  # when the device has nothing left to do
        self.next = 0  # index of the next arrival
        self.finished = 0
        self.launches = 0
        self.pace = Pace()
        self.waiting: deque[tuple[int, Arrival]] = deque()
        self.waiting_tokens = 0
        self.free = list(range(setting.slots))
        self.active: dict[int, Prefilling | Decoding] = {}
        self.flying: deque[_Flight] = deque()
        self.outcomes = [Outcome(each) for each in self.arrivals]
        self.result = Run(self.outcomes, Gaps())

    def run(self) -> Run:
        turn = 0
        while self.finished < len(self.arrivals):
            if self.progress is not None and turn % PROGRESS_TURNS == 0:
                self.progress(self.finished, len(self.arrivals))
            turn += 1
            if not self.waiting and not self.active and not self.flying:
                self.now_s = max(self.now_s, self.arrivals[self.next].at_s)
            self.turn()
        if self.progress is not None:
            self.progress(self.finished, len(self.arrivals))
        self.result.end_s = self.now_s
        return self.result

    def turn(self) -> None:
        """One turn of the worker."""
        self.arrive()
        allowed = self.allowed()
        self.admit(allowed)
        prefilling = [state for state in self.active.values() if isinstance(state, Prefilling)]
        decoding = [state for state in self.active.values() if isinstance(state, Decoding)]
        crowd = self.crowd(prefilling, decoding, allowed)
        drafts = propose(self.limits, decoding, self.drafts) if self.drafting else None
        plan = plan_step(self.limits, self.pace, prefilling, decoding, crowd=crowd, drafts=drafts)
        if isinstance(plan, PrefillPlan):
            self.launch_chunk(plan)
        elif isinstance(plan, DecodePlan):
            if self.bulk and not prefilling and not self.drafting and self.repeat(plan):
                return
            self.launch_decode(plan)
        nothing = plan is None or isinstance(plan, CollectPlan)
        if nothing and not self.flying:  # a guard holds everything back
            self.now_s += 1.0
        while self.flying and (nothing or len(self.flying) > self.run_ahead):
            self.collect()
            nothing = False

    def arrive(self) -> None:
        while self.next < len(self.arrivals) and self.due():
            arrival = self.arrivals[self.next]
            if self.concurrency is not None:
                arrival = replace(arrival, at_s=self.now_s)
                self.outcomes[self.next].arrival = arrival
            self.waiting.append((self.next, arrival))
            self.waiting_tokens += self.fitted(arrival)[0]
            self.next += 1

    def due(self) -> bool:
        """Whether the next request has come."""
        if self.concurrency is not None:
            return self.next - self.finished < self.concurrency
        return self.arrivals[self.next].at_s <= self.now_s

    def fitted(self, arrival: Arrival) -> tuple[int, int]:
        """Prompt and output tokens within the context."""
        prompt = max(1, min(arrival.prompt_tokens, self.limits.context_tokens - 1))
        return prompt, max(1, min(arrival.output_tokens, self.limits.context_tokens - prompt))

    def allowed(self) -> int:
        slots = self.setting.slots
        return slots if self.setting.active is None else min(slots, self.setting.active(self.now_s))

    def admit(self, allowed: int) -> None:
        most = allowed if self.setting.admitted is None else min(allowed, self.setting.admitted)
        while self.waiting and self.free and len(self.active) < most:
            number, arrival = self.waiting.popleft()
            prompt, output = self.fitted(arrival)
            self.result.clipped += (prompt, output) != (arrival.prompt_tokens, arrival.output_tokens)
            self.waiting_tokens -= prompt
            slot = heapq.heappop(self.free)
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            request = Request(number, (0,) * prompt, params, 0, frozenset(), arrival.task, arrival.at_s)
            self.drafts.admit(slot, arrival.task)
            self.active[slot] = Waiting(request).admit(slot)
        self.result.most_waiting = max(self.result.most_waiting, len(self.waiting))

    def crowd(self, prefilling: Sequence[Prefilling], decoding: Sequence[Decoding], allowed: int) -> Crowd:
        if not prefilling:
            return Crowd(slots=self.setting.slots, active_slots=allowed)
        oldest_s = min(each.request.arrival_s for each in prefilling)
        return Crowd(
            waiting=len(self.waiting),
            waiting_tokens=self.waiting_tokens,
            oldest_ms=(self.now_s - oldest_s) * 1e3,
            slots=self.setting.slots,
            active_slots=allowed,
            tokens_per_step=tokens_per_step(decoding, self.drafts),
        )

    def launch_chunk(self, plan: PrefillPlan) -> None:
        self.pace = plan.pace
        drafts: dict[int, tuple[int, int]] = {}
        samples, primed = False, False
        for slot, state in tuple(self.active.items()):
            if not isinstance(state, Prefilling):
                continue
            if slot != plan.slot:
                self.active[slot] = state.passed()
                continue
            after = state.chunk(plan.tokens, self.launches + 1)
            samples = isinstance(after, Decoding)
            wanted = self.wanted(after, 1) if isinstance(after, Decoding) else 0
            primed = self.drafts.follows(slot) and (wanted > 0 or not samples)
            drafts[slot] = (0, wanted)
            self.active[slot] = after
        self.result.prompt_tokens += plan.tokens
        self.result.padded_tokens += plan.cell.query_rows - plan.tokens
        rows = {plan.slot: self.active[plan.slot].request.id}
        self.launch(plan.cell, plan.start + plan.tokens, rows, samples, drafts, int(primed))

    def launch_decode(self, plan: DecodePlan) -> None:
        self.pace = plan.pace
        drafts: dict[int, tuple[int, int]] = {}
        rows: dict[int, int] = {}
        written = 0
        for slot in plan.slots:
            state = self.active[slot]
            assert isinstance(state, Decoding)
            verified = len(plan.drafts.get(slot, ()))
            written = max(written, state.launched_length + 1 + verified)
            after = state.launch(verified, self.launches + 1)
            self.active[slot] = after
            rows[slot] = after.request.id
            drafts[slot] = (verified, self.wanted(after, plan.cell.batch))
        most = max(made for _, made in drafts.values())
        self.launch(plan.cell, written, rows, True, drafts, most)

    def wanted(self, after: Decoding, batch: int) -> int:
        """As the worker's: drafts for the step after the one just planned."""
        if not self.drafting:
            return 0
        limit = drafts_wanted(self.limits, after, self.pace.tempo)
        return self.drafts.wanted(after.slot, after.request.task, batch, limit)

    def launch(
        self,
        cell: Cell,
        written: int,
        rows: dict[int, int],
        samples: bool,
        drafts: dict[int, tuple[int, int]],
        made: int,
    ) -> None:
        if self.drafting:
            for slot in rows:
                self.drafts.launched(slot, primed=made > 0, made=drafts[slot][1] if samples else None)
        cost_s = self.costs.step_ms(cell, written, made) / 1e3
        start_s = max(self.device_s, self.now_s + self.host_s)
        self.device_s = start_s + cost_s
        self.flying.append(_Flight(self.device_s, rows, samples, drafts))
        self.launches += 1
        self.result.launches[cell.label] += 1
        self.result.busy_s += cost_s
        if cell.kind == "prefill":
            self.result.prefill_s += cost_s

    def collect(self) -> None:
        flight = self.flying.popleft()
        self.now_s = max(self.now_s, flight.end_s)
        if not flight.samples:
            return
        for slot, number in flight.rows.items():
            state = self.active.get(slot)
            if isinstance(state, Decoding) and state.request.id == number:
                self.commit(state, *flight.drafts[slot])

    def commit(self, state: Decoding, verified: int, made: int) -> None:
        accepted = 0
        if verified:
            rates = self.setting.acceptance
            while accepted < verified and self.random.random() < rates[min(accepted, len(rates) - 1)]:
                accepted += 1
            self.drafts.verified(state.request.task, verified, accepted)
            self.result.draft_proposed += verified
            self.result.draft_accepted += accepted
        if self.drafting:
            self.drafts.collected(state.slot, (0,) * made)
        after = state.collect(accepted, 0)
        self.active[state.slot] = after
        outcome = self.outcomes[state.request.id]
        self.token(outcome, min(1 + accepted, state.request.params.max_tokens - state.outputs))
        if after.outputs >= state.request.params.max_tokens or after.length >= self.limits.context_tokens:
            del self.active[state.slot]
            heapq.heappush(self.free, state.slot)
            self.drafts.release(state.slot)
            self.finished += 1

    def token(self, outcome: Outcome, tokens: int) -> None:
        if not outcome.tokens:
            outcome.first_s = self.now_s
        else:
            gap_s = self.now_s - outcome.last_s
            outcome.longest_gap_s = max(outcome.longest_gap_s, gap_s)
            self.result.gaps.add(gap_s)
        if tokens > 1:
            self.result.gaps.add(0.0, tokens - 1)  # tokens of one step share a moment
        outcome.last_s = self.now_s
        outcome.tokens += tokens

    def repeat(self, plan: DecodePlan) -> bool:
        """Take every turn at which this plan would be made again, but for the last: nobody ends in one of these.

        False: there is none such, and nothing was done.
        """
        states = [self.active[slot] for slot in plan.slots]
        decoding = [state for state in states if isinstance(state, Decoding)]
        rows = {state.slot: state.request.id for state in decoding}
        if len(decoding) < len(self.active) or any(flight.rows != rows for flight in self.flying):
            return False
        if any(state.in_flight and state.in_flight[0].rows != 1 for state in decoding):
            return False
        longest = max(state.launched_length for state in decoding)
        turns = min(
            min(state.request.params.max_tokens - state.launched_outputs for state in decoding),
            self.limits.context_tokens - longest,
            plan.cell.kv_tier - longest,
        )
        launched, collected = self._tight(plan.cell, turns - 1, longest, decoding)
        if not launched:
            return False
        self.pace = replace(plan.pace, decode_steps=plan.pace.decode_steps + launched - 1)
        self.launches += launched
        self.result.launches[plan.cell.label] += launched
        for state in decoding:
            flights = len(state.in_flight) + launched - collected
            self.active[state.slot] = replace(
                state,
                length=state.length + collected,
                outputs=state.outputs + collected,
                token=0 if collected else state.token,
                in_flight=(InFlight(1, 0),) * flights,
                last_launch=self.launches,
            )
        return True

    def _tight(self, cell: Cell, turns: int, longest: int, decoding: Sequence[Decoding]) -> tuple[int, int]:
        """Launch and collect one step a turn until somebody arrives. Returns the launched and the collected."""
        open_ = self.concurrency is None and self.next < len(self.arrivals)
        next_s = self.arrivals[self.next].at_s if open_ else math.inf  # in a closed loop nobody comes before one ends
        outcomes = [self.outcomes[state.request.id] for state in decoding]
        rows = {state.slot: state.request.id for state in decoding}
        no_drafts = dict.fromkeys(rows, (0, 0))
        streams, last_s, widest_s = len(outcomes), math.nan, 0.0
        gaps, by_tier = self.result.gaps, self.costs.reads == "tier"
        cost_s = self.costs.step_ms(cell, longest + 1) / 1e3
        guarded = self.setting.active is not None
        launched = collected = 0
        while launched < turns and next_s > self.now_s:
            if not by_tier:
                cost_s = self.costs.step_ms(cell, longest + launched + 1) / 1e3
            self.device_s = max(self.device_s, self.now_s + self.host_s) + cost_s
            self.result.busy_s += cost_s
            self.flying.append(_Flight(self.device_s, rows, True, no_drafts))
            launched += 1
            if len(self.flying) > self.run_ahead:
                self.now_s = max(self.now_s, self.flying.popleft().end_s)
                collected += 1
                if collected == 1:
                    for outcome in outcomes:
                        self.token(outcome, 1)
                else:
                    gaps.add(self.now_s - last_s, streams)
                    widest_s = max(widest_s, self.now_s - last_s)
                last_s = self.now_s
            if guarded:
                break
        for outcome in outcomes:
            if collected > 1:
                outcome.longest_gap_s = max(outcome.longest_gap_s, widest_s)
                outcome.last_s = last_s
                outcome.tokens += collected - 1
        return launched, collected
