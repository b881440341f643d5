"""A build as its user meets it: every form of the command, what it prints, what it refuses and how."""

from __future__ import annotations

import json
import shlex
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import toys
import yaml
from command_line import TOY_LIMITS, Ran, run, write_profile
from edgert.manifest import load_manifest


def last_command(out: str) -> list[str]:
    return shlex.split(out.rstrip().splitlines()[-1])


def test_a_profile_alone_builds_from_another_directory_with_spaces_in_its_path(llama_build: tuple[Path, Ran]) -> None:
    artifact, ran = llama_build
    assert ran.code == 0, ran.err
    manifest = load_manifest(artifact)
    assert manifest.state == "complete"
    assert manifest.name == "llama-everything"
    for stage in ("traffic", "checkpoint", "plan", "export", "golden vectors", "hashes", "golden check", "report"):
        assert f"✓ {stage} " in ran.err
    # the first line says where from and where to; nothing of a library's own chatter is between ours
    first, *others = ran.err.splitlines()
    assert first == "edgebuild llama for everything → llama artifact"
    assert all(line.startswith(("  ✓ ", "    ")) for line in others), ran.err
    assert "steps agree with the reference" in ran.out
    # what it prints to try next can be pasted: the path has a space
    assert last_command(ran.out) == ["edgert", "chat", str(artifact)]


def test_the_artifact_holds_no_path_of_this_machine_and_no_leftovers(llama_artifact: Path, workshop: Path) -> None:
    names = {path.name for path in llama_artifact.iterdir()}
    assert names == {
        "decoder.onnx", "decoder.weights", "manifest.json", "scheduler.yaml", "golden.json", "tokenizer.json",
        "chat_template.jinja", "traffic.yaml", "plan.json", "build.json", "report.html",
    }  # fmt: skip
    for path in llama_artifact.iterdir():
        content = path.read_bytes()
        assert str(workshop).encode() not in content, path.name
        assert str(llama_artifact.parent).encode() not in content, path.name
    assert not [path for path in llama_artifact.parent.iterdir() if path.name.startswith(".")]


def test_build_by_name_prints_one_json_object(qwen3_build: tuple[Path, Ran]) -> None:
    artifact, ran = qwen3_build
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["artifact"] == str(artifact)
    assert result["state"] == "complete"
    assert result["next_step"] is None
    assert result["not_checked"] is None
    assert result["golden"]["steps"] >= 6
    assert result["golden"]["worst_error"] < 1e-4
    assert set(result["seconds"]) >= {"traffic", "plan", "export", "golden check"}


def test_a_gguf_goes_to_the_default_place(gguf_build: tuple[Path, Ran], toy_file: Path) -> None:
    artifact, ran = gguf_build
    assert ran.code == 0, ran.err
    manifest = load_manifest(artifact)
    assert [source.file for source in manifest.source] == [toy_file.name]
    assert manifest.model.family == "llama"
    assert manifest.model.eos_token_ids == (toys.IM_END,)


def test_inspect_shows_what_was_built(llama_artifact: Path) -> None:
    screen = run(["edgebuild", "inspect", llama_artifact])
    assert screen.code == 0
    for text in ("llama-everything", "onnxruntime", "KV cache", "decoder.weights", "prefill", "decode"):
        assert text in screen.out
    document = json.loads(run(["edgebuild", "inspect", llama_artifact, "--json"]).out)
    assert document["backend"]["name"] == "onnxruntime"
    assert document["sizes"]["files"]["decoder.onnx"] == (llama_artifact / "decoder.onnx").stat().st_size


def test_verify_checks_every_file_and_the_engine(llama_artifact: Path) -> None:
    ran = run(["edgebuild", "verify", llama_artifact])
    assert ran.code == 0, ran.err
    for entry in load_manifest(llama_artifact).files:
        assert f"ok      {entry.path} " in ran.out
    assert "ok      golden vectors" in ran.out


