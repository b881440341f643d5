"""Llama, Qwen2 and Qwen3 against Hugging Face Transformers in float32: the torch module, and its ONNX."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.errors import CheckpointError
from edgebuild.export import FORMS, Forms, export_decoder
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from graph_runner import GraphRunner
from transformers import AutoModelForCausalLM

CACHE = 160
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "llama-tied": (toys.make_llama, {}),
    "llama-untied-biases": (toys.make_llama, {"tied": False, "attention_bias": True, "mlp_bias": True}),
    "llama-mha": (toys.make_llama, {"kv_heads": 4}),
    "llama-one-kv-head": (toys.make_llama, {"kv_heads": 1}),
    "llama-linear": (toys.make_llama, {"rope": {"rope_type": "linear", "factor": 2.0}}),
    "llama-llama3": (toys.make_llama, {"rope": LLAMA3}),
    "llama-yarn": (toys.make_llama, {"rope": YARN}),
    "llama-yarn-mscale": (toys.make_llama, {"rope": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2, "truncate": False}}),
    "qwen2": (toys.make_qwen2, {}),
    "qwen3": (toys.make_qwen3, {}),
    "qwen3-wide-heads-untied": (toys.make_qwen3, {"tied": False, "head_dim": 128, "attention_bias": True}),
}


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def reference_logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 300, 97)


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_module_equals_transformers(variant: str, tmp_path: Path, ids: np.ndarray) -> None:
    make, options = VARIANTS[variant]
    make(tmp_path, **options)
    expected = reference_logits(tmp_path, ids)
    decoder = load_decoder(open_checkpoint(tmp_path), cache_tokens=CACHE)
    hidden, _ = decoder.backbone(
        torch.from_numpy(ids)[None], torch.zeros(1, dtype=torch.int64), torch.arange(CACHE), decoder.empty_states(1)
    )
    logits = decoder.head(hidden).detach().numpy()
    assert relative(logits, expected) <= 1e-5


@pytest.mark.parametrize("form", ["native", "written_out"])
@pytest.mark.parametrize("variant", ["llama-tied", "llama-yarn", "qwen2", "qwen3-wide-heads-untied"])
def test_onnx_equals_transformers_in_chunks_and_steps(variant: str, form: str, tmp_path: Path, ids: np.ndarray) -> None:
    """Chunks of 32 with a padded tail, then one token at a time: every step's logits against one reference pass."""
    make, options = VARIANTS[variant]
    make(tmp_path, **options)
    expected = reference_logits(tmp_path, ids)
    checkpoint = open_checkpoint(tmp_path)
    forms = Forms(attention=form, sampling="conditional" if form == "native" else "branchless")
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config), checkpoint, tmp_path, cache_tokens=CACHE, token_limit=300,
        precision="float32", forms=forms,
    )  # fmt: skip
    runner = GraphRunner(graph.path)
    position = 0
    for real in (32, 32, 21):
        chunk = np.zeros(32, np.int64)
        chunk[:real] = ids[position : position + real]
        outputs = runner.step(chunk, valid=[real], tier=128)
        position += real
        assert outputs["new_length"][0] == position
        assert relative(outputs["logits"][0, 0], expected[position - 1, :300]) <= 1e-4
    for token in ids[position:]:
        outputs = runner.step([token])
        position += 1
        assert relative(outputs["logits"][0, 0], expected[position - 1, :300]) <= 1e-4
        assert outputs["next_token"][0] == expected[position - 1, :300].argmax()


@pytest.fixture(scope="module")
def toy_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    toys.make_llama(directory)
    checkpoint = open_checkpoint(directory)
    return export_decoder(
        ModelConfig.from_hf(checkpoint.config), checkpoint, directory, cache_tokens=CACHE, token_limit=300,
        precision="float32", forms=FORMS["onnxruntime"],
    ).path  # fmt: skip


def test_drafts_are_accepted_up_to_the_first_wrong_one(toy_graph: Path, ids: np.ndarray) -> None:
    prompt = ids[:9]
    plain = GraphRunner(toy_graph)
    greedy = [int(plain.step(prompt)["next_token"][0])]
    for _ in range(5):
        greedy.append(int(plain.step([greedy[-1]])["next_token"][0]))
    for wrong_at in range(5):
        runner = GraphRunner(toy_graph)
        runner.step(prompt)
        drafts = list(greedy[1:5])
        if wrong_at < 4:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % 300
        outputs = runner.step([greedy[0], *drafts], forced=[1], logit_rows=5)
        assert outputs["accepted"][0] == wrong_at
        assert outputs["next_token"][0] == greedy[wrong_at + 1]
        assert outputs["new_length"][0] == len(prompt) + 1 + wrong_at
        if wrong_at < 4:  # the rejected rows leave no trace: the next plain step goes on as if they had never been
            following = runner.step([greedy[wrong_at + 1]])
            assert following["next_token"][0] == greedy[wrong_at + 2]


def test_idle_batch_row_leaves_no_trace(toy_graph: Path, ids: np.ndarray) -> None:
    alone = GraphRunner(toy_graph)
    expected = [alone.step(ids[:9]), alone.step(ids[9:10])]
    both = GraphRunner(toy_graph, batch=2)
    tokens = np.zeros((2, 9), np.int64)
    tokens[1] = ids[:9]
    first = both.step(tokens, valid=[0, 9])
    assert first["new_length"].tolist() == [0, 9]
    assert first["next_token"][1] == expected[0]["next_token"][0]
    second = both.step(np.array([[0], [ids[9]]]), valid=[0, 1])
    assert second["new_length"].tolist() == [0, 10]
    assert relative(second["logits"][1], expected[1]["logits"][0]) <= 1e-6


def test_vocabulary_rows_past_the_tokenizer_have_no_logits(toy_graph: Path, ids: np.ndarray) -> None:
    outputs = GraphRunner(toy_graph).step(ids[:5])
    assert outputs["logits"].shape == (1, 1, 300)  # the embedding has 320 rows


def test_unknown_rope_type_is_refused(tmp_path: Path) -> None:
    toys.make_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        broken = {k: v for k, v in config.items() if not k.startswith("rope")} | {
            key: {"rope_type": "longrope", "factor": 2.0}
        }
        with pytest.raises(CheckpointError, match="longrope"):
            ModelConfig.from_hf(broken)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_every_rope_spelling_reads_the_same(spelling: str, tmp_path: Path) -> None:
    toys.make_llama(tmp_path, rope=LLAMA3)
    config = {k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if not k.startswith("rope")}
    given = {
        "rope_parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 1e5}},
        "rope_scaling": {"rope_scaling": LLAMA3, "rope_theta": 1e5},
        "type": {
            "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()},
            "rope_theta": 1e5,
        },
    }[spelling]
    rope = ModelConfig.from_hf(config | given).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_context_tokens) == ("llama3", 1e5, 8.0, 64)
