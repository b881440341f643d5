"""GGUF files against the Hugging Face checkpoint they were written from, with the `gguf` package as the writer."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import toys
from edgebuild.checkpoint import match_tensors, open_checkpoint
from edgebuild.checkpoint.gguf_file import read_gguf
from edgebuild.checkpoint.gguf_model import unpermute
from edgebuild.checkpoint.gguf_rope import llama3_from_factors
from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from toy_gguf import permute, write_gguf


def llama3_factors(**rope: float) -> np.ndarray:
    """Divisors of the inverse frequencies that Transformers itself computes for a llama3 rope."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, **rope},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / 500_000.0 ** (np.arange(0, 64, 2) / 64)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize("family", ["toy_llama", "toy_qwen2", "toy_qwen3"])
def test_a_float_gguf_reads_back_the_original_tensors(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(family)
    reference = load_file(source / "model.safetensors")
    checkpoint = open_checkpoint(write_gguf(source, tmp_path / "toy.gguf"))
    assert checkpoint.names() == reference.keys()
    for name, tensor in reference.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 5e-4), ("BF16", 4e-3), ("Q8_0", 6e-3), ("Q4_1", 8e-2)])
def test_a_quantised_gguf_reads_back_nearly(toy_llama: Path, tmp_path: Path, kind: str, tolerance: float) -> None:
    reference = load_file(toy_llama / "model.safetensors")
    checkpoint = open_checkpoint(write_gguf(toy_llama, tmp_path / "toy.gguf", stored_as=kind))
    for name, tensor in reference.items():
        read = checkpoint.read(name)
        assert read.dtype == torch.float32
        assert torch.linalg.norm(read - tensor) <= tolerance * torch.linalg.norm(tensor), name


def test_llama_attention_biases_are_unpermuted_too(tmp_path: Path) -> None:
    source = toys.make_llama(tmp_path / "biased", attention_bias=True)
    reference = load_file(source / "model.safetensors")
    checkpoint = open_checkpoint(write_gguf(source, tmp_path / "toy.gguf"))
    for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias"):
        full = f"model.layers.1.self_attn.{name}"
        assert torch.equal(checkpoint.read(full), reference[full])
    match_tensors(ModelConfig.from_hf(checkpoint.config).expected_tensors(), checkpoint)


@given(heads=st.integers(1, 5), half=st.integers(1, 8), columns=st.integers(1, 3))
def test_unpermute_undoes_the_converters_permutation(heads: int, half: int, columns: int) -> None:
    rows = heads * half * 2
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    assert np.array_equal(unpermute(permute(values, heads), heads), values)


