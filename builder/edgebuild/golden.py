"""Golden vectors: what the reference module says for a few prompts, recorded so that every engine can be checked.

The prompts are chosen to pass through what can go wrong: one chunk with padding, several chunks with a padded tail, and
single-token steps after each. The same pass in the artifact's precision is the finite-logits probe. Where there is a
drafter, what it drafts after each of these steps is recorded too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from edgebuild.checkpoint import Checkpoint
from edgebuild.errors import ExportError
from edgebuild.golden_drafts import ReferenceDrafter
from edgebuild.models.loading import Sequence1, reference_logits

FORMAT_VERSION = 1
STEPS = 5  # decode steps after each prompt
LONGEST_PROMPT = 640  # keeps the reference pass short; two chunks of 512 are not needed to see a chunk boundary
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 4e-2}  # relative L2 error of the recorded logits
_TOP, _SPREAD = 16, 48  # logits recorded a step: the best ones, and as many at random
_TEXT = (
    "The capital of France is Paris. Water boils at one hundred degrees Celsius at sea level. "
    "A prime number has exactly two divisors, one and itself: 2, 3, 5, 7, 11, 13. "
    "def add(first, second):\n    return first + second\n\n"
    '{"city": "Paris", "population": 2102650, "river": "Seine"} '
)


def make_golden(
    checkpoint: Checkpoint,
    *,
    precision: str,
    chunk_sizes: Sequence[int],
    context_tokens: int,
    progress: Callable[[float], None] = lambda _fraction: None,
    drafter: ReferenceDrafter | None = None,
    draft_length: int = 0,
) -> dict[str, Any]:
    """The document golden.json. Raises ExportError when the logits are not finite in `precision`.

    drafter, draft_length: of an artifact that drafts; its chains are recorded with the steps.
    """
    sequences = _sequences(checkpoint, chunk_sizes, context_tokens)
    passes = 1 if precision == "float32" else 2
    hidden: list[torch.Tensor] = []
    reference = reference_logits(
        checkpoint, sequences, progress=lambda done: progress(done / passes), hidden=hidden if drafter else None
    )
    _refuse_nonfinite(reference, "float32")
    if passes == 2:
        dtype = getattr(torch, precision)
        low = reference_logits(checkpoint, sequences, dtype=dtype, progress=lambda done: progress((1 + done) / 2))
        _refuse_nonfinite(low, precision)
    rng = np.random.default_rng(0)
    cases = [_case(sequence, logits.numpy(), rng) for sequence, logits in zip(sequences, reference, strict=True)]
    if drafter is not None:
        for case, chains in zip(cases, drafter.drafts(sequences, hidden, draft_length), strict=True):
            for step, chain in zip(case["steps"], chains, strict=False):  # the last step's next token is not known
                margins = [round(margin, 6) for margin in chain.margins]
                step["drafts"] = {"tokens": list(chain.tokens), "margins": margins}
    return {"format_version": FORMAT_VERSION, "tolerance": TOLERANCE[precision], "cases": cases}


def prompt_lengths(chunk_sizes: Sequence[int], context_tokens: int) -> list[int]:
    """Lengths that pass through one padded chunk and, where the context allows, through a chunk boundary."""
    room = context_tokens - STEPS
    across = min(max(chunk_sizes) + min(chunk_sizes) // 2 + 1, LONGEST_PROMPT)
    return sorted({length for length in (min(23, room), min(across, room)) if length >= 1})


def _sequences(checkpoint: Checkpoint, chunk_sizes: Sequence[int], context_tokens: int) -> list[Sequence1]:
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
    text = tokenizer.encode(_TEXT, add_special_tokens=False).ids or [0]
    chosen = []
    for number, length in enumerate(prompt_lengths(chunk_sizes, context_tokens)):
        repeated = text[7 * number :] + text * (1 + (length + STEPS) // len(text))
        chosen.append(Sequence1(tuple(repeated[: length + STEPS]), first=length - 1))
    return chosen


def _case(sequence: Sequence1, logits: np.ndarray[Any, Any], rng: np.random.Generator) -> dict[str, Any]:
    prompt = sequence.ids[: sequence.first + 1]
    steps = []
    for place, row in enumerate(logits[: len(sequence.ids) - len(prompt) + 1]):
        best = np.argsort(-row, kind="stable")[: min(_TOP, len(row))]
        spread = rng.choice(len(row), size=min(_SPREAD, len(row)), replace=False)
        indices = sorted({*best.tolist(), *spread.tolist()})
        steps.append(
            {
                "token": sequence.ids[sequence.first + place],
                "position": sequence.first + place,
                "top_ids": best[:5].tolist(),
                "indices": indices,
                "values": [round(float(row[i]), 6) for i in indices],
                "norm": round(float(np.linalg.norm(row)), 6),
            }
        )
    return {"prompt_ids": list(prompt), "steps": steps}


def _refuse_nonfinite(logits: Sequence[torch.Tensor], precision: str) -> None:
    bad = sum(int((~torch.isfinite(row)).sum()) for row in logits)
    if not bad:
        return
    total = sum(row.numel() for row in logits)
    hint = "the weights themselves are damaged: check the checkpoint's files"
    if precision == "float16":
        hint = "activations pass 65,504, the largest float16: set `precision: bfloat16` in the profile"
    elif precision == "bfloat16":
        hint = "set `precision: float32` in the profile, or check the checkpoint"
    raise ExportError(f"{bad:,} of {total:,} probed logits are not finite in {precision}", hint=hint)
