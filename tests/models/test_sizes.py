"""The published configurations in numbers that others print, and docs/sizes.md against what the planner says today."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_sizes import load_configs, render, weight_bytes

SIZES = Path(__file__).parents[2] / "docs" / "sizes.md"


@pytest.mark.parametrize(
    ("model", "billions", "state_mib"),
    [
        ("Qwen3.5-0.8B", 0.75, 18),
        ("Qwen3.5-4B", 4.21, 48),
        ("Qwen3.5/3.6/3.8-27B", 26.9, 144),
        ("Qwen3.5/3.6-35B-A3B", 34.7, None),
        ("Qwen3-Next-80B-A3B", 79.7, None),
        ("Qwen3.8-Flash-Next", 177, 108),  # 125 and a table of 51
    ],
)
def test_published_configurations_count_up_to_the_published_sizes(
    model: str, billions: float, state_mib: int | None
) -> None:
    config = load_configs()[model]
    assert config.weight_elements() / 1e9 == pytest.approx(billions, rel=0.005)
    if state_mib is not None:  # matrices alone, without the convolutions' windows
        assert config.recurrent_bytes_per_slot(0) // 2**20 == state_mib


def test_fewer_bits_are_fewer_bytes() -> None:
    for config in load_configs().values():
        sixteen, eight, four = (weight_bytes(config, bits) for bits in (16, 8, 4))
        assert sixteen == 2 * config.weight_elements()
        assert sixteen / 2 < eight < sixteen
        assert sixteen / 4 < four < eight


def test_the_table_in_the_docs_is_what_the_planner_says() -> None:
    written = SIZES.read_text(encoding="utf-8")
    assert written == render(), "out of date: python tests/model_sizes.py > docs/sizes.md"
