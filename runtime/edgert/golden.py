"""Golden vectors: the engine's logits against those of the reference model, recorded when the artifact was built.

An engine can be silently wrong (a kernel of another version, a bad driver, a damaged weight); this is what notices.
Works on a backend directly, before any request: it uses slot 0 and leaves it reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgert.backends.base import Backend, Float32s, StepInputs
from edgert.cells import Cell
from edgert.errors import ArtifactError, GoldenMismatch
from edgert.manifest_records import MAX_TOKENS, ModelInfo
from edgert.policy import DecodeCandidate, choose_decode_window, choose_prefill_cell
from edgert.step import empty_step
from edgert.strictjson import Node, parse_json, read_bounded

GOLDEN_NAME = "golden.json"
MAX_GOLDEN_BYTES = 64 << 20
FORMAT_VERSION = 1


@dataclass(frozen=True)
class GoldenStep:
    """The reference's logits after one position.

    token    fed to get here (teacher forced); of the first step: the prompt's last
    top_ids  most likely tokens, first is the arg max
    indices  vocabulary places of `values`; norm: L2 norm of the whole row
    """

    token: int
    position: int
    top_ids: tuple[int, ...]
    indices: tuple[int, ...]
    values: tuple[float, ...]
    norm: float


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
    """worst_error: the largest relative error seen; steps: positions compared."""

    steps: int
    worst_error: float
    tolerance: float


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
    backend: Backend, golden: Golden, *, cells: Sequence[Cell], slots: int, context_tokens: int
) -> GoldenReport:
    """Run every case through the cells that requests will use. Raises GoldenMismatch with the worst numbers.

    cells, slots: as the scheduler has them. A case longer than context_tokens is cut; none left is an ArtifactError.
    """
    worst, compared = 0.0, 0
    for number, case in enumerate(golden.cases):
        if len(case.prompt_ids) > context_tokens:
            continue
        backend.reset_slot(0)
        for place, step in enumerate(case.steps):
            if place == 0:
                logits = prefill_logits(backend, case.prompt_ids, cells)
            elif len(case.prompt_ids) + place > context_tokens:
                break
            else:
                logits = _decode(backend, step.token, len(case.prompt_ids) + place - 1, cells, slots)
            worst = max(worst, _compare(logits, step, golden.tolerance, f"case {number}, step {place}"))
            compared += 1
    backend.reset_slot(0)
    if compared == 0:
        raise ArtifactError(f"{GOLDEN_NAME}: no case fits a context of {context_tokens} tokens")
    return GoldenReport(compared, worst, golden.tolerance)


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


def prefill_logits(backend: Backend, prompt: Sequence[int], cells: Sequence[Cell], *, slot: int = 0) -> Float32s:
    """Logits after a prompt, read into a slot in chunks as requests are. Raises BackendError or ArtifactError."""
    start = 0
    logits: Float32s | None = None
    while start < len(prompt):
        cell = choose_prefill_cell(cells, start, len(prompt) - start)
        if cell is None:
            raise ArtifactError(f"{GOLDEN_NAME}: no prefill cell reaches position {start}")
        count = min(cell.query_rows, len(prompt) - start)
        step = empty_step(cell, slot)
        step.tokens[0, :count] = prompt[start : start + count]
        step.length[0] = start
        step.valid[0] = step.forced[0] = count
        logits = _logits(backend, step, 0)
        start += count
    if logits is None:
        raise ArtifactError(f"{GOLDEN_NAME}: an empty prompt")
    return logits


def _decode(backend: Backend, token: int, length: int, cells: Sequence[Cell], slots: int) -> Float32s:
    window = choose_decode_window(cells, [DecodeCandidate(0, length, 1, 0)], slots=slots, any_first_slot=False)
    if window is None:
        raise ArtifactError(f"{GOLDEN_NAME}: no decode cell serves position {length}")
    step = empty_step(window.cell, window.first_slot)
    step.tokens[0, 0] = token
    step.length[0] = length
    step.valid[0] = step.forced[0] = 1
    return _logits(backend, step, 0)


def _logits(backend: Backend, step: StepInputs, row: int) -> Float32s:
    logits = backend.launch(replace(step, want_logits=True)).result().logits
    if logits is None:
        raise GoldenMismatch(f"backend {backend.name} returned no logits for {step.cell.label}")
    first: Float32s = logits[row, 0]
    return first


def _case(node: Node, model: ModelInfo) -> GoldenCase:
    part = node.fields(["prompt_ids", "steps"])
    prompt = tuple(entry.integer(0, model.vocabulary_size - 1) for entry in part["prompt_ids"].items(1, MAX_TOKENS))
    steps = tuple(_step(entry, model) for entry in part["steps"].items(1, MAX_TOKENS))
    return GoldenCase(prompt, steps)


def _step(node: Node, model: ModelInfo) -> GoldenStep:
    part = node.fields(["token", "position", "top_ids", "indices", "values", "norm"])
    last = model.token_limit - 1
    step = GoldenStep(
        token=part["token"].integer(0, model.vocabulary_size - 1),
        position=part["position"].integer(0, MAX_TOKENS),
        top_ids=tuple(entry.integer(0, last) for entry in part["top_ids"].items(1, 100)),
        indices=tuple(entry.integer(0, last) for entry in part["indices"].items(1, MAX_TOKENS)),
        values=tuple(entry.number(-1e30, 1e30) for entry in part["values"].items(1, MAX_TOKENS)),
        norm=part["norm"].number(0, 1e30),
    )
    if len(step.indices) != len(step.values):
        raise ArtifactError(
            f"{node.where}: {len(step.indices)} indices, {len(step.values)} values", hint="rebuild the artifact"
        )
    return step
