"""Who wins: only beyond the spread, never both, and never against a guard."""

from __future__ import annotations

import pytest
from edgebuild.tune.winner import LEAST_CHANGE, Goal, compare, judge, middle, spread
from hypothesis import given
from hypothesis import strategies as st

FIGURES = st.sampled_from(["output_tokens_per_s", "longest_gap_ms"])
REPEATS = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=7)


@given(FIGURES, REPEATS, REPEATS)
def test_two_trials_never_beat_each_other(figure: str, one: list[float], other: list[float]) -> None:
    there, back = compare({figure: one}, {figure: other}, figure), compare({figure: other}, {figure: one}, figure)
    assert not (there == "better" and back == "better")
    if min(one + other) * LEAST_CHANGE * 2 < abs(middle({figure: one}, figure) - middle({figure: other}, figure)):
        opposite = {"better": ("worse", "same"), "worse": ("better", "same"), "same": ("same", "better", "worse")}
        assert back in opposite[there]


@given(FIGURES, REPEATS, REPEATS)
def test_a_winner_is_better_in_every_repeat_and_by_more_than_the_spread(
    figure: str, before: list[float], after: list[float]
) -> None:
    verdict, _ = judge(Goal(figure), {figure: before}, {figure: after})
    if verdict == "wins":
        gap = abs(middle({figure: after}, figure) - middle({figure: before}, figure))
        assert gap > max(spread({figure: before}, figure), spread({figure: after}, figure))
        assert min(after) > max(before) if figure == "output_tokens_per_s" else max(after) < min(before)


@given(FIGURES, REPEATS, st.randoms())
def test_the_same_repeats_in_any_order_are_no_gain(figure: str, repeats: list[float], random: object) -> None:
    shuffled = list(repeats)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert judge(Goal(figure), {figure: repeats}, {figure: shuffled})[0] == "no gain"


@given(FIGURES, REPEATS, REPEATS, st.floats(0.01, 100))
def test_the_unit_does_not_matter(figure: str, before: list[float], after: list[float], scale: float) -> None:
    exact = [compare({figure: before}, {figure: after}, figure)]
    scaled = compare({figure: [v * scale for v in before]}, {figure: [v * scale for v in after]}, figure)
    gap = abs(middle({figure: after}, figure) - middle({figure: before}, figure))
    edges = (
        max(spread({figure: before}, figure), spread({figure: after}, figure)),
        LEAST_CHANGE * middle({figure: before}, figure),
        0.0,
    )
    if all(abs(gap - edge) > 1e-6 * (gap + edge) for edge in edges):  # rounding decides at an edge
        assert scaled in exact


@given(REPEATS)
def test_a_change_of_less_than_a_percent_is_never_worth_it(repeats: list[float]) -> None:
    figure = "output_tokens_per_s"
    better = [value * (1 + LEAST_CHANGE / 2) for value in repeats]
    assert judge(Goal(figure), {figure: repeats}, {figure: better})[0] == "no gain"


def test_a_gain_that_costs_too_much_elsewhere_loses() -> None:
    goal = Goal("longest_gap_ms", "output_tokens_per_s", 0.05)
    before = {"longest_gap_ms": [100.0, 101.0], "output_tokens_per_s": [50.0, 50.1]}
    cheap = {"longest_gap_ms": [20.0, 21.0], "output_tokens_per_s": [48.5, 48.6]}
    dear = {"longest_gap_ms": [20.0, 21.0], "output_tokens_per_s": [40.0, 40.1]}
    assert judge(goal, before, cheap)[0] == "wins"
    verdict, reason = judge(goal, before, dear)
    assert verdict == "loses"
    assert "20% worse, 5% is allowed" in reason


def test_small_losses_in_a_row_are_held_against_the_start() -> None:
    goal = Goal("longest_gap_ms", "output_tokens_per_s", 0.05)
    start = {"longest_gap_ms": [100.0], "output_tokens_per_s": [100.0]}
    middle_ = {"longest_gap_ms": [50.0], "output_tokens_per_s": [96.0]}
    last = {"longest_gap_ms": [25.0], "output_tokens_per_s": [92.0]}
    assert judge(goal, start, middle_, start)[0] == "wins"
    assert judge(goal, middle_, last, start)[0] == "loses"


@pytest.mark.parametrize("missing", [(), (None,)])
def test_what_was_not_measured_wins_nothing(missing: tuple[None, ...]) -> None:
    verdict, reason = judge(Goal("tpot_ms"), {"tpot_ms": [1.0]}, {"tpot_ms": missing})
    assert verdict == "no gain"
    assert "not measured" in reason
