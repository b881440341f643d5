"""The build: profile + traffic + checkpoint → plan → ONNX → engine → artifact, and `resume` for the second half.

The order of the stages stands here, and nothing else: every stage is a function of another module. Everything is
written to a hidden directory beside the target and published by one rename at the end.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from edgert.costs import StepCosts
from edgert.errors import ArtifactError, BackendError, ConfigError, GoldenMismatch
from edgert.golden import GoldenReport
from edgert.manifest import (
    BackendInfo,
    LedgerLine,
    Manifest,
    ModelInfo,
    SourceEntry,
    StateSpec,
    TensorSpec,
    TrafficInfo,
)
from edgert.selfcheck import SelfCheck

from edgebuild import __version__
from edgebuild.artifact import ArtifactWriter
from edgebuild.checkpoint import Checkpoint, match_tensors, open_checkpoint
from edgebuild.drafter import DrafterWeights, drafter_shape, find_drafter
from edgebuild.engine.targets import BuildPlace, can_build_here, device_capability
from edgebuild.errors import CheckpointError, EngineError
from edgebuild.models.config import ModelConfig
from edgebuild.models.hash_check import refuse_other_hashes
from edgebuild.models.support import refuse_backend
from edgebuild.plan import ModelShape, Plan, Tuned, make_plan
from edgebuild.profile import Profile
from edgebuild.progress import Stages
from edgebuild.restore import WEIGHTS, restore_weights, weights_missing
from edgebuild.traffic import Histogram, dump_histogram

_TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "numpy", "tokenizers")
_LEAN = {"prepack": False}  # the check runs beside the builder: no second copy of the weights
# what an engine replaces: graph and weights of the decoder, and of the drafter where there is one
ONNX_FILES = ("decoder.onnx", "decoder.weights", "mtp.onnx", "mtp.weights")


@dataclass(frozen=True)
class Built:
    """What a build or a resume left behind. `golden` is None where this machine cannot run the artifact."""

    path: Path
    manifest: Manifest
    golden: GoldenReport | None
    not_checked: str | None
    next_step: str | None


def build(
    profile: Profile,
    model: Path,
    histogram: Histogram,
    output: Path,
    stages: Stages,
    *,
    max_cells: int | None = None,
    engine: bool = True,
    tuned: Tuned | None = None,
    costs: StepCosts | None = None,
) -> Built:
    """Build an artifact at `output`. Raises EdgebuildError or EdgertError; on any error nothing is left behind.

    engine: False stops after ONNX, though this machine could go on. tuned: what was measured on the device, and costs:
    of an earlier build's cells.
    """
    if not engine and profile.backend == "onnxruntime":
        raise EngineError(
            "onnxruntime runs the ONNX file itself: there is no engine to leave for the device",
            hint="leave --no-engine out",
        )
    with stages.stage("checkpoint"):
        checkpoint = open_checkpoint(model)
        config = ModelConfig.from_hf(checkpoint.config)
        refuse_backend(profile.backend, config, profile.limits.max_chunk)
        refuse_other_hashes(config, checkpoint)
        left_out = match_tensors(config.expected_tensors(), checkpoint, ignored_prefixes=("mtp.",))
        drafter = _find_drafter(profile, config, checkpoint)
    for name in (*checkpoint.skipped, *left_out):
        stages.note(f"left out: {name}")
    with stages.stage("plan"):
        limit = min(checkpoint.tokenizer.token_limit, config.vocabulary_size)
        shape = None if drafter is None else drafter_shape(config, profile, limit, drafter.acceptance)
        plan = make_plan(profile, histogram, ModelShape.from_config(config), max_cells, shape, tuned, costs)
    drafter = drafter if plan.draft.length else None
    if drafter is not None and tuned is not None:
        drafter = replace(drafter, first=tuned.used_tokens)
    for note in plan.notes:
        stages.note(note)
    place = can_build_here(profile) if engine else BuildPlace(False, "it was left for the device")
    needed = plan.ledger.lines[0].bytes * (1 if profile.backend == "onnxruntime" else 2)
    with ArtifactWriter(output, needed_bytes=needed) as writer:
        manifest = _write_onnx(writer, profile, config, checkpoint, drafter, histogram, plan, model, stages)
        if profile.backend != "onnxruntime" and place.possible:
            manifest = _build_engine(writer.directory, writer, manifest, stages)
        with stages.stage("hashes"):
            manifest = writer.seal(manifest)
        checked, not_checked = _check(writer.directory, manifest, stages)
        with stages.stage("report"):
            _write_report(writer, manifest, checked, {} if drafter is None else drafter.card)
            manifest = writer.seal(manifest)
        path = _published(writer, stages)
    resume = None if manifest.state == "complete" else f"edgebuild resume {shlex.quote(str(path))}"
    golden = None if checked is None else checked.golden
    return Built(path, manifest, golden, not_checked if resume is None else place.reason, resume)


def _published(writer: ArtifactWriter, stages: Stages) -> Path:
    path = writer.publish()
    for copy in writer.kept:
        stages.note(f"kept from the artifact that was there: {copy}")
    return path


def resume(artifact: Path, stages: Stages, *, model: Path | None = None) -> Built:
    """Finish an artifact that stopped after ONNX: build its engine on this machine, in place of the ONNX files.

    model: the checkpoint, for an artifact that came without decoder.weights.
    """
    from edgert.integrity import check_files
    from edgert.manifest import load_manifest

    with stages.stage("artifact"):
        manifest = load_manifest(artifact)
        missing = manifest.state != "complete" and weights_missing(artifact, manifest)
        if missing and model is None:
            raise EngineError(f"{artifact}: came without {WEIGHTS}", hint="give the checkpoint: --model CHECKPOINT")
    if missing and model is not None:
        with stages.stage("weights") as report:
            restore_weights(artifact, manifest, model, report)
    elif model is not None:
        stages.note(f"--model was not needed: {artifact.name} has its weights")
    with stages.stage("hashes of what came"):
        check_files(artifact, manifest, "full")
    if manifest.state == "complete":
        where = shlex.quote(str(artifact))
        raise EngineError(f"{artifact}: complete already", hint=f"edgert generate {where} --prompt TEXT")
    place = can_build_here(_Target(manifest.backend))
    if not place.possible:
        raise EngineError(f"the {manifest.backend.name} engine cannot be built here: {place.reason}",
                          hint=place.next_step or "run it on the device")  # fmt: skip
    needed = 2 * sum(entry.bytes for entry in manifest.files if entry.path in ONNX_FILES)
    with ArtifactWriter(artifact, needed_bytes=needed) as writer:
        for entry in manifest.files:
            if entry.path not in ONNX_FILES:
                target = writer.directory / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact / entry.path, target)
        manifest = _build_engine(artifact, writer, manifest, stages)
        with stages.stage("hashes"):
            manifest = writer.seal(manifest)
        checked, not_checked = _check(writer.directory, manifest, stages)
        with stages.stage("report"):
            _write_report(writer, manifest, checked, {})
            manifest = writer.seal(manifest)
        path = _published(writer, stages)
    return Built(path, manifest, None if checked is None else checked.golden, not_checked, None)


@dataclass(frozen=True)
class _Target:
    """What `can_build_here` asks of a profile, read from a manifest."""

    info: BackendInfo

    @property
    def backend(self) -> str:
        return self.info.name

    @property
    def compute_capability(self) -> str | None:
        return self.info.compute_capabilities[0] if self.info.compute_capabilities else None


def _write_onnx(
    writer: ArtifactWriter,
    profile: Profile,
    config: ModelConfig,
    checkpoint: Checkpoint,
    drafter: DrafterWeights | None,
    histogram: Histogram,
    plan: Plan,
    model: Path,
    stages: Stages,
) -> Manifest:
    """Everything of an artifact but the engine, and the manifest that describes it (not sealed)."""
    from edgebuild.scheduler_config import render_scheduler

    tokenizer = checkpoint.tokenizer
    token_limit = min(tokenizer.token_limit, config.vocabulary_size)
    with stages.stage("export") as report:
        from edgebuild.export import FORMS, export_decoder  # loads torch, which takes seconds: inside the stage

        # the drafter's products stay whole: its time was not measured with parts
        forms = replace(FORMS[profile.backend], processors=profile.device.multiprocessors or 0)
        graph = export_decoder(
            config,
            checkpoint,
            writer.directory,
            cache_tokens=plan.cache_tokens,
            token_limit=token_limit,
            precision=profile.precision,
            forms=forms,
            drafting=drafter is not None,
            progress=lambda stage, done: report((0.7 if stage == "trace" else 0.7 + 0.3 * done) * (done or 0.01)),
        )
    draft_tokens: tuple[int, ...] = ()
    draft_states: tuple[StateSpec, ...] = ()
    if drafter is not None:
        with stages.stage("export of the drafter"):
            from edgebuild.export.mtp import export_mtp

            draft_tokens = drafter.draft_tokens(token_limit, profile.draft.vocabulary)
            states = export_mtp(
                config,
                drafter,
                writer.directory,
                cache_tokens=plan.cache_tokens,
                draft_tokens=draft_tokens,
                precision=profile.precision,
                forms=FORMS[profile.backend],
            ).states
            draft_states = tuple(StateSpec(s.name, f"{s.name}.out", s.dtype, s.kind, s.shape) for s in states)
    with stages.stage("golden vectors") as report:
        from edgebuild.golden import make_golden
        from edgebuild.golden_drafts import ReferenceDrafter

        golden = make_golden(
            checkpoint,
            precision=profile.precision,
            chunk_sizes=plan.prefill.chunk_sizes,
            context_tokens=plan.context_tokens,
            progress=report,
            drafter=None if drafter is None else ReferenceDrafter(config, drafter, draft_tokens),
            draft_length=plan.draft.length,
        )
        writer.write_json("golden.json", golden)
    with stages.stage("source hashes"):
        files = (*checkpoint.files, *(() if drafter is None else drafter.files))
        sources = tuple(SourceEntry(file.name, file.bytes, file.sha256()) for file in files)
    writer.write("tokenizer.json", tokenizer.tokenizer_json)
    if tokenizer.chat_template is not None:
        writer.write("chat_template.jinja", tokenizer.chat_template)
    writer.write("traffic.yaml", dump_histogram(histogram))
    writer.write("scheduler.yaml", render_scheduler(plan))
    writer.write_json("plan.json", plan.to_json())
    name = model_name(model)
    return Manifest(
        format_version=1,
        name=f"{name}-{profile.name}",
        edgebuild_version=__version__,
        tools=_tool_versions(),
        state="complete" if profile.backend == "onnxruntime" else "onnx",
        model=ModelInfo(
            family=config.family,
            name=name,
            identity=_identity(checkpoint, sources),
            hidden_size=config.hidden_size,
            layers=config.layers,
            vocabulary_size=config.vocabulary_size,
            token_limit=token_limit,
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id,
            context_tokens=config.context_tokens,
        ),
        source=sources,
        backend=BackendInfo(
            profile.backend, _backend_version(profile.backend), profile.compute_capabilities, profile.precision
        ),
        context_tokens=plan.context_tokens,
        cache_tokens=plan.cache_tokens,
        slots=plan.slots,
        cells=plan.cells,
        inputs=tuple(TensorSpec(t.name, t.dtype, t.shape) for t in graph.inputs),
        outputs=tuple(TensorSpec(t.name, t.dtype, t.shape) for t in graph.outputs),
        states=tuple(
            StateSpec(state.name, f"{state.name}.out", state.dtype, state.kind, state.shape) for state in graph.states
        ),
        ledger=tuple(LedgerLine(line.label, line.bytes, line.formula) for line in plan.ledger.lines),
        budget_bytes=plan.ledger.device_bytes,
        draft_length=plan.draft.length,
        draft_vocabulary=len(draft_tokens),
        draft_states=draft_states,
        traffic=TrafficInfo(histogram.name, histogram.source_sha256, histogram.requests, histogram.attribution),
        files=(),
    )


def _build_engine(onnx: Path, writer: ArtifactWriter, manifest: Manifest, stages: Stages) -> Manifest:
    """The engines in place of the ONNX files in `onnx`; copies of those in the writer's directory are dropped."""
    from edgebuild.engine.plans import build_plans

    version = build_plans(onnx, writer.directory, manifest, stages)
    for name in ONNX_FILES:
        (writer.directory / name).unlink(missing_ok=True)
    return replace(manifest, state="complete", backend=replace(manifest.backend, version=version))


