"""What a run is told, what it has done so far, and the file that a resumed run takes it from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from edgebuild.errors import OutputError
from edgebuild.train.generate import Sample, pack, unpack
from edgebuild.train.learner import Learner, Recipe


@dataclass(frozen=True)
class Settings:
    """What a run is told.

    minutes        for everything: `generate_share` of it at most goes into writing text
    steps          optimiser steps instead of minutes (tests)
    temperatures   each prompt is answered once at each; the first is what held-out prompts are answered at
    vocabulary     tokens that may be guessed in training: so many of the most used in the answers
    batch          sequences an optimiser step; gen_batch: sequences generated at once, at most
    recipe         how the module is trained
    """

    minutes: float = 10.0
    steps: int | None = None
    max_tokens: int = 224
    longest_prompt: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.3)
    vocabulary: int = 16384
    batch: int = 64
    gen_batch: int = 8192
    generate_share: float = 0.2
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)


@dataclass
class Progress:
    """What a resumed run takes up again. generated_s covers the prompts that the model wrote, too."""

    settings: Settings
    samples: list[Sample] = field(default_factory=list)
    held_out: dict[str, list[Sample]] = field(default_factory=dict)
    step: int = 0
    trained_s: float = 0.0
    generated_s: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


def save(path: Path, progress: Progress, learner: Learner) -> None:
    """Write the state beside the old one, then put it in its place."""
    document = {
        "settings": json.dumps(asdict(progress.settings), sort_keys=True),
        "samples": pack(progress.samples),
        "held_out": {name: pack(samples) for name, samples in progress.held_out.items()},
        "numbers": (progress.step, progress.trained_s, progress.generated_s),
        "log": json.dumps(progress.log),
        "learner": learner.state(),
    }
    partial = path.with_name(path.name + ".part")
    torch.save(document, partial)
    os.replace(partial, path)


def load(path: Path, settings: Settings, device: torch.device) -> tuple[Progress, dict[str, Any]]:
    """What a state file holds, and what its learner takes up.

    Raises OutputError when there is none, or when other settings made it.
    """
    if not path.exists():
        raise OutputError(f"{path}: no state to resume from", hint="leave --resume out to start anew")
    document = torch.load(path, map_location=device, weights_only=True)
    before = json.loads(document["settings"])
    now = json.loads(json.dumps(asdict(settings)))
    changed = [key for key in now if key not in ("minutes", "steps") and now[key] != before.get(key)]
    if changed:
        raise OutputError(
            f"{path}: was started with {changed[0]} {before.get(changed[0])}, now it is {now[changed[0]]}",
            hint="use the same settings, or leave --resume out",
        )
    step, trained_s, generated_s = document["numbers"]
    samples, held_out = unpack(document["samples"]), {n: unpack(packed) for n, packed in document["held_out"].items()}
    progress = Progress(settings, samples, held_out, step, trained_s, generated_s, json.loads(document["log"]))
    return progress, document["learner"]
