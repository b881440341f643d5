"""A plan, an artifact's data and every kind of measurement, small and made up: what the report's tests draw."""

from __future__ import annotations

from typing import Any

from edgebuild.plan import plan_for
from edgebuild.report import Evidence, Sources
from edgebuild.tune.records import Curve, CurvePoint, Trial
from edgert.config import parse_config
from edgert.manifest import Manifest
from toy_artifact import SCHEDULER, toy_manifest
from toy_plan import SMOLLM2, histogram, limits

TRAFFIC = histogram([(374, 44), (1500, 200), (90, 12), (800, 300)] * 20)
PLAN = plan_for(
    limits(
        power_mode="MAXN",
        draft_length=3,
        acceptance=(0.7, 0.6, 0.5),
        step_cost_ms=(1.0, 1.1, 1.2, 1.3),
        acceptance_threshold=0.4,
        drafter_elements=9_000_000,
        drafter_kv_elements=384,
    ),
    TRAFFIC,
    SMOLLM2,
)
MANIFEST: dict[str, Any] = {
    "name": "smollm2-bench",
    "state": "complete",
    "edgebuild_version": "0.1.0",
    "tools": {"torch": "2.13.0", "onnx": "1.20.0"},
    "model": {
        "family": "llama",
        "name": "SmolLM2-135M-Instruct",
        "identity": "ab" * 32,
        "layers": 30,
        "hidden_size": 576,
        "vocabulary_size": 49152,
    },
    "source": [{"file": "model.gguf", "bytes": 91_727_296, "sha256": "cd" * 32}],
    "backend": {"name": "onnxruntime", "version": "1.32.0", "compute_capabilities": [], "precision": "float32"},
}
TOY: Manifest = toy_manifest()
CONFIG = parse_config(
    SCHEDULER,
    TOY,
    {
        "power_mode": "MAXN",
        "soft_temperature_c": 85.0,
        "hard_temperature_c": 95.0,
        "throughput_headroom_fraction": 0.2,
    },
)
SOURCES = Sources(MANIFEST, PLAN.to_json(), TRAFFIC, CONFIG)

READING = {
    "sensors": "jetson",
    "temperature_c": 61.5,
    "power_w": 22.5,
    "gpu_clock_mhz": 1020.0,
    "throttle_reasons": [],
}


def _probe(cell: str, step_ms: float, tokens: int) -> dict[str, Any]:
    return {"cell": cell, "step_ms": step_ms, "tokens_per_s": tokens / step_ms * 1e3, "bytes_per_s": 1e11}


DOCTOR: dict[str, Any] = {
    "format_version": 1,
    "healthy": False,
    "artifact": {"name": "smollm2-bench", "identity": "ab" * 32},
    "findings": [
        {"symptom": "capture failed", "cause": "1 cells run eager", "next_step": "free device memory"},
        {
            "symptom": "wrong power mode",
            "cause": "the device is in power mode 15W, the artifact was planned for MAXN: speeds differ from the plan",
            "next_step": "sudo nvpmodel -m <id of MAXN>",
        },
    ],
    "device": {"device": "Orin", "compute_capability": "8.7", "driver": "540.4", "backend": "tensorrt"},
    "reading": READING,
    "loaded_reading": READING,
    "power_mode": {"actual": "15W", "expected": "MAXN"},
    "memory": {
        "planned_bytes": 1_200_000_000,
        "phases": {
            "opened": 500_000_000,
            "compiled": 650_000_000,
            "warmed_up": 700_000_000,
            "prefill-64": 720_000_000,
            "prefill-512": 900_000_000,
            "decode-1": 780_000_000,
        },
        "parts": {"weights": 271_000_000, "kv_cache": 850_000_000, "graphs": 9_000_000},
    },
    "cells": [
        {
            "cell": cell.label,
            "status": "captured" if place else "eager",
            "reason": "" if place else "operation not permitted: dynamic allocation",
        }
        for place, cell in enumerate(PLAN.cells)
    ],
    "golden": {"steps": 12, "worst_error": 3.2e-6, "tolerance": 1e-3},
    "chunks": [_probe("prefill-512@1024", 20.0, 512)],
    "steps": [_probe("decode-1x1@512", 4.0, 1), _probe("decode-4x1@512", 5.0, 4)],
}
IDENTITY = {
    "artifact": {
        "name": "smollm2-bench",
        "sha256": "1" * 64,
        "engine_sha256": "2" * 64,
        "config_sha256": "3" * 64,
        "backend": "tensorrt",
        "backend_version": "10.8",
        "precision": "float16",
        "model": "SmolLM2-135M-Instruct",
        "model_identity": "ab" * 32,
        "draft_length": 3,
        "draft_vocabulary": 8192,
    },
    "device": {
        "identity": "4" * 64,
        "name": "Orin",
        "machine": "aarch64",
        "cores": 12,
        "memory_bytes": 64_000_000_000,
        "compute_capability": "8.7",
        "driver": "540.4",
    },
    "versions": {"edgert": "0.1.0"},
    "workload": {
        "sha256": "5" * 64,
        "traffic": "by hand",
        "requests": 40,
        "prompt_tokens": 20_000,
        "output_tokens": 4_000,
        "concurrency": 4,
        "concurrency_source": "slots",
        "repeats": 3,
        "seed": 0,
        "prompts": "built-in",
        "tasks": ["chat", "code"],
    },
}
LOOK = {
    "sensors": "jetson",
    "temperature_c": 62.0,
    "power_w": 21.0,
    "cpu_clock_mhz": 2200.0,
    "gpu_clock_mhz": 1020.0,
    "memory_clock_mhz": None,
    "throttle_reasons": [],
    "memory_available_bytes": 40_000_000_000,
}


