"""Hugging Face directories: what is read, in which layouts, and what is refused before a tensor is touched."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
import toys
from edgebuild.checkpoint import match_tensors, open_checkpoint
from edgebuild.checkpoint.safetensors_header import read_header
from edgebuild.commands.plan import model_config
from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

EMBEDDING = "model.embed_tokens.weight"


def expected(directory: Path) -> dict[str, tuple[int, ...]]:
    return ModelConfig.from_hf(json.loads((directory / "config.json").read_text())).expected_tensors()


@pytest.fixture
def llama(toy_llama: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(toy_llama, tmp_path / "llama")


@pytest.fixture(scope="module")
def sharded_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_llama(tmp_path_factory.mktemp("sharded") / "llama", shards=3, tied=False, dtype="bfloat16")


@pytest.fixture
def sharded(sharded_source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded_source, tmp_path / "sharded")


@pytest.mark.parametrize("family", ["toy_llama", "toy_qwen2", "toy_qwen3"])
def test_every_tensor_reads_as_safetensors_itself_reads_it(family: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(family)
    reference = load_file(directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.names() == reference.keys()
    for name, tensor in reference.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor)
    assert match_tensors(expected(directory), checkpoint) == ()


def test_shards_in_bfloat16_read_in_their_own_dtype(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    match_tensors(expected(sharded), checkpoint)
    for shard in sorted(sharded.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            assert checkpoint.dtype(name) == "BF16"
            assert torch.equal(checkpoint.read(name), tensor)


def test_source_files_carry_names_sizes_and_hashes(sharded: Path) -> None:
    import hashlib

    files = {file.name: file for file in open_checkpoint(sharded).files}
    assert {"config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"} <= files.keys()
    for name, file in files.items():
        content = (sharded / name).read_bytes()
        assert (file.bytes, file.sha256()) == (len(content), hashlib.sha256(content).hexdigest())


# --- the tie flag -------------------------------------------------------------------------------------------------


def test_untied_without_a_head_names_the_missing_tensor(llama: Path) -> None:
    toys.edit_json(llama / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight .*tie_word_embeddings is false"):
        match_tensors(expected(llama), open_checkpoint(llama))


def test_tied_with_a_copy_of_the_embedding_as_head_is_accepted(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors[EMBEDDING].clone()}, llama / "model.safetensors")
    assert match_tensors(expected(llama), open_checkpoint(llama)) == ("lm_head.weight",)


def test_tied_with_another_head_is_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors[EMBEDDING] + 1}, llama / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        match_tensors(expected(llama), open_checkpoint(llama))


# --- matching ---------------------------------------------------------------------------------------------------------


def test_missing_unused_and_misshapen_tensors_are_all_named(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors[EMBEDDING] = torch.zeros(5, 64)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        match_tensors(expected(llama), open_checkpoint(llama))
    message = str(caught.value)
    for part in ("model.norm.weight", "model.layers.7.mlp.up_proj.weight", "[5, 64], expected [320, 64]"):
        assert part in message


def test_tensors_under_an_ignored_prefix_are_reported_not_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.zeros(2, 2)}, llama / "model.safetensors")
    checkpoint = open_checkpoint(llama)
    assert match_tensors(expected(llama), checkpoint, ignored_prefixes=("mtp.",)) == ("mtp.fc.weight",)
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        match_tensors(expected(llama), checkpoint)


# --- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "vision"),
    [
        ("model.language_model.", "model.visual.blocks.0.weight"),
        ("language_model.model.", "vision_tower.blocks.0.weight"),
        ("", "visual.blocks.0.weight"),
    ],
)
def test_nested_layouts_equal_the_flat_one_and_list_vision_tensors(llama: Path, prefix: str, vision: str) -> None:
    flat = load_file(llama / "model.safetensors")
    nested = {prefix + name.removeprefix("model."): tensor for name, tensor in flat.items()}
    save_file({**nested, vision: torch.zeros(3)}, llama / "model.safetensors")
    config = json.loads((llama / "config.json").read_text())
    outer = {"model_type": "some_vl", "text_config": config}
    (llama / "config.json").write_text(json.dumps(outer))
    checkpoint = open_checkpoint(llama)
    assert checkpoint.names() == flat.keys()
    assert checkpoint.skipped == (vision,)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in flat.items())
    assert checkpoint.tokenizer.eos_token_ids == (0, 2)


def test_two_tensors_that_mean_the_same_are_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "norm.weight": torch.ones(64)}, llama / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'norm\.weight' and 'model\.norm\.weight' are both"):
        open_checkpoint(llama)


# --- quantised ----------------------------------------------------------------------------------------------------


def test_packed_weights_are_refused_with_the_method(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int8)
    save_file(tensors, llama / "model.safetensors")
    toys.edit_json(llama / "config.json", quantization_config={"quant_method": "fbgemm_int8"})
    with pytest.raises(CheckpointError, match=r"1 of 20 tensors are quantised \(method: fbgemm_int8\)"):
        open_checkpoint(llama)


def test_a_quantization_config_over_plain_weights_is_accepted(llama: Path) -> None:
    toys.edit_json(llama / "config.json", quantization_config={"quant_method": "gptq"})
    match_tensors(expected(llama), open_checkpoint(llama))


# --- index ------------------------------------------------------------------------------------------------------------


def edit_index(directory: Path, **changes: str | None) -> None:
    path = directory / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    for name, shard in changes.items():
        if shard is None:
            del content["weight_map"][name]
        else:
            content["weight_map"][name] = shard
    path.write_text(json.dumps(content))


FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 shards are missing \(model-00002-of-00003"):
        open_checkpoint(sharded)


def test_an_indexed_tensor_that_no_shard_holds_is_named(sharded: Path) -> None:
    edit_index(sharded, **{"model.layers.9.ghost": FIRST})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.9\.ghost' into model-00001.*no shard holds it"):
        open_checkpoint(sharded)


def test_an_indexed_tensor_in_another_shard_is_named(sharded: Path) -> None:
    moved = next(iter(read_header(sharded / FIRST)))
    edit_index(sharded, **{moved: SECOND})
    with pytest.raises(CheckpointError, match=r"into model-00002.*but it is in model-00001"):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_list_is_named(sharded: Path) -> None:
    name = next(iter(read_header(sharded / FIRST)))
    edit_index(sharded, **{name: None})
    with pytest.raises(CheckpointError, match=rf"{FIRST} holds '{name}', which"):
        open_checkpoint(sharded)


def test_an_index_cannot_point_outside_its_directory(sharded: Path) -> None:
    edit_index(sharded, **{EMBEDDING: "../" + FIRST})
    with pytest.raises(CheckpointError, match="is not a file beside it"):
        open_checkpoint(sharded)


# --- damaged files ----------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "'b' at byte .* overlaps 'a'"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "'b' at byte .* leaves a hole after 'a'"),
        ({"a": entry([2], 0, 8)}, 6, "'a' ends at byte .*, the file has"),
        ({"a": entry([2], 0, 8)}, 9, "1 bytes after 'a' belong to no tensor"),
        ({"a": entry([3], 0, 8)}, 8, "takes 8 bytes, expected 12"),
        ({"a": entry([2**62, 2**62], 0, 8)}, 8, "takes 8 bytes, expected"),
        ({"a": entry([-2], 0, 8)}, 8, r"shape \[-2\]"),
        ({"a": entry([2], 8, 0)}, 8, "takes -8 bytes"),
        ({"a": entry([2], 0, 8, "F99")}, 8, "unknown dtype 'F99'"),
        ({"a": {"dtype": ["F32"]}}, 8, "unknown dtype"),
        ({"a": 3}, 8, "not an object"),
        ([1], 8, "not a JSON object"),
        (b"{nonsense", 8, "not readable JSON"),
        (b"[" * 100_000, 8, "not readable JSON"),
        (b'{"a": 1, "a": 2}', 8, "'a' stands there twice"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(tmp_path: Path, header: object, data: int, message: str) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, header, bytes(data))
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 0)])
def test_absurd_header_lengths_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"too few|header length"):
        read_header(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    mutations=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    kept=st.just(1.0) | st.floats(0, 1),
)
def test_a_mutated_file_is_read_or_refused(
    toy_llama: Path, tmp_path: Path, mutations: list[tuple[float, int]], kept: float
) -> None:
    content = bytearray((toy_llama / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for place, value in mutations:
        content[int(place * header)] = value
    content = content[: int(kept * len(content))]
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert all(tensor.offset + tensor.bytes <= len(content) for tensor in tensors.values())


def test_pickled_weights_are_refused_unopened(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04never to be read")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        open_checkpoint(llama)


def test_what_is_not_a_checkpoint_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        open_checkpoint(tmp_path / "model.bin")


# --- cost -------------------------------------------------------------------------------------------------------------


def test_reading_one_by_one_holds_one_tensor(tmp_path: Path) -> None:
    tensor_bytes = 8 << 20
    save_file({f"t{i}": torch.full((tensor_bytes // 4,), float(i)) for i in range(6)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.read("t0")
    tracemalloc.start()
    try:
        for index in range(6):
            assert checkpoint.read(f"t{index}")[-1] == index
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * tensor_bytes


def test_opening_matching_and_the_tokenizer_import_no_torch(toy_llama: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from edgebuild.checkpoint import match_tensors, open_checkpoint\n"
        "from edgebuild.models.config import ModelConfig\n"
        "checkpoint = open_checkpoint(Path(sys.argv[1]))\n"
        "match_tensors(ModelConfig.from_hf(checkpoint.config).expected_tensors(), checkpoint)\n"
        "checkpoint.tokenizer; print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(toy_llama)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_configuration_alone_is_no_checkpoint_but_can_be_planned_with(llama: Path, tmp_path: Path) -> None:
    alone = shutil.copyfile(llama / "config.json", tmp_path / "toy-0.1b.json")
    with pytest.raises(CheckpointError, match=r"toy-0\.1b\.json is a configuration at most") as refused:
        open_checkpoint(alone)
    assert "edgebuild plan takes a configuration alone" in str(refused.value.hint)
    assert model_config(alone) == model_config(llama)
