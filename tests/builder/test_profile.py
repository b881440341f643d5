"""Profiles: bundled ones load, a mistake names file, line and what was meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from edgebuild.commands.profiles import profiles
from edgebuild.errors import ProfileError
from edgebuild.profile import bundled_names, bundled_traffic, find_profile, load_profile
from edgebuild.profile.schema import Profile, json_schema
from edgebuild.profile.units import UNITS, human_bytes, parse_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

GOOD = """\
name: box
description: a box
backend: tensorrt
precision: float16
device:
  memory_bytes: 8 GiB
  unified_memory: true
  bandwidth_gb_per_s: 100
  compute_capability: "8.7"
  power_modes: [MAXN, 15W]
  power_mode: MAXN
  temperature_soft_c: 80
  temperature_hard_c: 90
limits:
  slots: 4
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "box.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_every_bundled_profile_loads_and_names_itself():
    assert set(bundled_names()) >= {"cpu", "rtx", "spark", "orin-agx", "orin-nano", "orin", "thor", "h200"}
    for name in bundled_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.traffic is not None
        assert profile.traffic.is_file()


@pytest.mark.parametrize(
    ("name", "memory_gb", "bandwidth", "capability", "unified", "backend"),
    [
        ("spark", 128, 273, "12.1", True, "tensorrt-rtx"),
        ("orin-agx", 64, 204.8, "8.7", True, "tensorrt"),
        ("orin-nano", 8, 102, "8.7", True, "tensorrt"),
        ("thor", 128, 273, "11.0", True, "tensorrt"),
        ("h200", 141, 4800, "9.0", False, "tensorrt-rtx"),
        ("rtx", 24, 1008, "8.9", False, "tensorrt-rtx"),
    ],
)
def test_bundled_figures_are_the_data_sheets(name, memory_gb, bandwidth, capability, unified, backend):
    profile = load_profile(name)
    assert profile.device.memory_bytes == memory_gb * 10**9
    assert profile.device.bandwidth_gb_per_s == bandwidth
    assert profile.compute_capability == capability
    assert profile.device.unified_memory is unified
    assert profile.backend == backend


def test_every_bundled_figure_has_a_source_beside_it():
    for name in bundled_names():
        text = find_profile(name).read_text()
        if "extends:" not in text:
            before = text[: text.index("bandwidth_gb_per_s")].splitlines()[-6:]
            line = next(line for line in text.splitlines() if "bandwidth_gb_per_s" in line)
            assert "#" in line or any(entry.strip().startswith("#") for entry in before), name


def test_orin_is_orin_agx_under_another_name():
    orin, agx = load_profile("orin"), load_profile("orin-agx")
    same = {"name": "", "description": ""}
    assert orin.model_copy(update=same) == agx.model_copy(update=same)


def test_a_bundled_profile_is_found_by_file_name_where_no_such_file_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_profile("orin.yaml").name == "orin"
    (tmp_path / "orin.yaml").write_text(GOOD)
    assert load_profile("orin.yaml").name == "box"


def test_an_unknown_name_lists_the_bundled_ones_and_the_nearest():
    with pytest.raises(ProfileError, match=r"did you mean orin-nano\?.*cpu"):
        load_profile("orin-nanno")


def test_defaults(write):
    profile = load_profile(write(GOOD))
    assert profile.device.memory_bytes == 8 * 2**30
    assert profile.limits.memory_margin_fraction == 0.12
    assert profile.limits.headroom_fraction == 0.20
    assert profile.limits.max_prefill_cells == 11
    assert (profile.scheduling.prefill_decode_ratio.min, profile.scheduling.prefill_decode_ratio.max) == (4, 8)
    assert profile.mechanisms.mtp_acceptance_threshold == 0.6
    assert profile.budget_bytes == int(8 * 2**30 * 0.88)
    assert profile.element_bytes == 2
    assert profile.compute_capabilities == ("8.7",)


@pytest.mark.parametrize(
    ("old", "new", "place", "told"),
    [
        ("memory_bytes", "memory_byte", "6:3", "unknown key 'device.memory_byte': did you mean 'memory_bytes'?"),
        ("limits:", "limit:", "14:1", "did you mean 'limits'?"),
        ("slots: 4", "slot: 4", "15:3", "did you mean 'slots'?"),
        ("slots: 4", "enable_mtp: true", "15:3", "it belongs under 'mechanisms'"),
        ("slots: 4", "slots: four", "15:10", "limits.slots: 'four'"),
        ("slots: 4", "slots: true", "15:10", "valid integer"),
        ("slots: 4", "slots: 0", "15:10", "greater than or equal to 1"),
        ("slots: 4", "memory_margin_fraction: 0.3", "15:27", "less than or equal to 0.15"),
        ("slots: 4", "memory_margin_fraction: .nan", "15:27", "memory_margin_fraction"),
        ("slots: 4", "min_chunk: 64\n  max_chunk: 32", "16:14", "32 is below min_chunk (64)"),
        ("slots: 4", "slots: 4\n  slots: 5", "16:3", "stands twice, first at line 15"),
        ("8 GiB", "8 Gib", "6:17", "did you mean GiB?"),
        ("8 GiB", "'8'", "6:17", "has no unit"),
        ("8 GiB", "8", "6:17", "hold no model"),
        ("8 GiB", "eight", "6:17", "a number and a unit"),
        ('"8.7"', "8.7", "9:23", 'write it as a text, "8.7"'),
        ("hard_c: 90", "hard_c: 70", "13:23", "is not above temperature_soft_c (80 °C)"),
        ("power_mode: MAXN", "power_mode: 50W", "11:15", "not among power_modes (MAXN, 15W)"),
        ("unified_memory: true", "unified_memory: maybe", "7:19", "valid boolean"),
        ("backend: tensorrt", "backend: tensort", "3:10", "did you mean 'tensorrt'?"),
        ("backend: tensorrt", "backend: onnxruntime", "4:12", "runs float32"),
        ("backend: tensorrt\n", "", "1:1", "backend is missing"),
        ("name: box", "name: box\ndraft: {length: 2}", "2:8", "enable_mtp is false"),
        ("name: box", "name: box\ndraft: 2", "2:8", "expected a section"),
        ("name: box", "name: [box", "2:12", "not YAML"),
        ("slots: 4", "slots: !!bool x", "15:10", "'x' is no bool"),
        ("slots: 4", "slots: !!int ''", "15:10", "'' is no int"),
        ("slots: 4", "slots: !!timestamp x", "15:10", "'x' is no timestamp"),
        ("slots: 4", "slots: 2024-13-45", "15:10", "'2024-13-45' is no timestamp"),
        ("name: box", "name: box\n1: 2", "2:1", "plain text"),
    ],
)
def test_a_mistake_names_file_line_column_and_what_was_expected(write, old, new, place, told):
    assert old in GOOD
    path = write(GOOD.replace(old, new, 1))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert f"{path}:{place}: " in message
    assert told in message
    assert "\n" not in message
    assert caught.value.exit_code == 3


