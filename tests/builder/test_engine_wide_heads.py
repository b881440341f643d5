"""The form of attention for 128-wide heads (keys · queryᵀ), on ONNX Runtime against the float32 module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.export import Forms, export_decoder
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from graph_runner import GraphRunner

CACHE, LIMIT = 160, 300


def test_keys_times_query_equals_the_module_in_chunks_and_steps(tmp_path: Path) -> None:
    toys.make_qwen3(tmp_path, hidden=128, head_dim=128, heads=4, kv_heads=2)
    checkpoint = open_checkpoint(tmp_path)
    ids = np.random.default_rng(2).integers(0, LIMIT, 70)
    decoder = load_decoder(checkpoint, cache_tokens=CACHE)
    with torch.no_grad():
        start, positions = torch.zeros(1, dtype=torch.int64), torch.arange(CACHE)
        hidden = decoder.backbone(torch.from_numpy(ids)[None], start, positions, decoder.empty_states(1))[0]
        expected = decoder.head(hidden)[:, :LIMIT].numpy()
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config),
        checkpoint,
        tmp_path,
        cache_tokens=CACHE,
        token_limit=LIMIT,
        precision="float32",
        forms=Forms(attention="written_out", sampling="branchless"),
    )
    runner = GraphRunner(graph.path)
    position = 0
    for real in (32, 21):  # the second chunk is padded
        chunk = np.zeros(32, np.int64)
        chunk[:real] = ids[position : position + real]
        outputs = runner.step(chunk, valid=[real], tier=128)
        position += real
        assert relative(outputs["logits"][0, 0], expected[position - 1]) <= 1e-4
    for token in ids[position:]:
        outputs = runner.step([token])
        position += 1
        assert relative(outputs["logits"][0, 0], expected[position - 1]) <= 1e-4


def relative(actual: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))
