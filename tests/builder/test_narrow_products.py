"""Narrow matrix products in parts: the same numbers, only where it pays, and nothing that the compiler fuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.export import Forms, export_decoder
from edgebuild.export.narrow import choose_parts
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from graph_runner import GraphRunner
from hypothesis import given
from hypothesis import strategies as st

CACHE, LIMIT = 192, 300


def test_products_in_parts_give_the_logits_of_the_module(tmp_path: Path) -> None:
    toys.make_qwen3(tmp_path, hidden=128, heads=4, kv_heads=2, head_dim=128, ffn=256)
    checkpoint = open_checkpoint(tmp_path)
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config), checkpoint, tmp_path, cache_tokens=CACHE, token_limit=LIMIT,
        precision="float32", forms=Forms(attention="written_out", sampling="branchless", processors=64),
    ).path  # fmt: skip
    # output and down projection are in parts; the others are fused by their shared inputs
    assert products(graph) == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    ids = np.random.default_rng(2).integers(0, LIMIT, 60)
    decoder = load_decoder(checkpoint, cache_tokens=CACHE)
    with torch.no_grad():
        start, positions = torch.zeros(1, dtype=torch.int64), torch.arange(CACHE)
        hidden = decoder.backbone(torch.from_numpy(ids)[None], start, positions, decoder.empty_states(1))[0]
        expected = decoder.head(hidden)[:, :LIMIT].numpy()
    runner = GraphRunner(graph)
    for first, last in [(0, 32), *((at, at + 2) for at in range(32, 60, 2))]:
        logits = runner.step(ids[first:last], tier=128)["logits"][0, 0]
        assert np.linalg.norm(logits - expected[last - 1]) <= 1e-4 * np.linalg.norm(expected[last - 1])


def products(path: Path) -> set[str]:
    """Which projections of the layers are whole products."""
    weights = [node.inputs[1].name for node in onnx_ir.load(path).graph if node.op_type == "Gemm"]
    return {name.split(".")[-2] for name in weights if "proj" in name}


@given(columns=st.integers(1, 200_000), inner=st.integers(1, 20_000), processors=st.integers(1, 256))
def test_parts_divide_the_inner_dimension_and_run_at_once(columns: int, inner: int, processors: int) -> None:
    parts = choose_parts(columns, inner, processors)
    assert parts in (1, 2, 4)
    if parts > 1:
        assert inner % parts == 0
        assert inner // parts >= 64
        assert parts * -(-columns // 32) <= 1.25 * processors


@pytest.mark.parametrize(
    ("columns", "inner", "parts"),
    [
        (1024, 3072, 4),
        (576, 1536, 4),
        (2560, 9728, 2),
        (151_936, 1024, 1),
        (1024, 100, 1),
        (1024, 3074, 2),
        (1, 1024, 1),
    ],
)
def test_parts_of_known_shapes_on_132_processors(columns: int, inner: int, parts: int) -> None:
    assert choose_parts(columns, inner, 132) == parts
