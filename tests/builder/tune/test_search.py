"""A tuning run in virtual time: its order, who wins, what is not applicable, what a cut or a drift does to it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgebuild.errors import TuningError
from edgebuild.progress import Stages
from edgebuild.tune.logbook import read_logbook
from edgebuild.tune.search import Setup
from rich.console import Console
from toy_artifact import make_artifact
from toy_tuning import FakeDevice, make_setup, plain_speed, run


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("tune") / "toy")


@pytest.fixture
def setup(artifact: Path, tmp_path: Path) -> Setup:
    return make_setup(artifact, tmp_path)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "tuning.jsonl"


def test_one_change_at_a_time_in_the_fixed_order(setup: Setup, book: Path) -> None:
    result, trials = run(setup, book, FakeDevice())
    order = list(dict.fromkeys(trial.step for trial in trials))
    assert order == [
        "baseline", "chunked_prefill", "cuda_graph", "mtp", "chunk_size", "kv_tiers", "ratio", "draft_length",
        "adaptive", "draft_curve", "soak",
    ]  # fmt: skip
    by_number = {trial.number: trial for trial in trials}
    first = trials[0].settings
    assert (first["enable_chunked_prefill"], first["enable_cuda_graph"], first["enable_mtp"]) == (False, False, False)
    for trial in trials[1:]:
        if trial.verdict not in ("wins", "no gain", "loses"):
            continue
        before = by_number[trial.against].settings
        assert {key for key in before if before[key] != trial.settings[key]} == {trial.changed}
        assert (trial.before, trial.after) == (before[trial.changed], trial.settings[trial.changed])
    assert result.settings["mtp_num_heads"] == 2  # the fake is fastest there
    assert result.settings["enable_cuda_graph"] is True


def test_a_winner_is_kept_and_a_loser_is_not(setup: Setup, book: Path) -> None:
    _, trials = run(setup, book, FakeDevice())
    verdicts = {(trial.step, json.dumps(trial.after)): trial.verdict for trial in trials}
    assert verdicts["mtp", "true"] == "wins"
    assert verdicts["chunk_size", "16"] == "loses"  # a shorter gap, but a fifth of the throughput
    assert verdicts["draft_length", "2"] == "wins"
    assert verdicts["draft_length", "1"] == "loses"
    assert verdicts["kv_tiers", "[256]"] == "no gain"


def test_within_the_spread_nothing_changes(setup: Setup, book: Path) -> None:
    result, trials = run(setup, book, FakeDevice(noise=(0.0, 0.9, -0.9)))
    # what is for loads that no trial has stays on unless it loses; drafting must win
    kept = {"enable_chunked_prefill": True, "enable_cuda_graph": True, "adaptive": True}
    assert result.settings == {**trials[0].settings, **kept}
    assert {trial.verdict for trial in trials if trial.step not in ("baseline", "draft_curve", "soak")} <= {
        "no gain",
        "not applicable",
    }


def test_a_device_that_became_faster_by_itself_makes_no_winner(setup: Setup, book: Path) -> None:
    device = FakeDevice()

    def speed(_: Mapping[str, Any]) -> dict[str, float]:
        return {"output_tokens_per_s": 100.0 + 50 * (len(device.jobs) >= 4), "longest_gap_ms": 100.0}

    device.speed = speed  # the fourth trial and all after it run on a device that is half as fast again
    result, trials = run(setup, book, device)
    drafts = next(trial for trial in trials if trial.step == "mtp" and trial.changed)
    assert drafts.verdict == "no gain"
    assert "the device itself has changed" in drafts.reason
    again = next(trial for trial in read_logbook(book).trials if trial.step == "mtp" and not trial.changed)
    assert (again.verdict, again.settings) == ("measured", {**drafts.settings, "enable_mtp": False})
    assert result.settings["enable_mtp"] is False


def test_what_a_backend_cannot_do_is_said_and_left_as_it_was(artifact: Path, tmp_path: Path, book: Path) -> None:
    setup = make_setup(artifact, tmp_path, gpu=False, drafts=0, concurrency=1)
    result, trials = run(setup, book, FakeDevice())
    reasons = {trial.step: trial.reason for trial in trials if trial.verdict == "not applicable"}
    assert set(reasons) >= {"chunked_prefill", "cuda_graph", "mtp", "kv_tiers", "draft_length"}
    assert "onnxruntime" in reasons["cuda_graph"]
    assert "no drafter" in reasons["mtp"]
    assert result.settings["enable_cuda_graph"] is True  # as scheduler.yaml has it
    assert result.curve is None


def test_a_trial_that_fails_is_a_verdict_and_the_run_goes_on(setup: Setup, book: Path) -> None:
    def fails(overrides: Mapping[str, Any]) -> str | None:
        return "out of memory: 3 MB short" if overrides["enable_mtp"] else None

    result, trials = run(setup, book, FakeDevice(fails=fails))
    failed = [trial for trial in trials if trial.verdict == "failed"]
    assert {trial.step for trial in failed} == {"mtp", "draft_curve"}
    assert failed[0].reason == "out of memory: 3 MB short"
    assert failed[0].figures is None
    assert result.settings["enable_mtp"] is False
    assert result.curve is None


def test_a_baseline_that_fails_ends_the_run(setup: Setup, book: Path) -> None:
    with pytest.raises(TuningError, match="baseline failed: no device"):
        run(setup, book, FakeDevice(fails=lambda _: "no device"))
    assert read_logbook(book).trials[0].verdict == "failed"


def test_the_command_in_the_error_of_a_baseline_can_be_pasted(tmp_path: Path) -> None:
    setup = make_setup(make_artifact(tmp_path / "my model"), tmp_path)
    with pytest.raises(TuningError, match=r"\(edgert doctor '.*/my model'\)"):
        run(setup, tmp_path / "book.jsonl", FakeDevice(fails=lambda _: "no device"))


def test_limits_make_goodput_decide(artifact: Path, tmp_path: Path, book: Path) -> None:
    def speed(overrides: Mapping[str, Any]) -> dict[str, float]:
        return {**plain_speed(overrides), "goodput_requests_per_s": 2.0 if overrides["enable_mtp"] else 3.0}

    setup = make_setup(artifact, tmp_path, slo_ttft_ms=100.0)
    result, _ = run(setup, book, FakeDevice(speed=speed))
    assert result.settings["enable_mtp"] is False


def test_a_run_that_is_cut_anywhere_continues_where_it_stopped(setup: Setup, tmp_path: Path) -> None:
    whole = FakeDevice()
    expected, trials = run(setup, tmp_path / "whole.jsonl", whole)
    for cut in range(len(whole.jobs)):
        book = tmp_path / f"cut{cut}.jsonl"
        first = FakeDevice(ends_after=cut)
        with pytest.raises(KeyboardInterrupt):
            run(setup, book, first)
        second = FakeDevice()
        result, resumed = run(setup, book, second)
        again = len(first.jobs) + len(second.jobs) - len(whole.jobs)
        assert again in (0, 1)  # 1: cut between a change that won and the trial that confirms it
        assert result == expected
        assert [trial.verdict for trial in resumed] == [trial.verdict for trial in trials]


def test_a_finished_run_measures_nothing_again(setup: Setup, book: Path) -> None:
    expected, _ = run(setup, book, FakeDevice())
    size = book.stat().st_size
    device = FakeDevice()
    result, _ = run(setup, book, device)
    assert (result, device.jobs, book.stat().st_size) == (expected, [], size)
    device = FakeDevice()
    run(setup, book, device, fresh=True)
    assert device.jobs


def test_a_trial_that_failed_is_tried_again(setup: Setup, book: Path) -> None:
    run(setup, book, FakeDevice(fails=lambda overrides: "no memory" if overrides["enable_mtp"] else None))
    device = FakeDevice()
    result, _ = run(setup, book, device)
    assert result.settings["enable_mtp"] is True
    assert not any(job["overrides"]["enable_cuda_graph"] is False for job in device.jobs)  # those are in the logbook


def test_a_half_written_last_line_is_cut_off_and_measured_again(setup: Setup, book: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(setup, book, FakeDevice(ends_after=3))
    lines = book.read_bytes().splitlines(keepends=True)
    book.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    told = io.StringIO()
    expected, _ = run(setup, book.with_name("whole.jsonl"), FakeDevice())
    result, _ = run(setup, book, FakeDevice(), stages=Stages(Console(file=told, width=200)))
    assert "half-written last line" in told.getvalue()
    assert result == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "identity"}, "of another device"),
        ({"artifact": "sha256"}, "of another artifact"),
        ({"artifact": "config_sha256"}, "of another artifact, or of another scheduler.yaml"),
        ({"workload": "sha256"}, "of other requests"),
    ],
)
def test_lines_of_another_device_or_artifact_are_not_reused_and_it_is_said(
    setup: Setup, book: Path, changes: dict[str, str], words: str
) -> None:
    run(setup, book, FakeDevice())
    ((part, field),) = changes.items()
    if part == "workload":
        record = setup.work.record.model_copy(update={field: "f" * 64})
        other = replace(setup, work=replace(setup.work, record=record))
    else:
        other = replace(setup, **{part: getattr(setup, part).model_copy(update={field: "f" * 64})})
    told, device = io.StringIO(), FakeDevice()
    run(other, book, device, stages=Stages(Console(file=told, width=200)))
    assert device.jobs
    assert words in told.getvalue()
    assert "not reused" in told.getvalue()


def test_a_winner_that_drifts_is_refused_and_the_one_before_it_soaks(setup: Setup, book: Path) -> None:
    device = FakeDevice(drifts=lambda overrides: overrides["enable_mtp"])
    result, trials = run(setup, book, device)
    soaks = [trial for trial in trials if trial.step == "soak"]
    assert [trial.verdict for trial in soaks] == ["drifts", "drifts", "steady"]
    assert "5% is allowed" in soaks[0].reason
    assert soaks[0].drift is not None
    assert soaks[0].drift.tpot == pytest.approx(0.2 * 0.8, abs=0.03)
    assert result.settings["enable_mtp"] is False
    assert result.settings["enable_cuda_graph"] is True
    assert result.settings["adaptive"] is True
    assert result.soak == soaks[-1].number
    assert device.now_s > 3 * 600  # in virtual time


def test_where_everything_drifts_nothing_is_chosen(setup: Setup, book: Path) -> None:
    with pytest.raises(TuningError, match="no settings held steady over 10 minutes"):
        run(setup, book, FakeDevice(drifts=lambda _: True))
    assert not read_logbook(book).results


def test_a_drift_within_the_limit_is_steady(setup: Setup, book: Path) -> None:
    result, _ = run(replace(setup, drift_limit=0.3), book, FakeDevice(drifts=lambda _: True))
    assert result.soak is not None


def test_the_curve_names_the_length_with_most_tokens_per_ms(setup: Setup, book: Path) -> None:
    result, _ = run(replace(setup, threshold=0.3), book, FakeDevice())
    curve = result.curve
    assert [point.draft_length for point in curve.points] == [0, 1, 2, 3]
    assert curve.points[0].mean_accepted_length == 1.0
    assert curve.points[0].step_ms == pytest.approx(10, rel=0.01)
    assert curve.points[3].by_task["json"].tokens_per_ms == pytest.approx(3.196 / 13, rel=0.01)
    assert curve.best_by_task == {"json": 3, "chat": 2}
    assert curve.pick == 3
    assert curve.acceptance[0] == pytest.approx(0.7)
    vocabulary = result.draft_vocabulary
    assert [option.tokens for option in vocabulary.options] == [300, 120]
    assert vocabulary.used_tokens[0] in (7, 8) or vocabulary.counted > 0
    assert [option.measured for option in vocabulary.options] == [False, True]


def test_a_trial_on_a_throttling_device_says_so(setup: Setup, book: Path) -> None:
    result, trials = run(setup, book, FakeDevice(hot=lambda overrides: overrides["kv_tiers"] == [256]))
    tiers = next(trial for trial in trials if trial.step == "kv_tiers")
    assert tiers.warnings == ("the hardware throttled: hw_thermal_slowdown (2 x)",)
    assert f"the hardware throttled in trials {tiers.number}: their figures are of a hot device" in result.notes


def test_every_line_names_what_it_was_measured_on(setup: Setup, book: Path) -> None:
    run(setup, book, FakeDevice())
    for line in map(json.loads, book.read_text().splitlines()):
        assert line["device"]["identity"] == setup.device.identity
        assert line["artifact"]["engine_sha256"] == setup.artifact.engine_sha256
        assert line["versions"]
        if line["kind"] == "trial" and line["verdict"] != "not applicable":
            assert line["power_mode"] == "MAXN"
            assert line["conditions_before"]["temperature_c"] >= 40
            assert line["conditions_before"]["gpu_clock_mhz"] is None  # unknown, not 0
            assert line["duration_s"] in (10.0, 600.0)


def test_trials_use_the_whole_device_and_the_soak_leaves_the_headroom(setup: Setup, book: Path) -> None:
    device = FakeDevice()
    run(setup, book, device)
    soaks = [job for job in device.jobs if job["soak_s"]]
    assert soaks
    assert all("throughput_headroom_fraction" not in job["overrides"] for job in soaks)
    trials = [job for job in device.jobs if not job["soak_s"]]
    assert {job["overrides"]["throughput_headroom_fraction"] for job in trials} == {0.0}
