"""What may be changed, in which order, and what a change is judged by. Pure: a manifest and a configuration in.

Every candidate changes one key of scheduler.yaml. Where a backend or an artifact cannot do something, the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from edgert.config import RuntimeConfig
from edgert.manifest import Manifest

from edgebuild.tune.records import Setting, Step
from edgebuild.tune.winner import Goal

Settings: TypeAlias = Mapping[str, Setting]

MECHANISMS: Mapping[Step, str] = {
    "chunked_prefill": "enable_chunked_prefill",
    "cuda_graph": "enable_cuda_graph",
    "mtp": "enable_mtp",
}
REFINEMENTS: Mapping[Step, str] = {
    "chunk_size": "max_prefill_chunk_size",
    "kv_tiers": "kv_tiers",
    "ratio": "prefill_decode_ratio",
    "draft_length": "mtp_num_heads",
    "adaptive": "adaptive",
}
TITLES: Mapping[Step, str] = {
    "baseline": "baseline",
    "chunked_prefill": "chunked prefill",
    "cuda_graph": "CUDA graphs",
    "mtp": "MTP",
    "chunk_size": "chunk size",
    "kv_tiers": "KV tiers",
    "ratio": "prefill:decode",
    "draft_length": "draft length",
    "adaptive": "adaptive",
    "draft_curve": "draft curve",
    "soak": "soak",
}
MOST_CURVE_DRAFTS = 6
CHUNK_STEP = 0.75  # a chunk size is tried when it is at most this much of the one before: nearer ones tell nothing
# A shorter gap may cost this share of the throughput; more throughput this share of the time to the first token.
GAP_COSTS_THROUGHPUT = 0.05
THROUGHPUT_COSTS_TTFT = 0.25


@dataclass(frozen=True)
class Candidates:
    """Values to try for `key`, in order. reason: why there are none. stop: a value that loses ends the step.

    keep: one that neither wins nor loses is kept too
    """

    key: str
    values: tuple[Setting, ...] = ()
    reason: str = ""
    stop: bool = True
    keep: bool = False


def current_settings(config: RuntimeConfig) -> dict[str, Setting]:
    """The tuned keys as a configuration has them."""
    return {
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_cuda_graph": config.enable_cuda_graph,
        "enable_mtp": config.enable_mtp,
        "mtp_num_heads": config.mtp_num_heads,
        "max_prefill_chunk_size": config.max_prefill_chunk_size,
        "kv_tiers": config.kv_tiers,
        "prefill_decode_ratio": f"1:{config.prefill_decode_ratio}",
        "adaptive": config.adaptive,
    }


TUNED_KEYS = (*MECHANISMS.values(), *REFINEMENTS.values())


def baseline_settings(manifest: Manifest, config: RuntimeConfig, concurrency: int) -> dict[str, Setting]:
    """All three mechanisms off, everything captured allowed. What cannot be tuned here stays as the file has it.

    Not adaptive, so that a trial runs by the values that it names.
    """
    settings = current_settings(config)
    for step, key in MECHANISMS.items():
        if not candidates(step, {**settings, key: False}, manifest, config, concurrency).reason:
            settings[key] = False
    settings["adaptive"] = False
    settings["max_prefill_chunk_size"] = config.graph_bucket_sizes[-1]
    if manifest.draft_length:
        settings["mtp_num_heads"] = manifest.draft_length
    return settings


def candidates(
    step: Step, settings: Settings, manifest: Manifest, config: RuntimeConfig, concurrency: int
) -> Candidates:
    """What `step` may try from `settings`."""
    key = {**MECHANISMS, **REFINEMENTS}[step]
    runs_on_cpu = manifest.backend.name == "onnxruntime"
    if step == "chunked_prefill":
        if concurrency == 1:
            return Candidates(key, reason="one request at a time: nothing decodes between the chunks of a prompt")
        return Candidates(key, (True,), keep=True)  # the next long prompt needs it, whether or not the trials had one
    if step == "cuda_graph":
        if runs_on_cpu:
            return Candidates(key, reason="the onnxruntime backend runs on the CPU: there are no CUDA graphs")
        return Candidates(key, (True,), keep=True)  # the host has other work in the field than in a trial
    if step == "mtp":
        if not manifest.draft_length:
            return Candidates(key, reason="the artifact has no drafter (edgebuild train-mtp makes one)")
        return Candidates(key, (True,))
    if step == "chunk_size":
        kept = [config.graph_bucket_sizes[-1]]
        for size in reversed(config.graph_bucket_sizes):
            if size <= CHUNK_STEP * kept[-1]:
                kept.append(size)
        others = tuple(size for size in kept if size != settings[key])
        return Candidates(key, others, "" if others else f"the artifact has one chunk size, {settings[key]}")
    if step == "kv_tiers":
        if runs_on_cpu:
            return Candidates(key, reason="the onnxruntime backend reads what is written, whatever the tier")
        tiers = config.kv_tiers
        fewer = tuple(dict.fromkeys(each for each in (tiers[::-1][::2][::-1], tiers[-1:]) if each != tiers))
        return Candidates(key, fewer, "" if fewer else f"the artifact has one tier, {tiers[-1]}", stop=False)
    if step == "ratio":
        if not settings["enable_chunked_prefill"]:
            return Candidates(key, reason="chunked prefill is off: nothing decodes between chunks")
        low, high = config.prefill_decode_ratio_range
        ratios = tuple(f"1:{n}" for n in dict.fromkeys((low, high)) if f"1:{n}" != settings[key])
        reason = "" if ratios else f"prefill_decode_ratio_range is [{low}, {high}]"
        return Candidates(key, ratios, reason, stop=False)
    if step == "adaptive":
        # closed-loop trials load the device evenly; what it gains is gained where load changes
        reason = "" if config.adaptive else "scheduler.yaml has it off"
        return Candidates(key, (True,) if config.adaptive else (), reason, keep=True)
    if not settings["enable_mtp"]:
        return Candidates(key, reason="MTP is off")
    longest = settings[key]
    shorter = tuple(range(longest - 1, 0, -1)) if isinstance(longest, int) else ()
    return Candidates(key, shorter, "" if shorter else "the artifact drafts one token")


def goal(step: Step, settings: Settings, *, slo: bool) -> Goal:
    """What a change is judged by. slo: limits were given, so that goodput decides everything."""
    if slo:
        return Goal("goodput_requests_per_s")
    if step == "chunked_prefill" or (step == "chunk_size" and settings["enable_chunked_prefill"]):
        return Goal("longest_gap_ms", "output_tokens_per_s", GAP_COSTS_THROUGHPUT)
    return Goal("output_tokens_per_s", "ttft_p95_ms", THROUGHPUT_COSTS_TTFT)