def test_verify_refuses_wrong_numbers_in_an_engine_whose_hashes_are_right(llama_artifact: Path, tmp_path: Path) -> None:
    """Weights changed and the manifest made to agree: only the golden vectors can tell."""
    import hashlib

    wrong = Path(shutil.copytree(llama_artifact, tmp_path / "wrong"))
    weights = bytearray((wrong / "decoder.weights").read_bytes())
    for place in range(3, len(weights), 4 * 7):
        weights[place] ^= 0x80  # the sign of every seventh float32
    (wrong / "decoder.weights").write_bytes(weights)
    manifest = json.loads((wrong / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["path"] == "decoder.weights":
            entry["sha256"] = hashlib.sha256(weights).hexdigest()
    (wrong / "manifest.json").write_text(json.dumps(manifest))
    ran = run(["edgebuild", "verify", wrong])
    assert ran.code == 7
    assert "golden vectors" in ran.error_line
    loaded = run(["edgert", "generate", wrong, "--prompt", "a"])
    assert loaded.code == 7
    assert "golden vectors" in loaded.error_line


def test_plan_json_has_the_keys_that_scripts_rely_on(workshop: Path, toy_cpu: Path, toy_llama: Path) -> None:
    ran = run(["edgebuild", "plan", "--profile", toy_cpu, "--model", toy_llama, "--traffic", workshop / "trace.csv",
               "--json"])  # fmt: skip
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    padding = plan["prefill"]["expected_padding_fraction"]
    for alternative in ("powers_of_two", "uniform"):
        assert plan["prefill"]["alternatives"][alternative]["expected_padding_fraction"] >= padding
    assert plan["prefill"]["chunk_sizes"] == sorted(plan["prefill"]["chunk_sizes"])
    assert plan["decode"]["kv_tiers"][-1] == 256
    assert {cell["kind"] for cell in plan["decode"]["cells"]} == {"decode"}
    assert {"label", "bytes", "formula"} <= set(plan["memory"]["ledger"][0])
    assert plan["draft"]["length"] == 0


def test_plan_on_the_screen_shows_chunks_tiers_cells_and_memory(workshop: Path, llama_artifact: Path) -> None:
    assert llama_artifact.is_dir()  # its profile lies in the workshop
    ran = run(["edgebuild", "plan", "--profile", workshop / "everything.yaml"])
    assert ran.code == 0, ran.err
    for text in ("Prefill chunks", "powers of two", "uniform steps", "cells", "Memory", "KV cache", "draft length 0"):
        assert text in ran.out


def test_the_plan_of_a_built_artifact_is_the_plan_that_was_announced(llama_artifact: Path, workshop: Path) -> None:
    ran = run(["edgebuild", "plan", "--profile", workshop / "everything.yaml", "--json"])
    assert json.loads((llama_artifact / "plan.json").read_text()) == json.loads(ran.out)


def test_a_profile_can_be_shown_saved_edited_and_built_with(tmp_path: Path, workshop: Path, toy_llama: Path) -> None:
    shown = run(["edgebuild", "profiles", "show", "cpu"])
    assert shown.code == 0
    saved = yaml.safe_load(shown.out)
    saved |= {"name": "mine", "model": str(toy_llama), "traffic": str(workshop / "trace.csv")}
    saved["limits"]["context_tokens"] = 128
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(saved))
    ran = run(["edgebuild", "plan", "--profile", tmp_path / "mine.yaml", "--json"])
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["context_tokens"] == 128


# --- refusals: one line, an exit code, nothing left behind ---


@pytest.fixture
def build_in(tmp_path: Path, workshop: Path, toy_cpu: Path) -> Any:
    """Run a build with output `tmp_path/out`; afterwards the folder must hold what it held before."""

    def go(*, profile: Path | str = toy_cpu, model: Path | str = "nowhere", output: str = "out") -> Ran:
        before = sorted(tmp_path.rglob("*"))
        ran = run(["edgebuild", "--profile", profile, "--model", model, "--traffic", workshop / "trace.csv",
                   "--output", output], cwd=tmp_path)  # fmt: skip
        assert sorted(tmp_path.rglob("*")) == before
        return ran

    return go


def copy_of(toy: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(toy, target)
    toys.edit_json(target / "config.json", **config)
    return target


def test_a_model_that_is_not_there(build_in: Any) -> None:
    ran = build_in(model="no such model")
    assert ran.code == 5
    assert "no such model" in ran.error_line


def test_a_missing_trace(tmp_path: Path, toy_cpu: Path, toy_llama: Path) -> None:
    ran = run(["edgebuild", "--profile", toy_cpu, "--model", toy_llama, "--traffic", tmp_path / "none.csv"], tmp_path)
    assert ran.code == 4
    assert "none.csv" in ran.error_line


def test_a_typo_in_a_profile_names_file_line_and_the_nearest_key(
    build_in: Any, tmp_path: Path, toy_llama: Path
) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("extends: cpu\nname: typo\nlimits:\n  contxt_tokens: 256\n")
    ran = build_in(profile=path, model=toy_llama)
    assert ran.code == 3
    assert f"{path}:4" in ran.error_line
    assert "did you mean 'context_tokens'?" in ran.error_line


def test_an_unknown_profile_names_the_bundled_ones(build_in: Any, toy_llama: Path) -> None:
    ran = build_in(profile="orin-nan", model=toy_llama)
    assert ran.code == 3
    assert "did you mean orin-nano?" in ran.error_line


def test_a_rope_variant_that_is_not_known(build_in: Any, toy_llama: Path, tmp_path: Path) -> None:
    model = copy_of(toy_llama, tmp_path / "spiral", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    ran = build_in(model=model)
    assert ran.code == 5
    assert "spiral" in ran.error_line
    assert "llama3" in ran.error_line


def test_a_tied_flag_that_is_false_without_a_head_names_the_missing_tensor(
    build_in: Any, toy_llama: Path, tmp_path: Path
) -> None:
    ran = build_in(model=copy_of(toy_llama, tmp_path / "headless", tie_word_embeddings=False))
    assert ran.code == 5
    assert "lm_head.weight" in ran.error_line


def test_drafts_without_the_weights_that_draft_stop_the_build(build_in: Any, toy_qwen3: Path, tmp_path: Path) -> None:
    """Layers declared, no mtp.* tensor, three drafts asked for."""
    profile = tmp_path / "drafting.yaml"
    profile.write_text(
        f"extends: cpu\nname: drafting\ndescription: a toy\n{TOY_LIMITS}\nmechanisms: {{enable_mtp: true}}\n"
        "draft: {length: 3}\n"
    )
    model = copy_of(toy_qwen3, tmp_path / "declared", mtp_num_hidden_layers=1)
    ran = build_in(profile=profile, model=model)
    assert ran.code == 5
    for text in ("draft length 3", "mtp.", "draft.length"):
        assert text in ran.error_line


def sparse_checkpoint(folder: Path) -> Path:
    """A Llama of 13 GB whose file is a header and a hole: enough for every check before the weights are read."""
    hidden, ffn, layers, kv, rows = 4096, 11008, 32, 1024, 32_000
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": rows,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0,
        "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [rows, hidden], "model.norm.weight": [hidden], "lm_head.weight": [rows, hidden],
    }  # fmt: skip
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden],
            "mlp.down_proj": [hidden, ffn], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    toys.write_tokenizer(folder, toys.byte_level_tokenizer())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + offset)
    return folder


