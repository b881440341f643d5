"""From an artifact and a traffic file to a tuning run, and from its result to files. The command line's other half."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from edgert.config import CONFIG_NAME, load_config
from edgert.guards.detect import detect_sensors
from edgert.integrity import check_files, require_complete
from edgert.manifest import MANIFEST_NAME, Manifest, load_manifest
from edgert.text import TextCodec

from edgebuild.artifact import canonical_json
from edgebuild.errors import TuningError
from edgebuild.profile import Profile
from edgebuild.profile.schema import Limits
from edgebuild.progress import Stages
from edgebuild.simulate.artifact import measure
from edgebuild.tune.concurrency import of_traffic
from edgebuild.tune.config_file import rest_sha256, tuned_text, write_atomically
from edgebuild.tune.device import conditions, this_device, versions
from edgebuild.tune.logbook import LogbookWriter, read_logbook
from edgebuild.tune.records import ArtifactId, Conditions, Result, Trial, to_json
from edgebuild.tune.runner import Runner
from edgebuild.tune.search import Look, Setup, Tuner, show_setting
from edgebuild.tune.workload import Shape, is_prompts, make_work


@dataclass(frozen=True)
class Ask:
    """What the command line asks for. concurrency None: as the traffic says, or as many as there are slots."""

    traffic: Path
    requests: int | None
    concurrency: int | None
    repeats: int
    seed: int
    soak_minutes: float
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None


def prepare(path: Path, ask: Ask, profile: Profile | None, stages: Stages) -> Setup:
    """Check the artifact, read the traffic. Raises EdgertError or EdgebuildError."""
    with stages.stage("artifact"):
        manifest = load_manifest(path)
        check_files(path, manifest)
        require_complete(manifest, path)
        config = load_config(path, manifest)
    with stages.stage("traffic"):
        concurrency, source = _concurrency(path, ask, config.slots)
        shape = Shape(
            requests=ask.requests,
            concurrency=concurrency,
            concurrency_source=source,
            repeats=ask.repeats,
            seed=ask.seed,
            slo_ttft_ms=ask.slo_ttft_ms,
            slo_tpot_ms=ask.slo_tpot_ms,
        )
        codec = TextCodec.from_artifact(path, manifest)
        work = make_work(ask.traffic, codec, shape, context_tokens=config.context_tokens)
    limits = Limits() if profile is None else profile.limits
    return Setup(
        path=path,
        manifest=manifest,
        config=config,
        artifact=artifact_id(path, manifest),
        device=this_device(manifest.backend.name),
        versions=versions(manifest.backend),
        work=work,
        threshold=(config.mtp_acceptance_threshold if profile is None else profile.mechanisms.mtp_acceptance_threshold),
        soak_s=ask.soak_minutes * 60,
        drift_limit=limits.max_drift_fraction,
        slo_ttft_ms=ask.slo_ttft_ms,
        slo_tpot_ms=ask.slo_tpot_ms,
    )


def _concurrency(path: Path, ask: Ask, slots: int) -> tuple[int, str]:
    """As asked for, else as the times of the trace say, else as many as there are slots."""
    if ask.concurrency is not None:
        return ask.concurrency, "--concurrency"
    told = None if is_prompts(ask.traffic) else of_traffic(ask.traffic, path, slots)
    return told or (slots, f"the artifact's {slots} slots")


def artifact_id(path: Path, manifest: Manifest) -> ArtifactId:
    """Which artifact, whatever is tuned in its scheduler.yaml."""
    engine = manifest.file(manifest.decoder_file)
    assert engine is not None, "a manifest that was read lists its decoder"
    return ArtifactId(
        name=manifest.name,
        sha256=hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest(),
        engine_sha256=engine.sha256,
        config_sha256=rest_sha256((path / CONFIG_NAME).read_text("utf-8")),
        backend=manifest.backend.name,
        backend_version=manifest.backend.version,
        precision=manifest.backend.precision,
        model=manifest.model.name,
        model_identity=manifest.model.identity,
        draft_length=manifest.draft_length,
        draft_vocabulary=manifest.draft_vocabulary,
    )


def usable(trials: Sequence[Trial], setup: Setup) -> tuple[list[Trial], list[str]]:
    """Lines that say what a trial here and now would say, and what is said of the others."""
    found, left = [], Counter[str]()
    for trial in trials:
        if trial.device.identity != setup.device.identity:
            left[f"of another device ({trial.device.name})"] += 1
        elif (trial.artifact.sha256, trial.artifact.config_sha256) != (
            setup.artifact.sha256,
            setup.artifact.config_sha256,
        ):
            left[f"of another artifact, or of another scheduler.yaml ({trial.artifact.name})"] += 1
        elif trial.versions != setup.versions:
            left["of other versions of edgebuild or the backend"] += 1
        elif trial.workload.sha256 != setup.work.record.sha256:
            left["of other requests, concurrency or limits"] += 1
        else:
            found.append(trial)
    return found, [f"{count} trials in the logbook are {what}: not reused" for what, count in left.items()]


def sensor_look(backend: str) -> Look:
    """Looks at the real device. A device without sensors still has a CPU clock and memory."""
    sensors = detect_sensors(gpu=backend != "onnxruntime", once=True)

    def look() -> tuple[Conditions | None, str | None]:
        mode, _ = sensors.power_mode()
        return conditions(sensors.read()), mode

    return look


def tune(
    setup: Setup,
    logbook: Path,
    stages: Stages,
    *,
    runner: Runner,
    look: Look,
    now: Callable[[], float],
    at: Callable[[], str],
    fresh: bool = False,
) -> tuple[Result, list[Trial]]:
    """Run what the logbook does not hold yet, and write the result into it. Raises TuningError."""
    with LogbookWriter(logbook) as book:
        if book.torn_bytes:
            stages.note(f"{logbook}: a half-written last line ({book.torn_bytes:,} bytes) was cut off")
        lines = read_logbook(logbook)
        known, notes = usable(() if fresh else lines.trials, setup)
        for note in notes:
            stages.note(note)
        if known:
            stages.note(f"{len(known)} trials are in the logbook: what they measured is not measured again")
        last = max((trial.number for trial in lines.trials), default=0)
        tuner = Tuner(setup, runner, book.append, look, now, at, stages, known=known, last_number=last)
        result = tuner.run()
        before = next((line for line in reversed(lines.results) if _same(line, result)), None)
        if before is None:
            book.append(result)
        return before or result, tuner.trials


def _same(one: Result, other: Result) -> bool:
    return one.model_copy(update={"at": ""}) == other.model_copy(update={"at": ""})


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_config(setup: Setup, result: Result, trials: Sequence[Trial], output: Path) -> None:
    """The artifact's scheduler.yaml with the chosen settings, at `output`."""
    text = (setup.path / CONFIG_NAME).read_text("utf-8")
    reasons = {key: f"{_why(key, trials)} (tuning on {result.device.name})" for key in result.settings}
    write_atomically(output, tuned_text(text, setup.manifest, result.settings, reasons))


