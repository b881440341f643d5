"""What the benchmarks of a whole engine share: opening an artifact, requests of given lengths, figures, results.

Times are the engine's own (vLLM's definitions, edgert.metrics). Works for every backend.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from edgert.bench import BenchRequest
from edgert.engine import Engine
from edgert.handles import Completion, Handle
from edgert.hostmemory import resident_bytes
from edgert.manifest import Manifest, load_manifest
from edgert.metrics import percentile
from environment import environment, saved

PACKAGES = ("tensorrt-rtx-cu13", "cuda-bindings", "onnxruntime", "numpy")


@contextmanager
def opened(artifact: Path, **overrides: Any) -> Iterator[Engine]:
    """The engine; hashes were checked when the artifact was made or unpacked."""
    with Engine.load(artifact, verify_files=False, **overrides) as engine:
        yield engine


class Drawn:
    """An engine whose requests are all sampled in one way."""

    def __init__(self, engine: Engine, **sampling: Any) -> None:
        self._engine, self._sampling = engine, sampling

    @property
    def context_tokens(self) -> int:
        return self._engine.context_tokens

    def submit(self, prompt: Sequence[int], **options: Any) -> Handle:
        return self._engine.submit(prompt, **options, **self._sampling)


def requests_of(
    lengths: Iterable[tuple[int, int]], manifest: Manifest, seed: int = 0, context: int | None = None
) -> list[BenchRequest]:
    """Random ids for (prompt tokens, output tokens); both together stay within the context."""
    rng = random.Random(seed)
    limit, vocabulary = context or manifest.context_tokens, manifest.model.token_limit
    made = []
    for prompt, output in lengths:
        kept = min(prompt, limit - output)
        ids = tuple(rng.randrange(3, vocabulary) for _ in range(kept))
        made.append(BenchRequest(ids, output, kept != prompt))
    return made


def figures(completions: Sequence[Completion], seconds: float) -> dict[str, float]:
    """Of one run: medians of TTFT and TPOT, tokens a second, the longest gap between two tokens of a stream."""
    metrics = [completion.metrics for completion in completions]
    gaps = [gap for entry in metrics for gap in entry.itl_ms]
    tokens = sum(completion.usage.completion_tokens for completion in completions)
    return {
        "ttft_ms": median(entry.ttft_ms for entry in metrics if entry.ttft_ms is not None),
        "tpot_ms": median(entry.tpot_ms for entry in metrics if entry.tpot_ms is not None),
        "itl_p95_ms": percentile(gaps, 95),
        "tokens_per_s": tokens / seconds,
        "longest_gap_ms": max(gaps),
    }


def middle(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each figure over the runs."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


def memory_now(engine: Engine) -> dict[str, int]:
    """Bytes in use: of the GPU, where there is one that this process uses, and of the process."""
    used: dict[str, int] = {"process": resident_bytes() or 0}
    if "driver" in engine.describe():
        from edgert import cuda

        used["device"] = cuda.device_info().total_bytes - cuda.free_bytes()
    return used


def device_bytes_in_use() -> int | None:
    """Of the GPU in use, by everybody, as nvidia-smi counts: with CUDA's own context. None without a GPU."""
    command = ["nvidia-smi", "-i", os.environ.get("CUDA_VISIBLE_DEVICES") or "0", "--query-gpu=memory.used"]
    try:
        ran = subprocess.run([*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return int(ran.stdout) << 20 if ran.returncode == 0 and ran.stdout.strip().isdigit() else None


def finish(output: Path | None, document: Mapping[str, Any], *, engine_says: Mapping[str, Any]) -> None:
    """Write the result with its provenance; print its rows."""
    where = environment(
        *PACKAGES, device=None if engine_says.get("device") in (None, "cpu") else str(engine_says["device"])
    )
    record = {"what": document["what"], **where, **document}
    saved(record, output)
    for row in record.get("rows", ()):
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def rounded(row: Mapping[str, Any], digits: int = 3) -> dict[str, Any]:
    """The row with its floats at a readable length."""
    return {key: round(value, digits) if isinstance(value, float) else value for key, value in row.items()}


__all__ = [
    "BenchRequest",
    "device_bytes_in_use",
    "figures",
    "finish",
    "load_manifest",
    "memory_now",
    "middle",
    "opened",
    "requests_of",
    "rounded",
]
