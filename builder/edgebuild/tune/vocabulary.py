"""The draft vocabulary from the tuning text: which tokens it uses, how many of them are worth a place. Pure.

Coverage is measured on text that the choice did not see: one half of the requests chooses, the other counts, both ways.
Below the tokens that were seen come the lowest ids: the first merges of a byte-pair vocabulary are its most used ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from edgebuild.plan.drafts import VocabularyCost, choose_vocabulary
from edgebuild.tune.records import DraftVocabulary, VocabularyOption

SIZES = (32_768, 16_384, 8_192)


def used_order(counts: Counter[int]) -> tuple[int, ...]:
    """Every token of the text, the most used first; equal counts: the lower id first."""
    return tuple(sorted(counts, key=lambda token: (-counts[token], token)))


def vocabulary_of(counts: Counter[int], size: int, token_limit: int) -> frozenset[int]:
    """The `size` most used tokens, filled up with the lowest ids that are not among them."""
    chosen = dict.fromkeys(used_order(counts)[:size])
    for token in range(token_limit):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return frozenset(chosen)


def coverage(texts: Sequence[Sequence[int]], size: int, token_limit: int) -> float:
    """Share of tokens that the vocabulary of the other half holds, both halves together; 1.0 for an empty text."""
    if size >= token_limit:
        return 1.0
    halves = [Counter[int](), Counter[int]()]
    for number, text in enumerate(texts):
        halves[number % 2].update(text)
    held = total = 0
    for chooses, counts in (halves, halves[::-1]):
        inside = vocabulary_of(chooses, size, token_limit)
        held += sum(count for token, count in counts.items() if token in inside)
        total += counts.total()
    return held / total if total else 1.0


def propose(
    texts: Sequence[Sequence[int]],
    *,
    token_limit: int,
    built: int,
    step_ms: Sequence[float],
    acceptance: Sequence[float],
    head_ms_per_token: float,
    threshold: float,
    sizes: Iterable[int] = SIZES,
) -> DraftVocabulary:
    """Full, 32k, 16k, 8k and what was built, and the pick by expected tokens per ms.

    step_ms            [k + 1] measured with `built` tokens
    head_ms_per_token  what one more token costs each draft, to tell the cost of the others from that
    """
    counts = Counter(token for text in texts for token in text)
    every = sorted({token_limit, built, *(size for size in sizes if size < token_limit)}, reverse=True)
    costs = [
        VocabularyCost(
            size,
            coverage(texts, size, token_limit),
            tuple(max(step_ms[0], ms + k * (size - built) * head_ms_per_token) for k, ms in enumerate(step_ms)),
        )
        for size in every
    ]
    as_built = next(cost for cost in costs if cost.tokens == built)
    best, choices = choose_vocabulary(costs, acceptance, as_built, threshold)
    options = tuple(
        VocabularyOption(
            tokens=cost.tokens,
            coverage=cost.coverage,
            draft_length=choices[cost.tokens].length,
            tokens_per_ms=choices[cost.tokens].tokens_per_ms or 0.0,
            step_ms=cost.step_ms,
            measured=cost.tokens == built,
        )
        for cost in costs
    )
    chosen = next(option for option in options if option.tokens == best.tokens)
    reason = (
        f"{chosen.tokens_per_ms:.3g} tokens/ms expected at {chosen.draft_length} drafts, "
        f"{chosen.coverage:.1%} of unseen text covered"
    )
    if not chosen.measured:
        reason += f"; its cost is told from {built:,} tokens as measured"
    if not chosen.draft_length:
        reason = "as built: with none of them a draft pays"
    return DraftVocabulary(
        counted=counts.total(),
        used_tokens=used_order(counts)[:65_536],
        options=options,
        pick=best.tokens if chosen.draft_length else built,
        reason=reason,
    )