@pytest.mark.parametrize("family", ["toy_llama", "toy_qwen2", "toy_qwen3"])
def test_metadata_means_what_the_config_said(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path = request.getfixturevalue(family)
    checkpoint = open_checkpoint(write_gguf(source, tmp_path / "toy.gguf"))
    config = ModelConfig.from_hf(checkpoint.config)
    assert config == ModelConfig.from_hf(json.loads((source / "config.json").read_text()))
    assert match_tensors(config.expected_tensors(), checkpoint) == ()


def test_a_missing_head_means_tied_and_a_missing_tensor_is_named(toy_qwen3: Path, tmp_path: Path) -> None:
    tied = open_checkpoint(write_gguf(toy_qwen3, tmp_path / "tied.gguf", drop=frozenset({"output.weight"})))
    assert tied.config["tie_word_embeddings"] is True
    match_tensors(ModelConfig.from_hf(tied.config).expected_tensors(), tied)
    cut = open_checkpoint(write_gguf(toy_qwen3, tmp_path / "cut.gguf", drop=frozenset({"blk.1.ffn_up.weight"})))
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        match_tensors(ModelConfig.from_hf(cut.config).expected_tensors(), cut)


# --- rope -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 2048)])
def test_llama3_parameters_come_back_from_their_factors(factor: float, original: int) -> None:
    factors = llama3_factors(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=original
    )
    assert llama3_from_factors(factors, 500_000.0, 64) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def test_factors_of_no_known_formula_are_carried_one_by_one(toy_llama: Path, tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 1.0, 2.0, 3.0, 3.0, 7.0, 7.5], dtype=np.float32)
    checkpoint = open_checkpoint(write_gguf(toy_llama, tmp_path / "toy.gguf", rope_factors=factors))
    assert checkpoint.skipped == ("rope_freqs.weight",)
    assert checkpoint.config["rope_scaling"] == {"rope_type": "default", "frequency_factors": factors.tolist()}
    assert ModelConfig.from_hf(checkpoint.config).rope.frequency_factors == tuple(factors.tolist())


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 512,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_rope_scaling_is_translated(
    toy_llama: Path, tmp_path: Path, metadata: dict[str, object], scaling: dict[str, object] | None
) -> None:
    checkpoint = open_checkpoint(write_gguf(toy_llama, tmp_path / "toy.gguf", metadata=metadata))
    assert checkpoint.config.get("rope_scaling") == scaling
    ModelConfig.from_hf(checkpoint.config)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.magic": 2.0}, "not known: magic"),
        ({"llama.expert_count": 8}, "a mixture of 8 experts"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.sliding_window": 64}, "sliding window of 64"),
        ({"split.count": 3}, r"one of 3 parts .*llama-gguf-split --merge"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    toy_llama: Path, tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    path = write_gguf(toy_llama, tmp_path / "toy.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' is not supported .*llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "x.gguf")


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(toy_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    path = write_gguf(toy_llama, tmp_path_factory.mktemp("gguf") / "toy.gguf")
    start = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    return SimpleNamespace(content=path.read_bytes(), header_bytes=start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:10], "too few"),
        (lambda content: content[:-1], "the file has"),
        (lambda content: content[:200], "bytes are announced"),
        (lambda content: content[:4] + struct.pack("<I", 1) + content[8:], "GGUF version 1"),
        (lambda content: content[:8] + struct.pack("<Q", 2**60) + content[16:], r"announced|dimensions|not UTF-8"),
        (lambda content: content[:16] + struct.pack("<Q", 2**60) + content[24:], r"announced|unknown|not UTF-8|twice"),
        (
            lambda content: content[:24] + struct.pack("<Q", 2**63) + content[32:],
            "9223372036854775808 bytes are announced",
        ),
    ],
)
def test_a_damaged_header_is_refused(whole: SimpleNamespace, tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(whole.content))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(mutations=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_mutated_gguf_is_read_or_refused(
    whole: SimpleNamespace, tmp_path: Path, mutations: list[tuple[float, int]]
) -> None:
    content = bytearray(whole.content)
    for place, value in mutations:
        content[int(place * whole.header_bytes)] = value
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        assert checkpoint.tokenizer.token_limit > 0
        for name in checkpoint.names():
            assert tuple(checkpoint.read(name).shape) == checkpoint.shape(name)
    except CheckpointError:
        pass


def test_a_scale_that_is_no_number_is_refused(toy_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(toy_llama, tmp_path / "toy.gguf", stored_as="Q8_0")
    content = bytearray(path.read_bytes())
    tensor = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    content[tensor.offset : tensor.offset + 2] = np.float16("nan").tobytes()  # a block starts with its scale
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight' holds values that are not finite"):
        open_checkpoint(path).read("model.layers.1.mlp.up_proj.weight")


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_dequantising_holds_little_more_than_the_result(tmp_path: Path, kind: str) -> None:
    rows, columns = 16_384, 512  # 32 MB of float32
    source = toys.make_llama(tmp_path / "wide", vocabulary_rows=rows, hidden=columns, layers=1, tied=False)
    checkpoint = open_checkpoint(write_gguf(source, tmp_path / "toy.gguf", stored_as=kind))
    checkpoint.read("model.norm.weight")
    tracemalloc.start()
    try:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            checkpoint.read(name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.6 * rows * columns * 4


def test_opening_a_gguf_imports_no_torch(whole: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(whole.content)
    script = (
        "import sys; from pathlib import Path; from edgebuild.checkpoint import open_checkpoint\n"
        "open_checkpoint(Path(sys.argv[1])).tokenizer; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_real_model_opens_whole(demo_gguf: Path) -> None:
    checkpoint = open_checkpoint(demo_gguf)
    config = ModelConfig.from_hf(checkpoint.config)
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (100_000.0, 1e-5, True)
    assert match_tensors(config.expected_tensors(), checkpoint) == ()


@pytest.mark.slow
def test_the_real_model_answers_through_transformers(demo_gguf: Path) -> None:
    """Our names, row order, configuration and tokenizer in Transformers' own Llama: any mistake makes it babble."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(demo_gguf)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    state = {name: checkpoint.read(name) for name in checkpoint.names()}
    assert model.load_state_dict(state, strict=False, assign=True).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
    ids = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=2)
    assert "Paris" in tokenizer.decode(out[0, len(ids) :].tolist())
