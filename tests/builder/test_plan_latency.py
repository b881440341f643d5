"""What the plan says of targets and headroom before anything is measured."""

from __future__ import annotations

import re

import numpy as np
import pytest
from edgebuild.plan import plan_for
from edgebuild.plan.cells import CostModel
from edgebuild.plan.latency import first_token_ms, first_token_note, headroom_note
from toy_plan import FOUR_B, histogram, limits

COST = CostModel(kv_share_per_token=1e-5, launch_cost_tokens=100.0, attention_share=0.0)
PROMPTS = np.bincount([400] * 96 + [4000] * 4)


def test_a_prompt_takes_its_chunks_and_the_steps_between_them() -> None:
    alone = first_token_ms(COST, 10.0, 1000, 400, 0, 4)
    assert alone == pytest.approx(10.0 * (3 + 1000 / 100))
    assert first_token_ms(COST, 10.0, 1000, 400, 6, 4) == pytest.approx(alone + 10.0 * 2 * 6 * COST.decode(4, 1000))
    assert first_token_ms(COST, 10.0, 1000, 1000, 6, 4) == pytest.approx(10.0 * (1 + 10))


@pytest.mark.parametrize(
    ("target_ms", "pattern"),
    [(40.0, "with nothing beside it; it cannot be kept"), (100.0, "only while few decode"), (1e6, None)],
)
def test_a_first_token_target_is_judged_by_the_95th_percentile(target_ms: float, pattern: str | None) -> None:
    note = first_token_note(COST, 10.0, PROMPTS, 200, 8, 4, target_ms)
    if pattern is None:
        assert note is None
    else:
        assert note is not None
        assert "a prompt of 400 tokens (95 % are no longer)" in note
        assert re.search(pattern, note)


def test_what_headroom_costs_is_said_where_it_costs_something() -> None:
    assert headroom_note(COST, (1, 2, 4), 4, 100.0, 0.2) == (
        "headroom: with measured costs (costs.json) admission holds 3 of 4 sequences, so that 20% of the throughput "
        "stays free; decode then yields about 75% of the tokens/s"
    )
    assert headroom_note(COST, (1,), 1, 100.0, 0.2) is None
    assert headroom_note(COST, (1, 2, 4), 4, 100.0, 0.0) is None


def test_the_plan_carries_both_notes() -> None:
    plan = plan_for(limits(ttft_ms=1.0, throughput_headroom_fraction=0.2), histogram([(374, 44), (1500, 200)]), FOUR_B)
    assert any(note.startswith("slo.ttft_ms 1:") for note in plan.notes)
    assert any(note.startswith("headroom:") for note in plan.notes)
