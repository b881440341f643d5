"""From an artifact directory to everything the engine runs on. Refuses early: files and numbers first, backend last.

`plan_loading` reads and checks on the caller's thread; `open_runtime` opens the backend, on the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.backends import resolve
from edgert.backends.base import Backend, Setup
from edgert.cells import Cell
from edgert.config import CONFIG_KEYS, RuntimeConfig, load_config
from edgert.drafting import DraftControl
from edgert.errors import BackendError, ConfigError
from edgert.golden import Golden, check_golden, load_golden
from edgert.guards.detect import detect_sensors
from edgert.guards.guard import Guard, GuardLimits
from edgert.guards.readings import Sensors
from edgert.headroom import headroom_of
from edgert.hostmemory import available_bytes, resident_bytes
from edgert.integrity import check_files, require_complete
from edgert.manifest import Manifest, load_manifest
from edgert.measure import quick_costs, stored_costs
from edgert.policy import Ratio
from edgert.scheduler import Limits
from edgert.slots import SlotTable, slots_to_allocate
from edgert.stepcosts import measure_step_costs, step_costs_of
from edgert.tempo import Targets
from edgert.worker import Drafter, Worker

if TYPE_CHECKING:
    from edgert.text import TextCodec

# Ledger lines that a load can do without, by edgebuild.plan.memory's labels.
OPTIONAL_LINES = ("margin", "weight copies")


@dataclass(frozen=True)
class Runtime:
    """What an Engine runs on.

    slots            sequences at once; limits.slots counts the reserved ones too
    vocabulary_size  prompt ids lie below it; token_limit: sampled ids do
    text             None: ids only
    draft_control    the backend drafts, and a fresh one of these says how much
    memory_phases    bytes in use after each phase of the load; baseline_bytes: in use before it, where those are the
                     process's; planned_bytes: what the ledger expects of the load alone
    guard            makes the guard, from the time now; None: nothing is guarded
    admitted         sequences that may run at once, so that headroom stays free; None: as many as there are slots
    """

    backend: Backend
    limits: Limits
    slots: int
    cache_tokens: int
    vocabulary_size: int
    token_limit: int
    eos_token_ids: tuple[int, ...]
    queue_limit: int
    text: TextCodec | None
    description: Mapping[str, Any]
    memory_bytes: Mapping[str, int]
    drafter: Drafter | None = None
    draft_control: Callable[[], DraftControl] | None = None
    memory_phases: Mapping[str, int] = field(default_factory=dict)
    guard: Callable[[float], Guard] | None = None
    baseline_bytes: int = 0
    planned_bytes: int | None = None
    admitted: int | None = None

    def worker(self, clock: Callable[[], float]) -> Worker:
        table = SlotTable(
            self.slots,
            allocated=self.limits.slots,
            context_tokens=self.limits.context_tokens,
            cache_tokens=self.cache_tokens,
        )
        return Worker(
            self.backend,
            self.limits,
            table,
            token_limit=self.token_limit,
            clock=clock,
            drafter=self.drafter,
            draft_control=None if self.draft_control is None else self.draft_control(),
            guard=None if self.guard is None else self.guard(clock()),
            admitted=self.admitted,
        )


@dataclass(frozen=True)
class Loading:
    """An artifact that was read and checked, and how to open it."""

    directory: Path
    manifest: Manifest
    config: RuntimeConfig
    cells: tuple[Cell, ...]
    text: TextCodec
    golden: Golden | None
    options: Mapping[str, Any]


def plan_loading(directory: Path, overrides: Mapping[str, Any]) -> Loading:
    """Read and check everything but the engine. Raises ArtifactError or ConfigError.

    overrides: scheduler.yaml's keys; `verify_files=False` compares sizes and not hashes; others go to the backend.
    """
    from edgert.text import TextCodec

    manifest = load_manifest(directory)
    options = dict(overrides)
    check_files(directory, manifest, "full" if _flag(options, "verify_files", default=True) else "sizes")
    require_complete(manifest, directory)
    changed = {key: options.pop(key) for key in tuple(options) if key in CONFIG_KEYS}
    config = load_config(directory, manifest, changed)
    require_memory(manifest, config, available_bytes())
    return Loading(
        directory=directory,
        manifest=manifest,
        config=config,
        cells=config.select_cells(manifest),
        text=TextCodec.from_artifact(directory, manifest),
        golden=load_golden(directory, manifest.model) if config.check_golden_at_load else None,
        options={"enable_cuda_graph": config.enable_cuda_graph, **options},
    )


def _flag(options: dict[str, Any], name: str, *, default: bool) -> bool:
    """Take an option that is true or false out of the options: a text that says "no" is neither."""
    value = options.pop(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: expected True or False")
    return value


def open_runtime(loading: Loading) -> Runtime:
    """Open the backend, warm it up, compare it with the golden vectors. Raises BackendError or GoldenMismatch."""
    manifest, config = loading.manifest, loading.config
    slots = slots_to_allocate(config.slots, [cell.batch for cell in loading.cells if cell.kind == "decode"])
    setup = Setup(
        artifact=loading.directory,
        cells=loading.cells,
        slots=slots,
        cache_tokens=manifest.cache_tokens,
        token_limit=manifest.model.token_limit,
        states=manifest.states,
        options=loading.options,
        manifest=manifest,
        draft_length=config.draft_length,
        draft_states=manifest.draft_states if config.draft_length else (),
        on_phase=lambda phase: mark(phase),
    )
    before = resident_bytes() or 0
    backend = resolve(manifest.backend.name)(setup)
    phases: dict[str, int] = {}

    def mark(phase: str) -> None:
        used = used_bytes(backend)
        if used is not None:
            phases[phase] = used

    try:
        mark("opened")
        limits = limits_of(config, loading.cells, slots, any_first_slot=backend.any_first_slot)
        if config.warm_up:
            backend.warm_up()
            mark("warmed_up")
        if loading.golden is not None:
            check_golden(
                backend,
                loading.golden,
                cells=loading.cells,
                slots=slots,
                context_tokens=config.context_tokens,
                draft_length=config.draft_length,
            )
            mark("checked")
        stored = stored_costs(loading.directory, manifest.model.identity, backend, loading.cells)
        costs_ms: Mapping[int, Sequence[float]] | None = None
        if stored is not None and config.draft_length:
            costs_ms = step_costs_of(stored, loading.cells, slots, config.draft_length)
        if costs_ms is None and config.warm_up and config.draft_length:
            costs_ms = measure_step_costs(backend, loading.cells, slots, config.draft_length, time.perf_counter)
        costs = stored
        if costs is None and config.adaptive and config.warm_up:
            costs = quick_costs(backend, loading.cells, slots, manifest.cache_tokens, time.perf_counter)
        limits = replace(limits, costs=costs)
        description = dict(backend.describe())
        headroom = None if stored is None else headroom_of(limits.rules, config)
        if headroom is not None and headroom.slots < headroom.of_slots:
            said = headroom.describe(config.throughput_headroom_fraction, "by costs.json")
            description["warnings"] = [*description.get("warnings", ()), said]
        return Runtime(
            backend=backend,
            limits=limits,
            slots=config.slots,
            cache_tokens=manifest.cache_tokens,
            vocabulary_size=manifest.model.vocabulary_size,
            token_limit=manifest.model.token_limit,
            eos_token_ids=manifest.model.eos_token_ids,
            queue_limit=config.queue_limit,
            text=loading.text,
            description=description,
            memory_bytes=backend.memory(),
            draft_control=lambda: DraftControl(
                config.draft_length, costs_ms=costs_ms, threshold=config.mtp_acceptance_threshold
            ),
            memory_phases=phases,
            baseline_bytes=0 if "device_used" in backend.memory() else before,
            planned_bytes=manifest.planned_bytes,
            guard=lambda now_s: make_guard(manifest, config, now_s),
            admitted=None if headroom is None else headroom.slots,
        )
    except BaseException:
        backend.close()
        raise


def limits_of(config: RuntimeConfig, cells: tuple[Cell, ...], slots: int, *, any_first_slot: bool) -> Limits:
    """What the scheduler goes by, without costs. slots: those allocated. Raises ConfigError."""
    low, high = config.prefill_decode_ratio_range
    return Limits(
        cells=cells,
        slots=slots,
        context_tokens=config.context_tokens,
        any_first_slot=any_first_slot,
        chunked_prefill=config.enable_chunked_prefill,
        ratio=Ratio(low, config.prefill_decode_ratio, high),
        adaptive=config.adaptive,
        draft_length=config.draft_length,
        targets=Targets(config.ttft_target_ms, config.itl_target_ms, config.itl_p95_ratio, config.tpot_target_ms),
    )


def used_bytes(backend: Backend) -> int | None:
    """Memory in use now: the device's where the backend measures it, the process's else."""
    return backend.memory().get("device_used") or resident_bytes()


def make_guard(manifest: Manifest, config: RuntimeConfig, now_s: float, *, sensors: Sensors | None = None) -> Guard:
    """The guard of this artifact on this machine. sensors: None = those that the machine has.

    On the CPU the cache's pages are taken from the system when a slot is first used, so one more sequence counts with
    a slot's bytes; a GPU backend holds them from the start.
    """
    gpu = manifest.backend.name != "onnxruntime"
    limits = GuardLimits(
        slots=config.slots,
        soft_temperature_c=config.soft_temperature_c,
        hard_temperature_c=config.hard_temperature_c,
        power_mode=config.power_mode,
        memory_margin_fraction=config.memory_margin_fraction,
        slot_bytes=0 if gpu else slot_bytes(manifest),
    )
    return Guard(sensors or detect_sensors(gpu=gpu), limits, now_s)


def slot_bytes(manifest: Manifest) -> int:
    """Bytes of one slot's states."""
    return sum(state.slot_bytes for state in (*manifest.states, *manifest.draft_states))


def require_memory(manifest: Manifest, config: RuntimeConfig, available: int | None) -> None:
    """Stop a load that the machine has no memory for, before the weights are read. Raises BackendError.

    available: bytes, None = unknown. Counted are the ledger's lines without what is optional: the margin, and copies of
    weights, which a backend makes only where there is room. Artifacts for a GPU are judged by their backend.
    """
    if available is None or manifest.backend.name != "onnxruntime":
        return
    per_slot = slot_bytes(manifest)
    lines = [line for line in manifest.ledger if line.label not in OPTIONAL_LINES]
    needed = sum(line.bytes for line in lines) - (manifest.slots - config.slots) * per_slot
    if needed > available:
        raise BackendError(
            f"the artifact needs {needed / 1e6:,.0f} MB, {available / 1e6:,.0f} MB are available",
            hint=f"free memory, or lower slots ({config.slots} now, {per_slot / 1e6:,.1f} MB each)",
        )
