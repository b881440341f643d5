"""The protocol that every inference backend implements, and the two records that cross it.

A backend owns the device memory: weights, one cache row and one state row per slot, and per slot the token and the
length that the next step starts from. It knows nothing of requests, queues or text. The step's arithmetic (sampling,
acceptance, state commit) happens inside the graph; see docs/architecture.md for the graph's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgert.cells import Cell
from edgert.manifest_records import Manifest, StateSpec

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


def _nobody(_phase: str) -> None:
    """Nobody watches the phases of a warm-up."""


@dataclass(frozen=True)
class Setup:
    """What a backend is opened with: everything decided at build time, read from the artifact by the engine.

    Each backend module has `open_backend(setup: Setup) -> Backend`; `edgert.backends.resolve(name)` returns it. The
    engine calls it, and every method of the backend, on one thread of its own.

    artifact      directory that holds decoder.onnx or decoder.plan
    cells         what may be launched
    slots         slots to allocate: those that sequences use, rounded up so that every batch cell has its rows
    cache_tokens  cache positions per slot
    token_limit   width of the logits
    states        in the graph's order
    options       enable_cuda_graph from scheduler.yaml, and what the caller of Engine.load set for this device
                  (threads, prepack ...); a backend refuses a name that it does not know with ConfigError
    manifest      manifest.json as read, for what only one backend needs (versions, compute capability); None in tests
    draft_length  tokens that may be drafted after a step; 0 = no drafter is opened
    draft_states  of the drafter's graph, in its order
    on_phase      warm_up calls it with a name after each part that takes memory ("compiled"); the memory in use is
                  looked at then. Before and after warm_up the engine looks by itself
    """

    artifact: Path
    cells: tuple[Cell, ...]
    slots: int
    cache_tokens: int
    token_limit: int
    states: tuple[StateSpec, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    draft_length: int = 0
    draft_states: tuple[StateSpec, ...] = ()
    on_phase: Callable[[str], None] = _nobody


@dataclass(frozen=True)
class StepInputs:
    """One launch. Arrays are host memory; B = cell.batch, q = cell.query_rows, R = cell.logit_rows.

    cell         the shape to run
    first_slot   slot of batch row 0; row b is slot first_slot + b
    tokens       [B, q] token ids; rows at and past `valid` are padding (id 0)
    length       [B] cache positions already committed before this step; for an idle row too (its padding is written
                 there, past what the slot has committed)
    valid        [B] rows that carry a token; 0 = this batch row is idle and must leave no trace
    forced       [B] leading rows that are given (prompt, or the last sampled token); the rest of `valid` are drafts
    from_device  [B] true: token 0, length and the drafts are what this slot's previous step left on the device, the
                 host's `tokens[b]` and `length[b]` are ignored (the host may not know them yet; its length is then the
                 least possible). `valid - forced` is no more than that step drafted. Never true for an idle row, nor
                 for a row whose slot was idle in the step before: an idle row's next token means nothing
    uniform      [B, R] one uniform number in [0, 1) for each row that is sampled
    temperature  [B] 0 = greedy
    top_k        [B] 0 = off
    top_p        [B] 1.0 = off
    want_logits  copy logits to the host (golden vectors, tests); costs a transfer
    prime        the drafter follows: its cache takes in the rows that this step commits
    draft_length tokens to draft after this step for each row; needs `prime`
    following    [B] with `prime`: the prompt's token after this chunk, -1 = the sampled one follows; None = all -1
    """

    cell: Cell
    first_slot: int
    tokens: Int64s
    length: Int64s
    valid: Int64s
    forced: Int64s
    from_device: npt.NDArray[np.bool_]
    uniform: Float32s
    temperature: Float32s
    top_k: Int64s
    top_p: Float32s
    want_logits: bool = False
    prime: bool = False
    draft_length: int = 0
    following: Int64s | None = None


@dataclass(frozen=True)
class StepOutputs:
    """What one launch produced, on the host.

    sampled     [B, R] the token sampled after each row
    accepted    [B] drafts accepted (0 without drafts); the step commits `forced + accepted` rows
    next_token  [B] the token sampled after the last committed row
    logits      [B, R, V] float32, or None when not asked for
    drafts      [B, draft_length] what may follow next_token, or None when none were asked for; idle rows mean nothing
    """

    sampled: Int64s
    accepted: Int64s
    next_token: Int64s
    logits: Float32s | None
    drafts: Int64s | None = None


class Ticket(Protocol):
    """A launched step. `result` waits for it; calling it twice returns the same outputs."""

    def result(self) -> StepOutputs: ...


class Backend(Protocol):
    """What the engine needs from a device.

    run_ahead       steps that may be launched before the oldest is collected: 0 = launch blocks (CPU), 1 = overlapped
    any_first_slot  decode cells may start at any slot; False: batched decode cells start at slot 0 (a graph has fixed
                    addresses), batch 1 may start anywhere
    cells           what can be launched, after warm-up
    """

    name: str
    run_ahead: int
    any_first_slot: bool
    cells: Sequence[Cell]

    def warm_up(self) -> None:
        """Prepare every cell (capture graphs, largest first). Called once, before ready is reported."""

    def launch(self, step: StepInputs) -> Ticket:
        """Queue one step. Steps run in the order they were launched. Raises BackendError."""

    def reset_slot(self, slot: int) -> None:
        """Forget a sequence: recurrent state to zero, length 0. Ordered after the steps launched so far."""

    def memory(self) -> dict[str, int]:
        """Bytes by label (weights, kv_cache, state, scratch ...), as measured where the backend can, for the ledger."""

    def describe(self) -> dict[str, Any]:
        """Versions, device name, compute capability, eager fallbacks: for reports and `doctor`."""

    def close(self) -> None:
        """Free everything; later calls raise BackendError."""
