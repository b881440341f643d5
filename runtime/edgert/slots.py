"""Slots: who owns which cache row, and the host's own record of how far each is written.

The record is kept apart from the requests on purpose: before every launch position, length and slot must agree between
the two, or the step is refused. A wrong KV write is silent on the device; here it is an error with numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgert.backends.base import StepInputs
from edgert.errors import KvWriteError


def slots_to_allocate(slots: int, batch_sizes: Iterable[int]) -> int:
    """Slots a backend allocates for `slots` sequences: the next decode batch size, so that padded rows have a place.

    The extra ones are reserved: never given to a sequence, they take the writes of padded batch rows.
    """
    covering = [size for size in batch_sizes if size >= slots]
    return min(covering, default=slots)


@dataclass
class _Slot:
    owner: int | None = None  # request id
    written: int = 0  # cache positions committed by collected and launched steps, without drafts in flight
    undecided: deque[int] = field(default_factory=deque)  # drafts of each step in flight: `written` may grow by as many


class SlotTable:
    """The pool (lowest free slot first) and the shadow of the device's lengths. Used by the worker thread only."""

    def __init__(self, slots: int, *, allocated: int, context_tokens: int, cache_tokens: int) -> None:
        if not 1 <= slots <= allocated:
            raise ValueError(f"{slots} slots of {allocated} allocated")
        self.usable = slots
        self.context_tokens = context_tokens
        self.cache_tokens = cache_tokens
        self._slots = [_Slot() for _ in range(allocated)]

    @property
    def free(self) -> int:
        return sum(slot.owner is None for slot in self._slots[: self.usable])

    @property
    def allocated(self) -> int:
        return len(self._slots)

    def take(self, owner: int) -> int:
        """The lowest free slot, so that decode batches stay small. Raises KvWriteError when there is none."""
        for index, slot in enumerate(self._slots[: self.usable]):
            if slot.owner is None:
                self._slots[index] = _Slot(owner)
                return index
        raise KvWriteError(f"request {owner} was admitted, but all {self.usable} slots are taken")

    def release(self, index: int, owner: int) -> None:
        if self._slots[index].owner != owner:
            raise KvWriteError(f"request {owner} frees slot {index}, which belongs to {self._slots[index].owner}")
        self._slots[index] = _Slot()

    def written(self, index: int) -> int:
        """Cache positions of a slot that hold committed tokens; 0 for a free or reserved slot."""
        return self._slots[index].written

    def check(self, step: StepInputs, owners: dict[int, int]) -> None:
        """Raise KvWriteError unless the launch writes exactly where each sequence ends. owners: slot → request id."""
        cell = step.cell
        last = step.first_slot + cell.batch
        if step.first_slot < 0 or last > len(self._slots):
            raise KvWriteError(f"{cell.label} covers slots {step.first_slot}..{last - 1} of {len(self._slots)}")
        for row in range(cell.batch):
            index = step.first_slot + row
            slot = self._slots[index]
            length, valid, forced = int(step.length[row]), int(step.valid[row]), int(step.forced[row])
            where = f"{cell.label}, slot {index}"
            if valid == 0 and (forced or step.from_device[row]):
                raise KvWriteError(f"{where}: an idle row has {forced} forced rows")
            if length != slot.written:
                raise KvWriteError(f"{where}: the step starts at position {length}, the slot ends at {slot.written}")
            longest = length + sum(slot.undecided) if step.from_device[row] else length
            if longest + cell.query_rows > self.cache_tokens:
                raise KvWriteError(f"{where}: rows {longest}..{longest + cell.query_rows - 1} leave the cache "
                                   f"of {self.cache_tokens} positions")  # fmt: skip
            if valid == 0:
                continue
            if not 1 <= forced <= valid <= cell.query_rows:
                raise KvWriteError(f"{where}: {forced} forced of {valid} valid of {cell.query_rows} rows")
            if slot.owner is None or owners.get(index) != slot.owner:
                raise KvWriteError(f"{where}: request {owners.get(index)} writes, the slot belongs to {slot.owner}")
            if slot.undecided and not step.from_device[row]:
                raise KvWriteError(f"{where}: launched while {sum(slot.undecided)} drafts are undecided")
            if longest + valid > min(cell.kv_tier, self.context_tokens):
                raise KvWriteError(f"{where}: position {longest + valid - 1} is outside the tier of {cell.kv_tier} "
                                   f"or the context of {self.context_tokens}")  # fmt: skip

    def launched(self, index: int, forced: int, drafts: int) -> None:
        """Record a checked launch: forced rows are committed for certain, drafts wait for `settle`."""
        slot = self._slots[index]
        slot.written += forced
        if drafts:
            slot.undecided.append(drafts)

    def settle(self, index: int, accepted: int) -> None:
        """Record how many drafts were committed of the slot's oldest step that carried some."""
        slot = self._slots[index]
        drafts = slot.undecided.popleft() if slot.undecided else 0
        if not 0 <= accepted <= drafts:
            raise KvWriteError(f"slot {index}: {accepted} drafts accepted of {drafts}")
        slot.written += accepted