def _figures(tokens_per_s: float, scale: float = 1.0) -> dict[str, float | None]:
    return {
        "ttft_p50_ms": 120.0 * scale,
        "ttft_p95_ms": 400.0 * scale,
        "tpot_ms": 12.0 * scale,
        "itl_p95_ms": 15.0 * scale,
        "longest_gap_ms": 900.0 * scale,
        "output_tokens_per_s": tokens_per_s,
        "goodput_requests_per_s": 2.5 * scale,
        "peak_memory_bytes": 2e9 * scale,
        "acceptance": None,
        "mean_accepted_length": None,
    }


def trial(number: int, step: str, tokens_per_s: float, **changes: Any) -> Trial:
    """One line of a logbook; everything that a test does not name is plausible."""
    fields: dict[str, Any] = {
        "format_version": 1,
        "kind": "trial",
        "number": number,
        "step": step,
        "changed": None,
        "before": None,
        "after": None,
        "against": None if number == 1 else number - 1,
        "settings": {"enable_mtp": False},
        **IDENTITY,
        "power_mode": "MAXN",
        "conditions_before": LOOK,
        "conditions_loaded": LOOK,
        "conditions_after": LOOK,
        "figures": _figures(tokens_per_s),
        "spread": _figures(4.0, 0.02),
        "samples": {"output_tokens_per_s": [tokens_per_s]},
        "acceptance": {},
        "draft_length": None,
        "step_ms": None,
        "drift": None,
        "outputs_sha256": "6" * 64,
        "warnings": [],
        "verdict": "baseline" if number == 1 else "wins",
        "reason": "everything is off" if number == 1 else "beyond the spread",
        "duration_s": 60.0,
        "at": "2026-11-30T00:00:00Z",
    }
    import json

    return Trial.model_validate_json(json.dumps({**fields, **changes}))


def acceptance(rate: float) -> dict[str, Any]:
    return {
        "acceptance": rate,
        "by_position": [rate, rate * 0.9, None],
        "mean_accepted_length": 1 + 2 * rate,
        "steps": 500,
    }


def bench() -> dict[str, Any]:
    """A report of `edgert bench --json`."""
    spread = {"mean": 1.0, "p50": 110.0, "p95": 350.0, "p99": 400.0, "max": 500.0}
    return {
        "requests": 40,
        "concurrency": 4,
        "output_tokens_per_s": 230.0,
        "ttft_ms": spread,
        "itl_ms": spread,
        "longest_gap_ms": 700.0,
        "acceptance": {"chat": acceptance(0.5), "": {**acceptance(0.0), "steps": 0}},
        "warnings": [],
    }


def full_evidence() -> Evidence:
    """Everything that can be known."""
    card = {"held_out": {"code": {"acceptance": [0.6, 0.7, 0.7], "mean_accepted_length": 2.2, "steps": 900}}}
    drafted = {"code": acceptance(0.8), "chat": acceptance(0.45)}
    trials = (
        trial(1, "baseline", 100.0),
        trial(2, "chunked_prefill", 104.0, changed="enable_chunked_prefill", before=False, after=True),
        trial(3, "cuda_graph", 180.0, changed="enable_cuda_graph", before=False, after=True),
        trial(4, "mtp", 250.0, changed="enable_mtp", before=False, after=True, acceptance=drafted),
        trial(5, "ratio", 240.0, changed="prefill_decode_ratio", before="1:6", after="1:4", verdict="loses"),
    )
    build = {"acceptance": card, "golden": DOCTOR["golden"], "memory": {"weights": 271_000_000}}
    points = tuple(
        CurvePoint(
            draft_length=k,
            tokens_per_ms=rate,
            spread=0.01,
            step_ms=10.0 + k,
            mean_accepted_length=1 + 0.4 * k,
            by_task={},
        )
        for k, rate in enumerate((0.1, 0.13, 0.15, 0.14))
    )
    curve = Curve(points=points, acceptance=(0.6,), threshold=0.3, pick=2, best_by_task={}, reason="most tokens a ms")
    return Evidence(build, DOCTOR, (("evening", bench()),), trials, 4, ("a note",), curve)
