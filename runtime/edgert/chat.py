"""A conversation on a terminal: history, streamed answers, Ctrl-C ends an answer, figures after each.

Knows the engine's public face; input and output streams are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from edgert.errors import RequestError
from edgert.handles import Completion, Handle

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"


class Chats(Protocol):
    """The part of edgert.Engine used here."""

    def submit(self, *, chat: list[dict[str, str]], **sampling: Any) -> Handle: ...


@dataclass
class Conversation:
    """Turns so far. A turn that fails or is cancelled before any text leaves no trace."""

    engine: Chats
    sampling: Mapping[str, Any]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.turns = []

    def ask(self, text: str, emit: Callable[[str], None]) -> Completion:
        """Stream one answer through `emit`. KeyboardInterrupt cancels the answer; what came of it is kept."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        handle = self.engine.submit(chat=[*head, *self.turns, question], **self.sampling)
        seen = 0
        try:
            for delta in handle:
                seen += 1
                emit(delta.text)
        except KeyboardInterrupt:
            handle.cancel()
            for delta in list(handle)[seen:]:
                emit(delta.text)
        completion = handle.result()
        if completion.text or completion.finish_reason != "cancelled":
            self.turns += [question, {"role": "assistant", "content": completion.text}]
        return completion


def figures(completion: Completion) -> str:
    """`TTFT 41 ms, TPOT 27.0 ms, 36.2 tokens/s (58 tokens, stop)`"""
    metrics = completion.metrics
    parts = []
    if metrics.ttft_ms is not None:
        parts.append(f"TTFT {metrics.ttft_ms:.0f} ms")
    if metrics.tpot_ms is not None:
        parts.append(f"TPOT {metrics.tpot_ms:.1f} ms")
    tokens = completion.usage.completion_tokens
    if tokens and metrics.latency_ms > 0:
        parts.append(f"{tokens * 1e3 / metrics.latency_ms:.1f} tokens/s")
    accepted = completion.usage.mean_accepted_length
    if accepted is not None:
        parts.append(f"{completion.usage.acceptance:.0%} of drafts accepted, {accepted:.2f} tokens a step")
    return f"{', '.join(parts) or 'no tokens'} ({tokens} tokens, {completion.finish_reason})"


def chat_once(conversation: Conversation, text: str, artifact: Path, out: TextIO) -> None:
    """One streamed answer, then the figures and where things are: for scripts and the demo."""
    completion = conversation.ask(text, lambda delta: _write(out, delta))
    report = artifact / "report.html"
    lines = ["", "", figures(completion), f"artifact  {artifact}"]
    lines.append(f"report    {report}" if report.exists() else "report    none in this artifact")
    _write(out, "\n".join(lines) + "\n")


def chat_loop(conversation: Conversation, read: Callable[[str], str], out: TextIO) -> None:
    """Until /exit or the end of input."""
    _write(out, HELP + "\n")
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            _write(out, "\n")
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            conversation.reset()
            _write(out, "forgotten\n")
        elif text.startswith("/") and " " not in text:
            _write(out, HELP + "\n")
        elif text:
            try:
                completion = conversation.ask(text, lambda delta: _write(out, delta))
            except RequestError as error:
                _write(out, f"\n{error}\n")
                continue
            _write(out, f"\n[{figures(completion)}]\n")


def _write(out: TextIO, text: str) -> None:
    out.write(text)
    out.flush()
