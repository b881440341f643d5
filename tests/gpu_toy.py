"""A toy decoder as a real engine: exported, built and opened for the GPU tests. Wide enough for the kernels in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.drafter import DrafterWeights, find_drafter
from edgebuild.engine.tensorrt import build_drafter_engine, build_engine
from edgebuild.export import FORMS, Forms, export_decoder
from edgebuild.export.mtp import export_mtp
from edgebuild.golden import make_golden
from edgebuild.golden_drafts import ReferenceDrafter
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from edgert.backends.base import Setup, StepInputs, StepOutputs
from edgert.backends.tensorrt import TensorRTBackend
from edgert.cells import Cell
from edgert.manifest_records import StateSpec
from edgert.step import empty_step
from toy_mtp import random_mtp, write_sidecar

CACHE, CONTEXT, SLOTS, VOCABULARY = 320, 256, 4, 300
SMALL, LARGE = Cell("prefill", 1, 16, 256), Cell("prefill", 1, 64, 256)
ONE, TWO, FOUR = (Cell("decode", batch, 1, 256) for batch in (1, 2, 4))
CELLS = (SMALL, LARGE, ONE, Cell("decode", 1, 1, 128), TWO, FOUR)
LONGEST = 4  # drafts a step
DRAFT_CELLS = (SMALL, LARGE, *(Cell("decode", batch, rows, 256) for batch in (1, 2) for rows in (1, 1 + LONGEST)))
SPLIT = replace(FORMS["tensorrt-rtx"], processors=132)  # as a build for this device exports
MAKERS = {
    "llama": toys.make_llama,
    "qwen2": toys.make_qwen2,
    "qwen3": toys.make_qwen3,
    "qwen3_5": toys.make_qwen3_5,
    "qwen3_5_moe": toys.make_qwen3_5_moe,
    "qwen3_next": toys.make_qwen3_next,
}


@dataclass(frozen=True)
class Toy:
    """artifact: folder with decoder.plan. reference: teacher-forced float32 logits of any token ids [n, V]."""

    artifact: Path
    checkpoint: Any
    states: tuple[StateSpec, ...]

    def reference(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        decoder = load_decoder(self.checkpoint, cache_tokens=CACHE)
        positions = torch.arange(CACHE)
        with torch.no_grad():
            tokens, start = torch.tensor([list(ids)]), torch.zeros(1, dtype=torch.int64)
            hidden, _ = decoder.backbone(tokens, start, positions, decoder.empty_states(1))
            logits: npt.NDArray[np.float32] = decoder.head(hidden)[:, :VOCABULARY].float().numpy()
        return logits

    def golden(self) -> dict[str, Any]:
        return make_golden(self.checkpoint, precision="float16", chunk_sizes=(16, 64), context_tokens=CONTEXT)

    def setup(self, **options: Any) -> Setup:
        return Setup(
            self.artifact, CELLS, SLOTS, CACHE, VOCABULARY, self.states, {"flavour": "tensorrt-rtx", **options}
        )

    @contextmanager
    def backend(self, **options: Any) -> Iterator[TensorRTBackend]:
        """Warm and ready."""
        backend = TensorRTBackend(self.setup(**options))
        try:
            backend.warm_up()
            yield backend
        finally:
            backend.close()


def make_toy(directory: Path, family: str = "llama", *, forms: Forms = SPLIT) -> Toy:
    """Checkpoint → ONNX in float16 → engine with the cells above."""
    make = MAKERS[family]
    head_dim = 128 if family == "qwen3" else 64  # the written-out attention has a form for either
    # a slot's state must be a multiple of the device's alignment, also that of a convolution
    recurrent = {} if family in ("llama", "qwen2", "qwen3") else {"key_dim": 32, "value_dim": 32}
    make(directory / "checkpoint", hidden=128, heads=4, kv_heads=2, head_dim=head_dim, ffn=256, **recurrent)
    checkpoint = open_checkpoint(directory / "checkpoint")
    artifact = directory / "artifact"
    artifact.mkdir()
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config),
        checkpoint,
        artifact,
        cache_tokens=CACHE,
        token_limit=VOCABULARY,
        precision="float16",
        forms=forms,
    )
    build_engine(graph.path, artifact / "decoder.plan", CELLS, packed=True)
    states = tuple(StateSpec(s.name, s.name + ".out", s.dtype, s.kind, s.shape) for s in graph.states)
    return Toy(artifact, checkpoint, states)


@dataclass(frozen=True)
class DraftingToy(Toy):
    """A toy with mtp.plan beside decoder.plan, for the cells DRAFT_CELLS. sidecar: the drafter's weights."""

    draft_states: tuple[StateSpec, ...] = ()
    sidecar: Path = Path()

    def setup(self, **options: Any) -> Setup:
        drafting = {"draft_length": LONGEST, "draft_states": self.draft_states}
        return replace(super().setup(**options), cells=DRAFT_CELLS, **drafting)

    def drafter(self) -> ReferenceDrafter:
        config = ModelConfig.from_hf(self.checkpoint.config)
        found = find_drafter(self.checkpoint, config, self.sidecar)
        assert isinstance(found, DrafterWeights)
        return ReferenceDrafter(config, found, range(VOCABULARY))

    def golden(self) -> dict[str, Any]:
        return make_golden(
            self.checkpoint,
            precision="float16",
            chunk_sizes=(16, 64),
            context_tokens=CONTEXT,
            drafter=self.drafter(),
            draft_length=LONGEST,
        )


