"""scheduler.yaml: what the artifact can do is read, what it cannot is refused with line, reason and allowed values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from edgert.cells import Cell
from edgert.config import default_config, load_config, parse_config
from edgert.errors import ArtifactError, ConfigError
from toy_artifact import SCHEDULER, toy_manifest

MANIFEST = toy_manifest()


def edited(key: str, value: str) -> str:
    lines = [f"  {key}: {value}" if line.strip().startswith(f"{key}:") else line for line in SCHEDULER.splitlines()]
    return "\n".join(lines) + "\n"


def line_of(key: str) -> int:
    return next(n for n, line in enumerate(SCHEDULER.splitlines(), 1) if line.strip().startswith(f"{key}:"))


def test_the_file_as_written_is_read() -> None:
    config = parse_config(SCHEDULER, MANIFEST)
    assert config.prefill_decode_ratio == 6
    assert config.graph_bucket_sizes == (16, 64)
    assert config.draft_length == 0
    assert set(config.select_cells(MANIFEST)) == set(MANIFEST.cells)


def test_an_unquoted_ratio_is_not_read_as_minutes_and_seconds() -> None:
    assert parse_config(edited("prefill_decode_ratio", "1:5"), MANIFEST).prefill_decode_ratio == 5


def test_limits_of_the_device_may_be_unknown() -> None:
    plain = parse_config(SCHEDULER, MANIFEST)
    assert (plain.soft_temperature_c, plain.hard_temperature_c, plain.power_mode) == (None, None, None)
    known = edited("soft_temperature_c", "80").replace("hard_temperature_c: null", "hard_temperature_c: 87.5")
    config = parse_config(known.replace("power_mode: null", "power_mode: 15"), MANIFEST)
    assert (config.soft_temperature_c, config.hard_temperature_c, config.power_mode) == (80.0, 87.5, "15")
    with pytest.raises(ConfigError, match=r"hard_temperature_c: 80 is not above soft_temperature_c \(80\)"):
        parse_config(known.replace("87.5", "80"), MANIFEST)
    assert parse_config(known, MANIFEST, {"soft_temperature_c": None}).soft_temperature_c is None


@pytest.mark.parametrize("key", ["enable_chunked_prefill", "enable_cuda_graph"])
def test_mechanisms_can_be_switched_off(key: str) -> None:
    assert getattr(parse_config(edited(key, "false"), MANIFEST), key) is False


def test_drafting_can_be_switched_off_and_shortened() -> None:
    manifest = replace(MANIFEST, draft_length=3)
    on = edited("enable_mtp", "true").replace("mtp_num_heads: 0", "mtp_num_heads: 2")
    assert parse_config(on, manifest).draft_length == 2
    assert parse_config(on.replace("enable_mtp: true", "enable_mtp: false"), manifest).draft_length == 0


def test_a_draft_length_without_a_drafter_is_refused_for_the_drafter() -> None:
    """What `--draft-length 3` asks for: no range of 0 to 0 is quoted."""
    with pytest.raises(ConfigError, match="override: enable_mtp: this artifact has no drafter"):
        parse_config(SCHEDULER, MANIFEST, {"enable_mtp": True, "mtp_num_heads": 3})


@pytest.mark.parametrize(
    ("key", "value", "pattern"),
    [
        ("graph_bucket_sizes", "[16, 48]", "48 was not captured.*allowed chunks: 16, 64"),
        ("graph_bucket_sizes", "[64, 16]", "not ascending"),
        ("max_prefill_chunk_size", "32", "32 is not among graph_bucket_sizes.*16, 64"),
        ("prefill_decode_ratio", '"1:65"', '"1:N" with N from 1 to 64'),
        ("prefill_decode_ratio", '"2:1"', '"1:N"'),
        ("prefill_decode_ratio", '"1:9"', r"outside prefill_decode_ratio_range \[4, 8\]"),
        ("prefill_decode_ratio_range", "[8, 4]", "not ascending"),
        ("graph_batch_sizes", "[1, 3]", "3 was not captured.*1, 2, 4"),
        ("graph_batch_sizes", "[2, 4]", "batch 1 is missing"),
        ("kv_tiers", "[128]", "decode reaches 128 positions, context_tokens is 256"),
        ("slots", "5", "whole number from 1 to 4, the artifact's slots, found 5"),
        ("context_tokens", "257", "from 1 to 256, the artifact's context"),
        ("enable_mtp", "true", "this artifact has no drafter"),
        ("mtp_num_heads", "1", "from 0 to 0, the artifact's draft length"),
        ("mtp_acceptance_threshold", ".nan", "a number from 0"),
        ("memory_margin_fraction", "0.6", r"a number from 0\.0 to 0\.5"),
        ("soft_temperature_c", "hot", "a number from 0 to 150, or null"),
        ("hard_temperature_c", "151", "a number from 0 to 150, or null"),
        ("hard_temperature_c", "true", "a number from 0 to 150, or null"),
        ("power_mode", "[MAXN]", "a name, or null"),
        ("power_mode", '"a mode"', "a name, or null"),
        ("warm_up", '"true"', "expected true or false, found 'true'"),
        ("queue_limit", "1e3", "a whole number"),
        ("queue_limit", "!!bool x", "expected a whole number from 0 to 1000000, found 'x'"),
        ("queue_limit", "!!int ''", "expected a whole number from 0 to 1000000, found ''"),
        ("warm_up", "!!timestamp x", "expected true or false, found 'x'"),
        ("queue_limit", "[1]", "found a list or a mapping"),
        ("queue_limit", "!!python/object/apply:os.getpid []", "found a list or a mapping"),
    ],
)
def test_impossible_edits_are_refused_with_line_and_reason(key: str, value: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern) as caught:
        parse_config(edited(key, value), MANIFEST)
    assert str(caught.value).startswith(f"scheduler.yaml:{line_of(key)}: {key}: ")


def test_fewer_slots_drop_the_batches_that_they_cannot_fill_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_config(edited("slots", "2"), MANIFEST)
    assert (config.slots, config.graph_batch_sizes) == (2, (1, 2))
    assert max(cell.batch for cell in config.select_cells(MANIFEST)) == 2
    assert caplog.messages == ["scheduler.yaml: slots is 2, decode batches of 4 are not used"]


def test_a_file_from_before_the_policy_is_read_as_adaptive_without_targets() -> None:
    newer = ("adaptive", "ttft_target_ms", "itl_target_ms", "itl_p95_ratio", "tpot_target_ms")
    newer += ("throughput_headroom_fraction",)
    lines = [line for line in SCHEDULER.splitlines() if line.split(":")[0].strip() not in newer]
    config = parse_config("\n".join(lines) + "\n", MANIFEST)
    assert config == replace(parse_config(SCHEDULER, MANIFEST))
    assert (config.adaptive, config.ttft_target_ms, config.throughput_headroom_fraction) == (True, None, 0.0)


def test_a_typo_names_the_line_and_the_nearest_key() -> None:
    text = SCHEDULER.replace("graph_batch_sizes", "graph_batchsizes")
    with pytest.raises(
        ConfigError, match=rf"yaml:{line_of('graph_batch_sizes')}: unknown key.*nearest.*graph_batch_sizes"
    ):
        parse_config(text, MANIFEST)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("", "the file is not a mapping"),
        ("runtime: 3", "runtime is not a mapping"),
        ("runtime: {a: [", "not valid YAML"),
        (SCHEDULER + "  slots: 2\n", "slots stands twice"),
        (SCHEDULER.replace("  slots: 4\n", ""), "slots is missing"),
        (SCHEDULER + "extra: 1\n", "unknown key 'extra'"),
        (SCHEDULER + "slots: 1\n", "unknown key 'slots' in the file.*slots belongs under runtime: indent"),
        (SCHEDULER.replace("[1, 2, 4]", "&a [*a]"), "aliases are not used"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_a_damaged_file_is_refused(text: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        parse_config(text, MANIFEST)


def test_overrides_are_checked_as_the_file_is() -> None:
    changed = parse_config(SCHEDULER, MANIFEST, {"enable_cuda_graph": False, "graph_batch_sizes": (1,), "slots": 1})
    assert (changed.enable_cuda_graph, changed.graph_batch_sizes, changed.slots) == (False, (1,), 1)
    with pytest.raises(ConfigError, match=r"override: slots: .*found 9"):
        parse_config(SCHEDULER, MANIFEST, {"slots": 9})
    with pytest.raises(ConfigError, match=r"unknown key 'slotz'.*slots"):
        parse_config(SCHEDULER, MANIFEST, {"slotz": 9})
    with pytest.raises(ConfigError, match="not a plain value"):
        parse_config(SCHEDULER, MANIFEST, {"slots": object()})


def test_the_file_is_found_in_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "scheduler.yaml").write_text(SCHEDULER)
    assert load_config(tmp_path, MANIFEST).slots == 4
    (tmp_path / "scheduler.yaml").write_bytes(b"\xff")
    with pytest.raises(ArtifactError, match="UTF-8"):
        load_config(tmp_path, MANIFEST)


def test_defaults_select_every_cell() -> None:
    assert set(default_config(MANIFEST).select_cells(MANIFEST)) == set(MANIFEST.cells)


def test_tiers_past_one_that_serves_a_lowered_context_are_left_out() -> None:
    config = parse_config(SCHEDULER, MANIFEST, {"context_tokens": 100})
    kept = set(config.select_cells(MANIFEST))
    assert kept < set(MANIFEST.cells)
    for cell in MANIFEST.cells:
        same = [each for each in MANIFEST.cells if (each.kind, each.batch, each.query_rows)
                == (cell.kind, cell.batch, cell.query_rows)]  # fmt: skip
        enough = min(each.kv_tier for each in same if each.kv_tier >= 100)
        assert (cell in kept) == (cell.kv_tier <= enough), cell


def test_cells_that_verify_more_than_is_drafted_are_left_out_where_a_smaller_one_serves() -> None:
    decode = [cell for cell in MANIFEST.cells if cell.kind == "decode"]
    verifying = [replace(cell, query_rows=rows) for cell in decode for rows in (3, 5)]
    alone = Cell("decode", 4, 3, 128)  # no plain cell beside it
    plain = [cell for cell in MANIFEST.cells if cell != replace(alone, query_rows=1)]
    manifest = replace(MANIFEST, cells=(*plain, *verifying))

    def rows(draft_length: int) -> set[int]:
        config = replace(default_config(MANIFEST), mtp_num_heads=draft_length, enable_mtp=draft_length > 0)
        chosen = set(config.select_cells(manifest))
        assert alone in chosen
        assert set(MANIFEST.prefill_cells) <= chosen
        return {cell.query_rows for cell in chosen - {alone} if cell.kind == "decode"}

    assert rows(0) == {1}
    assert rows(1) == rows(2) == {1, 3}
    assert rows(3) == rows(4) == {1, 3, 5}
