"""From a StepPlan to the arrays of one launch, and from its outputs to tokens.

Pure: states and slot lengths in, records out. This module knows neither queues nor text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgert.backends.base import StepInputs, StepOutputs
from edgert.cells import Cell
from edgert.errors import BackendError
from edgert.requests import Decoding, Prefilling, Request
from edgert.sampling import uniform
from edgert.scheduler import DecodePlan, PrefillPlan

# Normal float32 numbers: a parameter that became 0 or infinite on its way to the graph would mean something else there.
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RowOutcome:
    """What one batch row produced. tokens: sampled and kept, accepted drafts first, the bonus token last."""

    tokens: tuple[int, ...]
    accepted: int


def prefill_inputs(plan: PrefillPlan, state: Prefilling, *, prime: bool = False, draft_length: int = 0) -> StepInputs:
    """One chunk of a prompt; the number for its sample is the one of output position 0 (used if it is the last).

    prime, draft_length: for the backend's drafter, which is told the prompt's next token where there is one.
    """
    step = empty_step(plan.cell, plan.slot)
    step.tokens[0, : plan.tokens] = state.request.prompt_ids[plan.start : plan.start + plan.tokens]
    step.length[0] = plan.start
    step.valid[0] = step.forced[0] = plan.tokens
    _sampling(step, 0, state.request, position=0)
    if not prime:
        return step
    rest = state.request.prompt_ids[plan.start + plan.tokens :][:1]
    return replace(step, prime=True, draft_length=draft_length, following=np.array(rest or [-1], np.int64))


def decode_inputs(plan: DecodePlan, states: Mapping[int, Decoding], written: Callable[[int], int]) -> StepInputs:
    """One decode step. states: slot → state, for at least plan.slots; written: cache positions of any slot."""
    step = empty_step(plan.cell, plan.first_slot)
    for row in range(plan.cell.batch):
        slot = plan.first_slot + row
        if slot not in plan.slots:
            step.length[row] = written(slot)
            continue
        state = states[slot]
        drafts = plan.drafts.get(slot, ())
        step.length[row] = state.launched_length
        step.valid[row] = 1 + len(drafts)
        step.forced[row] = 1
        step.from_device[row] = bool(state.in_flight)
        if not state.in_flight:
            if state.token is None:
                raise ValueError(f"slot {slot} decodes without a token")
            step.tokens[row, : 1 + len(drafts)] = (state.token, *drafts)
        _sampling(step, row, state.request, position=state.launched_outputs)
    return step


def read_row(step: StepInputs, outputs: StepOutputs, row: int, token_limit: int) -> RowOutcome:
    """The tokens of an active row. Raises BackendError on a token or a count that the step cannot have produced."""
    accepted = int(outputs.accepted[row])
    drafts = int(step.valid[row] - step.forced[row])
    where = f"{step.cell.label}, slot {step.first_slot + row}"
    if not 0 <= accepted <= drafts:
        raise BackendError(f"{where}: the backend accepted {accepted} drafts of {drafts}")
    tokens = tuple(int(token) for token in outputs.sampled[row, : accepted + 1])
    if tokens[-1] != outputs.next_token[row]:
        raise BackendError(f"{where}: next token {outputs.next_token[row]} is not the last sampled, {tokens[-1]}")
    for token in tokens:
        if not 0 <= token < token_limit:
            raise BackendError(f"{where}: sampled token {token} is outside the vocabulary of {token_limit}")
    return RowOutcome(tokens, accepted)


def cut(request: Request, outputs_before: int, tokens: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The tokens to keep and whether a stop token ended them; a stop token inside an accepted block cuts there."""
    kept: list[int] = []
    for token in tokens[: request.params.max_tokens - outputs_before]:
        kept.append(token)
        if token in request.stop_token_ids:
            return tuple(kept), True
    return tuple(kept), False


def empty_step(cell: Cell, first_slot: int) -> StepInputs:
    """A greedy step in which every row is idle; the caller fills in its arrays."""
    batch, rows = cell.batch, cell.query_rows
    return StepInputs(
        cell=cell,
        first_slot=first_slot,
        tokens=np.zeros((batch, rows), np.int64),
        length=np.zeros(batch, np.int64),
        valid=np.zeros(batch, np.int64),
        forced=np.zeros(batch, np.int64),
        from_device=np.zeros(batch, np.bool_),
        uniform=np.zeros((batch, cell.logit_rows), np.float32),
        temperature=np.zeros(batch, np.float32),
        top_k=np.zeros(batch, np.int64),
        top_p=np.ones(batch, np.float32),
    )


def _sampling(step: StepInputs, row: int, request: Request, *, position: int) -> None:
    params = request.params
    if params.temperature == 0:
        return
    step.temperature[row] = min(max(float(params.temperature), LEAST), MOST)
    step.top_k[row] = params.top_k
    step.top_p[row] = max(float(params.top_p), LEAST)
    for column in range(step.uniform.shape[1]):
        step.uniform[row, column] = uniform(request.seed, position + column)
