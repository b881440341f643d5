"""Golden vectors: the engine's logits against those of the reference model, recorded when the artifact was built.

An engine can be silently wrong (a kernel of another version, a bad driver, a damaged weight); this is what notices.
Works on a backend directly, before any request: it uses slot 0 and leaves it reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgert.backends.base import Backend, Float32s, StepInputs, StepOutputs
from edgert.cells import Cell
from edgert.errors import ArtifactError, GoldenMismatch
from edgert.manifest_records import MAX_TOKENS, ModelInfo
from edgert.policy import DecodeCandidate, choose_decode_window, choose_prefill_cell
from edgert.step import empty_step
from edgert.strictjson import Node, parse_json, read_bounded

GOLDEN_NAME = "golden.json"
MAX_GOLDEN_BYTES = 64 << 20
FORMAT_VERSION = 1
# A drafter adds a layer of its own to the model's rows, and each draft takes the rows of the draft before: a token that
# leads by less than this many tolerances may lose.
DRAFT_TIE = 2.0


@dataclass(frozen=True)
class GoldenDrafts:
    """The chain that the reference drafts. margins: by how much each token leads, relative to its own logit."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class GoldenStep:
    """The reference's logits after one position.

    token    fed to get here (teacher forced); of the first step: the prompt's last
    top_ids  most likely tokens, first is the arg max
    indices  vocabulary places of `values`; norm: L2 norm of the whole row
    drafts   what is drafted when the next step's token follows; None = not recorded
    """

    token: int
    position: int
    top_ids: tuple[int, ...]
    indices: tuple[int, ...]
    values: tuple[float, ...]
    norm: float
    drafts: GoldenDrafts | None = None


@dataclass(frozen=True)
class GoldenCase:
    prompt_ids: tuple[int, ...]
    steps: tuple[GoldenStep, ...]


@dataclass(frozen=True)
class Golden:
    """tolerance: relative L2 error allowed, from the precision of the build."""

    tolerance: float
    cases: tuple[GoldenCase, ...]


@dataclass(frozen=True)
class GoldenReport:
    """worst_error: the largest relative error seen; steps: positions compared; drafts: drafted tokens compared."""

    steps: int
    worst_error: float
    tolerance: float
    drafts: int = 0


@dataclass(frozen=True)
class _Chain:
    """How many tokens a step drafts (0: the drafter does not follow), and the token that is said to come next."""

    length: int = 0
    following: int = -1

    def asked_of(self, step: StepInputs, following: int) -> StepInputs:
        """The step, with logits and, where there are drafts, with what the drafter needs to know."""
        if not self.length:
            return replace(step, want_logits=True)
        told = np.full(step.cell.batch, following, np.int64)
        return replace(step, want_logits=True, prime=True, draft_length=self.length, following=told)


def load_golden(directory: Path, model: ModelInfo) -> Golden:
    """Read golden.json strictly: every id lies in the model's vocabulary. Raises ArtifactError."""
    document = parse_json(read_bounded(Path(directory) / GOLDEN_NAME, MAX_GOLDEN_BYTES), GOLDEN_NAME)
    top = Node(document, GOLDEN_NAME).fields(["format_version", "tolerance", "cases"])
    top["format_version"].integer(FORMAT_VERSION, FORMAT_VERSION)
    return Golden(
        tolerance=top["tolerance"].number(1e-9, 0.5),
        cases=tuple(_case(node, model) for node in top["cases"].items(1, 1000)),
    )


