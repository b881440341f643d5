"""An exported toy with a drafter behind a real engine, and drafters that are right or wrong on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgebuild.checkpoint import open_checkpoint
from edgebuild.drafter import find_drafter
from edgebuild.export import FORMS, export_decoder
from edgebuild.export.mtp import export_mtp
from edgebuild.models.config import ModelConfig
from edgebuild.models.mtp_config import expected_mtp_tensors
from edgert.backends.base import Setup, StepInputs
from edgert.backends.onnxruntime import OnnxRuntimeBackend
from edgert.drafting import DraftControl
from edgert.engine import Engine
from edgert.loading import Runtime
from edgert.manifest_records import StateSpec
from edgert.scheduler import Limits
from fakes import make_cells
from toy_mtp import write_sidecar

CONTEXT, CHUNK, SLOTS, TOKENS, LONGEST = 96, 32, 2, 300, 4
CELLS = make_cells(CONTEXT, chunks=(8, CHUNK), batches=(1, 2), rows=(1, 2, 3, 4, 5), tiers=(64, CONTEXT))


@dataclass(frozen=True)
class Toy:
    """An exported model with its drafter; `source`: its checkpoint; `tensors`: the drafter's."""

    setup: Setup
    source: Path
    tensors: dict[str, torch.Tensor]


def specs(states: Sequence[Any]) -> tuple[StateSpec, ...]:
    return tuple(StateSpec(s.name, f"{s.name}.out", s.dtype, s.kind, tuple(s.shape)) for s in states)


def export_toy(source: Path, directory: Path, tensors: dict[str, torch.Tensor] | None = None) -> Toy:
    """Decoder and drafter of a checkpoint, with random MTP weights unless given."""
    checkpoint = open_checkpoint(source)
    config = ModelConfig.from_hf(checkpoint.config)
    if tensors is None:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: 0.12 * torch.randn(shape, generator=generator) for name, shape in expected_mtp_tensors(config).items()
        }
    drafter = find_drafter(checkpoint, config, write_sidecar(directory / "mtp.safetensors", tensors))
    assert drafter is not None
    common: dict[str, Any] = {
        "cache_tokens": CONTEXT + CHUNK, "precision": "float32", "forms": FORMS["onnxruntime"]
    }  # fmt: skip
    target = directory / "artifact"
    target.mkdir()
    decoder = export_decoder(config, checkpoint, target, token_limit=TOKENS, drafting=True, **common)
    mtp = export_mtp(config, drafter, target, draft_tokens=range(TOKENS), **common)
    setup = Setup(
        target, CELLS, SLOTS, CONTEXT + CHUNK, TOKENS, specs(decoder.states), {"threads": 1},
        draft_length=LONGEST, draft_states=specs(mtp.states),
    )  # fmt: skip
    return Toy(setup, source, tensors)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng([seed, length]).integers(3, TOKENS, length))


class Shadowed(OnnxRuntimeBackend):
    """The real backend; `forge` may replace what the module drafted."""

    forge: Any = None

    def launch(self, step: StepInputs) -> Any:
        ticket = super().launch(step)
        forged = None if self.forge is None else self.forge(step, ticket.outputs)
        if forged is None or not step.draft_length:
            return ticket
        return dataclasses.replace(ticket, outputs=dataclasses.replace(ticket.outputs, drafts=forged))


def make_engine(toy: Toy, length: int, *, forge: Any = None, eos: Sequence[int] = (), threshold: float = 0.0,
                costs_ms: dict[int, list[float]] | None = None, backend: Any = Shadowed) -> Engine:  # fmt: skip
    open_backend = backend

    def open_() -> Runtime:
        setup = toy.setup if length else dataclasses.replace(toy.setup, draft_length=0, draft_states=())
        backend = open_backend(setup)
        backend.forge = forge
        return Runtime(
            backend=backend,
            limits=Limits(CELLS, SLOTS, CONTEXT, any_first_slot=backend.any_first_slot),
            slots=SLOTS,
            cache_tokens=toy.setup.cache_tokens,
            vocabulary_size=320,
            token_limit=TOKENS,
            eos_token_ids=tuple(eos),
            queue_limit=64,
            text=None,
            description=backend.describe(),
            memory_bytes=backend.memory(),
            draft_control=lambda: DraftControl(length, threshold=threshold, costs_ms=costs_ms),
        )

    return Engine(open_)


class Forger:
    """Replaces drafts: `pattern(step number)` says for each position whether it shall be right."""

    def __init__(self, true: dict[tuple[int, ...], list[int]], pattern: Any) -> None:
        self.true, self.pattern, self.steps = true, pattern, 0
        self.written: dict[int, list[int]] = {}

    def __call__(self, step: StepInputs, outputs: Any) -> np.ndarray:
        self.steps += 1
        drafts = np.zeros((step.cell.batch, step.draft_length), np.int64)
        for row in range(step.cell.batch):
            slot = step.first_slot + row
            if not step.valid[row]:
                continue
            if step.cell.kind == "prefill" and step.length[row] == 0:
                self.written[slot] = []
            kept = int(step.forced[row] + outputs.accepted[row])
            known = self.written[slot][: int(step.length[row])] + step.tokens[row, :kept].tolist()
            self.written[slot] = known
            if not step.draft_length:
                continue
            so_far = [*known, int(outputs.next_token[row])]
            full = next(f for p, f in ((p, [*p, *t]) for p, t in self.true.items()) if f[: len(so_far)] == so_far)
            for place in range(step.draft_length):
                token = full[len(so_far) + place] if len(so_far) + place < len(full) else 5
                drafts[row, place] = token if self.pattern(self.steps, place) else (token + 1) % TOKENS
        return drafts


PATTERNS = {
    "right": lambda _step, _place: True,
    "wrong": lambda _step, _place: False,
    "alternating steps": lambda step, _place: step % 2 == 0,
    "alternating places": lambda step, place: (step + place) % 2 == 0,
}
