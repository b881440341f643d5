"""Chunk sizes and KV tiers against brute force, and the draft length likewise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from edgebuild.plan.buckets import best_sizes, choose_chunks, padding_of, powers_of_two, uniform_steps
from edgebuild.plan.drafts import choose_draft_length, expected_tokens
from edgebuild.plan.tiers import choose_tiers, cost_of_tiers
from hypothesis import given, settings
from hypothesis import strategies as st

histograms = st.lists(st.integers(0, 50), min_size=2, max_size=40).map(
    lambda counts: np.array([0, *counts[1:]], np.int64)
)


def padding_by_hand(prompt_counts: np.ndarray, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Padded tokens and launches, one prompt at a time."""
    padded = launches = 0
    for length, count in enumerate(prompt_counts.tolist()):
        full, tail = divmod(length, sizes[-1])
        launches += count * (full + (tail > 0))
        if tail:
            padded += count * (min(size for size in sizes if size >= tail) - tail)
    return padded, launches


@given(histograms, st.integers(1, 12), st.integers(1, 4))
def test_chunk_sizes_pad_as_little_as_the_best_of_all_subsets(counts: np.ndarray, largest: int, n: int) -> None:
    subsets = (
        (*some, largest) for size in range(min(n, largest)) for some in itertools.combinations(range(1, largest), size)
    )
    best = min(padding_by_hand(counts, sizes)[0] for sizes in subsets)
    found = best_sizes(counts, largest, n)[n - 1]
    assert found.padded_tokens == best == padding_by_hand(counts, found.sizes)[0]
    assert found.sizes[-1] == largest
    assert len(found.sizes) <= n


@given(histograms, st.integers(1, 6), st.integers(1, 3), st.integers(2, 4))
def test_chunk_sizes_on_a_grid_equal_brute_force_on_that_grid(
    counts: np.ndarray, points: int, n: int, step: int
) -> None:
    largest = points * step
    subsets = (
        (*(step * point for point in some), largest)
        for size in range(min(n, points))
        for some in itertools.combinations(range(1, points), size)
    )
    best = min(padding_by_hand(counts, sizes)[0] for sizes in subsets)
    assert best_sizes(counts, largest, n, step)[n - 1].padded_tokens == best


