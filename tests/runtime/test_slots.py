"""The slot pool, and the check that stands before every launch."""

from __future__ import annotations

from typing import Any

import pytest
from edgert.cells import Cell
from edgert.errors import KvWriteError
from edgert.slots import SlotTable, slots_to_allocate
from edgert.step import empty_step

CHUNK = Cell("prefill", 1, 16, 64)
PAIR = Cell("decode", 2, 2, 64)


def table(slots: int = 2, allocated: int = 4) -> SlotTable:
    return SlotTable(slots, allocated=allocated, context_tokens=60, cache_tokens=76)


def decode(rows: dict[int, tuple[int, int]], first: int = 0) -> Any:
    """row → (length, valid)."""
    step = empty_step(PAIR, first)
    for row, (length, valid) in rows.items():
        step.length[row], step.valid[row], step.forced[row] = length, valid, min(valid, 1)
    return step


def test_the_lowest_free_slot_is_taken_and_reserved_ones_never() -> None:
    slots = table()
    assert [slots.take(7), slots.take(8)] == [0, 1]
    with pytest.raises(KvWriteError, match="all 2 slots"):
        slots.take(9)
    slots.release(0, 7)
    assert slots.free == 1
    assert slots.take(10) == 0
    with pytest.raises(KvWriteError, match="request 7 frees slot 0, which belongs to 10"):
        slots.release(0, 7)


@pytest.mark.parametrize(("slots", "batches", "expected"), [(3, (1, 2, 4), 4), (4, (1, 2, 4), 4), (5, (1, 2, 4), 5)])
def test_allocation_goes_to_the_next_batch_size(slots: int, batches: tuple[int, ...], expected: int) -> None:
    assert slots_to_allocate(slots, batches) == expected


def test_a_step_that_agrees_passes_and_moves_the_record() -> None:
    slots = table()
    slots.take(7)
    step = empty_step(CHUNK, 0)
    step.valid[0] = step.forced[0] = 10
    slots.check(step, {0: 7})
    slots.launched(0, 10, 0)
    slots.check(decode({0: (10, 2)}), {0: 7})
    slots.launched(0, 1, 1)
    slots.settle(0, 1)
    assert slots.written(0) == 12
    slots.check(decode({0: (12, 1)}), {0: 7})


@pytest.mark.parametrize(
    ("rows", "owners", "first", "message"),
    [
        ({0: (11, 1)}, {0: 7}, 0, "starts at position 11, the slot ends at 10"),
        ({0: (9, 1)}, {0: 7}, 0, "starts at position 9, the slot ends at 10"),
        ({0: (9, 0)}, {}, 0, "starts at position 9"),
        ({0: (10, 1)}, {0: 8}, 0, "request 8 writes, the slot belongs to 7"),
        ({0: (10, 1), 1: (0, 1)}, {0: 7, 1: 9}, 0, "request 9 writes, the slot belongs to None"),
        ({0: (10, 3)}, {0: 7}, 0, "1 forced of 3 valid of 2 rows"),
        ({0: (0, 0)}, {}, 3, "covers slots 3..4 of 4"),
    ],
)
def test_a_step_that_disagrees_is_refused(rows: Any, owners: Any, first: int, message: str) -> None:
    slots = table()
    slots.take(7)
    slots.launched(0, 10, 0)
    with pytest.raises(KvWriteError, match=message):
        slots.check(decode(rows, first), owners)


def test_positions_stay_inside_tier_context_and_cache() -> None:
    for written, cell, message in ((60, PAIR, "context of 60"), (75, PAIR, "leave the cache of 76")):
        slots = table()
        slots.take(7)
        slots.launched(0, written, 0)
        step = empty_step(cell, 0)
        step.length[0], step.valid[0], step.forced[0] = written, 1, 1
        with pytest.raises(KvWriteError, match=message):
            slots.check(step, {0: 7})


def test_undecided_drafts_block_the_next_launch() -> None:
    slots = table()
    slots.take(7)
    slots.launched(0, 1, 1)
    with pytest.raises(KvWriteError, match="1 drafts are undecided"):
        slots.check(decode({0: (1, 1)}), {0: 7})
    with pytest.raises(KvWriteError, match="2 drafts accepted of 1"):
        slots.settle(0, 2)


def test_a_step_from_the_device_may_follow_undecided_drafts_where_all_of_them_would_fit() -> None:
    for written, fits in ((10, True), (57, True), (58, False)):
        slots = table()
        slots.take(7)
        slots.launched(0, written - 1, 0)
        slots.launched(0, 1, 1)
        step = decode({0: (written, 2)})
        step.from_device[0] = True
        if fits:  # at most 57 + 1 + 2 = 60 positions
            slots.check(step, {0: 7})
        else:
            with pytest.raises(KvWriteError, match="position 60 is outside the tier"):
                slots.check(step, {0: 7})
        slots.launched(0, 1, 1)
        slots.settle(0, 1)
        slots.settle(0, 0)
        assert slots.written(0) == written + 2


def test_an_idle_row_that_carries_anything_is_refused() -> None:
    slots = table()
    step = decode({0: (0, 0)})
    step.forced[0] = 1
    with pytest.raises(KvWriteError, match="idle row"):
        slots.check(step, {})
    with pytest.raises(ValueError, match="3 slots of 2"):
        SlotTable(3, allocated=2, context_tokens=1, cache_tokens=1)