def make_drafting_toy(directory: Path, family: str, *, seed: int = 0) -> DraftingToy:
    """As `make_toy`, with a random drafter. seed: of the drafter; the model is always the same."""
    head_dim = 128 if family == "qwen3" else 64
    MAKERS[family](directory / "checkpoint", hidden=128, heads=4, kv_heads=2, head_dim=head_dim, ffn=256)
    checkpoint = open_checkpoint(directory / "checkpoint")
    config = ModelConfig.from_hf(checkpoint.config)
    sidecar = write_sidecar(directory / "mtp.safetensors", random_mtp(directory / "checkpoint", seed))
    drafter = find_drafter(checkpoint, config, sidecar)
    assert drafter is not None
    artifact = directory / "artifact"
    artifact.mkdir()
    common: dict[str, Any] = {
        "cache_tokens": CACHE, "precision": "float16", "forms": FORMS["tensorrt-rtx"]
    }  # fmt: skip
    graph = export_decoder(config, checkpoint, artifact, token_limit=VOCABULARY, drafting=True, **common)
    mtp = export_mtp(config, drafter, artifact, draft_tokens=range(VOCABULARY), **common)
    build_engine(graph.path, artifact / "decoder.plan", DRAFT_CELLS, packed=True)
    build_drafter_engine(
        mtp.path, artifact / "mtp.plan", DRAFT_CELLS, draft_length=LONGEST, cache_tokens=CACHE, packed=True
    )
    states, drafts = (
        tuple(StateSpec(s.name, s.name + ".out", s.dtype, s.kind, s.shape) for s in each.states)
        for each in (graph, mtp)
    )
    return DraftingToy(artifact, checkpoint, states, drafts, sidecar)


def prefill(
    backend: TensorRTBackend, ids: Sequence[int], *, slot: int = 0, cell: Cell = SMALL, logits: bool = False
) -> list[StepOutputs]:
    """A prompt in chunks of one cell; one output a chunk."""
    outputs = []
    for start in range(0, len(ids), cell.query_rows):
        part = ids[start : start + cell.query_rows]
        step = empty_step(cell, slot)
        step.tokens[0, : len(part)] = part
        step.length[0] = start
        step.valid[0] = step.forced[0] = len(part)
        outputs.append(backend.launch(replace(step, want_logits=logits)).result())
    return outputs


def decode_step(
    cell: Cell, first_slot: int, tokens: Sequence[int | None], lengths: Sequence[int], *, logits: bool = False
) -> StepInputs:
    """One decode launch; a token of None is the one that the device holds."""
    step = empty_step(cell, first_slot)
    step.valid[:] = step.forced[:] = 1
    for row, (token, length) in enumerate(zip(tokens, lengths, strict=True)):
        step.from_device[row] = token is None
        if token is not None:
            step.tokens[row, 0], step.length[row] = token, length
    return replace(step, want_logits=logits)


def generate(
    backend: TensorRTBackend, ids: Sequence[int], count: int, *, slot: int = 0, cell: Cell = ONE, chunk: Cell = SMALL
) -> list[int]:
    """Greedy, one sequence, every step but the first fed from the device and launched before the last was read."""
    tokens = [int(prefill(backend, ids, slot=slot, cell=chunk)[-1].next_token[0])]
    tickets = [
        backend.launch(decode_step(cell, slot, [tokens[0] if place == 0 else None], [len(ids)]))
        for place in range(count - 1)
    ]
    return tokens + [int(ticket.result().next_token[0]) for ticket in tickets]


def relative(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
