"""The engines of an artifact: `decoder.plan`, and `mtp.plan` where it drafts, from its ONNX files.

Knows which files belong together and what the manifest says of them; how an engine is made is in `tensorrt.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgert.manifest import Manifest

from edgebuild.engine.tensorrt import EngineBuild, build_drafter_engine, build_engine
from edgebuild.progress import Stages


def build_plans(onnx: Path, target: Path, manifest: Manifest, stages: Stages) -> str:
    """From the ONNX files in the folder `onnx` into the folder `target`; returns the library's version."""
    common: dict[str, Any] = {
        "flavour": manifest.backend.name,
        "compute_capabilities": manifest.backend.compute_capabilities,
        "packed": manifest.backend.name == "tensorrt-rtx",  # whose plans hold text, and which has a stream reader
    }
    with stages.stage(f"{manifest.backend.name} engine") as report:
        engine = build_engine(
            onnx / "decoder.onnx", target / "decoder.plan", manifest.cells, progress=_fractions(report), **common
        )
    stages.note(_about(engine))
    if manifest.draft_length:
        with stages.stage(f"{manifest.backend.name} engine of the drafter") as report:
            drafter = build_drafter_engine(
                onnx / "mtp.onnx",
                target / "mtp.plan",
                manifest.cells,
                draft_length=manifest.draft_length,
                cache_tokens=manifest.cache_tokens,
                progress=_fractions(report),
                **common,
            )
        stages.note(_about(drafter))
    return engine.version


def _fractions(report: Callable[[float], None]) -> Callable[[str, int, int], bool]:
    def progress(_phase: str, done: int, steps: int) -> bool:
        report(done / max(steps, 1))
        return True

    return progress


def _about(engine: EngineBuild) -> str:
    over = engine.plan_bytes / max(engine.weight_bytes, 1)
    packed = f" ({engine.unpacked_bytes:,} before packing)" if engine.plan_bytes < engine.unpacked_bytes else ""
    return (
        f"{engine.path.name}: {engine.plan_bytes:,} bytes = {over:.2f} x the weights{packed}, "
        f"{len(engine.shapes)} optimization profiles, {engine.layers} layers"
    )
