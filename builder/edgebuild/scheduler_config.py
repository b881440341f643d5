"""scheduler.yaml: the plan as the values the runtime schedules by, rendered from templates/scheduler.yaml.j2.

This module knows the keys and where each value came from; it does not know how the runtime uses them.

The file is one mapping, `runtime:`, with exactly these keys (edgert.config reads them strictly):

    key                          type           meaning
    adaptive                     bool           true: chunk size, ratio and draft length follow load and guards;
                                                false: the values below hold at all times (edgert.tempo)
    enable_chunked_prefill       bool           false: a prompt's chunks run back to back, nothing decodes between them
    max_prefill_chunk_size       int            largest chunk used; one of graph_bucket_sizes
    prefill_decode_ratio         str "1:N"      decode steps after each prefill chunk while both wait, N in the range
    prefill_decode_ratio_range   [int, int]     adaptive N goes down to the first when first tokens are late
    enable_cuda_graph            bool           false: every cell runs eager (no effect on the onnxruntime backend)
    graph_bucket_sizes           list[int]      prefill chunk sizes, ascending; a subset of the artifact's prefill cells
    graph_batch_sizes            list[int]      decode batch sizes, ascending; a subset of the artifact's decode cells
    kv_tiers                     list[int]      decode KV tiers, ascending; the last serves context_tokens
    enable_mtp                   bool           false: draft length 0
    mtp_num_heads                int            draft length k (0 = none), at most the artifact's draft length
    mtp_acceptance_threshold     float 0..1     drafting stops where measured acceptance falls below this
    ttft_target_ms               float | null   time to first token to keep; past it prefill goes first
    itl_target_ms                float | null   gap between tokens to keep; chunks are cut to it while streams decode
    itl_p95_ratio                float | null   p95 of a stream's gaps while prompts are read ÷ a plain step; a chunk
                                                that stretches a gap past it is followed by 21 tokens of each stream
    tpot_target_ms               float | null   time per token to keep; pressure lowers the ratio no further than that
    slots                        int            sequences held at once, at most the artifact's slots
    context_tokens               int            prompt + output tokens of one sequence, at most the artifact's
    queue_limit                  int            requests waiting beyond the slots before a new one is refused
    throughput_headroom_fraction float 0..0.9   share of the measured throughput that admission leaves free
    warm_up                      bool           run (capture) every cell once before ready is reported
    check_golden_at_load         bool           compare with golden.json before ready is reported
    memory_margin_fraction       float 0..0.5   share of device memory left to the system
    memory_headroom_bytes        int            bytes that the ledger left free, the margin aside
    soft_temperature_c           float | null   from here on fewer slots are active; null: no such limit
    hard_temperature_c           float | null   from here on nothing new is admitted; null: no such limit
    power_mode                   str | null     the mode the plan assumes; another one is warned of; null: none named
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from edgebuild.data import bundled
from edgebuild.plan.records import Plan


@dataclass(frozen=True)
class Entry:
    """One key's value as YAML text (JSON is YAML) and where it came from."""

    text: str
    why: str


