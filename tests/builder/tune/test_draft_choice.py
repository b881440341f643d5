"""The draft length from measured rates, the draft vocabulary from the text: never worse than none, never by luck."""

from __future__ import annotations

from collections import Counter

import pytest
from edgebuild.plan.drafts import Measured, VocabularyCost, choose_measured, choose_vocabulary
from edgebuild.tune.curve import by_position
from edgebuild.tune.records import TaskAcceptance
from edgebuild.tune.vocabulary import coverage, propose, vocabulary_of
from hypothesis import given
from hypothesis import strategies as st

RATES = st.lists(st.floats(0.001, 10), min_size=1, max_size=4).map(tuple)
CURVES = st.lists(st.tuples(RATES, st.floats(0, 1)), min_size=1, max_size=6).map(
    lambda found: [
        Measured(k, rates, tuple(accepted for _, accepted in found[1 : k + 1])) for k, (rates, _) in enumerate(found)
    ]
)


@given(CURVES, st.floats(0, 1))
def test_a_draft_length_is_only_picked_where_every_repeat_beats_every_plain_one(
    points: list[Measured], threshold: float
) -> None:
    pick, reason = choose_measured(points, threshold)
    if pick:
        assert min(points[pick].tokens_per_ms) > max(points[0].tokens_per_ms)
        held = all(rate >= threshold for rate in points[pick].acceptance)
        assert held or "no length keeps" in reason


@given(CURVES, st.floats(0, 1))
def test_a_length_above_the_threshold_goes_before_a_faster_one_below(points: list[Measured], threshold: float) -> None:
    pick, _ = choose_measured(points, threshold)
    pays = [
        point.length
        for point in points[1:]
        if min(point.tokens_per_ms) > max(points[0].tokens_per_ms)
        and all(rate >= threshold for rate in point.acceptance)
    ]
    assert bool(pick) or not pays
    if pays:
        assert pick in pays


def test_the_order_of_the_points_does_not_matter() -> None:
    points = [Measured(k, (rate,), (0.9,) * k) for k, rate in enumerate((1.0, 1.4, 1.6, 1.5))]
    assert choose_measured(points[::-1])[0] == choose_measured(points)[0] == 2
    with pytest.raises(ValueError, match="begins with draft length 0"):
        choose_measured(points[1:])


TEXTS = st.lists(st.lists(st.integers(0, 49), max_size=40), max_size=8)


@given(TEXTS, st.integers(1, 50))
def test_coverage_lies_in_0_to_1_and_is_whole_for_the_full_vocabulary(texts: list[list[int]], size: int) -> None:
    assert 0 <= coverage(texts, size, 50) <= 1
    assert coverage(texts, 50, 50) == 1


@given(TEXTS, st.integers(1, 50))
def test_a_vocabulary_has_its_size_and_the_most_used_tokens(texts: list[list[int]], size: int) -> None:
    counts = Counter(token for text in texts for token in text)
    chosen = vocabulary_of(counts, size, 50)
    assert len(chosen) == size
    left_out = [counts[token] for token in range(50) if token not in chosen]
    assert max(left_out, default=0) <= min(counts[token] for token in chosen)


def test_a_cheap_head_pays_until_its_coverage_falls() -> None:
    built = VocabularyCost(1000, 1.0, (10.0, 12.0))
    small = VocabularyCost(100, 0.95, (10.0, 10.5))
    tiny = VocabularyCost(10, 0.3, (10.0, 10.2))
    best, choices = choose_vocabulary([built, small, tiny], [0.8], built, threshold=0.0)
    assert best is small
    assert choices[100].tokens_per_ms == pytest.approx((1 + 0.8 * 0.95) / 10.5)
    same = VocabularyCost(500, 1.0, built.step_ms)
    assert choose_vocabulary([built, same], [0.8], built, threshold=0.0)[0] is same  # the smaller one


def test_costs_of_other_sizes_follow_from_the_measured_one() -> None:
    found = propose(
        [[1, 2, 3] * 40, [1, 2, 3] * 40],
        token_limit=50_000,
        built=8_192,
        step_ms=[10.0, 11.0, 12.0],
        acceptance=[0.8, 0.8],
        head_ms_per_token=0.001,
        threshold=0.3,
    )
    costs = {option.tokens: option.step_ms for option in found.options}
    assert list(costs) == [50_000, 32_768, 16_384, 8_192]
    assert costs[8_192] == (10.0, 11.0, 12.0)
    assert costs[16_384] == pytest.approx((10.0, 11.0 + 8.192, 12.0 + 2 * 8.192))
    assert [option.measured for option in found.options] == [False, False, False, True]
    assert found.pick == 8_192
    assert found.used_tokens == (1, 2, 3)


def test_where_no_draft_pays_the_vocabulary_stays_as_built() -> None:
    found = propose(
        [[1], [2]], token_limit=50_000, built=16_384, step_ms=[10.0, 30.0], acceptance=[0.5],
        head_ms_per_token=0.0, threshold=0.0,
    )  # fmt: skip
    assert found.pick == 16_384
    assert "none of them" in found.reason


def test_tasks_are_weighted_by_how_often_a_position_was_verified() -> None:
    def task(steps: int, *rates: float | None) -> TaskAcceptance:
        return TaskAcceptance(acceptance=None, by_position=rates, mean_accepted_length=None, steps=steps)

    found = by_position({"a": task(100, 0.9, 0.5), "b": task(300, 0.5, None), "": task(0)})
    assert found == pytest.approx(((90 + 150) / 400, 45 / 90))
