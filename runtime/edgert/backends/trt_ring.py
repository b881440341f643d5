"""The pinned blocks through which steps pass between host and device, and the tickets of steps in flight.

A ring of block pairs: a step takes the next one; whoever still has to read what is in it reads it then at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgert import cuda
from edgert.backends.base import Int64s, StepInputs, StepOutputs
from edgert.backends.trt_layout import StepLayout, read_outputs
from edgert.cells import Cell

RING = 4  # pinned block pairs: one more than can be in flight, and one to spare for a slow reader


@dataclass
class RingSlot:
    """A pair of pinned blocks with their views by cell, the event after which the outputs are there, their reader."""

    inputs: cuda.PinnedMemory
    outputs: cuda.PinnedMemory
    done: cuda.Event
    views: dict[Cell, tuple[dict[str, Any], dict[str, Any]]]
    logits: cuda.PinnedMemory | None = None
    ticket: Ticket | None = None


class Ticket:
    """A launched step; reads its ring slot once, at the latest when the slot is needed again."""

    def __init__(self, slot: RingSlot, cell: Cell, logits_shape: tuple[int, ...] | None, drafts: int):
        self._slot, self._cell, self._logits_shape, self._drafts = slot, cell, logits_shape, drafts
        self._outputs: StepOutputs | None = None
        self._lengths: Int64s | None = None

    def result(self) -> StepOutputs:
        if self._outputs is None:
            self._slot.done.wait()
            logits = None
            if self._logits_shape is not None and self._slot.logits is not None:
                count = int(np.prod(self._logits_shape))
                logits = self._slot.logits.bytes[: 4 * count].view(np.float32).reshape(self._logits_shape)
            views = self._slot.views[self._cell][1]
            self._outputs = read_outputs(views, self._cell, logits, drafts=self._drafts)
            self._lengths = views["new_length"].astype(np.int64)
            self._slot.ticket = None
        return self._outputs

    def left(self, row: int, token: int, length: int, drafts: Int64s) -> bool:
        """Whether the step was read, and left this token, this length and these drafts to its row's slot."""
        if self._outputs is None or self._lengths is None:
            return False
        if len(drafts) > self._drafts or (len(drafts) and self._outputs.drafts is None):
            return False
        made = drafts if self._outputs.drafts is None else self._outputs.drafts[row, : len(drafts)]
        same = self._outputs.next_token[row] == token and self._lengths[row] == length
        return bool(same and np.array_equal(made, drafts))


class Ring:
    """Block pairs in turn, each large enough for every cell."""

    def __init__(self, layouts: Mapping[Cell, StepLayout]) -> None:
        self.input_bytes = max(layout.inputs.size for layout in layouts.values())
        self.output_bytes = max(layout.outputs.size for layout in layouts.values())
        self._next = 0
        self._slots = []
        for _ in range(RING):
            inputs, outputs = cuda.PinnedMemory(self.input_bytes), cuda.PinnedMemory(self.output_bytes)
            views = {
                cell: (layout.inputs.views(inputs.bytes), layout.outputs.views(outputs.bytes))
                for cell, layout in layouts.items()
            }
            self._slots.append(RingSlot(inputs, outputs, cuda.Event(), views))

    @property
    def first(self) -> RingSlot:
        """The pair that graphs are captured with."""
        return self._slots[0]

    def take(self) -> RingSlot:
        """The next pair, its last step read."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % RING
        if slot.ticket is not None:
            slot.ticket.result()
        return slot

    def free(self) -> None:
        for slot in self._slots:
            for pinned in (slot.inputs, slot.outputs, slot.logits):
                if pinned is not None:
                    pinned.free()
            slot.done.close()


class Held:
    """What slots hold on the device, as far as the host has read it: a step that says the same need not say it."""

    def __init__(self, slots: int) -> None:
        self._last: list[tuple[Ticket, int] | None] = [None] * slots

    def wrote(self, ticket: Ticket, first: int, batch: int) -> None:
        """The step wrote `batch` slots from `first` on."""
        self._last[first : first + batch] = [(ticket, row) for row in range(batch)]

    def forget(self, slot: int) -> None:
        self._last[slot] = None

    def known(self, step: StepInputs) -> npt.NDArray[np.bool_]:
        """[B] rows whose token and length need not travel: the device's are meant, or are the same."""
        known = step.from_device.copy()
        for row, asked in enumerate(step.from_device):
            last = self._last[step.first_slot + row]
            if not asked and last is not None:
                drafts = step.tokens[row, step.forced[row] : step.valid[row]]
                known[row] = last[0].left(last[1], int(step.tokens[row, 0]), int(step.length[row]), drafts)
        return known
