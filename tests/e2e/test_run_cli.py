"""`edgert` on an artifact that `edgebuild` made: every command and option, as a shell meets them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import command, environment, run
from edgebuild.profile.loader import bundled_traffic
from tokenizers import Tokenizer


def generate(artifact: Path, *arguments: str) -> Any:
    ran = run(["edgert", "generate", artifact, *arguments, "--json"])
    assert ran.code == 0, ran.err
    assert ran.err == ""
    return json.loads(ran.out)


def test_json_carries_text_ids_reason_usage_and_times(llama_artifact: Path) -> None:
    answer = generate(llama_artifact, "--prompt-ids", "5,6,7", "--max-tokens", "9", "--ignore-eos")
    assert len(answer["token_ids"]) == 9
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["total_tokens"] == 12
    assert answer["ttft_ms"] > 0
    assert answer["tpot_ms"] > 0
    assert set(answer["itl_ms"]) == {"p50", "p90", "p99"}
    assert set(answer["phases"]) >= {"load_ms", "queue_ms", "prefill_ms", "decode_ms"}
    tokenizer = Tokenizer.from_file(str(llama_artifact / "tokenizer.json"))
    assert answer["text"] == tokenizer.decode(answer["token_ids"])


def test_text_streams_to_stdout_and_equals_the_json(llama_artifact: Path) -> None:
    arguments = ["--prompt", "The capital of France", "--max-tokens", "12", "--ignore-eos"]
    ran = run(["edgert", "generate", llama_artifact, *arguments])
    assert ran.code == 0, ran.err
    assert ran.out == generate(llama_artifact, *arguments)["text"] + "\n"


def test_a_chat_message_goes_through_the_template(llama_artifact: Path) -> None:
    tokenizer = Tokenizer.from_file(str(llama_artifact / "tokenizer.json"))
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = ",".join(map(str, tokenizer.encode(text, add_special_tokens=False).ids))
    common = ["--max-tokens", "8", "--ignore-eos"]
    chatted = generate(llama_artifact, "--chat", "hello", *common)
    assert chatted["token_ids"] == generate(llama_artifact, "--prompt-ids", ids, *common)["token_ids"]


def test_sampling_options_reach_the_model(llama_artifact: Path) -> None:
    base = ["--prompt-ids", "5,6,7", "--max-tokens", "16", "--ignore-eos"]
    hot = [*base, "--temperature", "1.5"]
    greedy = generate(llama_artifact, *base)["token_ids"]
    seeded = [generate(llama_artifact, *hot, "--seed", seed)["token_ids"] for seed in ("1", "1", "2")]
    assert seeded[0] == seeded[1] != seeded[2]
    assert seeded[0] != greedy
    assert generate(llama_artifact, *hot, "--seed", "3", "--top-k", "1")["token_ids"] == greedy
    assert generate(llama_artifact, *hot, "--seed", "4", "--top-p", "0.000001")["token_ids"] == greedy


def test_stop_strings_end_the_answer(llama_artifact: Path) -> None:
    base = ["--prompt-ids", "5,6,7", "--max-tokens", "24", "--ignore-eos"]
    whole = generate(llama_artifact, *base)["text"]
    stop = whole[6:8]
    answer = generate(llama_artifact, *base, "--stop", "never in there", "--stop", stop)
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_drafting_can_only_be_switched_off_where_there_is_no_drafter(llama_artifact: Path) -> None:
    assert generate(llama_artifact, "--prompt-ids", "5", "--max-tokens", "2", "--draft-length", "0")["token_ids"]
    ran = run(["edgert", "generate", llama_artifact, "--prompt-ids", "5", "--draft-length", "2"])
    assert ran.code == 4
    assert "draft" in ran.error_line


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--prompt", ""], 5, "empty"),
        (["--prompt-ids", ""], 5, "empty"),
        (["--prompt-ids", "5,320"], 5, "320"),
        (["--prompt-ids", ",".join(["7"] * 257)], 5, "257"),
        (["--prompt", "a", "--max-tokens", "0"], 5, "max_tokens"),
        (["--prompt", "a", "--temperature", "-1"], 5, "temperature"),
        (["--prompt", "a", "--top-p", "0"], 5, "top_p"),
        (["--prompt", "a", "--stop", ""], 5, "stop"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(
    llama_artifact: Path, arguments: list[str], code: int, text: str
) -> None:
    ran = run(["edgert", "generate", llama_artifact, *arguments])
    assert ran.code == code, ran.err
    assert text in ran.error_line


def test_one_question_prints_the_answer_the_figures_and_where_things_are(llama_artifact: Path) -> None:
    ran = run(["edgert", "chat", llama_artifact, "--once", "hello", "--max-tokens", "8", "--ignore-eos"])
    assert ran.code == 0, ran.err
    for text in ("TTFT", "TPOT", "tokens/s", f"artifact  {llama_artifact}", "report.html"):
        assert text in ran.out


def test_a_conversation_over_a_pipe(llama_artifact: Path) -> None:
    line = command("edgert", "chat", llama_artifact, "--max-tokens", "6", "--system", "be brief")
    done = subprocess.run(
        line, input="hi\n/reset\nhi again\n/exit\n", env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens/s") == 2
    assert "forgotten" in done.stdout


@pytest.mark.parametrize("source", ["bundled histogram", "the trace itself"])
def test_bench_reports_latencies_and_throughput_on_real_lengths(
    llama_artifact: Path, workshop: Path, source: str
) -> None:
    """The bundled lengths pass this context by far: they are clipped to it, and the report says how many were."""
    traffic = bundled_traffic() if source == "bundled histogram" else workshop / "trace.csv"
    ran = run(["edgert", "bench", llama_artifact, "--traffic", traffic, "--requests", "12", "--concurrency", "4",
               "--json"])  # fmt: skip
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert report["requests"] == 12
    assert report["concurrency"] == 4
    flat = json.dumps(report)
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "p99"):
        assert f'"{key}"' in flat, key
    shown = run(["edgert", "bench", llama_artifact, "--traffic", traffic, "--requests", "2"])
    assert shown.code == 0
    assert "TTFT" in shown.out


def test_a_scheduler_that_asks_for_the_impossible_is_refused_with_the_reason(
    llama_artifact: Path, tmp_path: Path
) -> None:
    import shutil

    artifact = Path(shutil.copytree(llama_artifact, tmp_path / "edited"))
    path = artifact / "scheduler.yaml"
    text = path.read_text()
    assert "slots: 4" in text
    assert "prefill_decode_ratio_range: [4, 8]" in text
    path.write_text(text.replace("prefill_decode_ratio_range: [4, 8]", "prefill_decode_ratio_range: [1, 8]"))
    assert generate(artifact, "--prompt-ids", "5", "--max-tokens", "2")["token_ids"]  # a possible edit is taken
    path.write_text(text.replace("slots: 4", "slots: 400"))
    ran = run(["edgert", "generate", artifact, "--prompt", "a"])
    assert ran.code == 4
    assert "400" in ran.error_line


def test_ctrl_c_ends_a_generation_with_130(llama_artifact: Path) -> None:
    import signal

    line = command("edgert", "chat", llama_artifact, "--max-tokens", "200", "--ignore-eos")
    process = subprocess.Popen(
        line, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # the help line: the engine is loaded, it waits for a question
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_doctor_finds_a_fresh_artifact_healthy_and_a_changed_one_not(llama_artifact: Path, tmp_path: Path) -> None:
    ran = run(["edgert", "doctor", llama_artifact])
    assert ran.code == 0, ran.out + ran.err
    for row in ("versions", "device", "sensors", "memory", "golden", "decode", "healthy"):
        assert re.search(rf"^{row}", ran.out, re.MULTILINE), row
    assert len(ran.out.splitlines()) <= 24
    broken = shutil.copytree(llama_artifact, tmp_path / "broken")
    weights = broken / "decoder.weights"
    weights.write_bytes(weights.read_bytes()[:-4])
    ran = run(["edgert", "doctor", broken, "--json"])
    assert ran.code == 1
    document = json.loads(ran.out)
    assert [each["symptom"] for each in document["findings"]] == ["damaged artifact"]
