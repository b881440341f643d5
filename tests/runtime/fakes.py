"""A backend without a model: a toy in numpy that keeps the graph's contract to the letter, and an oracle for it.

The toy's logits hash every token that attention can see, so a wrong position, a wrong slot, a short tier or a row that
was not rolled back changes the output. Time is virtual: a launch costs what `cost_s` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from edgert.backends.base import StepInputs, StepOutputs
from edgert.cells import Cell
from edgert.errors import BackendError
from edgert.loading import Runtime
from edgert.policy import Ratio
from edgert.sampling import SamplingParams, uniform
from edgert.scheduler import Limits
from edgert.slots import slots_to_allocate

VOCABULARY = 48
GARBAGE = 1_000_003  # what uncommitted cache positions hold
PRIME = 2_147_483_647
_WEIGHTS = np.random.default_rng(7).integers(1, PRIME, 65_536)
_SPREAD = np.random.default_rng(8).integers(1, PRIME, VOCABULARY)


def toy_logits(tokens: np.ndarray) -> np.ndarray:
    """float32[V] of a sequence of token ids: a function of every token and its place."""
    seen = int(((tokens + 1) * _WEIGHTS[: len(tokens)] % PRIME).sum() % PRIME)
    return ((seen * _SPREAD) % PRIME / PRIME * 6.0).astype(np.float32)


def sample(logits: np.ndarray, number: float, temperature: float, top_k: int, top_p: float) -> int:
    """The contract's sampling: temperature, top-k, top-p, inverse CDF in descending order when filtered."""
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    order = np.arange(len(chances))
    if top_k > 0 or top_p < 1:
        order = np.argsort(-chances, kind="stable")
        if top_k > 0:
            order = order[:top_k]
        kept = chances[order] / chances[order].sum()
        if top_p < 1:
            order = order[: int(np.searchsorted(np.cumsum(kept), top_p)) + 1]
    kept = np.cumsum(chances[order] / chances[order].sum())
    return int(order[min(int(np.searchsorted(kept, number, side="right")), len(order) - 1)])


def reference(
    prompt: Sequence[int], params: SamplingParams, seed: int, context: int, eos: Sequence[int] = ()
) -> list[int]:
    """Token ids of a request run alone, without any of edgert's machinery."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    tokens, outputs = list(prompt), list[int]()
    while len(outputs) < params.max_tokens:
        number = float(uniform(seed, len(outputs))) if params.temperature else 0.0
        token = sample(toy_logits(np.array(tokens)), number, params.temperature, params.top_k, params.top_p)
        outputs.append(token)
        if token in stops or len(tokens) == context:
            break
        tokens.append(token)
    return outputs


@dataclass(frozen=True)
class Launch:
    """One step as the device saw it, and when (virtual seconds)."""

    step: StepInputs
    start_s: float
    end_s: float


@dataclass(frozen=True)
class _Ticket:
    outputs: StepOutputs

    def result(self) -> StepOutputs:
        return self.outputs


@dataclass
class FakeBackend:
    """The contract's graph over toy_logits. on_launch(number) runs first and may raise."""

    cells: Sequence[Cell]
    slots: int
    cache_tokens: int
    run_ahead: int = 0
    any_first_slot: bool = True
    name: str = "fake"
    on_launch: Callable[[int], None] | None = None
    cost_s: Callable[[Cell], float] = field(default=lambda cell: 0.001 * cell.query_rows)
    launches: list[Launch] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)
    now_s: float = 0.0
    closed: bool = False
    started: int = 0

    def __post_init__(self) -> None:
        self.cache = np.full((self.slots, self.cache_tokens), GARBAGE, np.int64)
        # As a recurrent layer's state: the committed tokens, folded in one by one. Rejected rows must not enter.
        self.state = np.zeros(self.slots, np.int64)
        self.device_length = np.zeros(self.slots, np.int64)
        self.device_token = np.full(self.slots, -1, np.int64)
        self.device_drafts: list[list[int]] = [[] for _ in range(self.slots)]

    def warm_up(self) -> None:
        pass

    def launch(self, step: StepInputs) -> _Ticket:
        self.started += 1
        if self.on_launch is not None:
            self.on_launch(self.started)
        if self.closed:
            raise BackendError("closed")
        cell, count = step.cell, step.cell.logit_rows
        assert cell in self.cells, f"{cell.label} was not captured"
        assert step.tokens.shape == (cell.batch, cell.query_rows)
        if not self.any_first_slot and cell.batch > 1:
            assert step.first_slot == 0
        sampled = np.zeros((cell.batch, count), np.int64)
        accepted = np.zeros(cell.batch, np.int64)
        following = np.zeros(cell.batch, np.int64)
        logits = np.zeros((cell.batch, count, VOCABULARY), np.float32)
        for row in range(cell.batch):
            self._row(step, row, sampled, accepted, following, logits)
        start = self.now_s
        self.now_s += self.cost_s(cell)
        self.launches.append(Launch(step, start, self.now_s))
        return _Ticket(StepOutputs(sampled, accepted, following, logits if step.want_logits else None))

    def _row(self, step: StepInputs, row: int, sampled: Any, accepted: Any, following: Any, logits: Any) -> None:
        slot = step.first_slot + row
        tokens, length = step.tokens[row].copy(), int(step.length[row])
        valid, forced = int(step.valid[row]), int(step.forced[row])
        rows = step.cell.query_rows
        if step.from_device[row]:
            assert valid > 0, "an idle row takes nothing from the device"
            assert self.device_token[slot] >= 0, "the device has no token for this slot"
            tokens[0], length = self.device_token[slot], int(self.device_length[slot])
            if drafts := valid - forced:
                assert drafts <= len(self.device_drafts[slot]), "the step before made fewer drafts"
                tokens[1:valid] = self.device_drafts[slot][:drafts]
        assert (tokens[valid:] == 0).all(), "padding carries token 0"
        if valid and length == 0:
            assert self.state[slot] == 0, "a new sequence starts in a slot that was not reset"
        assert length + rows <= self.cache_tokens
        self.cache[slot, length : length + rows] = np.where(np.arange(rows) < valid, tokens, GARBAGE)
        for column in range(sampled.shape[1]):
            place = min(max(forced - 1 + column, 0), rows - 1)
            visible = min(length + place + 1, step.cell.kv_tier)
            logits[row, column] = toy_logits(self.cache[slot, :visible])
            number = float(step.uniform[row, column])
            sampled[row, column] = sample(
                logits[row, column], number, float(step.temperature[row]), int(step.top_k[row]), float(step.top_p[row])
            )
        while forced + accepted[row] < valid and sampled[row, accepted[row]] == tokens[forced + accepted[row]]:
            accepted[row] += 1
        committed = forced + int(accepted[row]) if valid else 0
        for token in tokens[:committed]:
            self.state[slot] = (self.state[slot] * 31 + int(token) + 1) % PRIME
        self.device_length[slot] = length + committed
        following[row] = sampled[row, accepted[row]]
        self.device_token[slot] = following[row] if valid else -1

    def reset_slot(self, slot: int) -> None:
        self.resets.append(slot)
        self.state[slot] = 0
        self.device_length[slot] = 0
        self.device_token[slot] = -1

    def memory(self) -> dict[str, int]:
        return {"kv_cache": self.cache.nbytes}

    def describe(self) -> dict[str, Any]:
        return {"backend": self.name}

    def close(self) -> None:
        self.closed = True