@given(histograms, st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_measured_padding_counts_every_prompt(counts: np.ndarray, sizes: list[int]) -> None:
    ordered = tuple(sorted(set(sizes)))
    measured = padding_of(counts, sizes)
    assert (measured.padded_tokens, measured.launches) == padding_by_hand(counts, ordered)
    rows = sum(size * chunks for size, chunks in zip(measured.sizes, measured.chunks_by_size, strict=True))
    assert rows == measured.real_tokens + measured.padded_tokens


@given(histograms, st.floats(0, 64), st.integers(1, 4))
def test_the_largest_chunk_is_the_cheapest_of_the_candidates(counts: np.ndarray, launch_cost: float, n: int) -> None:
    chosen = choose_chunks(counts, range(1, 13), n, launch_cost)[n - 1]
    costs = [best_sizes(counts, largest, n)[n - 1].cost_tokens(launch_cost) for largest in range(1, 13)]
    assert chosen.cost_tokens(launch_cost) == min(costs)


@given(histograms, st.integers(1, 4), st.sampled_from([8, 16]))
def test_never_worse_than_powers_of_two_or_uniform_steps(counts: np.ndarray, n: int, largest: int) -> None:
    best = best_sizes(counts, largest, n)[n - 1].padded_tokens
    assert best <= padding_of(counts, powers_of_two(largest, n)).padded_tokens
    assert best <= padding_of(counts, uniform_steps(largest, n)).padded_tokens


@given(st.lists(st.integers(0, 50), min_size=1, max_size=14), st.integers(1, 4))
def test_kv_tiers_cost_as_little_as_the_best_of_all_subsets(counts: list[int], n: int) -> None:
    top = len(counts)
    contexts = np.array([0, *counts], np.int64)

    def cost(tiers: tuple[int, ...]) -> int:
        return sum(
            count * min(tier for tier in tiers if tier >= context) for context, count in enumerate(contexts.tolist())
        )

    subsets = ((*some, top) for size in range(min(n, top)) for some in itertools.combinations(range(1, top), size))
    best = min(cost(tiers) for tiers in subsets)
    found = choose_tiers(contexts, top, n, granularity=1)[n - 1]
    assert found.read_positions == best == cost(found.tiers)
    assert found.tiers[-1] == top


def test_steps_past_the_top_tier_are_not_counted() -> None:
    contexts = np.zeros(300, np.int64)
    contexts[[10, 200, 299]] = 5
    measured = cost_of_tiers(contexts, [64, 256])
    assert measured.steps_by_tier == (5, 5)
    assert measured.used_positions == 5 * 10 + 5 * 200
    assert measured.read_positions == 5 * 64 + 5 * 256


def test_all_prompts_of_one_length_are_one_chunk_without_padding() -> None:
    counts = np.zeros(513, np.int64)
    counts[512] = 1000
    chosen = choose_chunks(counts, range(64, 1025, 64), 4, 32.0, 8)[-1]
    assert chosen.sizes == (512,)
    assert chosen.padded_tokens == 0
    assert chosen.launches == 1000


def test_a_single_outlier_does_not_move_the_chunk_sizes() -> None:
    counts = np.zeros(8193, np.int64)
    counts[200], counts[8192] = 10_000, 1
    chosen = choose_chunks(counts, range(64, 2049, 64), 4, 32.0, 8)[-1]
    assert 200 in chosen.sizes
    assert chosen.fraction < 0.001
    assert padding_by_hand(counts, chosen.sizes) == (chosen.padded_tokens, chosen.launches)


def test_a_prompt_one_past_a_size_takes_the_next() -> None:
    counts = np.zeros(130, np.int64)
    counts[129] = 1
    measured = padding_of(counts, [128, 1024])
    assert measured.chunks_by_size == (0, 1)
    assert measured.padded_tokens == 1024 - 129


def test_the_usual_lists() -> None:
    assert powers_of_two(1024, 4) == (128, 256, 512, 1024)
    assert powers_of_two(704, 3) == (256, 512, 1024)
    assert uniform_steps(1024, 4) == (256, 512, 768, 1024)
    assert uniform_steps(100, 3, 8) == (40, 72, 100)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 100)), min_size=1, max_size=6),
    st.floats(0.1, 100),
    st.floats(0, 1),
)
@settings(max_examples=200)
def test_draft_length_is_the_best_rate_among_the_acceptable(
    steps: list[tuple[float, float]], plain_cost: float, threshold: float
) -> None:
    acceptance = [rate for rate, _ in steps]
    costs = [plain_cost, *(cost for _, cost in steps)]
    rates = {0: 1 / plain_cost}
    for k in range(1, len(steps) + 1):
        if min(acceptance[:k]) >= threshold:
            tokens = 1 + sum(float(np.prod(acceptance[:i])) for i in range(1, k + 1))
            rates[k] = tokens / costs[k]
    chosen = choose_draft_length(acceptance, costs, threshold)
    assert chosen.tokens_per_ms == pytest.approx(max(rates.values()))
    assert rates[chosen.length] == pytest.approx(max(rates.values()))


def test_measured_smollm2_json_acceptance_gives_the_measured_mean_length() -> None:
    # measured on SmolLM2: JSON accepted 0.89 / 0.81 / 0.91 given the one before, mean accepted length 3.28
    assert expected_tokens([0.89, 0.81, 0.91], 3) == pytest.approx(3.28, abs=0.04)


def test_nothing_measured_means_no_drafts_and_says_so() -> None:
    chosen = choose_draft_length([], [])
    assert chosen.length == 0
    assert "no acceptance was measured" in chosen.reason


def test_drafts_that_cost_more_than_they_bring_are_not_taken() -> None:
    assert choose_draft_length([0.9, 0.9], [1.0, 2.5, 4.0]).length == 0


def test_costs_must_match_the_positions() -> None:
    with pytest.raises(ValueError, match="2 acceptances need 3 step costs, got 2"):
        choose_draft_length([0.9, 0.9], [1.0, 2.0])
