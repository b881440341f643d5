"""What a built artifact says, against Transformers on the same checkpoint: token by token, greedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toys
from click.testing import CliRunner
from edgebuild.checkpoint import open_checkpoint
from edgebuild.cli import cli
from edgert.engine import Engine
from edgert.errors import RequestError
from edgert.manifest import Manifest, load_manifest
from greedy_reference import around, greedy, load_reference, random_prompts

CONTEXT, TOKENS, ROWS = 256, 300, 320
NEW = 12
K1 = (1, 15, 16, 17, 63, 64, 65, 128, 129)


def chunk_sizes(manifest: Manifest) -> list[int]:
    return sorted({cell.query_rows for cell in manifest.cells if cell.kind == "prefill"})


@pytest.fixture(scope="module")
def engine(llama_artifact: Path) -> Iterator[Engine]:
    with Engine.load(llama_artifact, threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def reference(toy_llama: Path) -> Any:
    return load_reference(toy_llama)


def test_every_length_around_a_chunk_boundary_equals_transformers_alone_and_four_interleaved(
    engine: Engine, reference: Any, llama_artifact: Path
) -> None:
    """K1, and every boundary of the chunks that this plan chose. Transformers prefills in one pass."""
    sizes = chunk_sizes(load_manifest(llama_artifact))
    assert sizes[-1] == 64
    prompts = random_prompts(sorted({*around(sizes, CONTEXT - NEW), *K1}), TOKENS)
    expected = [greedy(reference, prompt, NEW, TOKENS) for prompt in prompts]
    handles = [engine.submit(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts]
    assert [list(handle.result(300).token_ids) for handle in handles] == expected
    assert [list(engine.complete(prompt, max_tokens=NEW, ignore_eos=True).token_ids) for prompt in prompts] == expected
    labels = engine.metrics().launches
    assert any(label.startswith("decode-4x") for label in labels), labels  # they did run four at a time


@pytest.mark.parametrize("length", K1)
def test_no_chunk_is_empty(engine: Engine, length: int) -> None:
    def prefill_rows() -> dict[int, int]:
        rows: dict[int, int] = {}
        for label, count in engine.metrics().launches.items():
            found = re.match(r"prefill-(\d+)@", label)
            if found:
                rows[int(found[1])] = rows.get(int(found[1]), 0) + count
        return rows

    before = prefill_rows()
    engine.complete(random_prompts([length], TOKENS)[0], max_tokens=1)
    launched = {size: count - before.get(size, 0) for size, count in prefill_rows().items()}
    launched = {size: count for size, count in launched.items() if count}
    padded = sum(size * count for size, count in launched.items()) - length
    assert 0 <= padded < min(launched)  # a chunk without a token of the prompt would pad by all its rows


def test_the_edge_of_the_context(engine: Engine, reference: Any) -> None:
    for length, room in ((255, 2), (256, 1)):
        prompt = random_prompts([length], TOKENS)[0]
        completion = engine.complete(prompt, max_tokens=50, ignore_eos=True)
        assert completion.finish_reason == "length"
        assert list(completion.token_ids) == greedy(reference, prompt, room, TOKENS)[: len(completion.token_ids)]
        assert 1 <= len(completion.token_ids) <= room
        assert completion.usage.prompt_tokens == length
    with pytest.raises(RequestError, match=r"257 .*256"):
        engine.submit(random_prompts([257], TOKENS)[0])


def test_an_untied_qwen3_equals_transformers(qwen3_artifact: Path, toy_qwen3: Path) -> None:
    prompts = random_prompts((1, 33, 64, 65, 130), TOKENS)
    model = load_reference(toy_qwen3)
    with Engine.load(qwen3_artifact, threads=1) as engine:
        handles = [engine.submit(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts]
        found = [list(handle.result(300).token_ids) for handle in handles]
    assert found == [greedy(model, prompt, NEW, TOKENS) for prompt in prompts]


def test_a_gguf_equals_transformers_on_its_dequantised_weights(
    gguf_artifact: Path, toy_file: Path, toy_llama: Path
) -> None:
    checkpoint = open_checkpoint(toy_file)
    model = load_reference(toy_llama)
    missing = model.load_state_dict({name: checkpoint.read(name) for name in checkpoint.names()}, strict=False)
    assert not missing.unexpected_keys
    model.tie_weights()
    prompts = random_prompts((1, 40, 65, 129), TOKENS)
    with Engine.load(gguf_artifact, threads=1) as engine:
        found = [list(engine.complete(prompt, max_tokens=NEW, ignore_eos=True).token_ids) for prompt in prompts]
    assert found == [greedy(model, prompt, NEW, TOKENS) for prompt in prompts]


def test_every_mechanism_switched_off_gives_the_same_tokens(llama_artifact: Path, engine: Engine) -> None:
    prompts = random_prompts((5, 70, 131, 200), TOKENS)
    expected = [engine.complete(prompt, max_tokens=NEW, ignore_eos=True).token_ids for prompt in prompts]
    baseline: dict[str, Any] = {
        "enable_chunked_prefill": False,
        "enable_mtp": False,
        "slots": 1,
        "graph_batch_sizes": [1],
    }
    with Engine.load(llama_artifact, threads=1, **baseline) as plain:
        handles = [plain.submit(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts]
        assert [handle.result(300).token_ids for handle in handles] == expected


# --- more embedding rows than the tokenizer knows ---


@pytest.fixture(scope="module")
def topheavy(toy_qwen3: Path, workshop: Path, toy_cpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The artifact and the reference of a model whose row 310 always wins: channel 0 is one constant, and its head."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("c6")
    model = Path(shutil.copytree(toy_qwen3, folder / "topheavy"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 4.0
    tensors["model.norm.weight"][0] = 1.0
    tensors["lm_head.weight"][:, 0] = 0.0
    tensors["lm_head.weight"][310, 0] = 200.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    options = ["--model", model, "--traffic", workshop / "trace.csv", "--output", folder / "out", "--quiet"]
    done = CliRunner().invoke(cli, ["build", "--profile", str(toy_cpu), *map(str, options)])
    assert done.exit_code == 0, done.output
    return folder / "out", load_reference(model)


def test_a_row_past_the_tokenizer_is_never_sampled_at_any_temperature(topheavy: Any) -> None:
    artifact, model = topheavy
    prompts = random_prompts((3, 20, 70), TOKENS)
    for prompt in prompts:
        assert greedy(model, prompt, 1, ROWS) == [310]
    with Engine.load(artifact, threads=1) as engine:
        for prompt in prompts:
            found = list(engine.complete(prompt, max_tokens=NEW, ignore_eos=True).token_ids)
            assert found == greedy(model, prompt, NEW, TOKENS)
        handles = [
            engine.submit(prompt, max_tokens=60, temperature=temperature, seed=seed, top_p=top_p, ignore_eos=True)
            for prompt in prompts
            for seed, (temperature, top_p) in enumerate([(0.2, 1.0), (1.0, 0.9), (5.0, 1.0), (1000.0, 1.0)])
        ]
        drawn = [token for handle in handles for token in handle.result(300).token_ids]
    assert len(drawn) == 12 * 60
    assert max(drawn) < TOKENS
    assert len(set(drawn)) > 150  # the hot ones did wander over the vocabulary


def test_prompt_ids_may_be_any_embedding_row_and_no_more(engine: Engine, reference: Any) -> None:
    assert list(engine.complete([5, 319], max_tokens=4, ignore_eos=True).token_ids) == greedy(
        reference, [5, 319], 4, TOKENS
    )
    with pytest.raises(RequestError, match=r"320 .*320 rows"):
        engine.submit([5, 320])


def test_a_tied_model_without_a_head_gives_the_logits_of_transformers(toy_llama: Path, llama_artifact: Path) -> None:
    """No lm_head.weight in the file, the tie flag true; judged through the built artifact's own golden vectors."""
    import json

    import torch

    assert "lm_head.weight" not in open_checkpoint(toy_llama).names()
    assert json.loads((toy_llama / "config.json").read_text())["tie_word_embeddings"] is True
    model = load_reference(toy_llama)
    for case in json.loads((llama_artifact / "golden.json").read_text())["cases"]:
        ids = [*case["prompt_ids"], *(step["token"] for step in case["steps"][1:])]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        for place, step in enumerate(case["steps"]):
            row = logits[len(case["prompt_ids"]) - 1 + place, step["indices"]]
            recorded = torch.tensor(step["values"])
            assert float((row - recorded).norm() / row.norm()) < 1e-5
    assert toys.IM_END in load_manifest(llama_artifact).model.eos_token_ids
