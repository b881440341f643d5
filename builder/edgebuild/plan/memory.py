"""The memory ledger: what a plan needs on the device, one labelled factor a line, and what to change if it is too much.

Plain numbers only: no torch, no device, no file. A refusal takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgebuild.errors import DoesNotFit

if TYPE_CHECKING:
    from edgebuild.models.config import ModelConfig

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CACHE_GRANULARITY = 64
# A captured step with drafts, a layer of the decoder: 5.7 MB at 0.6B (36 graphs), 7.0 MB at 4B (6 graphs), on an H200.
DRAFT_GRAPH_BYTES = 200_000
MIB = 2**20
WIDE_HEAD = 128
EXPERT_ROWS = 4  # rows whose experts' weights are copied together (export/expert_forms.py)
MARGIN = "margin"  # label of the line that is left to the system


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that decide memory and cost. Counts of elements unless the name says otherwise.

    weight_elements           every weight once; a tied head is the embedding
    context_tokens            longest context the model was trained for
    kv_layers                 layers that keep keys and values; None = all
    index_dim                 elements that such a layer keeps of a position beside key and value (sparse attention)
    mixer_width               float32 elements of a row in a recurrent layer at its widest; 0 for a dense model
    expert_elements           weights of the experts that one token passes; 0 without experts
    gathered_rows             an engine's rows up to which those are copied side by side; more rows pass every expert
    dense_elements            activations of a row that passes every expert
    recurrent_float32         recurrent state of one sequence that is float32 in every precision; 0 for a dense model
    recurrent_window          the rest of it, in the model's precision
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    context_tokens: int
    weight_elements: int
    kv_layers: int | None = None
    index_dim: int = 0
    mixer_width: int = 0
    expert_elements: int = 0
    gathered_rows: int = 0
    dense_elements: int = 0
    recurrent_float32: int = 0
    recurrent_window: int = 0

    @classmethod
    def from_config(cls, config: ModelConfig, weight_elements: int | None = None) -> ModelShape:
        """From a model's config; without a checkpoint the elements follow from the config's tensor shapes."""
        return cls(
            layers=config.layers,
            hidden_size=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocabulary_size=config.vocabulary_size,
            context_tokens=config.context_tokens,
            weight_elements=config.weight_elements() if weight_elements is None else weight_elements,
            kv_layers=config.attention_layers,
            index_dim=config.index_dim,
            mixer_width=0 if config.delta is None else config.delta.row_elements(),
            expert_elements=0 if config.moe is None else config.moe.chosen_elements(config.hidden_size),
            gathered_rows=0 if config.moe is None else config.moe.gathered_rows,
            dense_elements=0 if config.moe is None else config.moe.dense_elements(config.hidden_size),
            recurrent_float32=config.recurrent_bytes_per_slot(0) // 4,
            recurrent_window=config.recurrent_bytes_per_slot(1) - config.recurrent_bytes_per_slot(0),
        )

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Key and value of one position over all layers; grouped queries share kv_heads."""
        return self.caching_layers * (2 * self.kv_heads * self.head_dim + self.index_dim) * element_bytes

    @property
    def caching_layers(self) -> int:
        return self.layers if self.kv_layers is None else self.kv_layers

    def recurrent_bytes_per_slot(self, element_bytes: int) -> int:
        """Recurrent state of one sequence, whatever its length."""
        return 4 * self.recurrent_float32 + element_bytes * self.recurrent_window


@dataclass(frozen=True)
class LedgerLine:
    """One factor. `formula` is the arithmetic in words and numbers, for people."""

    label: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Ledger:
    """Every factor, and all the memory that the device has."""

    lines: tuple[LedgerLine, ...]
    device_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def planned_bytes(self) -> int:
        """What the runtime itself takes: everything but the margin."""
        return sum(line.bytes for line in self.lines if line.label != MARGIN)

    @property
    def headroom_bytes(self) -> int:
        """What stays free after the margin; negative = does not fit."""
        return self.device_bytes - self.needed_bytes


@dataclass(frozen=True)
class MemoryRequest:
    """What a ledger is drawn up for.

    precision          of weights and cache: a key of ELEMENT_BYTES
    cells              captured shapes
    decode_rows        token rows of the widest decode launch (batch x query rows)
    margin_fraction    share of device memory left to the system
    weight_copy_factor engine bytes / weight bytes beyond 1: prepacked or duplicated weights
    graph_bytes_per_cell, runtime_bytes   what a backend takes for a cell, and once
    other_precisions   what the backend could run instead, for advice
    drafter_elements   weights of the drafter, its draft vocabulary included; drafter_kv_elements: of one position
    engine             a TensorRT engine: its scratch is another than that of ONNX Runtime
    draft_graphs       graphs captured beyond one a cell and slot: a step with 0, 1, ... drafts is a graph each
    """

    precision: str
    slots: int
    context_tokens: int
    largest_chunk: int
    cells: int
    decode_rows: int
    device_bytes: int
    margin_fraction: float
    weight_copy_factor: float
    graph_bytes_per_cell: int
    runtime_bytes: int
    other_precisions: tuple[str, ...] = ()
    drafter_elements: int = 0
    drafter_kv_elements: int = 0
    engine: bool = False
    draft_graphs: int = 0

    @property
    def cache_tokens(self) -> int:
        return cache_tokens(self.context_tokens, self.largest_chunk)