def test_a_model_that_does_not_fit_is_refused_before_the_export_with_what_would_help(
    build_in: Any, tmp_path: Path
) -> None:
    ran = build_in(model=sparse_checkpoint(tmp_path / "seven-b"), profile="orin-nano")
    assert ran.code == 6, ran.err
    assert "export" not in ran.err
    assert "GB" in ran.error_line or "MB" in ran.error_line
    assert ran.cpu_s < 2  # processor seconds, not a clock: the bound


def test_activations_past_the_largest_float16_are_found_before_anything_is_published(
    build_in: Any, workshop: Path, toy_llama: Path, tmp_path: Path
) -> None:
    """Built as float16 for a Jetson; the probe names what would work."""
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(toy_llama, tmp_path / "loud"))
    tensors = load_file(model / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"] *= 2000
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    ran = build_in(model=model, profile=write_profile(workshop, "loud-orin", "orin"))
    assert ran.code == 7, ran.err
    for text in ("not finite in float16", "65,504", "precision: bfloat16"):
        assert text in ran.error_line


def test_a_checkpoint_of_pickles_is_refused(build_in: Any, toy_llama: Path, tmp_path: Path) -> None:
    """Nothing is ever unpickled: a folder with pytorch_model.bin alone is not a checkpoint."""
    model = Path(shutil.copytree(toy_llama, tmp_path / "pickled"))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    ran = build_in(model=model)
    assert ran.code == 5
    assert "safetensors" in ran.error_line


def test_an_output_that_holds_something_else_is_left_alone(build_in: Any, tmp_path: Path, toy_llama: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    ran = build_in(model=toy_llama)
    assert ran.code == 9
    assert "not a readable artifact" in ran.error_line


def test_wrong_usage_is_exit_code_2_without_a_traceback() -> None:
    for arguments in (["frobnicate"], ["--profile"], ["build"], ["inspect"], ["--max-cells", "1", "--profile", "cpu"]):
        ran = run(["edgebuild", *arguments])
        assert ran.code == 2, arguments
        assert "Traceback" not in ran.err
        assert "Error" in ran.err


def test_help_of_every_command_and_the_version() -> None:
    top = run(["edgebuild", "--help"])
    for name in ("build", "resume", "plan", "traffic", "profiles", "inspect", "verify"):
        assert name in top.out
        assert run(["edgebuild", name, "--help"]).code == 0
    assert run(["edgebuild", "--version"]).out.startswith("edgebuild")
