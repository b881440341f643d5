"""Decisions on plain numbers, by property and against brute force."""

from __future__ import annotations

from collections import deque

import pytest
from edgert.cells import Cell
from edgert.policy import (
    PATIENCE,
    DecodeCandidate,
    PrefillCandidate,
    Ratio,
    choose_decode_window,
    choose_prefill,
    choose_prefill_cell,
    decode_steps_per_chunk,
)
from fakes import make_cells
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 10**6), st.integers(1, 4096), st.integers(0, 4096))
def test_more_backlog_never_means_more_decode_steps(backlog: int, chunk: int, more: int) -> None:
    before, after = (decode_steps_per_chunk(tokens, chunk, Ratio()) for tokens in (backlog, backlog + more))
    assert 4 <= after <= before <= 8


def test_the_base_ratio_holds_at_a_backlog_of_two_chunks_and_equal_bounds_fix_it() -> None:
    assert decode_steps_per_chunk(2 * 128, 128, Ratio(4, 6, 8)) == 6
    assert {decode_steps_per_chunk(tokens, 128, Ratio(5, 5, 5)) for tokens in range(0, 10_000, 100)} == {5}


@given(st.sets(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 5000))
def test_chunks_cover_a_prompt_exactly_and_none_is_empty(sizes: set[int], length: int) -> None:
    cells = [Cell("prefill", 1, size, 8192) for size in sizes]
    start, padded = 0, 0
    while start < length:
        cell = choose_prefill_cell(cells, start, length - start)
        assert cell is not None
        real = min(cell.query_rows, length - start)
        assert real > 0
        if real < cell.query_rows:
            # The tail: no smaller chunk holds it.
            assert all(size >= cell.query_rows or size < real for size in sizes)
            padded += cell.query_rows - real
        start += real
    assert start == length
    assert padded < max(sizes)


def test_a_length_exactly_at_a_tier_stays_in_it_and_one_past_it_does_not() -> None:
    cells = [Cell("prefill", 1, 64, tier) for tier in (128, 256)]
    decode = [Cell("decode", 1, 1, tier) for tier in (128, 256)]
    for start, remaining, tier in ((64, 64, 128), (65, 64, 256), (100, 28, 128), (100, 29, 256)):
        cell = choose_prefill_cell(cells, start, remaining)
        assert cell is not None
        assert cell.kv_tier == tier
    for length, tier in ((127, 128), (128, 256)):
        window = choose_decode_window(decode, [DecodeCandidate(0, length, 1, 0)], slots=1, any_first_slot=True)
        assert window is not None
        assert window.cell.kv_tier == tier
    assert choose_prefill_cell(cells, 256, 1) is None
    assert choose_decode_window(decode, [DecodeCandidate(0, 256, 1, 0)], slots=1, any_first_slot=True) is None


def test_a_chunk_without_a_tier_gives_way_to_one_that_reaches() -> None:
    cells = [Cell("prefill", 1, 128, 128), Cell("prefill", 1, 32, 512)]
    first, later = choose_prefill_cell(cells, 0, 300), choose_prefill_cell(cells, 128, 172)
    assert (first and first.query_rows, later and later.query_rows) == (128, 32)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(1, 5), max_size=60),
)
def test_nobody_waits_longer_than_patience_and_the_others(lengths: list[int], arrivals: list[int]) -> None:
    """Chunks of size 1; a finished prompt's slot is taken by the next arrival."""
    slots = len(lengths)
    queue = deque(arrivals)
    live = [PrefillCandidate(slot, length, 0, slot) for slot, length in enumerate(lengths)]
    born = slots
    while live:
        chosen = choose_prefill(live)
        after = []
        for each in live:
            if each.slot != chosen.slot:
                after.append(PrefillCandidate(each.slot, each.remaining, each.passed_over + 1, each.arrival))
                assert each.passed_over + 1 <= PATIENCE + slots - 1
            elif each.remaining > 1:
                after.append(PrefillCandidate(each.slot, each.remaining - 1, 0, each.arrival))
            elif queue:
                after.append(PrefillCandidate(each.slot, queue.popleft(), 0, born))
                born += 1
        live = after


def test_the_shortest_remaining_prompt_goes_first_and_the_earlier_of_equals() -> None:
    candidates = [PrefillCandidate(0, 500, 0, 0), PrefillCandidate(1, 20, 0, 2), PrefillCandidate(2, 20, 0, 1)]
    assert choose_prefill(candidates).slot == 2
    starving = PrefillCandidate(3, 9000, PATIENCE, 3)
    assert choose_prefill([*candidates, starving]).slot == 3


@given(
    st.dictionaries(st.integers(0, 3), st.tuples(st.integers(1, 255), st.integers(0, 9)), min_size=1),
    st.booleans(),
    st.sampled_from([(1, 2, 4), (1,), (1, 2), (1, 4)]),
)
def test_a_window_serves_the_longest_unserved_and_as_many_as_any_cell_can(
    asked: dict[int, tuple[int, int]], floating: bool, batches: tuple[int, ...]
) -> None:
    candidates = [DecodeCandidate(slot, length, 1, last) for slot, (length, last) in asked.items()]
    cells = make_cells(256, batches=batches, tiers=(64, 256))
    window = choose_decode_window(cells, candidates, slots=4, any_first_slot=floating)
    assert window is not None
    due = min(candidates, key=lambda each: (each.last_launch, each.slot))
    assert due.slot in window.slots
    assert all(window.first_slot <= slot < window.first_slot + window.cell.batch for slot in window.slots)
    assert window.first_slot + window.cell.batch <= 4
    if not floating and window.cell.batch > 1:
        assert window.first_slot == 0
    for slot in window.slots:
        assert asked[slot][0] + 1 <= window.cell.kv_tier
    if 4 in batches:
        assert set(window.slots) == set(asked)
    if len(asked) == 1 and (floating or 1 in batches):
        assert window.cell.batch == 1
        assert window.cell.kv_tier == (64 if due.length < 64 else 256)


@pytest.mark.parametrize("ratio", [(0, 1, 2), (3, 2, 4), (1, 5, 4)])
def test_a_ratio_out_of_order_is_refused(ratio: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="does not hold"):
        Ratio(*ratio)
