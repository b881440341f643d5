"""The real demo model through the engine: token ids equal Transformers'. Slow; needs the model in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgebuild.checkpoint import Checkpoint, open_checkpoint
from edgebuild.export import FORMS, export_decoder
from edgebuild.models.config import ModelConfig
from edgert.backends import resolve
from edgert.backends.base import Setup
from edgert.engine import Engine
from edgert.loading import Runtime
from edgert.manifest_records import StateSpec
from edgert.scheduler import Limits
from fakes import make_cells
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT, CHUNKS, SLOTS, NEW_TOKENS = 384, (32, 128), 4, 64
CELLS = make_cells(CONTEXT, chunks=CHUNKS, tiers=(192, CONTEXT))
# Around every chunk boundary that a prompt of up to 300 tokens meets, and some between.
LENGTHS = (1, 2, 16, 31, 32, 33, 63, 100, 127, 128, 129, 159, 160, 161, 255, 256, 257, 287, 288, 289)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(demo_gguf: Path) -> Checkpoint:
    return open_checkpoint(demo_gguf)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("smollm2")
    limit = checkpoint.tokenizer.token_limit
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config),
        checkpoint,
        directory,
        cache_tokens=CONTEXT + max(CHUNKS),
        token_limit=limit,
        precision="float32",
        forms=FORMS["onnxruntime"],
    )
    with Engine(lambda: open_runtime(directory, graph.states, limit)) as running:
        yield running


def open_runtime(directory: Path, states: Any, limit: int) -> Runtime:
    specs = tuple(StateSpec(each.name, f"{each.name}.out", "float32", each.kind, tuple(each.shape)) for each in states)
    backend = resolve("onnxruntime")(Setup(directory, CELLS, SLOTS, CONTEXT + max(CHUNKS), limit, specs))
    return Runtime(
        backend=backend,
        limits=Limits(CELLS, SLOTS, CONTEXT),
        slots=SLOTS,
        cache_tokens=CONTEXT + max(CHUNKS),
        vocabulary_size=limit,
        token_limit=limit,
        eos_token_ids=(),
        queue_limit=64,
        text=None,
        description=backend.describe(),
        memory_bytes=backend.memory(),
    )


@pytest.fixture(scope="module")
def transformers_model(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """Transformers' own Llama with the checkpoint's tensors, so that only the arithmetic is compared."""
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).to(torch.float32).eval()
    model.load_state_dict({name: checkpoint.read(name).to(torch.float32) for name in checkpoint.names()}, strict=False)
    model.tie_weights()
    return model


def prompts(vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[int(token) for token in rng.integers(20, vocabulary, length)] for length in LENGTHS]


def test_twenty_greedy_runs_equal_transformers_alone_and_four_interleaved(
    engine: Engine, checkpoint: Checkpoint, transformers_model: LlamaForCausalLM
) -> None:
    asked = prompts(checkpoint.tokenizer.token_limit)
    expected = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = transformers_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    handles = [engine.submit(prompt, max_tokens=NEW_TOKENS) for prompt in asked]
    together = [list(handle.result(600).token_ids) for handle in handles]
    alone = [list(engine.complete(prompt, max_tokens=NEW_TOKENS).token_ids) for prompt in asked]
    assert together == expected
    assert alone == expected
    assert any(label.startswith("decode-4x1") for label in engine.snapshot().launches)