def _write_report(
    writer: ArtifactWriter, manifest: Manifest, checked: SelfCheck | None, card: Mapping[str, Any]
) -> None:
    """What this build measured (a resumed one keeps what the first half wrote), and the page that shows it."""
    from edgebuild.report import BUILD_FACTS, Evidence, build_facts, read_sources, render_report

    facts = build_facts(writer.directory, manifest, checked, card)
    writer.write_json(BUILD_FACTS, facts)
    writer.write("report.html", render_report(read_sources(writer.directory, manifest), Evidence(build=facts)))


def _check(directory: Path, manifest: Manifest, stages: Stages) -> tuple[SelfCheck | None, str | None]:
    """Load the sealed artifact as the runtime would and compare it with its golden vectors, where this machine can."""
    if manifest.state != "complete":
        return None, "the engine is not built yet"
    if manifest.backend.name != "onnxruntime":
        found = device_capability()
        if found not in manifest.backend.compute_capabilities:
            built_for = ", ".join(manifest.backend.compute_capabilities)
            return None, f"built for compute capability {built_for}; this machine has {found or 'no NVIDIA GPU'}"
    with stages.stage("golden check"):
        checked = check_artifact(directory, manifest.backend.name)
    report = checked.golden
    stages.note(f"{report.steps} steps, worst relative error {report.worst_error:.1e} of {report.tolerance:.0e}")
    return checked, None


