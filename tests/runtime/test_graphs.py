"""Which graphs are captured, in which order, and what a failure costs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
from edgert.cells import Cell
from edgert.errors import BackendError
from edgert.graphs import GraphKey, GraphPool, draft_variants, graph_keys, size_order
from hypothesis import given
from hypothesis import strategies as st


@dataclass
class FakeGraph:
    key: GraphKey
    closed: list[GraphKey] = field(default_factory=list)

    def close(self) -> None:
        self.closed.append(self.key)


CELLS = [Cell("decode", batch, rows, tier) for batch in (1, 2, 4) for rows in (1, 4) for tier in (128, 256, 512, 1024)]


@given(st.lists(st.sampled_from(CELLS), unique=True))
def test_larger_launches_come_first(cells: list[Cell]) -> None:
    sizes = [(cell.batch * cell.query_rows, cell.kv_tier) for cell in size_order(cells)]
    assert sizes == sorted(sizes, reverse=True)


def test_one_sequence_may_sit_at_any_slot_and_a_batch_begins_at_the_first() -> None:
    keys = graph_keys([Cell("decode", 1, 1, 64), Cell("decode", 2, 1, 64)], slots=3)
    assert keys == [
        GraphKey(Cell("decode", 2, 1, 64), 0),
        *(GraphKey(Cell("decode", 1, 1, 64), slot) for slot in range(3)),
    ]


def test_a_step_with_each_number_of_drafts_is_a_graph_of_its_own_where_it_is_launched() -> None:
    chunk, plain, verify = Cell("prefill", 1, 16, 64), Cell("decode", 1, 1, 64), Cell("decode", 1, 4, 64)
    assert draft_variants(chunk, 3) == [3, 0, None]  # all or none; 0 primes
    assert draft_variants(plain, 3) == [None]
    assert draft_variants(verify, 3) == [3, 2, 1, None]
    assert [draft_variants(cell, 0) for cell in (chunk, plain, verify)] == [[None]] * 3
    keys = graph_keys([chunk, plain, verify], slots=2, draft_length=3)
    assert len(keys) == len(set(keys)) == 2 * (3 + 1 + 4)
    assert keys[0] == GraphKey(chunk, 0, 3)
    assert GraphKey(verify, 1, 2).label == "decode-1x4@64 + 2 drafts"


def test_24_cells_and_a_budget_of_8_capture_the_largest_and_count_the_rest() -> None:
    pool: GraphPool[FakeGraph] = GraphPool()
    keys = [GraphKey(cell, 0) for cell in size_order(CELLS)]
    assert len(keys) == 24
    pool.capture(keys, FakeGraph, limit=8)
    assert len(pool) == 8
    assert [fallback.key for fallback in pool.fallbacks] == keys[8:]
    assert all("budget of 8" in fallback.reason for fallback in pool.fallbacks)
    assert pool.take(keys[0]) is not None
    assert pool.take(keys[20]) is None
    assert (pool.replays, pool.eager) == (1, 1)


def test_a_failed_capture_costs_its_own_cell_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    broken = GraphKey(Cell("decode", 2, 1, 128), 0)

    def capture(key: GraphKey) -> FakeGraph:
        if key == broken:
            raise BackendError("cudaStreamEndCapture: cudaErrorStreamCaptureInvalidated")
        return FakeGraph(key)

    pool: GraphPool[FakeGraph] = GraphPool()
    with caplog.at_level(logging.WARNING):
        pool.capture([GraphKey(Cell("decode", 4, 1, 128), 0), broken, GraphKey(Cell("decode", 1, 1, 128), 0)], capture)
    assert len(pool) == 2
    assert [fallback.key for fallback in pool.fallbacks] == [broken]
    assert "decode-2x1@128" in caplog.text
    assert "cudaErrorStreamCaptureInvalidated" in caplog.text


def test_closing_frees_every_graph() -> None:
    closed: list[GraphKey] = []
    pool: GraphPool[FakeGraph] = GraphPool()
    keys = graph_keys(CELLS[:3], slots=2)
    pool.capture(keys, lambda key: FakeGraph(key, closed))
    pool.close()
    assert set(closed) == set(keys)
    assert len(pool) == 0