def cache_tokens(context_tokens: int, largest_chunk: int) -> int:
    """Positions allocated per slot: a padded tail may be written past the context, never read."""
    return round_up(context_tokens + largest_chunk, CACHE_GRANULARITY)


def round_up(value: int, step: int) -> int:
    """The first multiple of `step` that is >= `value`."""
    return -(-value // step) * step


def scratch_bytes(model: ModelShape, rows: int, kv_tier: int, logit_rows: int) -> int:
    """Float32 activations of one launch at their widest: residual, q/k/v, scores and probabilities or MLP, logits."""
    attention = (model.heads + 2 * model.kv_heads) * model.head_dim * rows + 2 * model.heads * rows * kv_tier
    return 4 * (
        3 * model.hidden_size * rows
        + max(attention, 3 * model.intermediate_size * rows, model.mixer_width * rows)
        + 2 * model.vocabulary_size * logit_rows
    )


def engine_scratch_bytes(
    model: ModelShape, rows: int, kv_tier: int, logit_rows: int, sequences: int, element: int
) -> int:
    """What a TensorRT engine keeps of one launch: scores, a mask, the caches cut to the tier, the MLP's inner rows,
    three passes over the logits.

    Heads of 128 and wider keep the scores in float32 and in the model's precision, narrower ones once (export/forms.py
    chooses by width). Measured on an H200: 11 chunk cells of SmolLM2 and 0.6B, 30 to 1,713 MB, within 4 %.
    """
    wide = model.head_dim >= WIDE_HEAD
    scores = rows * kv_tier * (model.heads * (4 + (element if wide else 0)) + 2)
    tiers = sequences * kv_tier * 2 * model.kv_heads * model.head_dim * element
    attention = max(scores, tiers + rows * kv_tier * 2 * model.heads) if wide else scores + tiers
    inner = max(2 * model.intermediate_size * element, 4 * model.mixer_width) * rows
    return attention + inner + 3 * 4 * model.vocabulary_size * logit_rows


def _scratch(model: ModelShape, request: MemoryRequest) -> int:
    """Of the larger of a chunk and the widest decode step."""
    chunk, rows, context = request.largest_chunk, request.decode_rows, request.context_tokens
    if not request.engine:
        return max(scratch_bytes(model, chunk, context, 1), scratch_bytes(model, rows, context, rows))
    element = ELEMENT_BYTES[request.precision]
    decode = engine_scratch_bytes(model, rows, context, rows, -(-rows // 2), element)  # two rows a sequence at least
    return max(engine_scratch_bytes(model, chunk, context, 1, 1, element), decode)


def _experts(model: ModelShape, request: MemoryRequest) -> int:
    """Elements: weights of gathered experts side by side, or what a chunk makes of every expert."""
    if not request.engine:
        return EXPERT_ROWS * model.expert_elements
    gathered = min(request.decode_rows, model.gathered_rows) * model.expert_elements
    return max(gathered, request.largest_chunk * model.dense_elements)


def draw_up(model: ModelShape, request: MemoryRequest) -> Ledger:
    """The ledger of a plan. Never raises: `fit_or_refuse` decides."""
    element = ELEMENT_BYTES[request.precision]
    weights = model.weight_elements * element
    per_token = model.kv_bytes_per_token(element)
    cache = request.cache_tokens
    recurrent = request.slots * model.recurrent_bytes_per_slot(element)
    lines = (
        LedgerLine("weights", weights, f"{model.weight_elements:,} elements x {element} B ({request.precision})"),
        LedgerLine(
            "weight copies",
            int(weights * request.weight_copy_factor),
            f"{request.weight_copy_factor:.2f} x weights (kernels keep some weights in a second layout)",
        ),
        LedgerLine(
            "KV cache",
            request.slots * cache * per_token,
            f"{request.slots} slots x {cache:,} tokens x {per_token:,} B "
            f"(2 x {model.caching_layers} layers x {model.kv_heads} KV heads x {model.head_dim} x {element} B"
            f"{f', {model.index_dim} x {element} B of index a layer' if model.index_dim else ''})",
        ),
        LedgerLine(
            "recurrent state",
            recurrent,
            f"{request.slots} slots x {model.recurrent_bytes_per_slot(element):,} B "
            f"({model.recurrent_float32:,} x 4 B + {model.recurrent_window:,} x {element} B)",
        ),
        LedgerLine(
            "scratch",
            _scratch(model, request) + 2 * recurrent + _experts(model, request) * element,
            f"{'an engine' if request.engine else 'float32 activations'}: the larger of a {request.largest_chunk}-row "
            f"chunk and {request.decode_rows} decode rows, attending {request.context_tokens:,} tokens with "
            f"{model.heads} heads"
            f"{', and the recurrent state after the forced and after the accepted rows' if recurrent else ''}"
            f"{f', and {_experts(model, request):,} x {element} B of experts' if model.expert_elements else ''}",
        ),
        LedgerLine(
            "graphs",
            request.cells * request.graph_bytes_per_cell + request.draft_graphs * model.layers * DRAFT_GRAPH_BYTES,
            f"{request.cells} cells x {request.graph_bytes_per_cell:,} B: compiled kernels, constants, captured graphs"
            f"{_draft_graphs(model, request)}",
        ),
        *_drafter_lines(request, element),
        LedgerLine("runtime", request.runtime_bytes, "libraries, device context, tokenizer, Python"),
        LedgerLine(
            MARGIN,
            int(request.device_bytes * request.margin_fraction),
            f"{request.margin_fraction:.0%} of {request.device_bytes:,} B left to the system",
        ),
    )
    return Ledger(lines=lines, device_bytes=request.device_bytes)


def _draft_graphs(model: ModelShape, request: MemoryRequest) -> str:
    if not request.draft_graphs:
        return ""
    return f"; {request.draft_graphs} graphs more with drafts x {model.layers} layers x {DRAFT_GRAPH_BYTES:,} B"


def _drafter_lines(request: MemoryRequest, element: int) -> tuple[LedgerLine, ...]:
    if not request.drafter_elements:
        return ()
    weights, kv = request.drafter_elements, request.drafter_kv_elements
    return (
        LedgerLine("drafter weights", weights * element, f"{weights:,} elements x {element} B"),
        LedgerLine(
            "drafter KV cache",
            request.slots * request.cache_tokens * kv * element,
            f"{request.slots} slots x {request.cache_tokens:,} tokens x {kv * element:,} B",
        ),
    )


def fit_or_refuse(model: ModelShape, request: MemoryRequest, device_name: str) -> Ledger:
    """The ledger, or DoesNotFit with what is needed, what there is, and every single change that would make it fit."""
    ledger = draw_up(model, request)
    if ledger.headroom_bytes >= 0:
        return ledger
    needs = ", ".join(f"{line.label} {_human(line.bytes)}" for line in ledger.lines if line.bytes)
    raise DoesNotFit(
        f"the plan needs {_human(ledger.needed_bytes)} and {device_name} has {_human(request.device_bytes)}: {needs}",
        hint="; or ".join(remedies(model, request)),
    )


def remedies(model: ModelShape, request: MemoryRequest) -> list[str]:
    """Changes that fit, each with its number; if none does alone, the smallest plan and the memory it needs."""

    def fits(**changes: object) -> bool:
        return draw_up(model, replace(request, **changes)).headroom_bytes >= 0  # type: ignore[arg-type]

    found = []
    slots = largest_true(range(1, request.slots), lambda n: fits(slots=n))
    if slots:
        found.append(f"slots: {slots} instead of {request.slots}")
    context = largest_true(range(1, request.context_tokens // 64), lambda n: fits(context_tokens=64 * n))
    if context:
        found.append(f"context_tokens: {64 * context} instead of {request.context_tokens}")
    smaller = [name for name in request.other_precisions if ELEMENT_BYTES[name] < ELEMENT_BYTES[request.precision]]
    if smaller and fits(precision=smaller[0]):
        found.append(f"precision: {smaller[0]} instead of {request.precision}")
    chunk = largest_true(range(1, request.largest_chunk // 64), lambda n: fits(largest_chunk=64 * n))
    if chunk:
        found.append(f"max_prefill_chunk_size: {64 * chunk} instead of {request.largest_chunk}")
    if found:
        return found
    least = replace(
        request,
        slots=1,
        context_tokens=min(1024, request.context_tokens),
        largest_chunk=min(64, request.largest_chunk),
        precision=smaller[0] if smaller else request.precision,
    )
    ledger = draw_up(model, least)
    size = f"1 slot, {least.context_tokens} context tokens, {least.precision}"
    if ledger.headroom_bytes >= 0:
        return [f"together: {size}, chunks of {least.largest_chunk} need {_human(ledger.needed_bytes)}"]
    enough = int(ledger.planned_bytes / (1 - request.margin_fraction))
    return [f"no setting fits this model: {size} needs a device of {_human(enough)}; choose a smaller model"]


def largest_true(numbers: Sequence[int], holds: Callable[[int], bool]) -> int:
    """The largest number for which a monotone predicate (true, then false) holds, 0 when none does."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if holds(numbers[middle]):
            low = middle + 1
        else:
            high = middle
    return numbers[low - 1] if low else 0


def _human(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.0f} MB"
