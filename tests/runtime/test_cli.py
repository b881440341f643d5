"""The command line over a real engine on the fake backend: output, JSON, exit codes, one-line errors, interrupts."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import toys
from edgert import cli
from edgert.chat import Conversation, chat_loop, chat_once, figures
from edgert.engine import Engine
from edgert.errors import ArtifactError
from edgert.guards.guard import Guard, GuardLimits
from edgert.guards.readings import DeviceReading
from edgert.text import TextCodec
from fakes import VOCABULARY, make_runtime
from toy_artifact import make_artifact


def small_codec() -> TextCodec:
    """One character a token, as many tokens as the fake backend's vocabulary."""
    characters = " \n<|_>abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    vocabulary = {character: number for number, character in enumerate(characters[:VOCABULARY])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return TextCodec(tokenizer, chat_template=toys.CHATML)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(lambda: make_runtime(text=small_codec(), context=256)) as running:
        yield running


@pytest.fixture
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands get the engine above; the list collects the overrides they asked for."""
    asked: list[Any] = []

    def load(path: Path, **overrides: Any) -> Engine:
        asked.append((path, overrides))
        return engine

    monkeypatch.setattr("edgert.engine.Engine.load", load)
    return asked


def test_generate_streams_the_text(loaded: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "toy", "--prompt", "hello", "--max-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert len(out) == 13
    assert out.endswith("\n")
    assert loaded == [(Path("toy"), {})]


@pytest.mark.usefixtures("loaded")
def test_generate_json_has_text_ids_usage_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "toy", "--prompt-ids", "5,6,7", "--max-tokens", "9", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["token_ids"]) == 9
    assert len(document["text"]) == 9
    assert document["finish_reason"] == "length"
    assert document["usage"]["prompt_tokens"] == 3
    assert document["usage"]["completion_tokens"] == 9
    assert document["usage"]["total_tokens"] == 12
    assert set(document) >= {"ttft_ms", "tpot_ms", "itl_ms", "phases"}
    assert set(document["phases"]) == {"load_ms", "queue_ms", "prefill_ms", "decode_ms"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-tokens", "100000"], True),
        (["--max-tokens", "255"], True),
        (["--max-tokens", "254"], False),  # max_tokens was reached as well
        (["--max-tokens", "100000", "--json"], False),
    ],
)
@pytest.mark.usefixtures("loaded")
def test_generate_says_when_the_context_ended_the_text(
    arguments: list[str], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "toy", "--prompt-ids", "5,6,7", "--ignore-eos", *arguments]) == 0
    line = f"edgert: the context of 256 tokens is full after 254 output tokens; --max-tokens is {arguments[1]}\n"
    assert capsys.readouterr().err == (line if told else "")


def test_a_stop_string_is_no_full_context(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = engine.complete([1, 2, 3], max_tokens=20).text[5:8]
    monkeypatch.setattr("edgert.engine.Engine.load", lambda path: engine)  # noqa: ARG005
    asked = ["generate", "toy", "--prompt-ids", "1,2,3", "--max-tokens", "100000"]
    assert cli.main([*asked, "--stop", stop]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("loaded")
def test_the_same_seed_gives_the_same_tokens(engine: Engine) -> None:
    sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
    assert engine.complete([1, 2], **sampling).token_ids == engine.complete([1, 2], **sampling).token_ids


def test_stop_strings_cut_the_text(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    whole = engine.complete([1, 2, 3], max_tokens=20).text
    monkeypatch.setattr("edgert.engine.Engine.load", lambda path: engine)  # noqa: ARG005
    assert cli.main(["generate", "toy", "--prompt-ids", "1,2,3", "--max-tokens", "20", "--stop", whole[5:8]]) == 0
    assert capsys.readouterr().out == whole[: whole.find(whole[5:8])] + "\n"


def test_the_draft_length_becomes_an_override(loaded: list[Any]) -> None:
    cli.main(["generate", "toy", "--prompt", "a", "--max-tokens", "1", "--draft-length", "0"])
    assert loaded[-1][1] == {"enable_mtp": False}


def test_a_request_that_cannot_be_served_is_one_line_and_its_exit_code(
    loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "toy", "--prompt", ""]) == 5
    error = capsys.readouterr().err
    assert error.startswith("edgert: the prompt is empty")
    assert error.count("\n") == 1
    assert loaded


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["generate", "/no/such/dir", "--prompt", "a"], 3),
        (["bench", "toy", "--traffic", "/no/such/file", "--requests", "1"], 8),
        (["generate", "toy", "--prompt", "a", "--draft-length", "-1"], 4),
    ],
)
def test_errors_have_the_exit_code_of_their_class(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    assert "Traceback" not in capsys.readouterr().err


def test_bench_names_the_files_there_are_in_place_of_a_bundled_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "traffic.yaml"
    asked = ["bench", str(tmp_path), "--traffic", "steady-chat", "--requests", "1"]
    assert cli.main(asked) == 8
    without = capsys.readouterr().err
    assert without.startswith("edgert: steady-chat: no such file (")
    assert "no bundled name" in without
    assert str(own) not in without
    own.write_text("not read here")
    assert cli.main(asked) == 8
    assert f"the artifact's own is {own};" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generate", "toy"],
        ["generate", "toy", "--prompt", "a", "--chat", "b"],
        ["generate", "toy", "--prompt-ids", "1,x"],
        ["bench", "toy", "--traffic", "f", "--requests", "0"],
        ["bench", "toy", "--traffic", "f", "--requests", "99999999999999"],
        ["bench", "toy", "--traffic", "f", "--requests", "1", "--slo-ttft-ms", "nan"],
        ["bench", "toy", "--traffic", "f", "--requests", "1", "--slo-tpot-ms", "-1"],
        ["fly"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: edgert" in capsys.readouterr().err


def test_help_describes_every_command_and_every_option_with_its_default() -> None:
    top = cli.build_parser()
    (commands,) = [each for each in top._actions if isinstance(each, argparse._SubParsersAction)]
    assert set(commands.choices) == {"generate", "chat", "bench", "doctor"}
    for name, parser in commands.choices.items():
        assert (parser.description or "").endswith("."), name
        for action in parser._actions:
            where, text = f"{name} {action.dest}", action.help or ""
            assert text, where
            if action.option_strings and action.required:
                assert "(required)" in text, where
            elif isinstance(action.default, (int, float)) and action.nargs != 0:
                assert f"(default {action.default:g})" in text, where
            elif action.dest in ("seed", "draft_length", "stop", "slo_ttft_ms", "slo_tpot_ms"):
                assert "(default " in text, where


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "-h"], ["chat", "-h"], ["bench", "-h"], ["--version"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "edgert" in capsys.readouterr().out


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: Path, **overrides: Any) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    monkeypatch.setattr("edgert.engine.Engine.load", interrupted)
    assert cli.main(["generate", "toy", "--prompt", "a"]) == 130
    assert capsys.readouterr().err == "edgert: interrupted\n"


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    """A real process whose stdout is closed before it writes."""
    script = (
        "import sys; from edgert import cli\n"
        "cli.run_generate = lambda options: print('x' * 100_000) or 0\n"
        "sys.exit(cli.main())"
    )
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-c", script, "generate", str(tmp_path), "--prompt", "a"],
        stdout=write, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(write)
    assert process.returncode == 141
    assert process.stderr == b""


def test_closed_standard_streams_are_no_traceback(tmp_path: Path) -> None:
    """A service manager may start us without any; Python gives None for each of them."""
    script = (
        "import os, sys; from edgert import cli\n"
        "cli.run_generate = lambda options: print(sys.stdin.read(), sys.stdout.isatty(), sys.stderr.isatty()) or 0\n"
        "os._exit(cli.main())"
    )
    command = f'exec "{sys.executable}" -c "$0" generate "{tmp_path}" --prompt a <&- >&- 2>&-'
    process = subprocess.run(["sh", "-c", command, script], check=False)
    assert process.returncode == 0


def test_a_damaged_artifact_never_reaches_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = make_artifact(tmp_path / "toy")
    with (artifact / "decoder.onnx").open("ab") as file:
        file.write(b"\x00")
    monkeypatch.setattr("edgert.loading.resolve", lambda name: pytest.fail(f"backend {name} was opened"))
    with pytest.raises(ArtifactError, match=r"decoder\.onnx"):
        Engine.load(artifact)


# chat


def test_chat_keeps_the_history_and_resets(engine: Engine) -> None:
    out = io.StringIO()
    asked: list[list[dict[str, str]]] = []

    class Recording:
        def submit(self, *, chat: list[dict[str, str]], **sampling: Any) -> Any:
            asked.append(chat)
            return engine.submit(chat=chat, **sampling)

    lines = iter(["hi", "again", "/reset", "/what", "", "anew", "/exit"])
    conversation = Conversation(Recording(), {"max_tokens": 4}, system="be brief")
    chat_loop(conversation, lambda prompt: next(lines), out)  # noqa: ARG005
    assert [[turn["role"] for turn in chat] for chat in asked] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert out.getvalue().count("tokens/s") == 3
    assert "forgotten" in out.getvalue()


def test_chat_goes_on_after_a_request_error_and_ends_with_the_input(engine: Engine) -> None:
    out = io.StringIO()
    lines = iter(["x" * 400, "hi"])

    def read(prompt: str) -> str:  # noqa: ARG001
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    chat_loop(Conversation(engine, {"max_tokens": 4}), read, out)
    assert "the context holds 256" in out.getvalue()
    assert out.getvalue().count("tokens/s") == 1


def test_ctrl_c_cancels_the_answer_and_keeps_the_conversation(engine: Engine) -> None:
    conversation = Conversation(engine, {"max_tokens": 200})
    pieces: list[str] = []

    def emit(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    completion = conversation.ask("hi", emit)
    assert completion.finish_reason in ("cancelled", "length")
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"]
    assert "".join(pieces) == completion.text


def test_once_prints_the_answer_the_figures_and_the_paths(engine: Engine, tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "report.html").touch()
    chat_once(Conversation(engine, {"max_tokens": 5}), "hi", tmp_path, out)
    text = out.getvalue()
    for part in ("TTFT", "TPOT", "tokens/s", f"artifact  {tmp_path}", "report.html"):
        assert part in text


def test_figures_of_an_answer_of_one_token_have_no_tpot(engine: Engine) -> None:
    assert "TPOT" not in figures(engine.complete([1], max_tokens=1))


def test_a_wrong_power_mode_stands_in_every_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,20,5\n")
    manifest = SimpleNamespace(model=SimpleNamespace(token_limit=VOCABULARY))
    monkeypatch.setattr("edgert.manifest.load_manifest", lambda _path: manifest)
    limits = GuardLimits(4, power_mode="MAXN_SUPER")
    sensors = SimpleNamespace(name="fake", read=lambda: DeviceReading("fake"), power_mode=lambda: ("15W", ()))
    bench = ["bench", "toy", "--traffic", str(trace), "--requests", "2"]
    generate = ["generate", "toy", "--prompt-ids", "1,2", "--max-tokens", "2", "--json"]
    for command in (bench, [*bench, "--json"], generate):
        running = Engine(lambda: make_runtime(guard=lambda now_s: Guard(sensors, limits, now_s)))
        monkeypatch.setattr("edgert.engine.Engine.load", lambda _path, running=running: running)
        assert cli.main(command) == 0
        out = capsys.readouterr().out
        assert "the device is in power mode 15W, the artifact was planned for MAXN_SUPER" in out
