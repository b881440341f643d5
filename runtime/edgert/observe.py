"""What is seen of a running engine from outside: its snapshot after each step, and a closer look once a second.

Used on the engine's thread. The closer look asks the backend and the system; the snapshot only copies numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgert.diagnosis import failure_findings, running_findings
from edgert.loading import Runtime, used_bytes
from edgert.metrics import EngineSnapshot
from edgert.probe import phase_of
from edgert.worker import Worker

log = logging.getLogger("edgert.engine")

LOOK_S = 1.0


class Observer:
    def __init__(self, runtime: Runtime, worker: Worker, clock: Callable[[], float]) -> None:
        self.description: Mapping[str, Any] = runtime.description
        self._runtime = runtime
        self._worker = worker
        self._clock = clock
        self._phases = dict(runtime.memory_phases)
        self._cells_seen = 0
        self._next_s = float("-inf")

    def snapshot(self, state: str, rejected: int) -> EngineSnapshot:
        """The engine now: copies numbers and asks nobody."""
        worker, counters = self._worker, self._worker.counters
        waiting, prefilling, decoding, free = worker.queues
        guard, drafts = worker.guard, worker.drafts
        return EngineSnapshot(
            state=state,
            waiting=waiting,
            prefilling=prefilling,
            decoding=decoding,
            free_slots=free,
            slots=self._runtime.slots,
            slot_limit=guard.verdict.active_slots if guard else self._runtime.slots,
            admission_open=guard is None or guard.verdict.refusal is None,
            chunk_limit=worker.tempo.chunk_rows,
            steps_per_chunk=worker.tempo.steps,
            draft_limit=worker.tempo.drafts,
            launches=dict(counters.launches),
            prompt_tokens=counters.prompt_tokens,
            padded_prompt_tokens=counters.padded_prompt_tokens,
            output_tokens=counters.output_tokens,
            decode_rows=counters.decode_rows,
            idle_rows=counters.idle_rows,
            discarded_rows=counters.discarded_rows,
            draft_proposed=counters.draft_proposed,
            draft_accepted=counters.draft_accepted,
            draft_proposed_by_task=_by_position({task: each.proposed for task, each in drafts.by_task.items()}),
            draft_accepted_by_task=_by_position({task: each.accepted for task, each in drafts.by_task.items()}),
            acceptance={task or "": each.to_json() for task, each in drafts.by_task.items()},
            draft_lengths=drafts.control.lengths(),
            draft_switched_off=drafts.control.switched_off,
            draft_switched_on=drafts.control.switched_on,
            finished=dict(counters.finished),
            rejected=rejected,
            queue_wait=counters.queue_wait.snapshot(),
            ttft=counters.ttft.snapshot(),
            tpot=counters.tpot.snapshot(),
            itl=counters.itl.snapshot(),
            graph_launches=self.description.get("graph_replays"),
            eager_launches=self.description.get("eager_launches"),
            memory_bytes=self._runtime.memory_bytes,
            memory_phases=dict(self._phases),
            memory_baseline_bytes=self._runtime.baseline_bytes,
            memory_planned_bytes=self._runtime.planned_bytes,
            device=guard.reading if guard else None,
            throttle_events=dict(guard.throttle_events) if guard else {},
            guard_changes=guard.changes if guard else 0,
            power_mode=guard.power_mode if guard else None,
            expected_power_mode=guard.limits.power_mode if guard else None,
        )

    def log_findings(self, snapshot: EngineSnapshot) -> None:
        """At the end: what the metrics say was wrong. Level info: `edgert.diagnosis` gives the same at any time."""
        for finding in running_findings(snapshot):
            log.info("%s: %s; next: %s", finding.symptom, finding.cause, finding.next_step)

    def look(self) -> None:
        """The closer look, when it is due or a cell has run for the first time: memory peaks then."""
        worker = self._worker
        if len(worker.counters.launches) == self._cells_seen and self._clock() < self._next_s:
            return
        self._cells_seen = len(worker.counters.launches)
        self._next_s = self._clock() + LOOK_S
        backend = self._runtime.backend
        described, warnings = dict(backend.describe()), list(self._runtime.description.get("warnings", ()))
        if worker.guard is not None:
            described["guards"] = worker.guard.describe()
            warnings += worker.guard.warnings
        if warnings or worker.guard is not None:
            described["warnings"] = warnings
        self.description = described
        used = used_bytes(backend)
        if used is not None and worker.last_cell is not None:
            phase = phase_of(worker.last_cell)
            self._phases[phase] = max(used, self._phases.get(phase, 0))

    def log_failure(self, error: BaseException) -> None:
        """The engine ends: under which name docs/troubleshooting.md has this, and what to do."""
        for finding in failure_findings(error):
            log.error("%s: %s; next: %s", finding.symptom, finding.cause, finding.next_step)


def _by_position(counts: Mapping[str | None, Sequence[int]]) -> dict[tuple[str, int], int]:
    """(task, position) → count; position 1 is the first draft."""
    return {(task or "", at): count for task, each in counts.items() for at, count in enumerate(each, 1)}
