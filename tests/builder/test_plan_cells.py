"""The choice of cells against brute force, and the demand it is drawn from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from edgebuild.plan.buckets import best_sizes
from edgebuild.plan.cells import CellBudget, CostModel, Demand, batch_sizes, choose_cells, decode_launches
from edgebuild.plan.tiers import choose_tiers
from hypothesis import given, settings
from hypothesis import strategies as st

COST = CostModel(kv_share_per_token=0.01, launch_cost_tokens=8.0, attention_share=0.001)


def demand(prompts: list[int], contexts: list[int], *, slots: int = 1, tiers: int = 3) -> Demand:
    prompt_counts = np.bincount(prompts, minlength=17).astype(np.int64)
    context_counts = np.bincount(contexts, minlength=33).astype(np.int64)
    return Demand(
        prompt_counts=prompt_counts,
        context_counts=context_counts,
        chunk_tables=best_sizes(prompt_counts, 16, 4),
        tier_tables=choose_tiers(context_counts, 32, tiers, granularity=1),
        batches=batch_sizes(slots, (1, 2, 4)),
        decode_rows=(1,),
        slots=slots,
        padding_target=1.0,
    )


def decode_cost(wanted: Demand, tiers: tuple[int, ...]) -> float:
    """One sequence at a time: each step in the smallest tier that holds its context."""
    return sum(
        count * COST.decode(1, min(tier for tier in tiers if tier >= context))
        for context, count in enumerate(wanted.context_counts.tolist())
        if count
    )


@given(st.lists(st.integers(1, 16), min_size=1, max_size=12), st.lists(st.integers(1, 32), min_size=1, max_size=12))
@settings(deadline=None)
def test_a_single_sequence_gets_tiers_as_good_as_any(prompts: list[int], contexts: list[int]) -> None:
    wanted = demand(prompts, contexts)
    chosen = choose_cells(wanted, COST, CellBudget(prefill=4, decode=3, total=7))
    tiers = tuple(item.cell.kv_tier for item in chosen.cells if item.cell.kind == "decode")
    best = min(decode_cost(wanted, (*some, 32)) for n in range(3) for some in itertools.combinations(range(1, 32), n))
    assert decode_cost(wanted, tiers) == pytest.approx(best)


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=12),
    st.lists(st.integers(1, 32), min_size=1, max_size=12),
    st.integers(2, 9),
    st.integers(1, 6),
)
@settings(deadline=None)
def test_more_cells_never_cost_more(prompts: list[int], contexts: list[int], total: int, slots: int) -> None:
    wanted = demand(prompts, contexts, slots=slots)
    batches = len(wanted.batches)
    less = choose_cells(wanted, COST, CellBudget(9, 9, total + batches))
    more = choose_cells(wanted, COST, CellBudget(9, 9, total + batches + 1))
    assert more.cost <= less.cost * (1 + 1e-9)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=12), st.integers(1, 9))
def test_every_decode_step_is_launched_once(contexts: list[int], slots: int) -> None:
    wanted = demand([1], contexts, slots=slots)
    launches = decode_launches(wanted)
    assert set(launches) == set(wanted.batches)
    # a launch of batch b commits at most b tokens and at least one
    assert sum(launches.values()) <= len(contexts) + 1e-9
    assert sum(batch * count for batch, count in launches.items()) >= len(contexts) - 1e-9


def test_launches_are_shared_out_over_the_cells() -> None:
    wanted = demand([16] * 5, [4] * 60 + [32] * 40)
    chosen = choose_cells(wanted, COST, CellBudget(prefill=4, decode=2, total=4))
    decode = {item.cell.kv_tier: item.launches for item in chosen.cells if item.cell.kind == "decode"}
    assert decode == {4: 60, 32: 40}
    assert sum(item.launches for item in chosen.cells if item.cell.kind == "prefill") == 5


def test_a_gain_of_nothing_takes_no_cell() -> None:
    wanted = demand([16], [32] * 10)
    assert len(choose_cells(wanted, COST, CellBudget(8, 8, 16)).cells) == 2


def test_batches_are_what_the_slots_can_fill() -> None:
    assert batch_sizes(3, (1, 2, 4)) == (1, 2)
    assert batch_sizes(4, (2, 4)) == (1, 2, 4)


def test_fewer_than_two_cells_serve_nothing() -> None:
    with pytest.raises(ValueError, match="one prefill and one decode cell"):
        choose_cells(demand([1], [1]), COST, CellBudget(1, 1, 1))
