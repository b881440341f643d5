"""The command line of edgert: generate, chat, bench, doctor. Each command imports what it needs when it runs.

Exit codes: 0 done, 2 wrong usage, 130 interrupted, 141 the reader of our output went away, others as in errors.py.
What nobody expected is one line and 1; EDGERT_DEBUG=1 shows its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert import __version__
from edgert.errors import ConfigError, EdgertError

if TYPE_CHECKING:
    from edgert.bench import Draws
    from edgert.engine import Engine
    from edgert.handles import Completion

MAX_REQUESTS = 100_000  # of one benchmark: their prompts are drawn before it starts


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected token ids such as 1,2,3") from None


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 6 or not 1 <= int(text) <= MAX_REQUESTS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number from 1 to {MAX_REQUESTS}")
    return int(text)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected milliseconds above 0")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edgert", description="Run an artifact that edgebuild made.")
    parser.add_argument("--version", action="version", version=f"edgert {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="complete one prompt", description="Complete one prompt; the text goes to stdout as it comes."
    )
    generate.set_defaults(run=run_generate)
    _artifact(generate)
    one_of = generate.add_argument_group("prompt, one of them required")
    prompt = one_of.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="token ids to continue")
    prompt.add_argument("--chat", metavar="TEXT", help="a user message, through the model's chat template")
    _sampling(generate)
    generate.add_argument(
        "--json", action="store_true", help="print one JSON object at the end: text, token ids, usage, times in ms"
    )

    chat = commands.add_parser(
        "chat",
        help="talk to the model",
        description="Talk to the model: /reset forgets the conversation, /exit leaves, Ctrl-C stops an answer.",
    )
    chat.set_defaults(run=run_chat)
    _artifact(chat)
    chat.add_argument("--once", metavar="TEXT", help="answer this one message, print the figures, leave")
    chat.add_argument("--system", metavar="TEXT", help="a system message before the conversation (default none)")
    _sampling(chat)

    bench = commands.add_parser(
        "bench",
        help="measure under real lengths",
        description="Measure latencies and throughput of requests whose lengths are drawn from a traffic file.",
    )
    bench.set_defaults(run=run_bench_command)
    _artifact(bench)
    bench.add_argument(
        "--traffic", type=Path, required=True, metavar="FILE", help="histogram YAML or Azure-style CSV (required)"
    )
    bench.add_argument(
        "--requests", type=_count, required=True, metavar="N", help=f"requests to run, 1 to {MAX_REQUESTS} (required)"
    )
    bench.add_argument("--concurrency", type=_count, default=1, metavar="C", help="requests at a time (default 1)")
    bench.add_argument("--seed", type=int, default=0, metavar="S", help="of the drawn lengths and prompts (default 0)")
    for figure, name in (("ttft", "time to first token"), ("tpot", "time per output token")):
        bench.add_argument(
            f"--slo-{figure}-ms",
            type=_milliseconds,
            metavar="MS",
            help=f"longest {name} in ms of a request that goodput counts (default no limit)",
        )
    _draft(bench)
    bench.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables: times in ms, memory in bytes"
    )

    doctor = commands.add_parser(
        "doctor",
        help="say whether this device runs an artifact well; 1 = something was found",
        description="Say whether this device runs an artifact well, and what to do where it does not. "
        "Exit code 1: something was found.",
    )
    doctor.set_defaults(run=run_doctor)
    _artifact(doctor)
    doctor.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables: facts and findings"
    )
    return parser


def _artifact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="the directory that edgebuild wrote")


def _draft(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="K",
        help="tokens drafted per step; 0 = off (default as scheduler.yaml says)",
    )


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="output tokens at most (default 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="divides the logits; 0 = greedy (default 0)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens; 0 = off (default 0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens of total probability P; 1 = off (default 1)",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="same seed, same tokens (default a fresh one)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable (default none)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    _draft(parser)


def _sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "stop": tuple(options.stop),
        "ignore_eos": options.ignore_eos,
    }


def _load(options: argparse.Namespace) -> Engine:
    from edgert.engine import Engine

    overrides: dict[str, Any] = {}
    if options.draft_length is not None:
        if options.draft_length < 0:
            raise ConfigError(f"--draft-length {options.draft_length}", hint="0 or more")
        overrides["enable_mtp"] = options.draft_length > 0
        if options.draft_length:
            overrides["mtp_num_heads"] = options.draft_length
    if sys.stderr.isatty():
        print(f"loading {options.artifact} ...", end="\r", file=sys.stderr, flush=True)
    engine = Engine.load(options.artifact, **overrides)
    if sys.stderr.isatty():
        print("\x1b[2K", end="\r", file=sys.stderr, flush=True)
    return engine


def run_generate(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    with _load(options) as engine:
        load_ms = (time.perf_counter() - start) * 1e3
        prompt = options.prompt if options.prompt is not None else options.prompt_ids
        handle = engine.submit(prompt, chat=options.chat, **_sampling_of(options))
        try:
            if not options.json:
                for delta in handle:
                    print(delta.text, end="", flush=True)
                print()
            completion = handle.result()
        except BaseException:
            handle.cancel()
            raise
        if options.json:
            usage = completion.usage
            times = completion.metrics.to_json()
            document = {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "total_tokens": usage.total_tokens,
                    "draft_proposed": usage.draft_proposed,
                    "draft_accepted": usage.draft_accepted,
                },
                "acceptance": usage.acceptance,
                "mean_accepted_length": usage.mean_accepted_length,
                **times,
                "phases": {"load_ms": load_ms, **times["phases"]},
                "warnings": list(engine.describe().get("warnings", ())),
            }
            print(json.dumps(document, ensure_ascii=False, allow_nan=False))
        elif _filled_the_context(completion, options.max_tokens):
            print(
                f"edgert: the context of {engine.context_tokens} tokens is full after "
                f"{completion.usage.completion_tokens} output tokens; --max-tokens is {options.max_tokens}",
                file=sys.stderr,
            )
    return 0


def _filled_the_context(completion: Completion, max_tokens: int) -> bool:
    """Whether the context ended the answer, not the model, a stop string or max_tokens."""
    return completion.finish_reason == "length" and completion.usage.completion_tokens < max_tokens


def run_chat(options: argparse.Namespace) -> int:
    from edgert.chat import Conversation, chat_loop, chat_once

    with _load(options) as engine:
        conversation = Conversation(engine, _sampling_of(options), system=options.system)
        if options.once is not None:
            chat_once(conversation, options.once, options.artifact, sys.stdout)
            return 0
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # some Python builds come without it
                import readline  # noqa: F401  (gives input() history and line editing)
        chat_loop(conversation, input, sys.stdout)
    return 0


def run_bench_command(options: argparse.Namespace) -> int:
    from edgert import bench
    from edgert.manifest import load_manifest

    draws = _lengths(options)
    vocabulary = load_manifest(options.artifact).model.token_limit
    tty = sys.stderr.isatty()

    def progress(done: int, of: int) -> None:
        if tty or done == of or done % max(1, of // 10) == 0:
            print(f"{done}/{of} requests", end="\r" if tty and done < of else "\n", file=sys.stderr, flush=True)

    concurrency = min(options.concurrency, options.requests)
    with _load(options) as engine:
        requests = bench.make_requests(
            draws,
            count=options.requests,
            context_tokens=engine.context_tokens,
            vocabulary=vocabulary,
            seed=options.seed,
        )
        completions, seconds = bench.run_bench(engine, requests, concurrency=concurrency, progress=progress)
        warnings = list(engine.describe().get("warnings", ()))
        seen = engine.metrics()
    report = bench.summarise(
        completions,
        seconds,
        requests,
        concurrency=concurrency,
        traffic=draws.name,
        seed=options.seed,
        slo_ttft_ms=options.slo_ttft_ms,
        slo_tpot_ms=options.slo_tpot_ms,
    )
    report["warnings"] = warnings
    acceptance = {task: each for task, each in seen.acceptance.items() if task != bench.WARM_UP_TASK}
    report |= {"memory_phases": seen.memory_phases, "launches": seen.launches, "acceptance": acceptance}
    report |= {"memory_planned_bytes": seen.memory_planned_bytes, "memory_baseline_bytes": seen.memory_baseline_bytes}
    print(bench.to_json(report) if options.json else bench.render(report))
    return 0


def _lengths(options: argparse.Namespace) -> Draws:
    """What --traffic names. Bundled names are edgebuild's, which need not be installed here."""
    from edgert import bench

    try:
        options.traffic.stat()
    except FileNotFoundError:
        own = options.artifact / "traffic.yaml"
        raise bench.TrafficFileError(
            f"{options.traffic}: no such file",
            hint="bench takes a histogram YAML or a CSV, no bundled name: "
            + (f"the artifact's own is {own}; " if own.is_file() else "")
            + "edgebuild traffic NAME --output mine.yaml writes a bundled one",
        ) from None
    except OSError:  # read_lengths says what it is
        pass
    return bench.read_lengths(options.traffic)


def run_doctor(options: argparse.Namespace) -> int:
    from edgert.doctor import diagnose, render, to_json

    facts, found = diagnose(options.artifact)
    if options.json:
        print(json.dumps(to_json(facts, found), ensure_ascii=False, allow_nan=False))
    else:
        print(render(facts, found))
    return 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; also the console script's, which exits with what this returns."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started us closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end an answer
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except EdgertError as error:
        print(f"edgert: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("edgert: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the interpreter flushes stdout once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("EDGERT_DEBUG"):
            raise
        print(f"edgert: {type(error).__name__}: {' '.join(str(error).split())[:500]} (EDGERT_DEBUG=1 shows where)",
              file=sys.stderr)  # fmt: skip
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
