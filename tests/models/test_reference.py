"""The streamed reference equals the whole model, and the finite-logits probe refuses what float16 cannot hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.errors import ExportError
from edgebuild.golden import STEPS, make_golden, prompt_lengths
from edgebuild.models import load_decoder
from edgebuild.models.loading import Sequence1, reference_logits
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize("tied", [True, False])
def test_streamed_reference_equals_the_whole_model(tied: bool, tmp_path: Path) -> None:
    toys.make_llama(tmp_path, tied=tied)
    checkpoint = open_checkpoint(tmp_path)
    ids = tuple(np.random.default_rng(0).integers(0, 300, 41).tolist())
    decoder = load_decoder(checkpoint, cache_tokens=64)
    hidden, _ = decoder.backbone(
        torch.tensor([ids]), torch.zeros(1, dtype=torch.int64), torch.arange(64), decoder.empty_states(1)
    )
    whole = decoder.head(hidden)[:, :300]
    (first, second) = reference_logits(checkpoint, [Sequence1(ids, 0), Sequence1(ids[:9], 8)])
    torch.testing.assert_close(first, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second[0], whole[8], rtol=1e-5, atol=1e-5)


def test_a_model_that_overflows_float16_is_refused_and_bfloat16_is_named(tmp_path: Path) -> None:
    """Activations past 65,504."""
    toys.make_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 3e4
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e3
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ExportError, match="bfloat16"):
        make_golden(checkpoint, precision="float16", chunk_sizes=[16, 32], context_tokens=128)
    for precision in ("bfloat16", "float32"):
        assert make_golden(checkpoint, precision=precision, chunk_sizes=[16, 32], context_tokens=128)["cases"]


def test_golden_prompts_cross_a_chunk_boundary_and_fit_the_context() -> None:
    assert prompt_lengths([32, 128], 4096) == [23, 145]
    for context in range(STEPS + 1, 200):
        lengths = prompt_lengths([32, 128], context)
        assert lengths
        assert max(lengths) + STEPS <= context


def test_golden_vectors_are_the_same_every_time(tmp_path: Path) -> None:
    toys.make_llama(tmp_path)
    documents = [
        make_golden(open_checkpoint(tmp_path), precision="float32", chunk_sizes=[16], context_tokens=64)
        for _ in range(2)
    ]
    assert documents[0] == documents[1]
