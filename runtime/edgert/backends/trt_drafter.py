"""The drafter on TensorRT: mtp.plan, its cache and its buffers; what follows the decoder inside one captured step.

A step that drafts is: the decoder, one pass over the rows that it committed, then chained passes of one row each, all
on one stream and in one graph. Passes hand positions on by address: pass j takes the lengths that the passes before it
wrote, so nothing is computed in between. Knows the graph mtp.onnx (docs/architecture.md, "Drafting"), not requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgert import cuda
from edgert.backends.base import Setup
from edgert.backends.trt_engine import CellShape, Engine
from edgert.backends.trt_states import SlotStates
from edgert.cells import Cell
from edgert.errors import ArtifactError, BackendError
from edgert.manifest_records import MTP_INPUTS, MTP_OUTPUTS

PLAN_NAME = "mtp.plan"


@dataclass(frozen=True)
class Rows:
    """Addresses of what a pass takes: embedding and hidden rows."""

    embedding: int
    hidden: int


@dataclass
class _Pass:
    """A profile as it runs: its context, made at warm-up."""

    profile: int
    shape: CellShape
    context: Any = None
    jit_s: float = 0.0


class Drafter:
    """Opened beside the decoder's engine. shapes: of the decoder's profiles by cell."""

    def __init__(self, engine: Engine, setup: Setup, shapes: Mapping[Cell, CellShape], stream: cuda.Stream) -> None:
        self._engine, self._setup, self._stream = engine, setup, stream
        self._scratch = self._positions = 0
        missing = {*MTP_INPUTS, *MTP_OUTPUTS} - set(engine.names)
        if missing:
            raise ArtifactError(f"{PLAN_NAME} lacks {', '.join(sorted(missing))}", hint="rebuild the artifact")
        engine.check_states(setup.draft_states)
        self._passes = [_Pass(index, engine.draft_shape(index)) for index in range(engine.profiles)]
        self._first: dict[Cell, _Pass] = {}
        self._chained: dict[Cell, _Pass] = {}
        for cell, shape in shapes.items():
            tier = min(shape.tier + setup.draft_length, setup.cache_tokens)
            self._first[cell] = self._find(cell, shape.rows, tier)
            if setup.draft_length > 1:
                self._chained[cell] = self._find(cell, None, tier)
        used = {id(each) for each in (*self._first.values(), *self._chained.values())}
        self._passes = [each for each in self._passes if id(each) in used]
        batch = max(each.shape.batch for each in self._passes)
        self._states = SlotStates(setup.draft_states, setup.slots, batch)
        # what a pass leaves for the next: two pairs in turn, with the rows that pad a chained pass (they stay 0)
        rows = max((each.shape.batch * each.shape.rows for each in self._chained.values()), default=batch)
        sizes = [rows * engine.row_bytes(name) for name in ("embedding", "hidden")]
        self._memory = [cuda.DeviceMemory(size) for size in sizes * 2]
        addresses = [memory.address for memory in self._memory]
        self._pairs = (Rows(*addresses[:2]), Rows(*addresses[2:]))
        self._lengths = [cuda.DeviceMemory(batch * 8) for _ in range(setup.draft_length + 1)]
        self._draft = cuda.DeviceMemory(batch * 8)  # of a pass that only primes

    def _find(self, cell: Cell, rows: int | None, tier: int) -> _Pass:
        """The profile of fewest rows and positions that serves.

        rows: exactly; None = a chained row, which only a single sequence may have padded.
        """
        found = [
            each
            for each in self._passes
            if each.shape.batch == cell.batch
            and each.shape.tier >= tier
            and (each.shape.rows == rows if rows else 1 in (each.shape.batch, each.shape.rows))
        ]
        if not found:
            what = "a chained row" if rows is None else f"{rows} rows"
            raise ArtifactError(
                f"{PLAN_NAME} has no profile for {what} after {cell.label}", hint="rebuild the artifact"
            )
        return min(found, key=lambda each: (each.shape.rows, each.shape.tier))

    @property
    def most_positions(self) -> int:
        """Cache positions that some pass reads."""
        return max(each.shape.tier for each in self._passes)

    def attach(self, scratch: int, positions: int) -> None:
        """Addresses of the scratch buffer that all engines share, and of the numbers 0, 1, ..."""
        self._scratch, self._positions = scratch, positions

    @property
    def quickest_s(self) -> float:
        """The shortest first run of a pass."""
        return min(each.jit_s for each in self._passes)

    def warm_up(self, rows: Rows) -> None:
        """Compile every kernel by idle passes."""
        idle = (self._lengths[0].address,) * 2
        for each in sorted(self._passes, key=lambda each: -each.shape.batch * each.shape.rows):
            started = time.monotonic()
            self._run(each, 0, rows, idle, self._lengths[-1].address, self._draft.address, self._pairs[0])
            self._stream.synchronize()
            each.jit_s = time.monotonic() - started

    def queue(self, cell: Cell, first: int, rows: Rows, lengths: tuple[int, int], drafts: Sequence[int]) -> None:
        """Queue the passes that follow a step of `cell`: one for each address in `drafts` [B], at least one.

        rows: where the decoder left its rows. lengths: addresses of the positions [B] before and after the step.
        """
        before, after = lengths
        each = self._first[cell]
        for place, draft in enumerate(drafts or (self._draft.address,)):
            following, left = self._lengths[place].address, self._pairs[place % 2]
            self._run(each, first, rows, (before, after), following, draft, left)
            rows, before, after = left, after, following
            each = self._chained.get(cell, each)

    def _run(
        self,
        each: _Pass,
        first: int,
        rows: Rows,
        lengths: tuple[int, int],
        following: int,
        draft: int,
        left: Rows,
    ) -> None:
        if each.context is None:
            shapes = self._engine.draft_input_shapes(each.shape, self._setup.draft_states)
            each.context = self._engine.context(each.profile, shapes, self._scratch, self._stream)
            each.context.set_tensor_address("kv_positions", self._positions)
        addresses = {
            "embedding": rows.embedding,
            "hidden": rows.hidden,
            "length": lengths[0],
            "new_length": lengths[1],
            "draft": draft,
            "draft_embedding": left.embedding,
            "draft_hidden": left.hidden,
            "next_length": following,
        }
        for name, address in addresses.items():
            each.context.set_tensor_address(name, address)
        self._states.bind(each.context, first)
        if not each.context.execute_async_v3(self._stream.handle):
            raise BackendError(f"drafting: TensorRT refused to run: {self._engine.log.last()}")
        self._states.settle(self._stream, first, each.shape.batch)

    def bytes_by_label(self) -> dict[str, int]:
        return self._states.bytes_by_label()

    @property
    def buffer_bytes(self) -> int:
        return sum(memory.size for memory in (*self._memory, *self._lengths, self._draft))

    def describe(self) -> dict[str, Any]:
        names = {each.profile: _label(each.shape) for each in self._passes}
        return {
            "draft_length": self._setup.draft_length,
            "jit_s": {names[each.profile]: round(each.jit_s, 3) for each in self._passes},
            "scratch_bytes": {
                names[each.profile]: self._engine.scratch_by_profile[each.profile] for each in self._passes
            },
        }

    def close(self) -> None:
        for each in self._passes:
            each.context = None
        self._engine.close()
        self._states.free()
        for memory in (*self._memory, *self._lengths, self._draft):
            memory.free()


def _label(shape: CellShape) -> str:
    return f"{shape.batch}x{shape.rows}@{shape.tier}"