def test_a_misspelt_required_key_is_told_once(write):
    with pytest.raises(ProfileError) as caught:
        load_profile(write(GOOD.replace("memory_bytes", "memory_byte")))
    assert "missing" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "- a\n", "a: &x {b: *x}\n", "a: &x {}\nb: *x\n", "\0", "a: !!python/name:os 1"]
)
def test_what_is_no_profile_at_all_is_refused_in_one_line(write, text):
    with pytest.raises(ProfileError) as caught:
        load_profile(write(text))
    assert "\n" not in str(caught.value)


def test_a_mistake_in_an_extended_profile_names_that_file(write):
    base = write(GOOD.replace("slots: 4", "slots: four"), "base.yaml")
    child = write("extends: base\nname: child\n")
    with pytest.raises(ProfileError, match=rf"{base.name}:15:10: limits.slots"):
        load_profile(child)


def test_a_child_overrides_key_by_key(write):
    write(GOOD, "base.yaml")
    child = load_profile(write("extends: base\nname: child\nlimits:\n  context_tokens: 512\n"))
    assert (child.name, child.limits.slots, child.limits.context_tokens) == ("child", 4, 512)


@pytest.mark.parametrize(
    ("file", "name"), [("small-box.yaml", "small-box"), ("my box.yaml", "base"), ("base2.yaml", "base2")]
)
def test_a_child_without_a_name_goes_by_its_files_where_that_can_be_one(write, file, name):
    write(re.sub(r"^name: .*$", "name: base", GOOD, flags=re.MULTILINE), "base.yaml")
    assert load_profile(write("extends: base\nlimits:\n  context_tokens: 512\n", file)).name == name


def test_a_circle_of_extends_is_refused(write):
    write("extends: b\n", "a.yaml")
    path = write("extends: a\n", "b.yaml")
    with pytest.raises(ProfileError, match="circle"):
        load_profile(path)


def test_a_user_file_may_extend_the_bundled_profile_of_its_own_name(write):
    path = write("extends: orin\nmodel: weights\n", "orin.yaml")
    profile = load_profile(path)
    assert profile.name == "orin"
    assert profile.model == path.parent / "weights"


def test_paths_are_relative_to_the_profile_that_writes_them(write, tmp_path, monkeypatch):
    write(GOOD + "model: weights/model.gguf\ntraffic: trace.csv\n", "base/base.yaml")
    child = write("extends: base/base.yaml\nname: child\ntraffic: other.csv\n")
    monkeypatch.chdir("/")
    profile = load_profile(child)
    assert profile.model == tmp_path / "base/weights/model.gguf"
    assert profile.traffic == tmp_path / "other.csv"


def test_a_bundled_histogram_may_be_given_by_name(write):
    assert load_profile(write(GOOD + "traffic: azure-conv-2023\n")).traffic == bundled_traffic()


def test_a_profile_is_never_changed_later(write):
    profile = load_profile(write(GOOD))
    with pytest.raises(ValueError, match="frozen"):
        profile.limits.slots = 9


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
@settings(deadline=None)
def test_sizes_mean_what_their_unit_says(number, unit, space):
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]


@pytest.mark.parametrize("text", ["64", "64 gb", "-1 GB", "1.2345 B", "GB", "1e3 GB", "64 Gbit", None, 1.5, True])
def test_sizes_that_could_be_misread_are_refused(text):
    with pytest.raises(ValueError, match=r"unit|size|whole"):
        parse_bytes(text)


def test_human_sizes_are_decimal():
    assert [human_bytes(size) for size in (12, 64 * 10**9, 141 * 10**9)] == ["12 B", "64.0 GB", "141.0 GB"]


def test_list_show_and_schema_commands(tmp_path):
    run = CliRunner().invoke
    listed = run(profiles, ["list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in bundled_names())
    assert {entry["name"] for entry in json.loads(run(profiles, ["list", "--json"]).output)} == set(bundled_names())

    shown = run(profiles, ["show", "rtx"]).output
    saved = tmp_path / "copy.yaml"
    saved.write_text(shown)
    assert load_profile(saved) == load_profile("rtx")

    schema = json.loads(run(profiles, ["schema"]).output)
    assert schema == json_schema()
    assert set(schema["properties"]) == {*Profile.model_fields, "extends"}
    assert schema["additionalProperties"] is False
    for name in bundled_names():
        assert set(yaml.safe_load(find_profile(name).read_text())) <= set(schema["properties"])
