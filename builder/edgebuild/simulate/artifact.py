"""From an artifact to what is simulated: its cells and scheduler.yaml, and the costs of its cells.

    run = replay(Path("artifacts/demo"), [Arrival(0.0, 300, 80), Arrival(0.4, 1200, 20)])

Costs come from, in this order: a file that is named, the artifact's costs.json, an estimate from a device profile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgert.config import RuntimeConfig, load_config
from edgert.costs import COSTS_NAME, StepCosts, load_costs
from edgert.errors import ArtifactError
from edgert.headroom import slots_within
from edgert.loading import limits_of, open_runtime, plan_loading
from edgert.manifest import Manifest, load_manifest
from edgert.measure import measure_costs
from edgert.slots import slots_to_allocate
from edgert.tempo import Targets

from edgebuild.errors import ProfileError, SimulationError
from edgebuild.files import write_whole
from edgebuild.plan.from_profile import CPU, GPU
from edgebuild.profile import load_profile
from edgebuild.simulate import estimate
from edgebuild.simulate.engine import simulate
from edgebuild.simulate.records import Arrival, Run
from edgebuild.simulate.setting import Setting

# What is expected of a drafter of which the plan knows nothing; edgert.drafting expects the same.
UNKNOWN_ACCEPTANCE = 0.7


@dataclass(frozen=True)
class Subject:
    """An artifact as the simulator sees it. plan: plan.json, {} when it is not there."""

    directory: Path
    manifest: Manifest
    config: RuntimeConfig
    plan: Mapping[str, Any]

    @property
    def tpot_ms(self) -> float | None:
        """The profile's limit for the time per token, which only judges requests; None where it names none."""
        slo = self.plan.get("slo")
        value = slo.get("tpot_ms") if isinstance(slo, dict) else None
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def read_subject(directory: Path, overrides: Mapping[str, Any] | None = None) -> Subject:
    """Read manifest, scheduler.yaml and plan.json; hashes are not checked. Raises ArtifactError or ConfigError."""
    manifest = load_manifest(directory)
    config = load_config(directory, manifest, overrides)
    try:
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        plan = {}
    return Subject(directory, manifest, config, plan if isinstance(plan, dict) else {})


def find_costs(subject: Subject, *, file: Path | None = None, profile_name: str | None = None) -> StepCosts:
    """Costs of every cell in use. Raises SimulationError where there is no source, or it is of another model."""
    cells = subject.config.select_cells(subject.manifest)
    here = subject.directory / COSTS_NAME
    if file is not None or (here.exists() and profile_name is None):
        costs = load_costs(file or here)
        identity = subject.manifest.model.identity
        if costs.model and costs.model != identity:
            raise SimulationError(
                f"{file or here}: costs of model {costs.model[:12]}, the artifact's is {identity[:12]}",
                hint="measure this artifact: --measure",
            )
        return costs
    device, bandwidth = _device_of(subject, profile_name)
    known = CPU if subject.manifest.backend.name == "onnxruntime" else GPU
    return estimate.of_artifact(subject.manifest, subject.plan, cells, device, bandwidth, known.launch_cost_tokens)


def _device_of(subject: Subject, profile_name: str | None) -> tuple[str, float]:
    """Name and bandwidth (bytes/s) of the device to estimate for: of a profile, else of the artifact's own plan."""
    device, bandwidth = str(subject.plan.get("device", "")), subject.plan.get("bandwidth_gb_per_s")
    if profile_name is None and device and isinstance(bandwidth, int | float) and bandwidth > 0:
        return device, bandwidth * 1e9
    try:
        profile = load_profile(profile_name or device)
    except ProfileError as error:
        if profile_name is not None:
            raise
        raise SimulationError(
            f"{subject.directory}: no {COSTS_NAME}, and no profile to estimate costs from ({error})",
            hint="measure on the device: --measure, or name a device: --profile",
        ) from None
    return profile.name, profile.device.bandwidth_gb_per_s * 1e9


def measure(
    directory: Path, progress: Callable[[int, int], None] | None = None, *,
    settings: Mapping[str, Any] | None = None, output: Path | None = None,
) -> StepCosts:  # fmt: skip
    """As `measured`, and costs.json is written. output: the file; None: costs.json in the artifact."""
    costs = measured(directory, progress, settings=settings)
    write_costs(output or directory / COSTS_NAME, costs)
    return costs


def measured(
    directory: Path, progress: Callable[[int, int], None] | None = None, *, settings: Mapping[str, Any] | None = None
) -> StepCosts:
    """Open the engine here and measure every cell in use. Raises BackendError or ArtifactError.

    settings  scheduler.yaml's keys that are to be measured by in place of the artifact's; drafts are measured where
              there is a drafter, in use or not, so that the costs still serve when they are switched on
    """
    overrides = {**(settings or {}), "adaptive": False, "check_golden_at_load": False, "verify_files": False}
    longest = load_manifest(directory).draft_length
    if longest:
        overrides |= {"enable_mtp": True, "mtp_num_heads": longest}
    loading = plan_loading(directory, overrides)
    runtime = open_runtime(loading)
    try:
        return measure_costs(runtime, time.perf_counter, model=loading.manifest.model.identity, progress=progress)
    finally:
        runtime.backend.close()


def write_costs(path: Path, costs: StepCosts) -> None:
    """Whole or not at all. Raises ArtifactError."""
    try:
        write_whole(path, costs.dump())
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror or error}", hint="is the artifact writable?") from None


def setting_of(
    subject: Subject, costs: StepCosts, *, adaptive: bool | None = None, targets: Targets | None = None,
    acceptance: Sequence[float] = (), headroom: bool = True,
) -> Setting:  # fmt: skip
    """What the runtime would run by. None: as scheduler.yaml says.

    acceptance  of drafts by position; () = what the plan counts on. headroom: admission leaves its share free
    """
    config, manifest = subject.config, subject.manifest
    cells = config.select_cells(manifest)
    allocated = slots_to_allocate(config.slots, [cell.batch for cell in cells if cell.kind == "decode"])
    limits = limits_of(config, cells, allocated, any_first_slot=manifest.backend.name == "onnxruntime")
    limits = replace(
        limits,
        costs=costs,
        adaptive=config.adaptive if adaptive is None else adaptive,
        targets=limits.targets if targets is None else targets,
    )
    if config.draft_length and not acceptance:
        draft = subject.plan.get("draft")
        known = draft.get("acceptance") if isinstance(draft, dict) else None
        acceptance = tuple(known or (UNKNOWN_ACCEPTANCE,) * config.draft_length)
    fraction = config.throughput_headroom_fraction if headroom else 0.0
    return Setting(
        limits=limits,
        costs=costs,
        slots=config.slots,
        acceptance=tuple(acceptance) if config.draft_length else (),
        threshold=config.mtp_acceptance_threshold,
        admitted=slots_within(limits.rules, config.slots, fraction).slots,
    )


def replay(
    directory: Path, arrivals: Sequence[Arrival], *, costs: StepCosts | None = None, adaptive: bool | None = None,
    concurrency: int | None = None, seed: int = 0, overrides: Mapping[str, Any] | None = None,
) -> Run:  # fmt: skip
    """The artifact under these requests: what a measurement of the same requests is compared with.

    concurrency: in a closed loop, as `edgert bench` measures; None: at their own times
    """
    subject = read_subject(directory, overrides)
    used = costs or find_costs(subject)
    return simulate(setting_of(subject, used, adaptive=adaptive), arrivals, concurrency=concurrency, seed=seed)