def check_golden(
    backend: Backend,
    golden: Golden,
    *,
    cells: Sequence[Cell],
    slots: int,
    context_tokens: int,
    draft_length: int = 0,
) -> GoldenReport:
    """Run every case through the cells that requests will use. Raises GoldenMismatch with the worst numbers.

    cells, slots, draft_length: as the scheduler has them. A case longer than context_tokens is cut; none left is an
    ArtifactError. With drafts, every step but a case's last runs in a cell that verifies them, and drafts.
    """
    worst, compared, drafted = 0.0, 0, 0
    for number, case in enumerate(golden.cases):
        if len(case.prompt_ids) > context_tokens:
            continue
        backend.reset_slot(0)
        for place, step in enumerate(case.steps):
            if place and len(case.prompt_ids) + place > context_tokens:
                break
            where, chain = f"case {number}, step {place}", _Chain()
            if step.drafts is not None and draft_length:
                chain = _Chain(min(draft_length, len(step.drafts.tokens)), case.steps[place + 1].token)
            if place == 0:
                outputs = _prefill(backend, case.prompt_ids, cells, chain, slot=0)
            else:
                outputs = _decode(backend, step.token, len(case.prompt_ids) + place - 1, cells, slots, chain)
            worst = max(worst, _compare(_logits(outputs, backend), step, golden.tolerance, where))
            compared += 1
            if chain.length and step.drafts is not None:
                drafted += _compare_drafts(outputs, step.drafts, chain.length, golden.tolerance, where)
    backend.reset_slot(0)
    if compared == 0:
        raise ArtifactError(f"{GOLDEN_NAME}: no case fits a context of {context_tokens} tokens")
    return GoldenReport(compared, worst, golden.tolerance, drafted)


def compare_logits(logits: Float32s, step: GoldenStep, tolerance: float) -> tuple[float, str | None]:
    """(relative L2 error at the recorded places, what is wrong or None)."""
    if max(step.indices) >= len(logits):
        return float("inf"), f"index {max(step.indices)} is past the {len(logits)} logits"
    ours = logits[list(step.indices)].astype(np.float64)
    reference = np.array(step.values, np.float64)
    if not np.isfinite(logits).all():
        return float("inf"), "the logits are not finite"
    error = float(np.linalg.norm(ours - reference) / max(float(np.linalg.norm(reference)), 1e-30))
    if error > tolerance:
        return error, f"relative error {error:.3g}, allowed {tolerance:g}"
    norm = float(np.linalg.norm(logits.astype(np.float64)))
    if abs(norm - step.norm) > tolerance * step.norm:
        return error, f"the row's norm is {norm:.6g}, the reference's {step.norm:.6g}, allowed {tolerance:g} relative"
    top = int(np.argmax(logits))
    if top != step.top_ids[0] and not _is_tie(step, tolerance):
        return error, f"the most likely token is {top}, the reference's {step.top_ids[0]}"
    return error, None


def _is_tie(step: GoldenStep, tolerance: float) -> bool:
    """Whether the reference's two best are closer than the tolerance: then either may win."""
    known = dict(zip(step.indices, step.values, strict=True))
    if len(step.top_ids) < 2 or not all(token in known for token in step.top_ids[:2]):
        return False
    first, second = (known[token] for token in step.top_ids[:2])
    return first - second <= tolerance * abs(first)


def _compare(logits: Float32s, step: GoldenStep, tolerance: float, where: str) -> float:
    error, wrong = compare_logits(logits, step, tolerance)
    if wrong is not None:
        raise GoldenMismatch(
            f"golden vectors, {where} (position {step.position}): {wrong}",
            hint="this engine's numbers cannot be trusted here: rebuild the artifact on this device",
        )
    return error


def _compare_drafts(outputs: StepOutputs, drafts: GoldenDrafts, length: int, tolerance: float, where: str) -> int:
    """Tokens compared. A near tie of the reference may go the other way; what follows it hangs on it."""
    if outputs.drafts is None:
        raise GoldenMismatch(f"golden vectors, {where}: no drafts came, {length} were asked for")
    found = outputs.drafts[0, :length].tolist()
    for place, (token, expected, margin) in enumerate(zip(found, drafts.tokens, drafts.margins, strict=False)):
        if token == expected:
            continue
        if margin <= DRAFT_TIE * tolerance:
            return place
        raise GoldenMismatch(
            f"golden vectors, {where}: draft {place + 1} is token {token}, the reference's is {expected}, "
            f"which leads by {margin:.3g} (a tie up to {DRAFT_TIE * tolerance:.3g})",
            hint="this drafter's numbers cannot be trusted here: rebuild the artifact on this device, or set "
            "enable_mtp: false",
        )
    return length


def prefill_logits(backend: Backend, prompt: Sequence[int], cells: Sequence[Cell], *, slot: int = 0) -> Float32s:
    """Logits after a prompt, read into a slot in chunks as requests are. Raises BackendError or ArtifactError."""
    return _logits(_prefill(backend, prompt, cells, _Chain(), slot=slot), backend)


