"""Layouts that hybrid checkpoints come in: nested beside a vision tower, partly quantised, with tensors nobody uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toys
from edgebuild.checkpoint import match_tensors, open_checkpoint
from edgebuild.commands.plan import plan
from edgebuild.errors import CheckpointError
from edgebuild.export import FORMS, export_decoder
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from edgebuild.models.hash_check import refuse_other_hashes
from edgebuild.profile import bundled_names, load_profile
from module_runner import ModuleRunner
from safetensors.torch import load_file, save_file


def exported(checkpoint: Path, directory: Path) -> tuple[bytes, bytes]:
    opened = open_checkpoint(checkpoint)
    directory.mkdir()
    graph = export_decoder(
        ModelConfig.from_hf(opened.config), opened, directory, cache_tokens=64, token_limit=300, precision="float32",
        forms=FORMS["onnxruntime"],
    )  # fmt: skip
    return graph.path.read_bytes(), graph.weights_path.read_bytes()


def test_nested_and_flat_layouts_of_the_same_weights_export_the_same(tmp_path: Path) -> None:
    nested, flat = tmp_path / "nested", tmp_path / "flat"
    toys.make_qwen3_5(nested, nested=True, tied=False, layers=2, interval=2)
    toys.make_qwen3_5(flat, tied=False, layers=2, interval=2)
    opened = open_checkpoint(nested)
    save_file({name: opened.read(name) for name in opened.names()}, flat / "model.safetensors", {"format": "pt"})
    vision = [name for name in load_file(nested / "model.safetensors") if ".visual." in name]
    assert vision
    assert set(opened.skipped) == set(vision)
    assert open_checkpoint(flat).skipped == ()
    assert exported(nested, tmp_path / "a") == exported(flat, tmp_path / "b")


@pytest.mark.parametrize("outer", [True, False])
def test_whether_the_head_is_tied_is_said_outside_a_nested_config(outer: bool, tmp_path: Path) -> None:
    toys.make_qwen3_5(tmp_path, nested=True, tied=outer, layers=2, interval=2)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = not outer
    assert ModelConfig.from_hf(config).tie_word_embeddings is outer


def test_a_partly_quantised_checkpoint_is_refused_by_its_packed_tensors_alone(tmp_path: Path) -> None:
    """The ignore list left linear attention, the shared expert and the head plain."""
    toys.make_qwen3_5_moe(tmp_path, tied=False, layers=2, interval=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    packed = [name for name in tensors if ".experts." in name or "self_attn.q_proj" in name]
    for name in packed:
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    toys.edit_json(tmp_path / "config.json", quantization_config={"quant_method": "compressed-tensors"})
    message = rf"{len(packed)} of \d+ tensors are quantised \(method: compressed-tensors\), for example .*experts"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_that_nobody_reads_is_fatal(tmp_path: Path) -> None:
    """A scale beside a plain weight would change it; so would a drafter under a name that is not `mtp.`."""
    toys.make_qwen3_next(tmp_path, layers=2, interval=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.linear_attn.out_proj.weight_scale"] = torch.ones(64, 1)
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    expected = ModelConfig.from_hf(checkpoint.config).expected_tensors()
    with pytest.raises(CheckpointError, match=r"1 that nothing uses: .*out_proj\.weight_scale"):
        match_tensors(expected, checkpoint, ignored_prefixes=("mtp.",))


@pytest.mark.parametrize("make", [toys.make_qwen3_5, toys.make_qwen3_next, toys.make_qwen4_exp])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
def test_half_precision_stays_near_and_keeps_its_matrices_in_float32(
    make, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """Chunks and steps in half precision against float32; decays and state matrices are float32 in both."""
    make(tmp_path, num_experts_per_tok=6) if make is not toys.make_qwen3_5 else make(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    whole = ModuleRunner(load_decoder(checkpoint, cache_tokens=128))
    half = ModuleRunner(load_decoder(checkpoint, cache_tokens=128, dtype=dtype))
    kinds = {state.kind: state.dtype for state in half.decoder.states()}
    assert kinds == {"kv": str(dtype)[6:], "conv": str(dtype)[6:], "recurrent": "float32"}
    ids = torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(4)).tolist()
    for part in (ids[:70], ids[70:96], *([token] for token in ids[96:])):
        expected, actual = (runner.step(part, tier=128)["logits"] for runner in (whole, half))
        difference = torch.tensor(actual - expected).norm() / torch.tensor(expected).norm()
        assert difference <= tolerance


@pytest.mark.parametrize("profile", [name for name in bundled_names() if load_profile(name).backend != "onnxruntime"])
def test_plan_says_where_flash_next_does_not_run(profile: str, tmp_path: Path) -> None:
    published = Path(__file__).parents[1] / "data" / "configs" / "qwen3.8-flash-next.json"
    (tmp_path / "config.json").write_text(published.read_text())
    with pytest.raises(
        CheckpointError, match=f"qwen4_exp does not run on {load_profile(profile).backend}: its n-grams"
    ):
        plan.main(["--profile", profile, "--model", str(tmp_path)], standalone_mode=False)


def test_an_ngram_hash_other_than_the_configured_one_is_refused(tmp_path: Path) -> None:
    """The files carry its factors; rows looked up under other ones would be other rows, and nothing would say so."""
    toys.make_qwen4_exp(tmp_path, layers=2, interval=2, ple_layer_ids=[1])
    checkpoint = open_checkpoint(tmp_path)
    refuse_other_hashes(ModelConfig.from_hf(checkpoint.config), checkpoint)
    assert any(name.endswith("layer_multipliers") for name in checkpoint.skipped)
    with pytest.raises(CheckpointError, match="layer_multipliers is "):
        refuse_other_hashes(ModelConfig.from_hf({**checkpoint.config, "seed": 99}), checkpoint)
