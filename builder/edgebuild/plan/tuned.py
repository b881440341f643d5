"""What a tuning run on the device measured, as plain numbers over the plan's own estimates. Pure.

Each number that comes from there is said in a note of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgebuild.plan.drafts import DraftChoice, expected_tokens
from edgebuild.plan.records import Limits, Plan


@dataclass(frozen=True)
class TunedDraft:
    """One draft length of the measured curve."""

    length: int
    tokens_per_ms: float
    step_ms: float


@dataclass(frozen=True)
class Tuned:
    """source: for people, such as "tuning on Orin AGX, trial 12". None: not measured, or left as it was.

    drafts       the measured curve, k = 0 first; () = nothing drafts
    pick         the draft length that the curve chose, and why
    max_chunk    largest prefill chunk, where a smaller one than the artifact's largest won
    draft_vocabulary, used_tokens   how many tokens may be drafted, and which first
    """

    source: str
    drafts: tuple[TunedDraft, ...] = ()
    acceptance: tuple[float, ...] = ()
    pick: int = 0
    pick_reason: str = ""
    max_chunk: int | None = None
    output_tokens_per_s: float | None = None
    concurrency: int = 1
    peak_memory_bytes: float | None = None
    draft_vocabulary: int | None = None
    used_tokens: tuple[int, ...] = ()


def tuned_limits(limits: Limits, tuned: Tuned) -> Limits:
    """The limits with what was measured in place of what was estimated."""
    if tuned.max_chunk is not None:
        limits = replace(limits, max_chunk=max(limits.min_chunk, min(limits.max_chunk, tuned.max_chunk)))
    draft = _draft(limits.draft_length, tuned)
    return limits if draft is None else replace(limits, measured_draft=draft)


def tuned_plan(plan: Plan, tuned: Tuned) -> Plan:
    """The plan with a note for each number that came from the tuning run."""
    return replace(plan, notes=(*plan.notes, *_notes(plan, tuned)))


def _draft(asked: int, tuned: Tuned) -> DraftChoice | None:
    """The curve's pick, or the best of what the profile still allows; None where no curve was measured."""
    known = [point for point in tuned.drafts if point.length <= asked]
    if not asked or len(known) < 2:
        return None
    point = next((point for point in known if point.length == tuned.pick), None)
    reason = tuned.pick_reason
    if point is None:
        point = max(known, key=lambda each: (each.tokens_per_ms, -each.length))
        reason = f"{point.tokens_per_ms:.3g} tokens/ms is the best of k = 0..{asked}, which the profile allows"
    return DraftChoice(
        point.length,
        expected_tokens(tuned.acceptance, point.length),
        point.tokens_per_ms,
        tuned.acceptance[:asked],
        f"measured ({tuned.source}): {reason}",
    )


def _notes(plan: Plan, tuned: Tuned) -> Sequence[str]:
    limits, notes = plan.limits, []
    if limits.measured_draft is not None:
        notes.append(f"draft length {plan.draft.length} {plan.draft.reason}")
    if tuned.max_chunk is not None and limits.max_chunk == tuned.max_chunk:
        notes.append(f"chunks of at most {tuned.max_chunk} rows: measured ({tuned.source})")
    if tuned.output_tokens_per_s is not None:
        free = limits.throughput_headroom_fraction
        notes.append(
            f"measured ({tuned.source}): {tuned.output_tokens_per_s:,.1f} output tokens/s with {tuned.concurrency} "
            f"requests at a time; {free:.0%} of it kept free leaves {tuned.output_tokens_per_s * (1 - free):,.1f}"
        )
    if tuned.peak_memory_bytes is not None:
        planned = plan.ledger.planned_bytes
        notes.append(
            f"measured ({tuned.source}): {tuned.peak_memory_bytes / 1e6:,.0f} MB at the peak of the tuned artifact, "
            f"{planned / 1e6:,.0f} MB are planned here"
        )
    return notes
