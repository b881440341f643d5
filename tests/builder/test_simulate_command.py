"""`edgebuild simulate` on a toy artifact: traffic in every form, costs from every place, figures and refusals."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgebuild.commands.simulate import simulate as command
from edgebuild.errors import OutputError, SimulationError, TrafficError
from edgebuild.plan import plan_for
from edgebuild.plan.from_profile import limits_from
from edgebuild.profile import load_profile
from edgebuild.profile.loader import bundled_traffic, bundled_traffic_names
from edgebuild.simulate.arrivals import draw, has_times, mean_rate, read_arrivals
from edgebuild.simulate.artifact import find_costs, read_subject, replay, setting_of
from edgebuild.simulate.engine import simulate
from edgebuild.simulate.estimate import of_artifact, of_plan
from edgebuild.simulate.records import Arrival, Gaps, Outcome, Run
from edgebuild.simulate.study import Ask, study
from edgebuild.simulate.summary import Slo, changes, figures
from edgebuild.traffic import dump_histogram, read_traffic
from edgert.costs import StepCosts
from edgert.integrity import check_files
from edgert.manifest import LedgerLine, StateSpec, load_manifest
from toy_artifact import make_artifact, toy_manifest
from toy_plan import SMOLLM2, histogram

LIST = "arrival_s,prompt_tokens,output_tokens,task\n0.0,20,5,chat\n0.01,200,9,\n0.5,31,1,code\n2.5,40,30,chat\n"


def costs() -> StepCosts:
    manifest = toy_manifest()
    cells = {cell: (1.0 + 0.05 * cell.batch * cell.query_rows + cell.kv_tier / 512,) for cell in manifest.cells}
    return StepCosts("measured", "a toy", "onnxruntime", "1", manifest.model.identity, "written", 0, 0.1, cells)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("simulate") / "toy")


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    directory = Path(shutil.copytree(pristine, tmp_path / "toy"))
    (directory / "costs.json").write_text(costs().dump())
    return directory


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "list.csv"
    path.write_text(LIST)
    return path


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(command, [str(each) for each in arguments], env={"COLUMNS": "200"})


def test_a_list_of_requests_gives_both_policies_and_what_adaptive_gains(artifact: Path, listed: Path) -> None:
    result = invoke(artifact, "--traffic", listed, "--json", "--slo-ttft-ms", "500", "--slo-itl-ms", "50")
    document = json.loads(result.output)
    assert set(document["policies"]) == {"fixed", "adaptive"}
    for made in document["policies"].values():
        assert made["requests"] == 4
        assert made["good_share"] == 1.0
        assert made["ttft_ms_p95"] <= 500
    assert set(document["adaptive_gains"]) == {"ttft_ms_p95", "longest_gap_ms", "goodput_per_s"}
    assert document["costs"]["source"] == "measured"
    run = replay(artifact, read_arrivals(listed)[0], adaptive=False)
    assert figures(run, Slo()).ttft_ms_p95 == pytest.approx(document["policies"]["fixed"]["ttft_ms_p95"], abs=1e-3)


def test_people_get_a_table_a_line_over_time_and_a_page(artifact: Path, listed: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = invoke(artifact, "--traffic", listed, "--picture", page)
    assert result.exit_code == 0, result.output
    for expected in ("TTFT p95, ms", "longest gap, ms", "adaptive", "measured on a toy", "no goodput", f"wrote {page}"):
        assert expected in result.output
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "http" not in text
    assert "<script" not in text
    with pytest.raises(OutputError, match="No such file"):
        CliRunner().invoke(
            command, [str(artifact), "--traffic", str(listed), "--picture", str(tmp_path / "no" / "x")],
            standalone_mode=False, catch_exceptions=False,
        )  # fmt: skip


def test_a_histogram_comes_at_the_load_that_is_asked_for(artifact: Path) -> None:
    results = {}
    for load in ("0.3", "1.5"):
        result = invoke(
            artifact, "--traffic", "bursty-long", "--load", load, "--requests", "150", "--policy", "fixed", "--json"
        )
        results[load] = json.loads(result.output)
    slow, fast = (results[load]["traffic"]["rate_per_s"] for load in ("0.3", "1.5"))
    assert fast == pytest.approx(5 * slow)
    assert "gamma of shape 0.15" in results["0.3"]["traffic"]["arrivals"]
    assert results["1.5"]["policies"]["fixed"]["most_waiting"] > results["0.3"]["policies"]["fixed"]["most_waiting"]
    assert results["0.3"]["adaptive_gains"] is None
    assert any("were cut to the context" in note for note in results["0.3"]["notes"])
    assert any("CC BY 4.0" in note for note in results["0.3"]["notes"])


def test_limits_are_the_artifacts_own_unless_told_otherwise(artifact: Path, listed: Path) -> None:
    schedule = artifact / "scheduler.yaml"
    schedule.write_text(schedule.read_text().replace("ttft_target_ms: null", "ttft_target_ms: 750"))
    (artifact / "plan.json").write_text(json.dumps({"slo": {"ttft_ms": 750, "itl_ms": None, "tpot_ms": 33}}))
    common = (artifact, "--traffic", listed, "--policy", "fixed", "--json")
    assert json.loads(invoke(*common).output)["slo"] == {"ttft_ms": 750, "itl_ms": None, "tpot_ms": 33}
    told = invoke(*common, "--slo-ttft-ms", "10", "--slo-itl-ms", "5", "--slo-tpot-ms", "2")
    assert json.loads(told.output)["slo"] == {"ttft_ms": 10, "itl_ms": 5, "tpot_ms": 2}


def test_a_closed_loop_holds_so_many_at_any_time(artifact: Path, listed: Path) -> None:
    result = invoke(artifact, "--traffic", listed, "--concurrency", "2", "--policy", "fixed", "--json")
    document = json.loads(result.output)
    assert document["traffic"]["arrivals"] == "2 at any time, seed 0"
    run = replay(artifact, read_arrivals(listed)[0], concurrency=2, adaptive=False)
    ends = sorted(each.last_s for each in run.outcomes)
    starts = sorted(each.arrival.at_s for each in run.outcomes)
    assert starts[:2] == [0.0, 0.0]
    assert starts[2:] == pytest.approx(ends[:2])
    alone = replay(artifact, read_arrivals(listed)[0], concurrency=1, adaptive=False)
    assert alone.end_s >= run.end_s


def test_costs_are_estimated_from_a_profile_and_say_so(artifact: Path, listed: Path) -> None:
    (artifact / "costs.json").unlink()
    with pytest.raises(SimulationError, match=r"no costs.json, and no profile.*--measure"):
        find_costs(read_subject(artifact))
    result = invoke(artifact, "--traffic", listed, "--profile", "cpu")
    assert "costs: ESTIMATED for cpu, not measured: bytes / (25.6 GB/s x 0.78)" in result.output
    estimate = find_costs(read_subject(artifact), profile_name="cpu")
    assert (estimate.source, estimate.reads) == ("estimate", "written")
    assert set(estimate.cells) == set(toy_manifest().cells)


def test_the_estimate_of_an_artifact_is_that_of_its_plan() -> None:
    """The same formula from two sides: manifest and plan.json here, plan and profile there."""
    profile = load_profile("cpu")
    plan = plan_for(limits_from(profile, SMOLLM2), histogram([(374, 44), (1500, 200)]), SMOLLM2)
    weights, kv = 4 * SMOLLM2.weight_elements, 2 * SMOLLM2.kv_heads * SMOLLM2.head_dim
    manifest = replace(
        toy_manifest(),
        cells=plan.cells,
        cache_tokens=plan.cache_tokens,
        ledger=(LedgerLine("weights", weights, ""),),
        states=(StateSpec("key", "key.out", "float32", "kv", (SMOLLM2.layers, plan.cache_tokens, kv)),),
    )
    bandwidth = profile.device.bandwidth_gb_per_s * 1e9
    here = of_artifact(manifest, plan.to_json(), plan.cells, profile.name, bandwidth, plan.cost.launch_cost_tokens)
    there = of_plan(plan)
    for cell in plan.cells:
        assert here.cells[cell] == pytest.approx(there.cells[cell])


def test_costs_are_estimated_for_the_device_that_the_plan_was_made_for(artifact: Path) -> None:
    (artifact / "costs.json").unlink()
    plan = json.loads((artifact / "plan.json").read_text()) if (artifact / "plan.json").exists() else {}

    def estimated(**facts: object) -> StepCosts:
        return find_costs(replace(read_subject(artifact), plan={**plan, **facts}))

    mine = estimated(device="small", bandwidth_gb_per_s=40.0)  # no bundled profile has that name
    assert (mine.source, mine.device) == ("estimate", "small")
    slower = estimated(device="small", bandwidth_gb_per_s=20.0)
    assert all(slower.cells[cell][0] > ms[0] for cell, ms in mine.cells.items())
    before = load_profile("cpu").device.bandwidth_gb_per_s  # a plan of an older edgebuild names the profile alone
    assert estimated(device="cpu").cells == estimated(device="cpu", bandwidth_gb_per_s=before).cells
    with pytest.raises(SimulationError, match="no profile to estimate costs from"):
        estimated(device="small")


def test_costs_of_another_model_are_refused(artifact: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(replace(costs(), model="b" * 64).dump())
    with pytest.raises(SimulationError, match=r"costs of model bbbb.*the artifact's is aaaa"):
        find_costs(read_subject(artifact), file=other)


def test_measured_costs_lie_in_an_artifact_without_damaging_it(artifact: Path) -> None:
    assert check_files(artifact, load_manifest(artifact))


def test_a_trace_that_comes_all_at_once_takes_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n3.0,20,5\n3.0,30,6\n")
    arrivals, pattern = read_arrivals(path)
    assert [each.prompt_tokens for each in arrivals] == [20, 30]
    assert (pattern.how, pattern.rate) == ("all at once, as the trace says", 0.0)
    with pytest.raises(TrafficError, match=r"its 2 requests all come at once") as refused:
        read_arrivals(path, rate=2.0)
    assert "--concurrency" in str(refused.value.hint)
    path.write_text("arrival_s,prompt_tokens,output_tokens\n3.0,20,5\n")
    assert len(read_arrivals(path, rate=2.0)[0]) == 1


@pytest.mark.parametrize("arguments", [("--rate", "1", "--load", "0.5"), ("--measure", "--profile", "cpu")])
def test_two_answers_to_one_question_are_refused(artifact: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SimulationError, match="give"):
        CliRunner().invoke(command, [str(artifact), *arguments], standalone_mode=False, catch_exceptions=False)


def test_an_unknown_traffic_names_the_bundled_ones(artifact: Path) -> None:
    with pytest.raises(TrafficError, match="azure-conv-2023, bursty-long, steady-chat"):
        CliRunner().invoke(
            command, [str(artifact), "--traffic", "nothing"], standalone_mode=False, catch_exceptions=False
        )


def test_a_study_says_whether_edgert_holds_slots_back_too(artifact: Path, listed: Path) -> None:
    subject = read_subject(artifact, {"throughput_headroom_fraction": 0.4})
    ask = Ask(traffic=listed, policies=("fixed",), rate=1.0, requests=4)
    assert any(note.startswith("so does edgert, by costs.json") for note in study(subject, costs(), ask).notes)
    (artifact / "costs.json").unlink()
    notes = study(subject, costs(), ask).notes
    assert any(note.startswith("edgert admits all 4 while there is no costs.json") for note in notes)
    free = study(read_subject(artifact), costs(), ask)
    assert not any("edgert" in note for note in free.notes)


def test_headroom_holds_slots_back(artifact: Path) -> None:
    subject = read_subject(artifact, {"throughput_headroom_fraction": 0.4})
    held, free = (setting_of(subject, costs(), headroom=headroom) for headroom in (True, False))
    arrivals = [Arrival(0.0, 20, 60) for _ in range(12)]
    with_headroom, without = (simulate(setting, arrivals) for setting in (held, free))
    assert held.admitted is not None
    assert held.admitted < held.slots
    assert with_headroom.end_s > without.end_s
    assert not any(label.startswith("decode-4") for label in with_headroom.launches) or held.admitted == 3


# --- traffic files ---


def test_a_trace_keeps_its_times_and_is_stretched_to_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\nnonsense,1,1\n2023-11-16 18:15:47.5,10,0\n2023-11-17 00:00:00Z,5,6"
    )
    arrivals, pattern = read_arrivals(path)
    assert [each.at_s for each in arrivals] == pytest.approx([0.0, 4.314579, 20653.31941])
    assert (arrivals[1].prompt_tokens, arrivals[2].output_tokens, pattern.skipped) == (396, 6, 2)
    stretched, _ = read_arrivals(path, rate=2.0)
    assert mean_rate(stretched) == pytest.approx(2.0)
    assert [each.at_s / stretched[-1].at_s for each in stretched] == pytest.approx(
        [each.at_s / arrivals[-1].at_s for each in arrivals]
    )


@pytest.mark.parametrize(
    ("name", "text", "times"),
    [
        ("burst.csv", "Timestamp,Model,Request tokens,Response tokens,Log Type\n5,m,10,2,a\n7.5,m,30,4,b\n", (0, 2.5)),
        ("moon.jsonl", '{"timestamp": 1000, "input_length": 10, "output_length": 2}\n'
         '{"timestamp": 3500, "input_length": 30, "output_length": 4, "hash_ids": []}\n', (0, 2.5)),
        ("own.jsonl", '{"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 2}\n'
         '{"arrival_s": 3.5, "prompt_tokens": 30, "output_tokens": 4, "task": "t"}\n', (0, 2.5)),
    ],
)  # fmt: skip
def test_every_format_with_times_is_read(tmp_path: Path, name: str, text: str, times: tuple[float, ...]) -> None:
    (tmp_path / name).write_text(text)
    arrivals, _ = read_arrivals(tmp_path / name)
    assert [each.at_s for each in arrivals] == list(times)
    assert [(each.prompt_tokens, each.output_tokens) for each in arrivals] == [(10, 2), (30, 4)]


def test_a_file_without_times_needs_a_rate(tmp_path: Path) -> None:
    path = bundled_traffic("steady-chat")
    assert not has_times(path)
    with pytest.raises(TrafficError, match=r"lengths without times.*--rate"):
        read_arrivals(path)
    with pytest.raises(TrafficError, match="No such file"):
        read_arrivals(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("arrival_s,prompt_tokens,output_tokens\nx,1,1\n")
    with pytest.raises(TrafficError, match=r"no row has a time and both lengths \(1 were skipped\)"):
        read_arrivals(tmp_path / "empty.csv")


@pytest.mark.parametrize("burstiness", [1.0, 0.15])
def test_drawn_requests_have_the_histograms_lengths_and_the_rate(burstiness: float) -> None:
    histogram = read_traffic(bundled_traffic())
    arrivals = draw(histogram, 20_000, 2.0, burstiness, 5)
    assert mean_rate(arrivals) == pytest.approx(2.0, rel=0.06)
    assert np.mean([each.prompt_tokens for each in arrivals]) == pytest.approx(
        histogram.prompt_tokens / histogram.requests, rel=0.03
    )
    gaps = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert draw(histogram, 50, 2.0, burstiness, 5) == draw(histogram, 50, 2.0, burstiness, 5)


def test_bundled_traffics_are_whole_and_attributed() -> None:
    assert bundled_traffic_names() == ["azure-conv-2023", "bursty-long", "steady-chat"]
    for name in bundled_traffic_names():
        histogram = read_traffic(bundled_traffic(name))
        assert histogram.name == name
        assert "CC BY 4.0" in histogram.attribution
        assert histogram.problems() == []
    assert read_traffic(bundled_traffic("bursty-long")).burstiness == 0.15


def test_burstiness_stays_in_a_histogram_file(tmp_path: Path) -> None:
    histogram = replace(read_traffic(bundled_traffic("steady-chat")), burstiness=0.4)
    (tmp_path / "h.yaml").write_text(dump_histogram(histogram))
    assert read_traffic(tmp_path / "h.yaml") == histogram
    (tmp_path / "h.yaml").write_text(dump_histogram(histogram).replace("burstiness: 0.4", "burstiness: -1"))
    with pytest.raises(TrafficError, match=r"burstiness is -1, expected a number from 0.01 to 100"):
        read_traffic(tmp_path / "h.yaml")


# --- figures ---


def test_figures_are_those_of_numpy_and_goodput_counts_the_whole_slo() -> None:
    outcomes = [
        Outcome(Arrival(0.0, 5, 3), first_s=0.1, last_s=0.5, longest_gap_s=0.3, tokens=3),
        Outcome(Arrival(1.0, 5, 1), first_s=1.4, last_s=1.4, tokens=1),
        Outcome(Arrival(2.0, 5, 2), first_s=2.1, last_s=2.2, longest_gap_s=0.1, tokens=2),
    ]
    gaps = Gaps()
    for gap, count in ((0.1, 2), (0.3, 1)):
        gaps.add(gap, count)
    run = Run(outcomes, gaps, end_s=4.0, busy_s=1.0, prompt_tokens=15, padded_tokens=5)
    made = figures(run, Slo(ttft_ms=200.0, itl_ms=250.0))
    assert made.ttft_ms_p50 == pytest.approx(np.percentile([100, 400, 100], 50))
    assert made.ttft_ms_p95 == pytest.approx(np.percentile([100, 400, 100], 95))
    assert made.tpot_ms_p50 == pytest.approx(150.0)
    assert (made.longest_gap_ms, made.itl_ms_p95) == (pytest.approx(300.0), pytest.approx(300.0))
    assert (made.goodput_per_s, made.good_share) == (0.25, pytest.approx(1 / 3))
    assert figures(run, Slo(tpot_ms=120.0)).good_share == pytest.approx(2 / 3)
    assert figures(run, Slo()).goodput_per_s is None
    assert (made.device_busy, made.padding, made.output_tokens_per_s) == (0.25, 0.25, 1.5)
    better = replace(made, ttft_ms_p95=made.ttft_ms_p95 / 2, goodput_per_s=0.5)
    assert changes(made, better) == pytest.approx({"ttft_ms_p95": 0.5, "longest_gap_ms": 0.0, "goodput_per_s": 1.0})


@pytest.mark.parametrize("option", ["--rate", "--load", "--burstiness", "--slo-ttft-ms"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_wrong_usage_and_not_waited_for(artifact: Path, option: str, value: str) -> None:
    ran = CliRunner().invoke(command, [str(artifact), option, value])
    assert ran.exit_code == 2
    assert f"'{option}'" in ran.output


def test_a_page_that_cannot_be_replaced_stays_as_it_was(
    artifact: Path, listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("the old one")
    monkeypatch.setattr("os.fsync", full_disk)
    ran = CliRunner().invoke(command, [str(artifact), "--traffic", str(listed), "--picture", str(page)])
    assert isinstance(ran.exception, OutputError)
    assert page.read_text() == "the old one"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")