def _why(key: str, trials: Sequence[Trial]) -> str:
    """What decided a key: the change that won, else what became of the last one that was tried."""
    tried = [
        trial for trial in trials if trial.changed == key and trial.figures is not None and trial.step != "draft_curve"
    ]
    won = [trial for trial in tried if trial.verdict == "wins"]
    if won:
        return f"trial {won[-1].number}: {won[-1].reason}"
    if tried:
        last = tried[-1]
        return f"trial {last.number}, {show_setting(last.after)}: {last.verdict}: {last.reason}"
    return "not tried"


def write_costs(setup: Setup, result: Result, output: Path, stages: Stages) -> None:
    """costs.json of the chosen settings, at `output`. Raises EdgertError."""
    with stages.stage("step costs") as report:
        measure(
            setup.path,
            lambda done, cells: report(done / cells),
            settings=json.loads(json.dumps(result.settings)),
            output=output,
        )


# --- what a later build on this device reads ---


def tuning_folder() -> Path:
    """Where results are kept by device: $EDGEBUILD_TUNING, else in the user's cache."""
    given = os.environ.get("EDGEBUILD_TUNING")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgebuild" / "tuning"


def remembered(device: str, model: str, backend: str, folder: Path | None = None) -> Path:
    """The file for one device, model and backend. device: its identity."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in model)
    return (folder or tuning_folder()) / f"{device[:16]}-{safe}-{backend}.jsonl"


def remember(result: Result, folder: Path | None = None) -> Path:
    """Keep a result for later builds on this device; the last one counts. A logbook of one line."""
    path = remembered(result.device.identity, result.artifact.model, result.artifact.backend, folder)
    write_atomically(path, result.model_dump_json() + "\n")
    return path


def last_result(logbook: Path) -> Result:
    """The latest result of a logbook. Raises TuningError where it has none."""
    results = read_logbook(logbook).results
    if not results:
        raise TuningError(f"{logbook}: no finished tuning run in it", hint="run edgebuild tune to its end")
    return results[-1]


def document(result: Result, trials: Sequence[Trial], logbook: Path, config: Path, costs: Path | None) -> str:
    """The JSON that the command prints. costs: None where they could not be measured."""
    return canonical_json(
        {
            "result": to_json(result),
            "trials": [to_json(trial) for trial in trials],
            "logbook": str(logbook),
            "config": str(config),
            "costs": None if costs is None else str(costs),
        }
    ).decode()
