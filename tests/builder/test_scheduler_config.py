"""scheduler.yaml: what the template writes, the runtime's strict reader accepts, for any plan."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from edgebuild.plan import Plan, plan_for
from edgebuild.scheduler_config import render_scheduler, scheduler_entries
from edgert.config import RuntimeConfig, parse_config
from edgert.errors import ConfigError
from edgert.manifest import Manifest
from toy_plan import SMOLLM2, histogram, limits

PLAIN = limits()
DRAFTING = limits(acceptance=(0.89, 0.81, 0.91), step_cost_ms=(1.0, 1.1, 1.2, 1.3))
GUARDED = limits(temperature_soft_c=85.0, temperature_hard_c=95.0, power_mode="MAXN_SUPER")
ONE_SLOT = limits(slots=1, min_decode_rows=1, enable_cuda_graph=False, enable_chunked_prefill=False, ratio_range=(2, 3))


def made(wanted: Any) -> Plan:
    return plan_for(wanted, histogram([(374, 44), (1500, 200), (90, 12)]), SMOLLM2)


def manifest_of(plan: Plan) -> Manifest:
    """The part of a manifest that the reader looks at."""
    return cast(
        Manifest,
        SimpleNamespace(
            cells=plan.cells,
            prefill_cells=[cell for cell in plan.cells if cell.kind == "prefill"],
            decode_cells=[cell for cell in plan.cells if cell.kind == "decode"],
            draft_length=plan.draft.length,
            slots=plan.slots,
            context_tokens=plan.context_tokens,
        ),
    )


@pytest.mark.parametrize(
    "wanted", [PLAIN, DRAFTING, GUARDED, ONE_SLOT], ids=["plain", "drafting", "guarded", "one slot"]
)
def test_the_runtime_reads_what_the_plan_wrote(wanted: Any) -> None:
    plan = made(wanted)
    config = parse_config(render_scheduler(plan), manifest_of(plan))
    assert config.graph_bucket_sizes == plan.prefill.chunk_sizes
    assert config.max_prefill_chunk_size == plan.prefill.chunk_sizes[-1]
    assert config.graph_batch_sizes == plan.decode.batch_sizes
    assert config.kv_tiers == plan.decode.kv_tiers
    assert config.draft_length == plan.draft.length
    assert (config.slots, config.context_tokens) == (plan.slots, plan.context_tokens)
    assert config.prefill_decode_ratio_range == wanted.ratio_range
    assert config.enable_cuda_graph is wanted.enable_cuda_graph
    assert config.enable_chunked_prefill is wanted.enable_chunked_prefill
    assert config.memory_headroom_bytes == plan.ledger.headroom_bytes
    assert config.soft_temperature_c == wanted.temperature_soft_c
    assert config.hard_temperature_c == wanted.temperature_hard_c
    assert config.power_mode == wanted.power_mode
    assert set(config.select_cells(manifest_of(plan))) == set(plan.cells)


def test_keys_are_the_readers_and_each_says_where_its_value_came_from() -> None:
    plan = made(PLAIN)
    text = render_scheduler(plan)
    keys = [field.name for field in fields(RuntimeConfig)]
    assert sorted(yaml.safe_load(text)["runtime"]) == sorted(keys)
    lines = text.splitlines()
    for key in keys:
        (at,) = (number for number, line in enumerate(lines) if line.startswith(f"  {key}:"))
        assert lines[at - 1].startswith("  # "), f"{key} has no comment"
    assert all(len(line) <= 120 for line in lines)


def test_the_ratio_is_a_text_and_not_a_sexagesimal_number() -> None:
    assert yaml.safe_load(render_scheduler(made(PLAIN)))["runtime"]["prefill_decode_ratio"].startswith("1:")


def test_an_impossible_edit_is_refused() -> None:
    plan = made(PLAIN)
    text = render_scheduler(plan).replace(f"slots: {plan.slots}", "slots: 99")
    with pytest.raises(ConfigError, match="slots"):
        parse_config(text, manifest_of(plan))


def test_the_same_plan_gives_the_same_bytes() -> None:
    assert render_scheduler(made(DRAFTING)) == render_scheduler(made(DRAFTING))
    assert list(scheduler_entries(made(PLAIN))) == list(scheduler_entries(made(DRAFTING)))
