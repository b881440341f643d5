"""The whole plan: every length is served, budgets hold, what does not fit is refused with what would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from edgebuild.cli import cli
from edgebuild.errors import CheckpointError, DoesNotFit, ProfileError
from edgebuild.plan import Plan, plan_for
from edgebuild.plan.cells import CellBudget, chunk_ends
from edgebuild.plan.memory import ModelShape, cache_tokens
from edgebuild.plan.records import Limits
from edgebuild.traffic import Histogram, read_traffic
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_plan import FOUR_B, SMOLLM2, histogram, limits

BUNDLED = Path(__file__).parents[2] / "profiles" / "traffic" / "azure-conv-2023.yaml"


def azure() -> Histogram:
    return read_traffic(BUNDLED)


def check_servable(plan: Plan) -> None:
    """Every prompt length and every context up to the limit finds its cells; every cell is possible."""
    context = plan.context_tokens
    prefill = [cell for cell in plan.cells if cell.kind == "prefill"]
    decode = [cell for cell in plan.cells if cell.kind == "decode"]
    largest = plan.prefill.chunk_sizes[-1]
    assert {cell.query_rows for cell in prefill} == set(plan.prefill.chunk_sizes)
    for size in plan.prefill.chunk_sizes:
        assert max(cell.kv_tier for cell in prefill if cell.query_rows == size) >= context
    for tail in range(1, largest + 1):
        assert any(size >= tail for size in plan.prefill.chunk_sizes)
    assert 1 in plan.decode.batch_sizes
    for batch in plan.decode.batch_sizes:
        assert batch <= plan.slots
        assert max(cell.kv_tier for cell in decode if cell.batch == batch) >= context
    assert plan.cache_tokens >= context + largest
    assert all(cell.query_rows <= cell.kv_tier <= plan.cache_tokens for cell in plan.cells)
    assert len(set(plan.cells)) == len(plan.cells)
    assert {cell.kv_tier for cell in decode} == set(plan.decode.kv_tiers)


requests = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 400)), min_size=1, max_size=30)


@given(
    requests,
    st.integers(1, 12),
    st.integers(2, 24),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(16, 4096),
    st.integers(17, 2048),
    st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_length_is_served_within_every_budget(
    pairs: list[tuple[int, int]],
    slots: int,
    total: int,
    prefill: int,
    decode: int,
    context: int,
    max_chunk: int,
    drafts: int,
) -> None:
    wanted = limits(
        slots=slots,
        budget=CellBudget(prefill, decode, total),
        context_tokens=context,
        max_chunk=max_chunk,
        acceptance=(0.9,) * drafts,
        step_cost_ms=tuple(1 + 0.1 * k for k in range(drafts + 1)) if drafts else (),
        min_decode_rows=1 + drafts % 2,
    )
    plan = plan_for(wanted, histogram(pairs), SMOLLM2)
    check_servable(plan)
    assert len(plan.cells) <= total
    assert sum(cell.kind == "prefill" for cell in plan.cells) <= prefill
    assert sum(cell.kind == "decode" for cell in plan.cells) <= decode
    assert plan.ledger.headroom_bytes >= 0
    assert plan.draft.length == drafts


@pytest.mark.parametrize("model", [SMOLLM2, FOUR_B], ids=["SmolLM2", "4B"])
def test_eleven_cells_for_real_traffic_pad_less_than_the_usual_lists(model: ModelShape) -> None:
    prefill = plan_for(limits(), azure(), model).to_json()["prefill"]
    fraction = prefill["expected_padding_fraction"]
    assert fraction <= 0.10
    assert fraction < prefill["alternatives"]["powers_of_two"]["expected_padding_fraction"]
    assert fraction < prefill["alternatives"]["uniform"]["expected_padding_fraction"]
    counts = {len(prefill["chunk_sizes"])} | {len(a["chunk_sizes"]) for a in prefill["alternatives"].values()}
    assert len(counts) == 1


def test_tiers_read_less_in_vain_than_the_usual_lists() -> None:
    decode = plan_for(limits(), azure(), SMOLLM2).to_json()["decode"]
    waste = decode["expected_waste_fraction"]
    assert waste < decode["alternatives"]["powers_of_two"]["expected_waste_fraction"]
    assert waste < decode["alternatives"]["uniform"]["expected_waste_fraction"]


def test_all_prompts_of_512_tokens_run_one_unpadded_chunk() -> None:
    plan = plan_for(limits(), histogram([(512, 64)] * 100), SMOLLM2)
    check_servable(plan)
    assert plan.prefill.padding.padded_tokens == 0
    assert plan.prefill.padding.launches == 100


def test_one_outlier_of_8192_tokens_is_served_and_moves_nothing_else() -> None:
    wide = limits(context_tokens=16_384, device_bytes=64 * 10**9)
    without = plan_for(wide, histogram([(500, 64)] * 5000), FOUR_B)
    plan = plan_for(wide, histogram([(500, 64)] * 5000 + [(8192, 64)]), FOUR_B)
    check_servable(plan)
    assert plan.traffic.unservable == 0
    assert plan.prefill.chunk_sizes[0] == without.prefill.chunk_sizes[0]
    assert plan.prefill.padding.fraction < 0.02


def test_prompts_beyond_the_context_are_counted_and_said() -> None:
    plan = plan_for(limits(context_tokens=1024), histogram([(100, 10), (1023, 10), (1024, 10), (5000, 1)]), SMOLLM2)
    assert plan.traffic.unservable == 2
    assert any("2 of 4 requests will be refused" in note for note in plan.notes)


def test_three_slots_use_batches_of_one_and_two() -> None:
    assert plan_for(limits(slots=3), azure(), SMOLLM2).decode.batch_sizes == (1, 2)


def test_dropped_batches_are_said() -> None:
    plan = plan_for(limits(budget=CellBudget(8, 1, 11)), azure(), SMOLLM2)
    assert plan.decode.batch_sizes == (1,)
    assert any("no room for decode batches of 2, 4" in note for note in plan.notes)


def test_a_trace_without_decode_is_still_served() -> None:
    empty = replace(histogram([(100, 1)]), decode_context_counts=np.zeros(1, np.int64))
    check_servable(plan_for(limits(), empty, SMOLLM2))


def test_a_context_past_the_training_is_cut_and_said() -> None:
    plan = plan_for(limits(context_tokens=8192), azure(), SMOLLM2)
    assert plan.context_tokens == 2048
    assert any("trained for no more" in note for note in plan.notes)


def test_an_open_context_shrinks_to_memory_and_says_so() -> None:
    plan = plan_for(limits(context_tokens=40_960, context_may_shrink=True), azure(), FOUR_B)
    check_servable(plan)
    assert 512 <= plan.context_tokens < 40_960
    assert any(note.startswith("context reduced from 40,960") for note in plan.notes)


def test_a_gap_aimed_at_bounds_the_chunk() -> None:
    free = plan_for(limits(), azure(), FOUR_B)
    bound = plan_for(limits(itl_ms=250.0), azure(), FOUR_B)
    assert bound.prefill.chunk_sizes[-1] < free.prefill.chunk_sizes[-1]
    assert any("slo.itl_ms" in note for note in bound.notes)


def test_the_ledger_adds_up_and_counts_grouped_kv_heads() -> None:
    plan = plan_for(limits(), azure(), SMOLLM2)
    memory = plan.to_json()["memory"]
    assert memory["needed_bytes"] == sum(line["bytes"] for line in memory["ledger"])
    assert memory["headroom_bytes"] == memory["budget_bytes"] - memory["needed_bytes"]
    lines = {line["label"]: line["bytes"] for line in memory["ledger"]}
    assert lines["weights"] == 134_515_008 * 2
    assert lines["KV cache"] == 4 * plan.cache_tokens * 2 * 30 * 3 * 64 * 2
    assert lines["margin"] == int(16e9 * 0.12)
    assert plan.cache_tokens == cache_tokens(plan.context_tokens, plan.prefill.chunk_sizes[-1])


REMEDY = re.compile(r"(slots|context_tokens|max_prefill_chunk_size): (\d+) instead of")


def test_a_refusal_names_changes_that_fit() -> None:
    asked = limits(context_tokens=16_384, slots=8, device_bytes=20 * 10**9)
    with pytest.raises(DoesNotFit) as refused:
        plan_for(asked, azure(), FOUR_B)
    text = str(refused.value)
    assert "bench has 20.00 GB" in text
    assert "weights 8.04 GB" in text
    found = dict(REMEDY.findall(text))
    assert set(found) >= {"slots", "context_tokens"}
    check_servable(plan_for(replace(asked, slots=int(found["slots"])), azure(), FOUR_B))
    check_servable(plan_for(replace(asked, context_tokens=int(found["context_tokens"])), azure(), FOUR_B))
    for key in ("slots", "context_tokens"):
        step = 1 if key == "slots" else 64
        more: dict[str, int] = {key: int(found[key]) + step}
        with pytest.raises(DoesNotFit):
            plan_for(replace(asked, **more), azure(), FOUR_B)


def test_a_smaller_precision_is_advised_only_where_the_backend_runs_it() -> None:
    asked = limits(precision="float32", device_bytes=20 * 10**9, context_tokens=2048)
    with pytest.raises(DoesNotFit, match="precision: float16 instead of float32"):
        plan_for(asked, azure(), FOUR_B)
    with pytest.raises(DoesNotFit) as refused:
        plan_for(replace(asked, other_precisions=()), azure(), FOUR_B)
    assert "float16" not in str(refused.value)


def test_optional_weight_copies_are_given_up_first() -> None:
    tight = limits(weight_copy_factor=1.19, device_bytes=16 * 10**9, context_tokens=2048)
    with pytest.raises(DoesNotFit):
        plan_for(tight, azure(), FOUR_B)
    plan = plan_for(replace(tight, weight_copies_optional=True), azure(), FOUR_B)
    assert plan.context_tokens == 2048
    assert {line.label: line.bytes for line in plan.ledger.lines}["weight copies"] == 0
    assert any("packed copy" in note for note in plan.notes)


def test_a_model_too_large_for_any_setting_says_how_much_it_needs() -> None:
    with pytest.raises(DoesNotFit, match=r"no setting fits this model: .* needs a device of \d+\.\d+ GB"):
        plan_for(limits(device_bytes=4 * 10**9), azure(), FOUR_B)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_chunk_ends_follow_every_prompt(prompts: list[int], sizes: list[int]) -> None:
    ordered = sorted(set(sizes))
    counts = np.bincount(prompts).astype(np.int64)
    expected: dict[int, list[int]] = {size: [0] * counts.size for size in ordered}
    for length in prompts:
        position = 0
        while length - position >= ordered[-1]:
            position += ordered[-1]
            expected[ordered[-1]][position] += 1
        if length > position:
            expected[min(size for size in ordered if size >= length - position)][length] += 1
    ends = chunk_ends(counts, ordered)
    assert {size: found.tolist() for size, found in ends.items()} == expected


def test_the_same_numbers_give_the_same_plan() -> None:
    def text(wanted: Limits) -> str:
        return json.dumps(plan_for(wanted, azure(), SMOLLM2).to_json())

    assert text(limits()) == text(limits())


@pytest.fixture
def shape_only(tmp_path: Path) -> Path:
    """A folder that holds the config of SmolLM2 and no weights."""
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command_plans_from_a_config_alone(shape_only: Path) -> None:
    arguments = ["plan", "--profile", "cpu", "--model", str(shape_only), "--traffic", str(BUNDLED), "--max-cells", "11"]
    run = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    plan = json.loads(run.output)
    assert plan["prefill"]["expected_padding_fraction"] <= 0.10
    assert plan["memory"]["ledger"][0]["bytes"] == 134_515_008 * 4
    assert len(plan["prefill"]["cells"]) + len(plan["decode"]["cells"]) <= 11
    assert plan["draft"]["length"] == 0
    run = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    for heading in ("Prefill chunks", "powers of two", "11 cells", "KV cache", "no acceptance was measured"):
        assert heading in run.output


def test_a_missing_model_or_traffic_is_asked_for(shape_only: Path) -> None:
    with pytest.raises(ProfileError, match="add --model"):
        CliRunner().invoke(cli, ["plan", "--profile", "h200"], catch_exceptions=False)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        CliRunner().invoke(
            cli, ["plan", "--profile", "h200", "--model", str(shape_only / "..")], catch_exceptions=False
        )


def test_a_plan_and_a_refusal_import_no_torch(shape_only: Path) -> None:
    arguments = ["plan", "--profile", "cpu", "--model", str(shape_only), "--traffic", str(BUNDLED)]
    script = (
        "import sys; from click.testing import CliRunner; from edgebuild.cli import cli;"
        f"run = CliRunner().invoke(cli, {arguments!r}); assert run.exit_code == 0, run.output;"
        "print([name for name in ('torch', 'onnx', 'transformers', 'onnxruntime') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
