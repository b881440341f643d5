"""The figures that bench, tune and reports share: one layout, unknown is a dash."""

from __future__ import annotations

from edgert.figures import FIGURES, figure_table, shown_figures


def test_unknown_is_a_dash_and_a_column_that_nobody_has_is_left_out() -> None:
    rows = [{"tpot_ms": 20.25, "output_tokens_per_s": None}, {"tpot_ms": None, "output_tokens_per_s": 1234.56}]
    assert [figure.key for figure in shown_figures(rows)] == ["tpot_ms", "output_tokens_per_s"]
    lines = figure_table([("baseline", rows[0]), ("with graphs", rows[1])]).splitlines()
    assert lines[-2].split() == ["baseline", "20.25", "-"]
    assert lines[-1].split() == ["with", "graphs", "-", "1,234.6"]


def test_every_figure_says_which_way_is_better_and_prints_with_its_unit() -> None:
    by_key = {figure.key: figure for figure in FIGURES}
    assert len(by_key) == len(FIGURES)
    assert by_key["acceptance"].show(0.523) == "52 %"
    assert by_key["peak_memory_bytes"].show(1.5e9) == "1,500"
    assert {figure.key for figure in FIGURES if figure.better == "higher"} == {
        "output_tokens_per_s", "goodput_requests_per_s", "acceptance", "mean_accepted_length"
    }  # fmt: skip