def _prefill(
    backend: Backend, prompt: Sequence[int], cells: Sequence[Cell], chain: _Chain, *, slot: int
) -> StepOutputs:
    start = 0
    outputs: StepOutputs | None = None
    while start < len(prompt):
        cell = choose_prefill_cell(cells, start, len(prompt) - start)
        if cell is None:
            raise ArtifactError(f"{GOLDEN_NAME}: no prefill cell reaches position {start}")
        count = min(cell.query_rows, len(prompt) - start)
        step = empty_step(cell, slot)
        step.tokens[0, :count] = prompt[start : start + count]
        step.length[0] = start
        step.valid[0] = step.forced[0] = count
        start += count
        following = chain.following if start == len(prompt) else prompt[start]
        outputs = backend.launch(chain.asked_of(step, following)).result()
    if outputs is None:
        raise ArtifactError(f"{GOLDEN_NAME}: an empty prompt")
    return outputs


def _decode(backend: Backend, token: int, length: int, cells: Sequence[Cell], slots: int, chain: _Chain) -> StepOutputs:
    rows = 1 + chain.length
    window = choose_decode_window(cells, [DecodeCandidate(0, length, rows, 0)], slots=slots, any_first_slot=False)
    if window is None and rows > 1:  # near the context's end nothing is verified any more
        window = choose_decode_window(cells, [DecodeCandidate(0, length, 1, 0)], slots=slots, any_first_slot=False)
    if window is None:
        raise ArtifactError(f"{GOLDEN_NAME}: no decode cell serves position {length}")
    step = empty_step(window.cell, window.first_slot)
    step.tokens[0, 0] = token
    step.length[0] = length
    step.valid[0] = step.forced[0] = 1
    return backend.launch(chain.asked_of(step, chain.following)).result()


def _logits(outputs: StepOutputs, backend: Backend) -> Float32s:
    if outputs.logits is None:
        raise GoldenMismatch(f"backend {backend.name} returned no logits")
    first: Float32s = outputs.logits[0, 0]
    return first


def _case(node: Node, model: ModelInfo) -> GoldenCase:
    part = node.fields(["prompt_ids", "steps"])
    prompt = tuple(entry.integer(0, model.vocabulary_size - 1) for entry in part["prompt_ids"].items(1, MAX_TOKENS))
    steps = tuple(_step(entry, model) for entry in part["steps"].items(1, MAX_TOKENS))
    if steps[-1].drafts is not None:
        raise ArtifactError(f"{node.where}: drafts after the last step, whose next token is not known")
    return GoldenCase(prompt, steps)


def _step(node: Node, model: ModelInfo) -> GoldenStep:
    part = node.fields(["token", "position", "top_ids", "indices", "values", "norm"], ["drafts"])
    last = model.token_limit - 1
    step = GoldenStep(
        token=part["token"].integer(0, model.vocabulary_size - 1),
        position=part["position"].integer(0, MAX_TOKENS),
        top_ids=tuple(entry.integer(0, last) for entry in part["top_ids"].items(1, 100)),
        indices=tuple(entry.integer(0, last) for entry in part["indices"].items(1, MAX_TOKENS)),
        values=tuple(entry.number(-1e30, 1e30) for entry in part["values"].items(1, MAX_TOKENS)),
        norm=part["norm"].number(0, 1e30),
        drafts=_drafts(part["drafts"], model) if "drafts" in part else None,
    )
    if len(step.indices) != len(step.values):
        raise ArtifactError(
            f"{node.where}: {len(step.indices)} indices, {len(step.values)} values", hint="rebuild the artifact"
        )
    return step


def _drafts(node: Node, model: ModelInfo) -> GoldenDrafts:
    part = node.fields(["tokens", "margins"])
    drafts = GoldenDrafts(
        tokens=tuple(entry.integer(0, model.token_limit - 1) for entry in part["tokens"].items(1, 64)),
        margins=tuple(entry.number(0, 1e30) for entry in part["margins"].items(1, 64)),
    )
    if len(drafts.tokens) != len(drafts.margins):
        raise ArtifactError(
            f"{node.where}: {len(drafts.tokens)} tokens, {len(drafts.margins)} margins", hint="rebuild the artifact"
        )
    return drafts
