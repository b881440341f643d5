"""The bench draws what the traffic says, clips to the context, keeps its concurrency and adds up."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from edgert import bench, cli
from edgert.bench import TrafficFileError, make_requests, read_lengths, run_bench, summarise
from edgert.engine import Engine
from edgert.errors import BackendError
from fakes import VOCABULARY, make_runtime

HISTOGRAM = """\
edgebuild_traffic: 1
name: small
source_sha256: ''
attribution: ''
requests: 4
prompt_counts: {size: 301, counts: "10:1 20:2 300:1"}
output_counts: {size: 9, counts: "4:3 8:1"}
decode_context_changes: {size: 1, changes: ""}
"""


@pytest.fixture
def histogram(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(HISTOGRAM)
    return path


def test_lengths_follow_the_histogram(histogram: Path) -> None:
    draws, rng = read_lengths(histogram), random.Random(1)
    seen = [draws.draw(rng) for _ in range(4000)]
    prompts = Counter(prompt for prompt, _ in seen)
    assert set(prompts) == {10, 20, 300}
    assert prompts[20] == pytest.approx(2000, rel=0.1)
    assert Counter(output for _, output in seen)[4] == pytest.approx(3000, rel=0.1)


@pytest.mark.parametrize(
    "columns", ["TIMESTAMP,ContextTokens,GeneratedTokens", "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"]
)
def test_azure_traces_are_read_by_header(tmp_path: Path, columns: str) -> None:
    images = ",0" if "NumImages" in columns else ""
    path = tmp_path / "trace.csv"
    path.write_text(f"{columns}\n2023{images},100,7\n2023{images},,3\n2023{images},0,3\n2023{images},100,7")
    assert read_lengths(path).draw(random.Random(0)) == (100, 7)


def test_the_bundled_traffic_is_read() -> None:
    path = Path(__file__).parents[2] / "profiles" / "traffic" / "azure-conv-2023.yaml"
    draws, rng = read_lengths(path), random.Random(0)
    prompts = sorted(draws.draw(rng)[0] for _ in range(2001))
    assert 900 < prompts[1000] < 1150  # the trace's median is 1,020


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("a.csv", "time,tokens\n1,2\n", "the header has time, tokens"),
        ("a.csv", "", "the header has nothing"),
        ("a.csv", "ContextTokens,GeneratedTokens\nx,y\n", "no row has both"),
        ("a.yaml", "runtime: 1", "not a traffic histogram"),
        ("a.yaml", "{", "not YAML"),
        ("own.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n', "not YAML.*edgebuild traffic"),
        ("a.yaml", "name: !!timestamp x", "not YAML"),
        ("a.yaml", HISTOGRAM.replace("10:1", "ten:1"), "prompt_counts"),
        ("a.yaml", HISTOGRAM.replace("4:3 8:1", ""), "no requests"),
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path: Path, name: str, text: str, pattern: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TrafficFileError, match=pattern):
        read_lengths(tmp_path / name)


def test_requests_are_clipped_to_the_context_and_counted(histogram: Path) -> None:
    requests = make_requests(read_lengths(histogram), count=400, context_tokens=64, vocabulary=10, seed=3)
    long = [request for request in requests if request.clipped]
    assert {len(request.prompt_ids) for request in long} == {63}
    assert all(len(request.prompt_ids) + request.output_tokens <= 64 for request in requests)
    assert 60 < len(long) < 140
    assert all(0 <= token < 10 for request in requests for token in request.prompt_ids)


def test_the_same_seed_draws_the_same_requests(histogram: Path) -> None:
    draws = read_lengths(histogram)
    arguments: dict[str, Any] = {"count": 20, "context_tokens": 64, "vocabulary": 10}
    assert make_requests(draws, seed=1, **arguments) == make_requests(draws, seed=1, **arguments)
    assert make_requests(draws, seed=1, **arguments) != make_requests(draws, seed=2, **arguments)


def test_every_request_runs_and_the_sums_agree(histogram: Path) -> None:
    with Engine(lambda: make_runtime(context=64)) as engine:
        requests = make_requests(read_lengths(histogram), count=30, context_tokens=64, vocabulary=VOCABULARY, seed=0)
        told: list[int] = []
        completions, seconds = run_bench(engine, requests, concurrency=3, progress=lambda done, of: told.append(done))  # noqa: ARG005
        report = summarise(
            completions, seconds, requests, concurrency=3, traffic="t", seed=0, slo_ttft_ms=1e9, slo_tpot_ms=1e9
        )
    assert sorted(told) == list(range(1, 31))
    assert report["output_tokens"] == sum(request.output_tokens for request in requests)
    assert report["prompt_tokens"] == sum(len(request.prompt_ids) for request in requests)
    assert report["finish_reasons"] == {"length": 30}
    assert report["goodput_requests_per_s"] == pytest.approx(report["requests_per_s"])
    assert report["ttft_ms"]["p50"] <= report["ttft_ms"]["p95"] <= report["ttft_ms"]["p99"] <= report["ttft_ms"]["max"]
    assert report["longest_gap_ms"] == report["itl_ms"]["max"]
    table = bench.render(report).splitlines()[-5:]
    assert table[0].split() == ["TTFT", "TTFT", "ITL", "longest"]
    assert table[-1].split()[0] == "t"
    assert f"{report['longest_gap_ms']:,.1f}" in table[-1]


def test_no_more_requests_run_at_a_time_than_asked_for(histogram: Path) -> None:
    requests = make_requests(read_lengths(histogram), count=20, context_tokens=64, vocabulary=VOCABULARY, seed=0)
    lock, running, most = threading.Lock(), set(), []
    with Engine(lambda: make_runtime(context=64)) as engine:

        class Watching:
            context_tokens = 64

            def submit(self, prompt: Any, **options: Any) -> Any:
                handle = engine.submit(prompt, **options)
                with lock:
                    running.difference_update({other for other in running if other.done})
                    running.add(handle)
                    most.append(len(running))
                return handle

        run_bench(Watching(), requests, concurrency=2)
    assert max(most) <= 2


def test_a_backend_that_fails_ends_the_bench_with_its_error(histogram: Path) -> None:
    def fail(number: int) -> None:
        if number > 20:
            raise BackendError("device lost")

    requests = make_requests(read_lengths(histogram), count=20, context_tokens=64, vocabulary=VOCABULARY, seed=0)
    with Engine(lambda: make_runtime(context=64, on_launch=fail)) as engine, pytest.raises(BackendError, match="lost"):
        run_bench(engine, requests, concurrency=2)


def test_the_command_prints_json(
    histogram: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from toy_artifact import make_artifact

    artifact = make_artifact(tmp_path / "toy")
    with Engine(lambda: make_runtime(context=64, eos=())) as engine:
        monkeypatch.setattr("edgert.engine.Engine.load", lambda path: engine)  # noqa: ARG005
        monkeypatch.setattr("edgert.manifest.load_manifest", lambda path: _Vocabulary())  # noqa: ARG005
        arguments = [
            "bench",
            str(artifact),
            "--traffic",
            str(histogram),
            "--requests",
            "6",
            "--concurrency",
            "2",
            "--json",
        ]
        assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["requests"] == 6
    assert report["goodput_requests_per_s"] is None
    assert "6/6 requests" in captured.err


class _Vocabulary:
    """A manifest whose model has the fake backend's vocabulary."""

    model = type("model", (), {"token_limit": VOCABULARY})
