"""The output side of one request: tokens in, text deltas and the final completion out. Used by the worker thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edgert.handles import Completion, Delta, Handle
from edgert.metrics import RequestMetrics, Usage
from edgert.requests import FinishReason, Request


class TokenText(Protocol):
    """edgert.text.Detokenizer: token ids to text that is safe to show."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class StopText(Protocol):
    """edgert.text.StopMatcher: text in; text that cannot be part of a stop string out, and whether one matched."""

    def push(self, delta: str) -> tuple[str, bool]: ...

    def finish(self) -> str: ...


class Output:
    """Collects one request's tokens, text and times, and passes them to its handle."""

    def __init__(self, request: Request, handle: Handle, detokenizer: TokenText | None, stops: StopText | None) -> None:
        self.request = request
        self.handle = handle
        self.admitted_s: float | None = None
        self.draft_proposed = 0
        self.draft_accepted = 0
        self.draft_steps = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._text: list[str] = []

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def latest_s(self) -> float | None:
        """When the latest token came."""
        return self._times[-1] if self._times else None

    def push(self, tokens: Sequence[int], *, ends_with_stop_token: bool, now_s: float) -> bool:
        """Take the tokens of one step; true when a stop string matched. The delta goes out with `finish` then.

        Tokens after the one that completes a stop string are dropped; a stop token adds no text.
        """
        text = ""
        kept: list[int] = []
        matched = False
        for place, token in enumerate(tokens):
            kept.append(token)
            if ends_with_stop_token and place == len(tokens) - 1:
                break
            piece, matched = self._read(token)
            text += piece
            if matched:
                break
        self._tokens += kept
        self._times += [now_s] * len(kept)
        self._text.append(text)
        self._pending = Delta(text, tuple(kept))
        return matched

    def send(self) -> None:
        """Pass on the delta of the last push: the request goes on."""
        self.handle._push(self._pending)
        self._pending = Delta("", ())

    def finish(
        self,
        reason: FinishReason,
        *,
        matched: bool,
        now_s: float,
        error: Exception | None = None,
        before: Callable[[Completion], None] | None = None,
    ) -> Completion:
        """End the request: the last delta carries the text held back (nothing after a matched stop string).

        before: gets the completion before the caller does.
        """
        rest = "" if matched or reason == "error" else self._flush()
        self._text.append(rest)
        last = Delta(self._pending.text + rest, self._pending.token_ids, reason)
        usage = Usage(len(self.request.prompt_ids), len(self._tokens), self.draft_proposed, self.draft_accepted,
                      self.draft_steps)  # fmt: skip
        metrics = RequestMetrics(
            task=self.request.task,
            arrival_s=self.request.arrival_s,
            admitted_s=self.admitted_s,
            token_s=tuple(self._times),
            finished_s=now_s,
            usage=usage,
        )
        completion = Completion("".join(self._text), tuple(self._tokens), reason, usage, metrics)
        if before is not None:
            before(completion)
        self.handle._finish(last, completion, error)
        return completion

    _pending = Delta("", ())

    def _read(self, token: int) -> tuple[str, bool]:
        if self._detokenizer is None:
            return "", False
        piece = self._detokenizer.push(token)
        return self._stops.push(piece) if self._stops is not None else (piece, False)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.finish()
        if self._stops is None:
            return piece
        emitted, matched = self._stops.push(piece)
        return emitted if matched else emitted + self._stops.finish()
