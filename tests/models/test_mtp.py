"""The MTP module: its tensors, where they come from, and its mathematics against a second, naive implementation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.drafter import find_drafter, load_mtp, planned_drafter, write_sidecar
from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig
from edgebuild.models.drafting import MtpGraph
from edgebuild.models.mtp import Mtp
from edgebuild.models.mtp_config import expected_mtp_tensors, mtp_config
from edgebuild.plan import ModelShape, make_plan
from edgebuild.profile import load_profile
from edgebuild.profile.loader import bundled_traffic
from edgebuild.traffic import read_traffic
from toy_mtp import NaiveMtp, add_to_checkpoint, mtp_shapes, random_mtp
from toy_mtp import write_sidecar as write_raw

MAKERS = {"llama": toys.make_llama, "qwen2": toys.make_qwen2, "qwen3": toys.make_qwen3}


def config_of(checkpoint: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((checkpoint / "config.json").read_text()))


@pytest.mark.parametrize("family", MAKERS)
def test_tensors_are_those_of_the_published_checkpoints(family: str, tmp_path: Path) -> None:
    MAKERS[family](tmp_path)
    config = config_of(tmp_path)
    expected = expected_mtp_tensors(config)
    assert expected == mtp_shapes(json.loads((tmp_path / "config.json").read_text()))
    assert {f"mtp.{name}" for name, _ in Mtp(config).named_parameters()} == set(expected)
    if family == "qwen3":
        assert len(expected) == 15


def test_the_layer_of_a_hybrid_is_full_attention_with_the_experts_of_its_last_layer(tmp_path: Path) -> None:
    toys.make_qwen3_5_moe(tmp_path)
    config = config_of(tmp_path)
    own = mtp_config(config)
    assert (own.layers, own.delta, own.layer_kind(0)) == (1, None, "full_attention")
    names = expected_mtp_tensors(config)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in names
    assert names["mtp.layers.0.self_attn.q_proj.weight"][0] == 2 * config.heads * config.head_dim  # query and gate
    assert not any("linear_attn" in name for name in names)


@pytest.mark.parametrize("family", MAKERS)
def test_module_equals_the_naive_one_in_one_pass_in_pieces_and_after_a_replaced_tail(
    family: str, tmp_path: Path
) -> None:
    MAKERS[family](tmp_path)
    tensors = random_mtp(tmp_path)
    config = config_of(tmp_path)
    rng = np.random.default_rng(0)
    embedding, hidden = (torch.from_numpy(rng.standard_normal((1, 9, config.hidden_size))).float() for _ in range(2))
    naive = NaiveMtp(tmp_path, tensors)
    expected = naive.rows(list(zip(embedding[0].double().numpy(), hidden[0].double().numpy(), strict=True)))
    graph = MtpGraph(config, cache_tokens=32, draft_tokens=config.vocabulary_size)
    for name, value in graph.constants().items():
        setattr(graph, name, value)
    graph.mtp.load_state_dict({name.removeprefix("mtp."): value for name, value in tensors.items()})
    graph.draft_embedding.weight.data = torch.from_numpy(naive.embedding).float()
    graph.draft_ids = torch.arange(config.vocabulary_size)
    whole = torch.arange(32)

    def run(first: int, last: int, states: list[torch.Tensor], source: torch.Tensor) -> list[torch.Tensor]:
        length, new_length = torch.tensor([first]), torch.tensor([last])
        draft, embedded, row, next_length, new = graph(
            embedding[:, first:last], source[:, first:last], length, new_length, whole, states
        )
        assert np.allclose(row[0, 0].detach().numpy(), expected[last - 1], atol=2e-4) or source is not hidden
        assert torch.equal(embedded[0, 0], graph.draft_embedding.weight[draft[0]])
        assert int(next_length) == last + 1
        if source is hidden:
            assert int(draft) == int((naive.head @ expected[last - 1]).argmax())
        return new

    run(0, 9, graph.empty_states(1), hidden)
    states = run(0, 4, graph.empty_states(1), hidden)
    run(4, 9, states, hidden)
    # a chain wrote rows 4 .. 6 with other hidden rows; the pass over the verified rows replaces them
    states = run(4, 7, states, hidden + 1.0)
    run(4, 9, states, hidden)


def test_weights_come_from_the_checkpoint_or_a_sidecar_and_the_sidecar_goes_first(tmp_path: Path) -> None:
    toys.make_qwen3(tmp_path / "model")
    own, other = random_mtp(tmp_path / "model", 1), random_mtp(tmp_path / "model", 2)
    add_to_checkpoint(tmp_path / "model", own)
    sidecar = write_raw(tmp_path / "mtp.safetensors", other)
    checkpoint = open_checkpoint(tmp_path / "model")
    config = config_of(tmp_path / "model")
    for source, tensors in ((None, own), (sidecar, other)):
        drafter = find_drafter(checkpoint, config, source)
        assert drafter is not None
        module = load_mtp(drafter, config, torch.float32)
        assert all(torch.equal(value, tensors[f"mtp.{name}"]) for name, value in module.named_parameters())
        assert [file.name for file in drafter.files] == ([] if source is None else ["mtp.safetensors"])


def test_no_drafter_where_there_is_none_and_never_half_of_one(tmp_path: Path, toy_llama: Path) -> None:
    checkpoint, config = open_checkpoint(toy_llama), config_of(toy_llama)
    assert find_drafter(checkpoint, config, None) is None
    with pytest.raises(CheckpointError, match="no drafter at"):
        find_drafter(checkpoint, config, tmp_path / "absent.safetensors")
    tensors = random_mtp(toy_llama)
    for broken, text in (
        ({k: v for k, v in tensors.items() if k != "mtp.fc.weight"}, r"1 missing: mtp\.fc\.weight"),
        (tensors | {"mtp.extra.weight": torch.zeros(3)}, r"1 that nothing uses: mtp\.extra\.weight"),
        (tensors | {"mtp.fc.weight": torch.zeros(64, 64)}, r"mtp\.fc\.weight is \[64, 64\], expected \[64, 128\]"),
    ):
        with pytest.raises(CheckpointError, match=text):
            find_drafter(checkpoint, config, write_raw(tmp_path / "broken.safetensors", broken))
    published = tmp_path / "published"
    shutil.copytree(toy_llama, published)
    add_to_checkpoint(published, {"mtp.norm.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match="12 missing"):
        find_drafter(open_checkpoint(published), config, None)


def test_a_sidecar_gives_back_what_was_written(tmp_path: Path, toy_llama: Path) -> None:
    checkpoint, config = open_checkpoint(toy_llama), config_of(toy_llama)
    module = Mtp(config)
    tensors = random_mtp(toy_llama)
    module.load_state_dict({name.removeprefix("mtp."): value for name, value in tensors.items()})
    card = {"acceptance": {"held_out": {"a": {"acceptance": [0.8, 0.6]}, "b": {"acceptance": [0.4, 0.2]}}}}
    path = tmp_path / "mtp.safetensors"
    write_sidecar(path, module, [7, 3, *[t for t in range(300) if t not in (3, 7)]], card)
    drafter = find_drafter(checkpoint, config, path)
    assert drafter is not None
    assert drafter.acceptance == pytest.approx((0.6, 0.4))
    assert drafter.draft_tokens(300, None) == tuple(range(300))
    assert drafter.draft_tokens(300, 2) == (3, 7)
    assert drafter.draft_tokens(6, 3) == (0, 1, 3)  # ids that the tokenizer does not know are not drafted
    read = load_mtp(drafter, config, torch.float32)
    for name, value in read.named_parameters():
        assert torch.equal(value, tensors[f"mtp.{name}"].half().float()), name
    module.fc.weight.data[0, 0] = 1e6
    with pytest.raises(CheckpointError, match="float16 cannot hold"):
        write_sidecar(path, module, [], {})
    own = find_drafter(checkpoint, config, write_raw(tmp_path / "plain.safetensors", tensors))
    assert own is not None
    with pytest.raises(CheckpointError, match="draft vocabulary of 10"):
        own.draft_tokens(300, 10)


def test_the_plan_takes_a_heads_measured_acceptance_and_says_where_a_length_comes_from(
    tmp_path: Path, toy_llama: Path
) -> None:
    config = config_of(toy_llama)
    module = Mtp(config)
    module.load_state_dict({name.removeprefix("mtp."): value for name, value in random_mtp(toy_llama).items()})
    histogram = read_traffic(bundled_traffic())
    plans, shape = {}, ModelShape.from_config(config)
    for name, rates in (("good", [0.9, 0.9, 0.9]), ("poor", [0.1, 0.1, 0.1]), ("unknown", None)):
        head = tmp_path / f"{name}.safetensors"
        card = {} if rates is None else {"acceptance": {"held_out": {"chat": {"acceptance": rates}}}}
        write_sidecar(head, module, range(300), card)
        profile = load_profile("cpu").with_drafter(head, vocabulary=100)
        plans[name] = make_plan(profile, histogram, shape, None, planned_drafter(profile, config))
    assert plans["good"].draft.length == 3
    assert "plain steps" in plans["good"].draft.reason
    assert {cell.query_rows for cell in plans["good"].cells if cell.kind == "decode"} == {1, 4}
    lines = {line.label: line.bytes for line in plans["good"].ledger.lines}
    weights = sum(int(np.prod(shape)) for shape in expected_mtp_tensors(config).values()) + 100 * config.hidden_size
    assert lines["drafter weights"] == 4 * weights
    assert plans["poor"].draft.length == 0
    assert any("no drafts, though the profile asks for 3" in note for note in plans["poor"].notes)
    assert "drafter weights" not in {line.label for line in plans["poor"].ledger.lines}
    assert plans["unknown"].draft.length == 3
    assert "nothing is measured" in plans["unknown"].draft.reason
    plain = load_profile("cpu")
    assert planned_drafter(plain, config) is None
    asking = plain.with_drafter(tmp_path / "good.safetensors").model_copy(update={"drafter": None})
    with pytest.raises(CheckpointError, match="no MTP layers"):
        planned_drafter(asking, config)
