"""The Qwen hybrids against Hugging Face Transformers in float32: the torch module, and its ONNX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
import transformers
from edgebuild.checkpoint import match_tensors, open_checkpoint
from edgebuild.errors import CheckpointError
from edgebuild.export import FORMS, Forms, export_decoder
from edgebuild.export.delta_form import delta_levels
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from edgebuild.models.loading import Sequence1, reference_logits
from graph_runner import GraphRunner
from safetensors.torch import load_file, save_file

CACHE = 224
VARIANTS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5": (toys.make_qwen3_5, {}),
    "qwen3_5-untied-nested": (toys.make_qwen3_5, {"tied": False, "nested": True}),
    "qwen3_5-one-value-head-a-key-head": (toys.make_qwen3_5, {"key_heads": 3, "value_heads": 3}),
    "qwen3_5-one-kv-head": (toys.make_qwen3_5, {"kv_heads": 1, "partial": 0.5, "interval": 2}),
    "qwen3_5-whole-head-rotates": (toys.make_qwen3_5, {"partial": 1.0, "kv_heads": 4, "layers": 2, "interval": 2}),
    "qwen3_5-longer-kernel": (toys.make_qwen3_5, {"linear_conv_kernel_dim": 6, "value_heads": 6}),
    "qwen3_5-biases": (toys.make_qwen3_5, {"attention_bias": True}),
    "qwen3_5_moe": (toys.make_qwen3_5_moe, {"tied": False}),
    "qwen3_5_moe-nested-all-experts": (toys.make_qwen3_5_moe, {"nested": True, "num_experts_per_tok": 6}),
    "qwen3_next": (toys.make_qwen3_next, {"tied": False}),
    "qwen3_next-dense": (toys.make_qwen3_next, {"num_experts": 0, "value_heads": 6}),
    "qwen3_next-mixed": (toys.make_qwen3_next, {"mlp_only_layers": [1], "decoder_sparse_step": 2, "key_heads": 4}),
    "qwen3_next-not-renormalised": (toys.make_qwen3_next, {"norm_topk_prob": False}),
    "qwen4_exp": (toys.make_qwen4_exp, {}),
    "qwen4_exp-two-tables-nested": (
        toys.make_qwen4_exp,
        {"interval": 2, "ple_layer_ids": [1, 3], "ngram_size": 4, "ple_embed_dim": 36, "nested": True, "tied": False},
    ),
    "qwen4_exp-everything-within-the-budget": (toys.make_qwen4_exp, {"indexer_budget": 400, "hc_count": 4}),
    "qwen4_exp-no-ngrams-silu": (toys.make_qwen4_exp, {"ple_layer_ids": [], "output_gate_type": None}),
}  # fmt: skip


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def transformers_logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    drawn = np.random.default_rng(7).integers(0, 300, 201)
    drawn[[40, 41, 63, 90, 129]] = toys.IM_END  # n-grams end there
    return drawn


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_module_equals_transformers(variant: str, tmp_path: Path, ids: np.ndarray) -> None:
    """201 tokens: three blocks of 64 and a ragged one. The streamed reference is the same to the last digits."""
    make, options = VARIANTS[variant]
    make(tmp_path, **options)
    expected = transformers_logits(tmp_path, ids)
    checkpoint = open_checkpoint(tmp_path)
    match_tensors(ModelConfig.from_hf(checkpoint.config).expected_tensors(), checkpoint)
    decoder = load_decoder(checkpoint, cache_tokens=CACHE)
    with torch.no_grad():
        hidden, _ = decoder.backbone(
            torch.from_numpy(ids)[None], torch.zeros(1, dtype=torch.int64), torch.arange(CACHE), decoder.empty_states(1)
        )
        logits = decoder.head(hidden).numpy()
    assert relative(logits, expected) <= 1e-5
    (streamed,) = reference_logits(checkpoint, [Sequence1(tuple(ids.tolist()), 190)])
    assert relative(streamed.numpy(), expected[190:, :300]) <= 1e-5


# plain qwen3_5 is what test_hybrid_artifact.py runs whole; an export is dear
@pytest.mark.parametrize("variant", ["qwen3_5-longer-kernel", "qwen3_5_moe", "qwen3_next-mixed", "qwen4_exp"])
def test_onnx_equals_transformers_in_chunks_and_steps(variant: str, tmp_path: Path, ids: np.ndarray) -> None:
    """One chunk over several blocks, padded ones, then one token at a time: each against one reference pass."""
    make, options = VARIANTS[variant]
    make(tmp_path, **options)
    check_onnx(tmp_path, transformers_logits(tmp_path, ids), ids, FORMS["onnxruntime"], 1e-4)


def test_onnx_form_of_captured_graphs_equals_transformers(tmp_path: Path, ids: np.ndarray) -> None:
    """Gathered experts and written-out attention, as the TensorRT backends export them."""
    toys.make_qwen3_next(tmp_path)
    check_onnx(tmp_path, transformers_logits(tmp_path, ids), ids, FORMS["tensorrt-rtx"], 1e-4)


def check_onnx(directory: Path, expected: np.ndarray, ids: np.ndarray, forms: Forms, tolerance: float) -> None:
    checkpoint = open_checkpoint(directory)
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config), checkpoint, directory, cache_tokens=CACHE, token_limit=300,
        precision="float32", forms=forms,
    )  # fmt: skip
    runner = GraphRunner(graph.path)
    position = 0
    for rows, real in ((130, 130), (32, 32), (32, 2), (32, 21)):
        chunk = np.zeros(rows, np.int64)
        chunk[:real] = ids[position : position + real]
        outputs = runner.step(chunk, valid=[real], tier=CACHE)
        position += real
        assert outputs["new_length"][0] == position
        assert relative(outputs["logits"][0, 0], expected[position - 1, :300]) <= tolerance
    for token in ids[position:]:
        outputs = runner.step([token])
        position += 1
        assert relative(outputs["logits"][0, 0], expected[position - 1, :300]) <= tolerance
        assert outputs["next_token"][0] == expected[position - 1, :300].argmax()


def test_a_token_that_repeats_does_not_break_the_triangular_inverse(tmp_path: Path) -> None:
    """Equal keys with slow decay are where a product of powers of the system loses all digits."""
    toys.make_qwen3_5(tmp_path, layers=2, interval=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.linear_attn.A_log"].fill_(-12.0)  # next to no decay
    tensors["model.layers.0.linear_attn.conv1d.weight"].fill_(0.0)
    tensors["model.layers.0.linear_attn.conv1d.weight"][:, :, -1] = 1.0  # equal tokens, equal keys
    tensors["model.layers.0.linear_attn.in_proj_b.weight"] *= 20  # β near 0 or 1
    save_file(tensors, file, metadata={"format": "pt"})
    ids = np.full(201, 17)
    check_onnx(tmp_path, transformers_logits(tmp_path, ids), ids, FORMS["onnxruntime"], 1e-4)


def test_doubling_levels_cover_each_pair_of_rows_once() -> None:
    levels = delta_levels()
    for i in range(64):
        for j in range(64):
            if i > j:
                size = 2 ** int(levels[i, j])
                assert i // (2 * size) == j // (2 * size)  # in one pair of blocks
                assert i // size == j // size + 1  # of which j lies in the first, i in the second
            else:
                assert levels[i, j] == (-1 if i == j else -2)


def test_a_table_in_shards_is_read_whole_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    toys.make_qwen4_exp(tmp_path, layers=2, interval=2, ple_layer_ids=[1])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = "model.layers.0.ple.ple_embedding.ngram_embedding"
    shards = [tensors[f"{table}.shard_{index}.weight"] for index in (0, 1)]
    assert torch.equal(open_checkpoint(tmp_path).read(f"{table}.weight"), torch.cat(shards))
    del tensors[f"{table}.shard_0.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"shard_N\.weight is missing for 1 of 2, for example N = 0"):
        open_checkpoint(tmp_path)


def test_experts_are_read_stacked_whichever_way_they_are_stored(tmp_path: Path) -> None:
    toys.make_qwen3_5_moe(tmp_path, layers=2, interval=2)
    apart = open_checkpoint(tmp_path)
    stacked = {name: apart.read(name) for name in apart.names()}
    other = tmp_path / "stacked"
    toys.make_qwen3_5_moe(other, layers=2, interval=2)
    save_file(stacked, other / "model.safetensors", metadata={"format": "pt"})
    again = open_checkpoint(other)
    assert not any(".experts.0." in name for name in apart.names() | again.names())
    assert any(".experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    for name in ModelConfig.from_hf(apart.config).expected_tensors():
        assert apart.shape(name) == again.shape(name)
        assert torch.equal(apart.read(name), again.read(name))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    toys.make_qwen3_5_moe(tmp_path, layers=2, interval=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.N\.up_proj\.weight .* N = 4"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "sliding"),
        ({"layer_types": ["linear_attention"]}, "1 entries for 2 layers"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple"),
        ({"output_gate_type": "tanh"}, "tanh"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.05}}, "partial_rotary_factor"),
    ],
)
def test_a_configuration_that_would_be_computed_wrong_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    toys.make_qwen3_5(tmp_path, layers=2, interval=2)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(config)