def check_artifact(directory: Path, backend: str) -> SelfCheck:
    """Golden vectors through the runtime in a process of its own: no torch, no builder. Raises EdgertError."""
    options = json.dumps(_LEAN if backend == "onnxruntime" else {})
    command = [sys.executable, "-m", "edgert.selfcheck", str(directory), options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return SelfCheck.from_json(json.loads(result.stdout))
    message = result.stderr.strip().splitlines()[-1:] or [f"the check ended with status {result.returncode}"]
    errors = {kind.exit_code: kind for kind in (ArtifactError, ConfigError, BackendError, GoldenMismatch)}
    raise errors.get(result.returncode, BackendError)(message[0])


def model_name(path: Path) -> str:
    """A name for people and directories: the checkpoint's folder or file name without what does not belong there."""
    stem = path.name[: -len(".gguf")] if path.name.endswith(".gguf") else path.resolve().name
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("-.") or "model"


def _find_drafter(profile: Profile, config: ModelConfig, checkpoint: Checkpoint) -> DrafterWeights | None:
    """A profile that asks for drafts needs the weights that draft: never a random head, never a silent no."""
    asked = profile.draft.length
    if not asked:
        return None
    drafter = find_drafter(checkpoint, config, profile.drafter)
    if drafter is None:
        declared = (
            f"config.json declares {config.mtp_layers} MTP layers" if config.mtp_layers else "its config has no MTP"
        )
        raise CheckpointError(
            f"the profile asks for draft length {asked}, but the checkpoint has no mtp.* tensor ({declared})",
            hint="give a head with --mtp FILE (edgebuild train-mtp makes one), or set draft.length to 0",
        )
    return drafter


def _identity(checkpoint: Checkpoint, sources: Sequence[SourceEntry]) -> str:
    """SHA-256 over the configuration and the hash of every file."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for source in sorted(sources, key=lambda entry: entry.file):
        digest.update(f"{source.file}\0{source.sha256}\n".encode())
    return digest.hexdigest()


def _tool_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _TOOLS}


def _backend_version(backend: str) -> str:
    from edgert.backends import trt_module

    if backend == "onnxruntime":
        return metadata.version("onnxruntime")
    return trt_module.version(backend) or "none"


__all__ = ["Built", "build", "check_artifact", "model_name", "resume"]
