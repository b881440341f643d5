"""A device that is a formula: trials without a process, under a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgebuild.progress import Stages
from edgebuild.tune.device import conditions
from edgebuild.tune.records import Conditions
from edgebuild.tune.runner import TrialFailed
from edgebuild.tune.search import Setup
from edgebuild.tune.session import Ask, prepare, tune
from edgert.figures import FIGURES
from edgert.guards.readings import DeviceReading
from edgert.manifest import BackendInfo
from rich.console import Console

TASKS = {"json": (0.9, 0.8, 0.8), "chat": (0.5, 0.4, 0.4)}
PROMPTS = "\n".join(
    f'{{"prompt": "please write {task} number {n}", "max_tokens": 8, "task": "{task}"}}'
    for n in range(4)
    for task in TASKS
)

Speed = Callable[[Mapping[str, Any]], Mapping[str, float]]


def plain_speed(overrides: Mapping[str, Any]) -> dict[str, float]:
    """Tokens/s and gap of a device on which each mechanism does what it is for."""
    tokens = 100.0
    gap = 400.0 * overrides["max_prefill_chunk_size"] / 64
    if overrides["enable_chunked_prefill"]:
        gap, tokens = gap / 4, tokens * 0.99
    if overrides["enable_cuda_graph"]:
        tokens *= 1.8
    if overrides["enable_mtp"]:
        tokens *= {1: 1.3, 2: 1.5, 3: 1.2}[overrides["mtp_num_heads"]]
    if overrides["max_prefill_chunk_size"] < 64:
        tokens *= 0.8
    return {"output_tokens_per_s": tokens, "longest_gap_ms": gap, "ttft_p95_ms": 200.0, "tpot_ms": 1e3 / tokens}


@dataclass
class FakeDevice:
    """The Runner, the clock and the sensors. ends_after: trials until it raises KeyboardInterrupt, None = never.

    drifts   (settings) → True where latency grows by a fifth over a soak
    fails    (settings) → the reason why a trial fails, or None
    hot      (settings) → True where the hardware throttles meanwhile
    """

    speed: Speed = plain_speed
    noise: tuple[float, ...] = (0.0, 0.004, -0.004)
    drifts: Callable[[Mapping[str, Any]], bool] = lambda _: False
    fails: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    hot: Callable[[Mapping[str, Any]], bool] = lambda _: False
    ends_after: int | None = None
    now_s: float = 0.0
    jobs: list[Mapping[str, Any]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def look(self) -> tuple[Conditions | None, str | None]:
        return conditions(DeviceReading("fake", temperature_c=40 + self.now_s / 100), root=Path("/nowhere")), "MAXN"

    def __call__(self, job: Mapping[str, Any], report: Callable[[float], None]) -> dict[str, Any]:
        if self.ends_after is not None and len(self.jobs) >= self.ends_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        report(0.5)
        overrides = job["overrides"]
        self.now_s += job["soak_s"] or 10.0
        reason = self.fails(overrides)
        if reason is not None:
            raise TrialFailed(reason)
        drafts = overrides["mtp_num_heads"] if overrides["enable_mtp"] else 0
        result: dict[str, Any] = {
            "figures": [self._figures(overrides, factor) for factor in self.noise],
            "by_task": [self._decode(drafts, factor) for factor in self.noise],
            "acceptance": {task: self._acceptance(rates[:drafts]) for task, rates in TASKS.items()} if drafts else {},
            "outputs_sha256": "0" * 64,
            "output_tokens": [[7, 8, 7] for _ in job["requests"]] if job["want_tokens"] else None,
            "soak": None,
            "peak_memory_bytes": 10**9,
            "device": None,
            "warnings": [],
            "fallbacks": [],
            "throttle_events": {"hw_thermal_slowdown": 2} if self.hot(overrides) else {},
        }
        if job["soak_s"] is not None:
            result |= {"figures": [], "by_task": [], "soak": self._soak(job)}
        return result

    def _figures(self, overrides: Mapping[str, Any], factor: float) -> dict[str, float | None]:
        values = {key: value * (1 + factor) for key, value in self.speed(overrides).items()}
        return {figure.key: values.get(figure.key) for figure in FIGURES}

    def _decode(self, drafts: int, factor: float) -> dict[str, dict[str, float]]:
        """100 steps of each task: 10 ms, and 1 ms more for each draft."""
        found = {}
        for task, rates in TASKS.items():
            tokens, reach = 1.0, 1.0
            for rate in rates[:drafts]:
                reach *= rate
                tokens += reach
            found[f"task:{task}"] = {"tokens": 100 * tokens, "ms": 100 * (10 + drafts) * (1 + factor), "steps": 100}
        every = list(found.values())
        return {**found, "all": {key: sum(each[key] for each in every) for key in ("tokens", "ms", "steps")}}

    def _acceptance(self, rates: tuple[float, ...]) -> dict[str, Any]:
        reach, accepted = 1.0, 0.0
        for rate in rates:
            reach *= rate
            accepted += reach
        return {
            "acceptance": accepted / len(rates),
            "by_position": list(rates),
            "mean_accepted_length": 1 + accepted,
            "steps": 100,
        }

    def _soak(self, job: Mapping[str, Any]) -> dict[str, Any]:
        seconds, worse = job["soak_s"], 0.2 if self.drifts(job["overrides"]) else 0.0
        samples = [
            {
                "at_s": at * seconds / 100,
                "request": at % 8,
                "ttft_ms": (100 + at % 8) * (1 + worse * at / 100),
                "tpot_ms": 10 * (1 + worse * at / 100),
                "memory_bytes": 10**9,
            }
            for at in range(101)
        ]
        return {"seconds": seconds, "samples": samples}


def make_setup(artifact: Path, folder: Path, *, gpu: bool = True, drafts: int = 3, **ask: Any) -> Setup:
    """A run on a files-only artifact. gpu: as if it were built for TensorRT; drafts: as if it had a drafter."""
    traffic = folder / "own.jsonl"
    traffic.write_text(PROMPTS)
    fields: dict[str, Any] = {"requests": None, "concurrency": 4, "repeats": 3, "seed": 0, "soak_minutes": 10.0}
    setup = prepare(artifact, Ask(traffic, **{**fields, **ask}), None, quiet())
    backend = BackendInfo("tensorrt", "10.0", ("8.7",), "float16") if gpu else setup.manifest.backend
    manifest = replace(setup.manifest, backend=backend, draft_length=drafts, draft_vocabulary=120 if drafts else 0)
    return replace(setup, manifest=manifest)


def quiet() -> Stages:
    return Stages(Console(quiet=True))


def run(setup: Setup, logbook: Path, device: FakeDevice, **options: Any) -> Any:
    """`edgebuild.tune.session.tune` on the fake device."""
    return tune(
        setup,
        logbook,
        options.pop("stages", quiet()),
        runner=device,
        look=device.look,
        now=device.clock,
        at=lambda: "2026-11-30T00:00:00Z",
        **options,
    )
