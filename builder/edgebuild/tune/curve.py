"""The acceptance curve: what k = 0, 1, ... gave on this device, by task, and which draft length to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from edgert.manifest import Manifest

from edgebuild.plan.drafts import Measured, choose_measured, expected_tokens
from edgebuild.plan.memory import ELEMENT_BYTES
from edgebuild.tune.outcome import TOKENS_PER_MS
from edgebuild.tune.records import Curve, CurvePoint, DraftVocabulary, TaskAcceptance, Trial
from edgebuild.tune.vocabulary import propose


def make_curve(trials: Sequence[Trial], threshold: float) -> Curve | None:
    """From the trials of the step `draft_curve`; None where the plain one is missing, or nothing was drafted."""
    points, measured = [], []
    for trial in trials:
        rates = [value for value in trial.samples.get(TOKENS_PER_MS, ()) if value is not None]
        if not rates or trial.step_ms is None or trial.draft_length is None:
            continue
        positions = by_position(trial.acceptance)
        points.append(
            CurvePoint(
                draft_length=trial.draft_length,
                tokens_per_ms=median(rates),
                spread=max(rates) - min(rates),
                step_ms=trial.step_ms,
                mean_accepted_length=expected_tokens(positions, trial.draft_length),
                by_task=trial.acceptance,
            )
        )
        measured.append(Measured(trial.draft_length, tuple(rates), positions))
    if len(points) < 2 or points[0].draft_length:
        return None
    pick, reason = choose_measured(measured, threshold)
    return Curve(
        points=tuple(points),
        acceptance=measured[-1].acceptance,
        threshold=threshold,
        pick=pick,
        best_by_task=_best_by_task(points),
        reason=reason,
    )


def by_position(tasks: Mapping[str, TaskAcceptance]) -> tuple[float, ...]:
    """Acceptance by position over all tasks, each weighted by how often that position was verified."""
    length = max((len(each.by_position) for each in tasks.values()), default=0)
    reached, accepted = [0.0] * length, [0.0] * length
    for each in tasks.values():
        here = float(each.steps)
        for at, rate in enumerate(each.by_position):
            if rate is None:
                break
            reached[at] += here
            here *= rate
            accepted[at] += here
    found = []
    for steps, kept in zip(reached, accepted, strict=True):
        if not steps:
            break
        found.append(kept / steps)
    return tuple(found)


def _best_by_task(points: Sequence[CurvePoint]) -> dict[str, int]:
    best: dict[str, int] = {}
    for task in sorted({task for point in points for task in point.by_task}):
        rates = {
            point.draft_length: each.tokens_per_ms
            for point in points
            if (each := point.by_task.get(task)) is not None and each.tokens_per_ms is not None
        }
        if rates:
            best[task] = max(rates, key=lambda length: (rates[length] or 0.0, -length))
    return best


def make_vocabulary(
    trials: Sequence[Trial], curve: Curve | None, manifest: Manifest, threshold: float
) -> DraftVocabulary | None:
    """What `draft_vocabulary` should be for the text of the curve; None without a curve.

    The cost of another vocabulary follows from the plain step: it reads the weights once, the draft head reads its
    table at the same speed.
    """
    if curve is None or not trials[0].token_counts:
        return None
    texts = [[token for token, count in each for _ in range(count)] for each in trials[0].token_counts]
    weights = next((line.bytes for line in manifest.ledger if line.label == "weights"), 0)
    plain_ms = curve.points[0].step_ms
    table_bytes = manifest.model.hidden_size * ELEMENT_BYTES[manifest.backend.precision]
    return propose(
        texts,
        token_limit=manifest.model.token_limit,
        built=manifest.draft_vocabulary or manifest.model.token_limit,
        step_ms=[point.step_ms for point in curve.points],
        acceptance=curve.acceptance,
        head_ms_per_token=table_bytes * plain_ms / weights if weights else 0.0,
        threshold=threshold,
    )
