"""The engine's thread: owns the backend, hands commands from other threads to worker.Worker, shows its state to them.

Knows no prompt and no text: what comes in has been checked by edgert.engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edgert.errors import BackendError, EdgertError, QueueFull
from edgert.guards.guard import POLL_S
from edgert.loading import Runtime
from edgert.metrics import EngineSnapshot
from edgert.observe import Observer
from edgert.output import Output
from edgert.worker import Worker

# How old metrics() may be while steps follow each other: a snapshot costs as much as a tenth of a small GPU step.
PUBLISH_S = 0.01
# How often an idle engine looks at its device, so that metrics() is not hours old.
IDLE_POLL_S = 10.0


class Loop:
    """The engine's thread and its inbox. Holds no reference to the Engine, so that a forgotten one is collected."""

    def __init__(self, open_: Callable[[], Runtime], clock: Callable[[], float]) -> None:
        self.thread = threading.Thread(target=self._run, name="edgert", daemon=True)
        self.ready = threading.Event()
        self.state = "loading"
        self.error: Exception | None = None
        self.runtime: Runtime
        self._open = open_
        self._clock = clock
        self._changed = threading.Condition()
        self._added: deque[Output] = deque()
        self._cancelled: deque[int] = deque()
        self._closing = False
        self._waiting = 0  # requests in the worker's queue as of the last step
        self._rejected = 0
        self._free = 0  # slots, as of the last step
        self._snapshot: EngineSnapshot | None = None
        self._stale_s = 0.0  # when the snapshot is due again
        self._observer: Observer | None = None

    def add(self, output: Output) -> None:
        with self._changed:
            if self.state != "ready" or self._closing:
                state = "closed" if self._closing else self.state
                raise BackendError(f"the engine is {state}: {self.error}" if self.error else f"the engine is {state}")
            # A free slot takes the first of them at once: the bound is on those that wait beyond the slots.
            limit = self.runtime.queue_limit + self._free
            waiting = self._waiting + len(self._added)
            if waiting >= limit:
                self._rejected += 1
                raise QueueFull(f"{waiting} requests wait, queue_limit is {self.runtime.queue_limit}", hint="try later")
            self._added.append(output)
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify()

    def reject(self) -> None:
        with self._changed:
            self._rejected += 1

    def describe(self) -> Mapping[str, Any]:
        return self.runtime.description if self._observer is None else self._observer.description

    def metrics(self) -> EngineSnapshot:
        with self._changed:
            snapshot, rejected = self._snapshot, self._rejected
        if snapshot is None:
            raise BackendError("the engine is not loaded")
        return replace(snapshot, rejected=rejected)  # counted on the caller's thread, between two snapshots

    def shut(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self.thread is not threading.current_thread():
            self.thread.join()

    def _run(self) -> None:
        runtime: Runtime | None = None
        try:
            self.runtime = runtime = self._open()
            worker = runtime.worker(self._clock)
            self._observer = observer = Observer(runtime, worker, self._clock)
            observer.look()
            self._publish(worker, "ready")
        except Exception as error:
            self.error = error
            self.state = "failed"
            if runtime is not None:
                runtime.backend.close()
            self.ready.set()
            return
        self.ready.set()
        # who has a result finds it in metrics() too
        worker.on_end = lambda: self._publish(worker, self.state)
        try:
            while self._take(worker):
                worker.step()
                observer.look()
                self._publish(worker, "ready", soon=worker.busy and not worker.held)
            worker.stop()
        except Exception as error:
            self._fail(worker, error)
        finally:
            runtime.backend.close()
        observer.log_findings(self.metrics())
        if self.error is None:
            self._publish(worker, "closed")

    def _take(self, worker: Worker) -> bool:
        """Hand new commands to the worker; wait while there is nothing to do. False: close.

        With a guard the wait ends by itself now and then, so that it looks at the device.
        """
        held = worker.held
        idle_s = None if worker.guard is None else POLL_S if held else IDLE_POLL_S
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._added or self._cancelled or (worker.busy and not held), idle_s
            )
            added, self._added = self._added, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            self._waiting = worker.waiting + len(added)
            closing = self._closing
        for output in added:
            worker.add(output)
        for request_id in cancelled:
            worker.cancel(request_id)
        return not closing

    def _fail(self, worker: Worker, error: Exception) -> None:
        """The backend, or this program, failed in a step: every request ends with it and no new one is taken."""
        if not isinstance(error, EdgertError):
            wrapped = BackendError(f"the step failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        with self._changed:
            self.error = error
            self.state = "failed"
            added, self._added = self._added, deque()
        for output in added:
            worker.add(output)
        worker.fail(error)
        if self._observer is not None:
            self._observer.log_failure(error)
        self._publish(worker, "failed")

    def _publish(self, worker: Worker, state: str, *, soon: bool = False) -> None:
        """Show the state to other threads. soon: another step follows at once, a snapshot may be PUBLISH_S old."""
        observer = self._observer
        with self._changed:
            self.state = state
            self._waiting = worker.waiting
            self._free = worker.free_slots
            now = self._clock()
            if observer is not None and (not soon or now >= self._stale_s):
                self._stale_s = now + PUBLISH_S
                self._snapshot = observer.snapshot(state, self._rejected)
