"""What a caller holds while a request runs: deltas as they come, the result, cancel. Safe from any thread.

The worker only appends and notifies; a caller that reads slowly, or never, does not hold it up. What is kept per
request is bounded by max_tokens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgert.metrics import RequestMetrics, Usage
from edgert.requests import FinishReason

log = logging.getLogger("edgert.engine")


@dataclass(frozen=True)
class Delta:
    """What one step added. text may be empty (half a character, or a stop string that may still match).

    finish_reason is set on the last delta only.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request. token_ids includes a stop token that ended it; text holds neither that nor a stop string."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: RequestMetrics


class Handle:
    """One submitted request. Iterating yields its deltas from the first on, and raises if the request failed."""

    def __init__(self, request_id: int, on_cancel: Callable[[int], None]) -> None:
        self.id = request_id
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._deltas: list[Delta] = []
        self._completion: Completion | None = None
        self._error: Exception | None = None
        self._listeners: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[Delta]:
        index = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda index=index: len(self._deltas) > index or self.done)  # type: ignore[misc]
                fresh, ended = self._deltas[index:], self.done
            index += len(fresh)
            yield from fresh
            if ended:
                if self._error is not None:
                    raise self._error
                return

    @property
    def done(self) -> bool:
        return self._completion is not None

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Raises what the request failed with, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.id} is not finished after {timeout} s")
        if self._error is not None:
            raise self._error
        if self._completion is None:
            raise RuntimeError(f"request {self.id} ended without a completion")
        return self._completion

    def cancel(self) -> None:
        """Ask for the end; at most one more step of it runs. Twice, or after the end, does nothing."""
        if not self.done:
            self._on_cancel(self.id)

    def deltas_since(self, index: int) -> tuple[list[Delta], bool, Exception | None]:
        """Without waiting: deltas from `index` on, whether that was the end, and the error."""
        with self._changed:
            return self._deltas[index:], self.done, self._error

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the worker's thread after each change (at once and here, if something is there already).

        It must not block; what it raises there goes to the log.
        """
        with self._changed:
            self._listeners.append(listener)
            present = bool(self._deltas) or self.done
        if present:
            listener()

    def _push(self, delta: Delta) -> None:
        with self._changed:
            self._deltas.append(delta)
            self._changed.notify_all()
        self._tell()

    def _finish(self, delta: Delta, completion: Completion, error: Exception | None) -> None:
        with self._changed:
            self._deltas.append(delta)
            self._error = error
            self._completion = completion
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        """On the worker's thread, which serves everybody: a listener that raises is logged and has no other effect."""
        with self._changed:
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener()
            except Exception:
                log.exception("a listener of request %d failed", self.id)