def folded_state(tokens: Sequence[int]) -> int:
    """What FakeBackend.state holds after exactly these tokens were committed."""
    state = 0
    for token in tokens:
        state = (state * 31 + token + 1) % PRIME
    return state


def make_cells(
    context: int,
    *,
    chunks: Sequence[int] = (16, 64),
    batches: Sequence[int] = (1, 2, 4),
    rows: Sequence[int] = (1,),
    tiers: Sequence[int] | None = None,
) -> tuple[Cell, ...]:
    tiers = tiers or sorted({min(128, context), context})
    prefill = [Cell("prefill", 1, chunk, max(tier, chunk)) for chunk in chunks for tier in tiers]
    decode = [Cell("decode", batch, row, max(tier, row)) for batch in batches for row in rows for tier in tiers]
    return tuple(dict.fromkeys([*prefill, *decode]))


def make_runtime(
    *,
    context: int = 256,
    slots: int = 4,
    cells: Sequence[Cell] | None = None,
    queue_limit: int = 64,
    eos: Sequence[int] = (),
    chunked_prefill: bool = True,
    ratio: Ratio | None = None,
    text: Any = None,
    drafter: Any = None,
    guard: Any = None,
    **backend: Any,
) -> Runtime:
    """A Runtime on a FakeBackend, for Engine(lambda: runtime) or runtime.worker(clock)."""
    cells = tuple(cells or make_cells(context))
    largest = max(cell.query_rows for cell in cells)
    allocated = slots_to_allocate(slots, [cell.batch for cell in cells if cell.kind == "decode"])
    fake = FakeBackend(cells, allocated, context + largest, **backend)
    limits = Limits(cells, allocated, context, fake.any_first_slot, chunked_prefill, ratio or Ratio())
    return Runtime(
        backend=fake,
        limits=limits,
        slots=slots,
        cache_tokens=context + largest,
        vocabulary_size=VOCABULARY + 4,
        token_limit=VOCABULARY,
        eos_token_ids=tuple(eos),
        queue_limit=queue_limit,
        text=text,
        description=fake.describe(),
        memory_bytes=fake.memory(),
        drafter=drafter,
        guard=guard,
    )
