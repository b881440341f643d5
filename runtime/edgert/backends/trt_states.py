"""The caches and states of every slot on the device: one allocation a state, slots as neighbours.

A batch of neighbouring slots is one tensor. Only a cache is updated in place: the next value of another state has its
own memory and is copied behind the step. Knows tensor addresses and nothing of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgert import cuda
from edgert.backends.trt_layout import ALIGNMENT
from edgert.errors import BackendError
from edgert.manifest_records import StateSpec


def slot_bytes(state: StateSpec) -> int:
    """Bytes of one slot. Raises BackendError when slots could not be neighbours."""
    size = state.slot_bytes
    if size % ALIGNMENT:
        raise BackendError(f"state {state.input}: {size} bytes a slot is no multiple of {ALIGNMENT}")
    return size


class SlotStates:
    """The states of one engine for `slots` slots; `batch`: the most slots of one step."""

    def __init__(self, states: Sequence[StateSpec], slots: int, batch: int) -> None:
        self._states = tuple(states)
        self._slot_bytes = {state.input: slot_bytes(state) for state in states}
        self._memory = {name: cuda.DeviceMemory(slots * size) for name, size in self._slot_bytes.items()}
        self._following = {
            state.input: cuda.DeviceMemory(batch * self._slot_bytes[state.input])
            for state in states
            if state.kind != "kv"
        }

    def bind(self, context: Any, first: int) -> None:
        """Point every state tensor of an execution context at the slots from `first` on."""
        for state in self._states:
            address = self._memory[state.input].address + first * self._slot_bytes[state.input]
            context.set_tensor_address(state.input, address)
            following = self._following.get(state.input)
            context.set_tensor_address(state.output, address if following is None else following.address)

    def settle(self, stream: cuda.Stream, first: int, batch: int) -> None:
        """Queue the copies of what a step did not write in place."""
        for name, following in self._following.items():
            size = self._slot_bytes[name]
            target = self._memory[name].address + first * size
            stream.copy(target, following.address, batch * size, cuda.ON_DEVICE)

    def reset(self, stream: cuda.Stream, slot: int) -> None:
        """Zero what is not a cache: a cache's old positions are never read."""
        for name in self._following:
            size = self._slot_bytes[name]
            stream.zero(self._memory[name].address + slot * size, size)

    def bytes_by_label(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for state in self._states:
            label = "kv_cache" if state.kind == "kv" else "state"
            kinds[label] = kinds.get(label, 0) + self._memory[state.input].size
        return kinds

    def free(self) -> None:
        for memory in (*self._memory.values(), *self._following.values()):
            memory.free()
