"""make_plan: profile, traffic and model in, every decision out. The order of the decisions stands here, nothing else.

context -> chunk sizes -> tiers -> draft length -> cells -> ledger. Pure: the same numbers give the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from edgert.cells import Cell
from edgert.costs import StepCosts
from edgert.graphs import graph_keys

from edgebuild.errors import DoesNotFit
from edgebuild.plan.buckets import Padding, choose_chunks, padding_of, powers_of_two, uniform_steps
from edgebuild.plan.cells import CellChoice, CostModel, Counts, Demand, batch_sizes, choose_cells
from edgebuild.plan.drafts import DraftChoice, draft_length_for
from edgebuild.plan.latency import first_token_note, headroom_note, read_ms
from edgebuild.plan.memory import (
    ELEMENT_BYTES,
    MemoryRequest,
    ModelShape,
    draw_up,
    fit_or_refuse,
    largest_true,
    round_up,
)
from edgebuild.plan.records import DecodePlan, Limits, Plan, PrefillPlan, Ratio, Traffic
from edgebuild.plan.smooth import (
    Times,
    Wanted,
    estimated_times,
    measured_times,
    smooth_chunk,
    smooth_note,
    smooth_ratio,
)
from edgebuild.plan.tiers import choose_tiers, cost_of_tiers
from edgebuild.traffic.histogram import Histogram

LEAST_CONTEXT_TOKENS = 512  # below this an automatic reduction refuses rather than shrink further
LEAST_CHUNK = 64
USEFUL_CHUNK = 512


def plan_for(limits: Limits, histogram: Histogram, model: ModelShape, costs: StepCosts | None = None) -> Plan:
    """Decide everything. Raises DoesNotFit with what to change. costs: measured ones, for slo.itl_p95_ratio."""
    notes: list[str] = []
    context = _context(limits, model, notes)
    draft = limits.measured_draft or draft_length_for(
        limits.draft_length, limits.acceptance, limits.step_cost_ms, limits.acceptance_threshold
    )
    if not draft.length:
        if limits.draft_length:
            notes.append(f"no drafts, though the profile asks for {limits.draft_length}: {draft.reason}")
        limits = replace(limits, drafter_elements=0, drafter_kv_elements=0)
    rows = _decode_rows(limits, draft)
    batches = batch_sizes(limits.slots, limits.batch_sizes)
    limits = _without_copies(limits, model, context, batches[-1] * rows[-1], notes)
    context, max_chunk = _fit_context_and_chunk(limits, model, context, batches[-1] * rows[-1], notes)

    prompts, contexts, unservable = _servable(histogram, context)
    if unservable:
        share = f"{unservable:,} of {histogram.requests:,} requests"
        notes.append(f"{share} will be refused: their prompts have {context:,} tokens or more")
    top = round_up(context, limits.tier_granularity)
    cost = cost_model(limits, model)
    fitting_chunk = max_chunk
    wanted = _wanted(limits, prompts, contexts, context, batches[-1])
    times = estimated_times(cost, _weights_ms(limits, model)) if costs is None else measured_times(costs)
    ordinary = partial(_ordinary_steps, limits, cost, batches[-1], contexts)
    if wanted is not None:
        least = min(max_chunk, max(LEAST_CHUNK, limits.min_chunk))
        max_chunk = smooth_chunk(times, wanted, max_chunk, least, ordinary)
    demand = Demand(
        prompt_counts=prompts,
        context_counts=contexts,
        chunk_tables=_chunk_tables(limits, prompts, max_chunk),
        tier_tables=choose_tiers(contexts, top, limits.max_kv_tiers, limits.tier_granularity),
        batches=batches,
        decode_rows=rows,
        slots=limits.slots,
        padding_target=limits.padding_target,
    )
    choice = choose_cells(demand, cost, limits.budget)
    kept_batches = tuple(sorted({item.cell.batch for item in choice.cells if item.cell.kind == "decode"}))
    if kept_batches != batches:
        dropped = ", ".join(str(batch) for batch in batches if batch not in kept_batches)
        notes.append(f"{limits.budget.total} cells leave no room for decode batches of {dropped}")
    if choice.chunks.fraction > limits.padding_target:
        notes.append(
            f"{choice.chunks.fraction:.1%} of prefill rows are padding; the aim is {limits.padding_target:.0%}"
        )
    chunk = choice.chunks.sizes[-1]
    ledger = fit_or_refuse(
        model,
        replace(
            _request(limits, context, chunk, len(choice.cells), kept_batches[-1] * rows[-1]),
            draft_graphs=_draft_graphs(limits, draft, [item.cell for item in choice.cells]),
        ),
        limits.device,
    )
    if ledger.headroom_bytes < limits.headroom_fraction * ledger.planned_bytes:
        free, aim = ledger.headroom_bytes / ledger.planned_bytes, limits.headroom_fraction
        notes.append(f"{free:.0%} of the planned memory stays free at the peak; the aim is {aim:.0%}")
    ratio = _ratio(limits, cost, chunk, kept_batches[-1], contexts)
    if wanted is not None:
        wanted = replace(wanted, batch=kept_batches[-1])
        ratio = _smooth(ratio, times, wanted, chunk)
        notes.append(smooth_note(times, wanted, chunk, ratio.start, max(chunk, fitting_chunk), ordinary))
    elif limits.itl_p95_ratio is not None:
        notes.append(f"slo.itl_p95_ratio {limits.itl_p95_ratio:g}: {_nothing_to_smooth(limits)}")
    notes += _latency_notes(limits, model, cost, prompts, contexts, chunk, ratio.start, kept_batches)
    return Plan(
        limits=limits,
        model=model,
        traffic=Traffic(histogram.name, histogram.source_sha256, histogram.attribution, histogram.requests, unservable),
        slots=limits.slots,
        context_tokens=context,
        cache_tokens=_request(limits, context, chunk, 0, 1).cache_tokens,
        prefill=_prefill(limits, prompts, choice.chunks),
        decode=_decode(limits, contexts, choice, kept_batches),
        planned_cells=choice.cells,
        draft=draft,
        ratio=ratio,
        cost=cost,
        ledger=ledger,
        notes=tuple(notes),
    )


def cost_model(limits: Limits, model: ModelShape) -> CostModel:
    """What launches cost, in weight reads: see edgebuild.plan.cells."""
    element = ELEMENT_BYTES[limits.precision]
    return CostModel(
        kv_share_per_token=model.kv_bytes_per_token(element) / (model.weight_elements * element),
        launch_cost_tokens=limits.launch_cost_tokens,
        attention_share=4 * model.heads * model.head_dim * model.layers / (2 * model.weight_elements),
    )


def _context(limits: Limits, model: ModelShape, notes: list[str]) -> int:
    wanted = limits.context_tokens
    if wanted > model.context_tokens:
        notes.append(
            f"context {model.context_tokens:,}: the model was trained for no more than that ({wanted:,} asked)"
        )
    return min(wanted, model.context_tokens)


def _decode_rows(limits: Limits, draft: DraftChoice) -> tuple[int, ...]:
    """1 + drafts, and beside it the plain step: in a cell of five rows it takes 2, 4 and 9 % longer at batch 1, 2 and 4
    (0.6B, H200). An engine pads one row to `min_decode_rows` by itself."""
    widest = max(1 + draft.length, limits.min_decode_rows)
    return (1, widest) if draft.length else (widest,)


def _draft_graphs(limits: Limits, draft: DraftChoice, cells: Sequence[Cell]) -> int:
    """Graphs that a backend which captures steps has because of drafts."""
    if limits.backend == "onnxruntime" or not limits.enable_cuda_graph:
        return 0
    return len(graph_keys(cells, limits.slots, draft.length)) - len(graph_keys(cells, limits.slots))


def _request(limits: Limits, context: int, chunk: int, cells: int, decode_rows: int) -> MemoryRequest:
    return MemoryRequest(
        precision=limits.precision,
        slots=limits.slots,
        context_tokens=context,
        largest_chunk=chunk,
        cells=cells,
        decode_rows=decode_rows,
        device_bytes=limits.device_bytes,
        margin_fraction=limits.margin_fraction,
        weight_copy_factor=limits.weight_copy_factor,
        graph_bytes_per_cell=limits.graph_bytes_per_cell,
        runtime_bytes=limits.runtime_bytes,
        other_precisions=limits.other_precisions,
        drafter_elements=limits.drafter_elements,
        drafter_kv_elements=limits.drafter_kv_elements,
        engine=limits.backend != "onnxruntime",
    )


def _without_copies(limits: Limits, model: ModelShape, context: int, decode_rows: int, notes: list[str]) -> Limits:
    """Give up optional weight copies before anything else when they do not fit."""
    if not limits.weight_copies_optional:
        return limits
    request = _request(limits, context, min(USEFUL_CHUNK, limits.max_chunk, context), limits.budget.total, decode_rows)
    if draw_up(model, request).headroom_bytes >= 0:
        return limits
    notes.append("no room for a packed copy of the weights: batches and chunks run slower than they could")
    return replace(limits, weight_copy_factor=0.0)


def _fit_context_and_chunk(
    limits: Limits, model: ModelShape, context: int, decode_rows: int, notes: list[str]
) -> tuple[int, int]:
    """The context (reduced only when the profile leaves it open), then the largest chunk whose scratch fits."""

    def fits(tokens: int, chunk: int, headroom_fraction: float = 0.0) -> bool:
        ledger = draw_up(model, _request(limits, tokens, chunk, limits.budget.total, decode_rows))
        return ledger.headroom_bytes >= headroom_fraction * ledger.planned_bytes

    least_chunk = min(LEAST_CHUNK, limits.max_chunk, context)
    if not fits(context, least_chunk):
        step = limits.tier_granularity
        # leave room for a useful chunk: context and chunk compete for the same bytes
        useful_chunk = min(USEFUL_CHUNK, limits.max_chunk, context)
        reduced = step * largest_true(range(1, context // step + 1), lambda n: fits(step * n, useful_chunk))
        if not limits.context_may_shrink or reduced < min(LEAST_CONTEXT_TOKENS, context):
            request = _request(limits, context, least_chunk, limits.budget.total, decode_rows)
            fit_or_refuse(model, request, limits.device)
            raise DoesNotFit(f"{context} tokens of context do not fit {limits.device}")  # pragma: no cover
        notes.append(f"context reduced from {context:,} to {reduced:,} tokens so that {limits.slots} slots fit")
        context = reduced
    limit = min(limits.max_chunk, context)
    if limits.itl_ms is not None:
        limit = _within_gap(limits, model, limit, context, notes)
    if limit <= least_chunk:
        return context, limit
    step = least_chunk
    share = limits.headroom_fraction if fits(context, step, limits.headroom_fraction) else 0.0
    fitting = step * largest_true(range(1, limit // step + 1), lambda n: fits(context, step * n, share))
    if fitting < limit // step * step:
        reason = f"leaves less than {share:.0%} of the planned memory free" if share else "does not fit"
        notes.append(f"chunks of at most {fitting} rows: scratch for {limit} {reason}")
    return context, max(fitting, least_chunk)


def _within_gap(limits: Limits, model: ModelShape, limit: int, context: int, notes: list[str]) -> int:
    """The largest chunk that, with one decode step, stays within the gap between tokens that the profile asks for."""
    cost = cost_model(limits, model)
    weights_ms = _weights_ms(limits, model)
    aim_ms = limits.itl_ms or 0.0

    def gap_ms(rows: int) -> float:
        return weights_ms * (cost.prefill(rows, context) + cost.decode(limits.slots, context))

    rows = largest_true(range(1, limit + 1), lambda n: gap_ms(n) <= aim_ms)
    least = min(LEAST_CHUNK, limit)
    if rows < least:
        notes.append(
            f"slo.itl_ms {aim_ms:g} cannot be kept: a {least}-row chunk and a step take {gap_ms(least):.1f} ms at peak"
        )
    elif rows < limit:
        notes.append(f"chunks of at most {rows} rows: slo.itl_ms {aim_ms:g}, estimated from peak bandwidth")
    return max(rows, least)


def _servable(histogram: Histogram, context: int) -> tuple[Counts, Counts, int]:
    """Prompt and decode-context counts within the context, and how many prompts leave no room for a token."""
    prompts = histogram.prompt_counts[:context]
    unservable = int(histogram.prompt_counts[context:].sum())
    contexts = histogram.decode_context_counts[: context + 1]
    if contexts[1:].sum() == 0:
        contexts = np.array([0, 1], dtype=np.int64)  # no decode in the trace: any tier will do
    return prompts, contexts, unservable


def _chunk_tables(limits: Limits, prompts: Counts, max_chunk: int) -> list[Padding]:
    # powers of two for the largest chunk only: then "powers of two" of as many sizes is a like-for-like comparison
    candidates = [1 << power for power in range(LEAST_CHUNK.bit_length() - 1, max_chunk.bit_length())] or [max_chunk]
    granularity = limits.chunk_granularity if all(c % limits.chunk_granularity == 0 for c in candidates) else 1
    return choose_chunks(
        prompts, candidates, limits.budget.prefill, limits.launch_cost_tokens, granularity, limits.min_chunk
    )


def _prefill(limits: Limits, prompts: Counts, chosen: Padding) -> PrefillPlan:
    largest, count = chosen.sizes[-1], len(chosen.sizes)
    return PrefillPlan(
        padding=chosen,
        powers_of_two=padding_of(prompts, powers_of_two(largest, count)),
        uniform=padding_of(prompts, uniform_steps(largest, count, limits.chunk_granularity)),
    )


def _decode(limits: Limits, contexts: Counts, choice: CellChoice, batches: tuple[int, ...]) -> DecodePlan:
    top = choice.tiers.tiers[-1]
    decode = [item.cell for item in choice.cells if item.cell.kind == "decode"]
    tiers = cost_of_tiers(contexts, sorted({cell.kv_tier for cell in decode}))
    count = len(tiers.tiers)
    usual = [min(top, tier) for tier in powers_of_two(top, count)]
    return DecodePlan(
        tiers=tiers,
        powers_of_two=cost_of_tiers(contexts, usual),
        uniform=cost_of_tiers(contexts, uniform_steps(top, count, limits.tier_granularity)),
        batch_sizes=batches,
        query_rows=tuple(sorted({cell.query_rows for cell in decode})),
    )


def _latency_notes(
    limits: Limits, model: ModelShape, cost: CostModel, prompts: Counts, contexts: Counts, chunk: int, steps: int,
    batches: tuple[int, ...],
) -> list[str]:  # fmt: skip
    notes = []
    weights_ms = _weights_ms(limits, model)
    if limits.ttft_ms is not None:
        batch = batches[-1]
        notes.append(first_token_note(cost, weights_ms, prompts, chunk, steps, batch, limits.ttft_ms))
    if limits.throughput_headroom_fraction:
        mean = _mean(contexts)
        notes.append(headroom_note(cost, batches, limits.slots, mean, limits.throughput_headroom_fraction))
    return [note for note in notes if note is not None]


def _weights_ms(limits: Limits, model: ModelShape) -> float:
    return read_ms(model.weight_elements * ELEMENT_BYTES[limits.precision], limits.bandwidth_bytes_per_s)


def _mean(counts: Counts) -> float:
    return float((np.arange(counts.size) * counts).sum() / counts.sum())


def _wanted(limits: Limits, prompts: Counts, contexts: Counts, context: int, batch: int) -> Wanted | None:
    """What slo.itl_p95_ratio asks, None = nothing: no prompt is read in chunks beside a stream."""
    if limits.itl_p95_ratio is None or limits.slots == 1 or not limits.enable_chunked_prefill or not prompts.any():
        return None
    longest = int(np.flatnonzero(prompts)[-1])
    return Wanted(limits.itl_p95_ratio, limits.slots - 1, batch, context, max(1, longest), round(_mean(contexts)))


def _nothing_to_smooth(limits: Limits) -> str:
    if limits.slots == 1:
        return "kept by itself: with one slot no prompt is read beside a stream"
    if not limits.enable_chunked_prefill:
        return "not looked at, mechanisms.enable_chunked_prefill is false: a whole prompt lies in one gap"
    return "not looked at, the traffic holds no prompt that is served"


def _smooth(ratio: Ratio, times: Times, wanted: Wanted, chunk: int) -> Ratio:
    start, low, high = smooth_ratio(times, wanted, chunk, ratio.start, (ratio.low, ratio.high))
    if (start, low, high) == (ratio.start, ratio.low, ratio.high):
        return ratio
    return Ratio(start, low, high, f"raised to {start} for slo.itl_p95_ratio {wanted.ratio:g}; {ratio.reason}")


def _ordinary_steps(limits: Limits, cost: CostModel, batch: int, contexts: Counts, chunk: int) -> int:
    return _ratio(limits, cost, chunk, batch, contexts).start


def _ratio(limits: Limits, cost: CostModel, chunk: int, batch: int, contexts: Counts) -> Ratio:
    """As many decode steps as take the time of one chunk: each side gets half, within the range."""
    mean = _mean(contexts)
    steps = cost.prefill(chunk, mean) / cost.decode(batch, mean)
    low, high = limits.ratio_range
    start = min(high, max(low, round(steps)))
    return Ratio(
        start, low, high, f"a {chunk}-row chunk takes as long as {steps:.1f} decode steps; held within {low}..{high}"
    )
