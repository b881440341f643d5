"""Draft length: how many tokens to propose a step, from measured acceptance and measured step costs.

With acceptance a_1..a_K (position i accepted, given that those before it were) a step with k drafts yields
E(k) = 1 + a_1 + a_1 a_2 + ... + a_1..a_k tokens (Leviathan et al. 2023, by position) in cost(k) ms.
This module knows numbers only; nothing measured means no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

ACCEPTANCE_THRESHOLD = 0.6


@dataclass(frozen=True)
class Measured:
    """One draft length as it ran. tokens_per_ms: of each repeat; acceptance: by position, given the one before."""

    length: int
    tokens_per_ms: tuple[float, ...]
    acceptance: tuple[float, ...]


@dataclass(frozen=True)
class DraftChoice:
    """length 0 = no drafts; `expected_tokens` a step, bonus token included; `tokens_per_ms` None = not measured."""

    length: int
    expected_tokens: float
    tokens_per_ms: float | None
    acceptance: tuple[float, ...]
    reason: str


def expected_tokens(acceptance: Sequence[float], length: int) -> float:
    """Tokens a step is expected to commit with `length` drafts, the bonus token included."""
    total = reach = 1.0
    for rate in acceptance[:length]:
        reach *= rate
        total += reach
    return total


def draft_length_for(
    asked: int, acceptance: Sequence[float], step_cost_ms: Sequence[float], threshold: float
) -> DraftChoice:
    """The length for a drafter of which at most `asked` drafts are wanted: by measurement where there is one.

    step_cost_ms: here relative to a step without drafts, which is what a backend's costs are known as before a build.
    """
    if not asked:
        return choose_draft_length(acceptance, step_cost_ms, threshold)
    known = min(asked, len(acceptance), len(step_cost_ms) - 1)
    if known < 1:
        reason = f"{asked} asked for by the profile; nothing is measured for this model and device"
        return DraftChoice(asked, 1.0, None, tuple(acceptance[:asked]), reason)
    chosen = choose_draft_length(acceptance[:known], step_cost_ms[: known + 1], threshold, unit="plain steps")
    return replace(chosen, tokens_per_ms=None)


def choose_draft_length(
    acceptance: Sequence[float],
    step_cost_ms: Sequence[float],
    threshold: float = ACCEPTANCE_THRESHOLD,
    *,
    unit: str = "ms",
) -> DraftChoice:
    """The k in 0..K that maximises expected tokens per ms; equal rates go to the smaller k.

    acceptance    per position, given that the one before was accepted, each in 0..1
    step_cost_ms  [K + 1] cost of a whole step with k drafts (drafting included), each > 0
    threshold     only lengths whose every position accepts at least this are considered; k = 0 always is
    """
    if not acceptance:
        return DraftChoice(0, 1.0, None, (), "no acceptance was measured: no drafts")
    if len(step_cost_ms) != len(acceptance) + 1:
        raise ValueError(
            f"{len(acceptance)} acceptances need {len(acceptance) + 1} step costs, got {len(step_cost_ms)}"
        )
    if any(not 0 <= rate <= 1 for rate in acceptance) or any(cost <= 0 for cost in step_cost_ms):
        raise ValueError(f"acceptance {list(acceptance)} must lie in 0..1 and step costs {list(step_cost_ms)} above 0")
    preferred = 0
    while preferred < len(acceptance) and acceptance[preferred] >= threshold:
        preferred += 1
    rates = [expected_tokens(acceptance, k) / step_cost_ms[k] for k in range(preferred + 1)]
    length = max(range(len(rates)), key=lambda k: (rates[k], -k))
    reason = (
        f"{expected_tokens(acceptance, length):.2f} tokens in {step_cost_ms[length]:.2f} {unit} is the best of "
        f"k = 0..{preferred} (acceptance >= {threshold:g})"
    )
    return DraftChoice(length, expected_tokens(acceptance, length), rates[length], tuple(acceptance), reason)


def choose_measured(points: Sequence[Measured], threshold: float = ACCEPTANCE_THRESHOLD) -> tuple[int, str]:
    """The length with most tokens per ms among those that ran, and why.

    Lengths whose every position accepts at least `threshold` are preferred: a longer one is taken only where none of
    them beats k = 0. A longer length must beat a shorter one beyond the spread: its worst repeat above the best.
    """
    points = sorted(points, key=lambda point: point.length)
    if not points or points[0].length:
        raise ValueError("a curve begins with draft length 0")
    plain = points[0]
    for preferred in (True, False):
        best = plain
        for point in points[1:]:
            held = all(rate >= threshold for rate in point.acceptance[: point.length])
            if (held or not preferred) and min(point.tokens_per_ms) > max(best.tokens_per_ms):
                best = point
        if best.length:
            what = (
                f"acceptance >= {threshold:g}" if preferred else f"no length keeps acceptance >= {threshold:g} and pays"
            )
            return best.length, (
                f"{median(best.tokens_per_ms):.3g} tokens/ms against {median(plain.tokens_per_ms):.3g} without drafts "
                f"({what})"
            )
    return 0, f"no draft length beats {median(plain.tokens_per_ms):.3g} tokens/ms beyond the spread"


@dataclass(frozen=True)
class VocabularyCost:
    """A draft vocabulary that could be built. step_ms: [k + 1]. coverage: share of tokens it holds, in text unseen."""

    tokens: int
    coverage: float
    step_ms: tuple[float, ...]


def choose_vocabulary(
    options: Sequence[VocabularyCost], acceptance: Sequence[float], built: VocabularyCost, threshold: float
) -> tuple[VocabularyCost, dict[int, DraftChoice]]:
    """The draft vocabulary with most expected tokens per ms, and the draft length of each (by its tokens).

    acceptance: measured with `built`. A token outside the vocabulary is never drafted, so acceptance follows coverage.
    Equal rates go to the smaller vocabulary.
    """
    choices = {}
    for option in options:
        share = option.coverage / built.coverage if built.coverage else 1.0
        rates = [min(1.0, rate * share) for rate in acceptance]
        choices[option.tokens] = choose_draft_length(rates, option.step_ms[: len(rates) + 1], threshold)
    best = max(options, key=lambda option: (choices[option.tokens].tokens_per_ms or 0.0, -option.tokens))
    return best, choices