def scheduler_entries(plan: Plan) -> dict[str, Entry]:
    """Every key of `runtime:` in file order, each with the measurement or formula behind it."""
    prefill, decode, draft, ratio = plan.prefill, plan.decode, plan.draft, plan.ratio
    chunks, tiers = prefill.padding, decode.tiers
    values: dict[str, tuple[Any, str]] = {
        "adaptive": (
            True,
            "chunk size, ratio and draft length follow load and guards; false: the values below hold at all times; "
            "edgebuild simulate compares the two",
        ),
        "enable_chunked_prefill": (
            plan.limits.enable_chunked_prefill,
            "false: a prompt's chunks run back to back and nothing decodes between them",
        ),
        "max_prefill_chunk_size": (
            chunks.sizes[-1],
            "rows; the one that minimises padded tokens + launch cost x launches over the traffic, a launch costing "
            f"{plan.limits.launch_cost_tokens:.0f} tokens ({plan.limits.launch_cost_source}); bounds the decode gap",
        ),
        "prefill_decode_ratio": (
            f"1:{ratio.start}",
            f"one chunk, then decode steps; adaptive, a smaller chunk owes its share; {ratio.reason}",
        ),
        "prefill_decode_ratio_range": (
            [ratio.low, ratio.high],
            "adaptive, the ratio goes down to the first while prompts wait; the second bounds it",
        ),
        "enable_cuda_graph": (
            plan.limits.enable_cuda_graph,
            "false: every cell runs eager; without effect on the onnxruntime backend",
        ),
        "graph_bucket_sizes": (
            list(chunks.sizes),
            f"rows; by dynamic programming over {plan.traffic.requests:,} prompts of {plan.traffic.name}: "
            f"{chunks.fraction:.1%} of rows are padding (powers of two {prefill.powers_of_two.fraction:.1%}, "
            f"uniform steps {prefill.uniform.fraction:.1%})",
        ),
        "graph_batch_sizes": (
            list(decode.batch_sizes),
            f"sequences in one decode step; what {plan.slots} slots can fill",
        ),
        "kv_tiers": (
            list(tiers.tiers),
            "cache positions that a decode step reads; by dynamic programming over the contexts of the traffic: "
            f"{tiers.waste_fraction:.1%} are read in vain (powers of two {decode.powers_of_two.waste_fraction:.1%}, "
            f"uniform steps {decode.uniform.waste_fraction:.1%}); the last one serves the whole context",
        ),
        "enable_mtp": (draft.length > 0, "false: no drafts"),
        "mtp_num_heads": (draft.length, f"tokens drafted a step; {draft.reason}"),
        "mtp_acceptance_threshold": (
            plan.limits.acceptance_threshold,
            "drafting stops where measured acceptance falls below this; the plan prefers lengths at or above it",
        ),
        "ttft_target_ms": (plan.limits.ttft_ms, _target("past it prefill goes first", plan.limits.ttft_ms)),
        "itl_target_ms": (
            plan.limits.itl_ms,
            _target("chunks are cut to it while streams decode, by measured costs", plan.limits.itl_ms),
        ),
        "itl_p95_ratio": (
            plan.limits.itl_p95_ratio,
            _target("a chunk past it is followed by 21 tokens of each stream", plan.limits.itl_p95_ratio),
        ),
        "tpot_target_ms": (
            plan.limits.tpot_ms,
            _target("while prompts wait the ratio goes no lower than this allows", plan.limits.tpot_ms),
        ),
        "slots": (plan.slots, "sequences held at once; from the profile, checked by the memory ledger"),
        "context_tokens": (
            plan.context_tokens,
            f"prompt + output tokens of one sequence; the model was trained for {plan.model.context_tokens:,}, "
            f"{plan.cache_tokens:,} positions are allocated (context + largest chunk)",
        ),
        "queue_limit": (
            plan.limits.queue_limit,
            f"requests waiting before a new one is refused; {plan.limits.queue_limit // plan.slots} a slot",
        ),
        "throughput_headroom_fraction": (
            plan.limits.throughput_headroom_fraction,
            "of the measured throughput is left free by admission; without measured costs (costs.json) nothing is; "
            "from the profile",
        ),
        "warm_up": (
            True,
            "every cell runs once before ready is reported, so that the first request waits for no compiler",
        ),
        "check_golden_at_load": (True, "logits are compared with golden.json before ready is reported"),
        "memory_margin_fraction": (
            plan.limits.margin_fraction,
            f"of {plan.ledger.device_bytes:,} B left to the system; from the profile",
        ),
        "memory_headroom_bytes": (
            plan.ledger.headroom_bytes,
            f"device memory - everything in the ledger ({plan.ledger.needed_bytes:,} B, the margin included)",
        ),
        "soft_temperature_c": (
            plan.limits.temperature_soft_c,
            "from here on one slot fewer is active every ten seconds; "
            + (
                "from the profile" if plan.limits.temperature_soft_c is not None else "null: the profile names no limit"
            ),
        ),
        "hard_temperature_c": (
            plan.limits.temperature_hard_c,
            "from here on no new request starts; "
            + (
                "from the profile" if plan.limits.temperature_hard_c is not None else "null: the profile names no limit"
            ),
        ),
        "power_mode": (
            plan.limits.power_mode,
            "the mode whose bandwidth the plan assumes, a device in another one is warned of; "
            + ("from the profile" if plan.limits.power_mode is not None else "null: the profile names none"),
        ),
    }
    return {key: Entry(json.dumps(value), why) for key, (value, why) in values.items()}


def _target(meaning: str, value: float | None) -> str:
    return f"{meaning}; " + ("slo of the profile" if value is not None else "null: the profile's slo names none")


def render_scheduler(plan: Plan) -> str:
    """The text of scheduler.yaml. The same plan gives the same bytes."""
    environment = template_environment()
    entries: Mapping[str, Entry] = scheduler_entries(plan)
    return environment.get_template("scheduler.yaml.j2").render(device=plan.limits.device, values=entries)


def template_environment(*, autoescape: bool = False) -> jinja2.Environment:
    """Jinja over the bundled templates; an undefined name is an error, never an empty string."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(bundled("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=autoescape,
    )
