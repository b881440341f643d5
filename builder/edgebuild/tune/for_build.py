"""A tuning result as the numbers that a later build on the same device goes by, and where it is looked for.

Given as a file it must be of the same backend, precision and model, and of the profile's compute capability; of which
device is the user's word, since a build for an Orin may run on a laptop. Found by itself it must be of this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgebuild.engine.targets import can_build_here
from edgebuild.errors import EdgebuildError, TuningError
from edgebuild.plan.tuned import Tuned, TunedDraft
from edgebuild.profile import Profile
from edgebuild.tune.device import this_device
from edgebuild.tune.records import Result
from edgebuild.tune.session import last_result, remembered, tuning_folder


def tuned_from(result: Result) -> Tuned:
    """The numbers of a result. A chunk size counts where a smaller one than the largest won."""
    curve, vocabulary = result.curve, result.draft_vocabulary
    chunk = result.settings.get("max_prefill_chunk_size")
    smaller = isinstance(chunk, int) and result.largest_chunk is not None and chunk < result.largest_chunk
    points = () if curve is None else curve.points
    return Tuned(
        source=f"tuning on {result.device.name}, trial {result.trial}",
        drafts=tuple(TunedDraft(point.draft_length, point.tokens_per_ms, point.step_ms) for point in points),
        acceptance=() if curve is None else curve.acceptance,
        pick=0 if curve is None else curve.pick,
        pick_reason="" if curve is None else curve.reason,
        max_chunk=chunk if smaller and isinstance(chunk, int) else None,
        output_tokens_per_s=result.figures.output_tokens_per_s,
        concurrency=result.workload.concurrency,
        peak_memory_bytes=result.figures.peak_memory_bytes,
        draft_vocabulary=None if vocabulary is None else vocabulary.pick,
        used_tokens=() if vocabulary is None else vocabulary.used_tokens,
    )


def given_tuning(path: Path, profile: Profile, model: str) -> Result:
    """The last result of a logbook that was named. Raises TuningError where it is not of this backend and model."""
    result = last_result(path)
    wrong = _unlike(result, profile, model)
    if wrong:
        raise TuningError(f"{path}: the tuning run is of {wrong}", hint="tune an artifact of this model and profile")
    return result


def found_tuning(
    profile: Profile, model: str, say: Callable[[str], None], *, folder: Path | None = None
) -> Result | None:
    """What `edgebuild tune` kept for this machine, where the engine is for this machine. Never raises."""
    folder = folder or tuning_folder()
    if not folder.is_dir() or not can_build_here(profile).possible:
        return None
    path = remembered(this_device(profile.backend).identity, model, profile.backend, folder)
    if not path.is_file():
        return None
    try:
        result = last_result(path)
    except EdgebuildError as error:
        say(f"not used: {error}")
        return None
    wrong = _unlike(result, profile, model)
    if wrong:
        say(f"not used: {path}: the tuning run is of {wrong}")
        return None
    say(f"read {path}: what was measured here goes over what is estimated (--no-tuning leaves it out)")
    return result


def apply_vocabulary(profile: Profile, tuned: Tuned, say: Callable[[str], None]) -> Profile:
    """The profile with the measured draft vocabulary, where it drafts and names none itself."""
    if not profile.draft.length or profile.draft.vocabulary is not None or tuned.draft_vocabulary is None:
        return profile
    say(f"draft vocabulary of {tuned.draft_vocabulary:,} tokens: measured ({tuned.source})")
    draft = profile.draft.model_copy(update={"vocabulary": tuned.draft_vocabulary})
    return profile.model_copy(update={"draft": draft})


def _unlike(result: Result, profile: Profile, model: str) -> str | None:
    """What does not fit the build, in words; None where everything does."""
    artifact, device = result.artifact, result.device
    if artifact.backend != profile.backend:
        return f"{artifact.backend}, the profile says {profile.backend}"
    if artifact.precision != profile.precision:
        return f"{artifact.precision}, the profile says {profile.precision}"
    if artifact.model != model:
        return f"the model {artifact.model}, this is {model}"
    if None not in (device.compute_capability, profile.compute_capability) and (
        device.compute_capability != profile.compute_capability
    ):
        return f"compute capability {device.compute_capability}, the profile says {profile.compute_capability}"
    return None
