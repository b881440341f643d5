"""The engine as a program uses it: load an artifact, submit requests from any thread, read what comes.

    with Engine.load("artifacts/demo") as engine:
        for delta in engine.generate("Once upon a time", max_tokens=40):
            print(delta.text, end="", flush=True)

This module is the door: it checks a request before it goes in to the thread that serves it (edgert.loop), and knows
neither slots nor plans.
"""

from __future__ import annotations

import itertools
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from edgert.errors import RequestError
from edgert.handles import Completion, Delta, Handle
from edgert.loading import Runtime, open_runtime, plan_loading
from edgert.loop import Loop
from edgert.metrics import EngineSnapshot
from edgert.output import Output, StopText, TokenText
from edgert.requests import Request
from edgert.sampling import SamplingParams

Prompt: TypeAlias = str | Sequence[int]
Chat: TypeAlias = str | Sequence[Mapping[str, str]]


class Engine(AbstractContextManager["Engine"]):
    """Runs one artifact. Thread-safe. Use `Engine.load`; the constructor takes a runtime made by hand (tests)."""

    def __init__(self, open_: Callable[[], Runtime], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """open_ is called on the engine's thread and may raise; the constructor waits for it and raises the same."""
        self._clock = clock
        self._ids = itertools.count()
        self._loop = Loop(open_, clock)
        self._loop.thread.start()
        self._finalizer = weakref.finalize(self, Loop.shut, self._loop)
        self._loop.ready.wait()
        if self._loop.error is not None:
            self._loop.thread.join()
            raise self._loop.error
        self._runtime = self._loop.runtime

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Engine:
        """Open an artifact and return when it is ready: warmed up, and checked against its golden vectors.

        overrides: keys of scheduler.yaml, checked as the file is; verify_files=False compares sizes, not hashes; the
        rest are the backend's own (onnxruntime: threads, prepack).
        Raises ArtifactError, ConfigError, BackendError or GoldenMismatch.
        """
        loading = plan_loading(Path(path), overrides)
        return cls(lambda: open_runtime(loading))

    # --- requests ---

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Chat | None = None,
        params: SamplingParams | None = None,
        task: str | None = None,
        **sampling: Any,
    ) -> Handle:
        """Queue one request and return at once.

        prompt    text or token ids; chat: one user message or a list of {"role", "content"}; exactly one of the two
        params    or its fields as keywords: max_tokens=40, temperature=0.7, stop=["\\n"] ...
        task      a label for the metrics
        Raises RequestError (QueueFull when too many wait) or BackendError when the engine is unusable or closed.
        """
        try:
            params = _params(params, sampling)
            if task is not None and not isinstance(task, str):
                raise RequestError(f"task is {type(task).__name__}: expected a text")
            ids = self._prompt_ids(prompt, chat)
            self._check(ids, params)
        except RequestError:
            self._loop.reject()
            raise
        runtime = self._runtime
        eos = () if params.ignore_eos else runtime.eos_token_ids
        request = Request(
            id=next(self._ids),
            prompt_ids=ids,
            params=params,
            seed=params.seeded(),
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            task=task,
            arrival_s=self._clock(),
        )
        handle = Handle(request.id, self._cancel)
        detokenizer: TokenText | None = runtime.text.detokenizer() if runtime.text else None
        stops: StopText | None = _stop_matcher(params.stop) if params.stop else None
        self._loop.add(Output(request, handle, detokenizer, stops))
        return handle

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Chat | None = None,
        params: SamplingParams | None = None,
        task: str | None = None,
        **sampling: Any,
    ) -> Iterator[Delta]:
        """`submit`, and iterate over the deltas. Leaving the loop early, or never starting it, cancels the request."""
        handle = self.submit(prompt, chat=chat, params=params, task=task, **sampling)
        deltas = _cancel_on_exit(handle)
        weakref.finalize(deltas, handle.cancel).atexit = False  # a generator that never ran has no end of its own
        return deltas

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Chat | None = None,
        params: SamplingParams | None = None,
        task: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """`submit`, and wait for the end."""
        return self.submit(prompt, chat=chat, params=params, task=task, **sampling).result()

    # --- state ---

    @property
    def state(self) -> str:
        """ "ready", "failed" (a backend error ended it; `error` says which) or "closed"."""
        return self._loop.state

    @property
    def error(self) -> Exception | None:
        return self._loop.error

    @property
    def context_tokens(self) -> int:
        return self._runtime.limits.context_tokens

    def metrics(self) -> EngineSnapshot:
        """Queues and counters (10 ms old at most), the device as of the last second. See metrics.prometheus_text.

        Whoever has a result finds it counted here.
        """
        return self._loop.metrics()

    def describe(self) -> Mapping[str, Any]:
        """The backend's versions and device, what the guards go by, and `warnings`; at most a second old."""
        return self._loop.describe()

    def close(self) -> None:
        """End everything that runs as cancelled, free the backend, join the thread. Twice does nothing."""
        self._finalizer()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- checks ---

    def _cancel(self, request_id: int) -> None:
        """A handle holds this method, so that an engine lives as long as somebody waits for its tokens."""
        self._loop.cancel(request_id)

    def _prompt_ids(self, prompt: Prompt | None, chat: Chat | None) -> tuple[int, ...]:
        if (prompt is None) == (chat is None):
            raise RequestError("give either prompt or chat", hint="prompt is text or token ids, chat is messages")
        if prompt is not None and not isinstance(prompt, str):
            return _token_ids(prompt)
        if prompt == "":
            raise RequestError("the prompt is empty", hint="give at least one token")
        text = self._runtime.text
        if text is None:
            raise RequestError("this artifact has no tokenizer", hint="give token ids")
        if prompt is not None:
            return tuple(text.encode(prompt))
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat or []
        return tuple(text.encode_chat(messages))

    def _check(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        runtime, context = self._runtime, self._runtime.limits.context_tokens
        if not ids:
            raise RequestError("the prompt is empty", hint="give at least one token")
        if len(ids) > context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context holds {context}",
                hint="shorten the prompt or build with a larger context",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= runtime.vocabulary_size:
            raise RequestError(
                f"prompt id {low if low < 0 else high} is outside the vocabulary of {runtime.vocabulary_size} rows"
            )
        if params.stop and runtime.text is None:
            raise RequestError("stop strings need a tokenizer, this artifact has none", hint="use stop_token_ids")


def _stop_matcher(stops: Sequence[str]) -> StopText:
    from edgert.text import StopMatcher

    return StopMatcher(stops)


def _cancel_on_exit(handle: Handle) -> Iterator[Delta]:
    try:
        yield from handle
    finally:
        handle.cancel()


def _params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {type(params).__name__}: expected SamplingParams")
        if sampling:
            raise RequestError(f"give params or keywords, not both: {', '.join(sampling)}")
        return params
    unknown = [name for name in sampling if name not in SamplingParams.__dataclass_fields__]
    if unknown:
        raise RequestError(
            f"unknown sampling keyword {unknown[0]!r}", hint=f"known: {', '.join(SamplingParams.__dataclass_fields__)}"
        )
    return SamplingParams(**sampling)


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    if isinstance(prompt, (bytes, bytearray, Set, Mapping)) or not isinstance(prompt, Iterable):
        raise RequestError(f"the prompt is {type(prompt).__name__}: expected text or token ids")
    ids = []
    for token in prompt:
        try:
            ids.append(operator.index(token if not isinstance(token, bool) else None))  # type: ignore[arg-type]
        except TypeError:
            kind = type(token).__name__
            raise RequestError(
                f"the prompt is a list holding {kind}: expected one text, or token ids in a list"
            ) from None
    return tuple(ids)
