"""Native MTP modules of the Qwen hybrids: their tensors, and their mathematics against Transformers' own layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.drafter import find_drafter, load_mtp
from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig
from edgebuild.models.drafting import MtpGraph
from edgebuild.models.mtp import make_mtp
from edgebuild.models.mtp_config import expected_mtp_tensors
from hybrid_mtp import ReferenceMtp, add_to_checkpoint, random_mtp, read_config

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5": (toys.make_qwen3_5, {}),
    "qwen3_5_moe": (toys.make_qwen3_5_moe, {"tied": False}),
    "qwen3_next": (toys.make_qwen3_next, {"partial": 0.5}),
    "qwen3_next-dense-last": (toys.make_qwen3_next, {"mlp_only_layers": [1]}),
    "qwen4_exp": (toys.make_qwen4_exp, {"indexer_budget": 8, "ple_layer_ids": [1]}),
}


def make(family: str, directory: Path) -> Path:
    maker, options = FAMILIES[family]
    checkpoint: Path = maker(directory, layers=2, interval=2, **options)
    return checkpoint


def test_tensors_of_qwen3_next_are_those_of_the_published_checkpoint(tmp_path: Path) -> None:
    """Experts stacked, whichever way the files hold them; q_proj gives query and gate."""
    make("qwen3_next", tmp_path)
    layer, attention, mlp = "mtp.layers.0.", "mtp.layers.0.self_attn.", "mtp.layers.0.mlp."
    assert expected_mtp_tensors(ModelConfig.from_hf(read_config(tmp_path))) == {
        "mtp.fc.weight": (64, 128),
        **{f"mtp.{name}.weight": (64,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        **{f"{layer}{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")},
        f"{attention}q_proj.weight": (128, 64),
        f"{attention}k_proj.weight": (32, 64),
        f"{attention}v_proj.weight": (32, 64),
        f"{attention}o_proj.weight": (64, 64),
        f"{attention}q_norm.weight": (16,),
        f"{attention}k_norm.weight": (16,),
        f"{mlp}gate.weight": (6, 64),
        f"{mlp}experts.gate_up_proj": (6, 48, 64),
        f"{mlp}experts.down_proj": (6, 64, 24),
        **{f"{mlp}shared_expert.{name}_proj.weight": (40, 64) for name in ("gate", "up")},
        f"{mlp}shared_expert.down_proj.weight": (64, 40),
        f"{mlp}shared_expert_gate.weight": (1, 64),
    }


def test_tensors_of_flash_next_are_the_31_of_the_published_checkpoint(tmp_path: Path) -> None:
    """The norm of the carried row is one over all streams; there is no n-gram embedding and no final norm."""
    make("qwen4_exp", tmp_path)
    found = expected_mtp_tensors(ModelConfig.from_hf(read_config(tmp_path)))
    assert len(found) == 31
    assert found["mtp.fc_embedding.weight"] == found["mtp.fc_hidden.weight"] == (64, 64)
    assert (found["mtp.pre_fc_norm_embedding.weight"], found["mtp.pre_fc_norm_hidden.weight"]) == ((64,), (192,))
    around = {"hc_norm": (192,), "input_mix_weight_down": (8, 192), "input_mix_weight_up": (192, 8)}
    for name, shape in around.items():
        assert found[f"mtp.hyper_connection_mixer.{name}.weight"] == shape
        assert found[f"mtp.layers.0.mlp_hyper_connection.{name}.weight"] == shape
    assert found["mtp.layers.0.attn_hyper_connection.block_inject_weight.weight"] == (3, 192)
    assert found["mtp.layers.0.self_attn.indexer.index_qk_proj.weight"] == (72, 64)
    assert not any("ple" in name or name == "mtp.norm.weight" for name in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_load_by_their_published_names_from_the_checkpoint_itself(family: str, tmp_path: Path) -> None:
    tensors = random_mtp(make(family, tmp_path))
    add_to_checkpoint(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    config = ModelConfig.from_hf(checkpoint.config)
    assert config.mtp_layers == 1
    drafter = find_drafter(checkpoint, config, None)
    assert drafter is not None
    module = load_mtp(drafter, config, torch.float32)
    found = {f"mtp.{name}": value for name, value in module.named_parameters()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in found.items())


def test_a_tensor_under_another_name_stops_the_build(tmp_path: Path) -> None:
    """Weights dropped by a name that does not match pin the accepted length at 1, silently."""
    tensors = random_mtp(make("qwen4_exp", tmp_path))
    tensors["mtp.fc.weight"] = tensors.pop("mtp.fc_hidden.weight")
    add_to_checkpoint(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"1 missing: mtp\.fc_hidden\.weight; 1 that nothing uses: mtp\.fc\."):
        find_drafter(checkpoint, ModelConfig.from_hf(checkpoint.config), None)


def graph_of(checkpoint: Path, tensors: dict[str, torch.Tensor], reference: ReferenceMtp) -> MtpGraph:
    config = ModelConfig.from_hf(read_config(checkpoint))
    graph = MtpGraph(config, cache_tokens=32, draft_tokens=config.vocabulary_size)
    for name, value in graph.constants().items():
        setattr(graph, name, value)
    graph.mtp = make_mtp(config)
    graph.mtp.load_state_dict({name.removeprefix("mtp."): value for name, value in tensors.items()})
    graph.draft_embedding.weight.data = reference.embedding.clone()
    if graph.draft_head is not None:
        graph.draft_head.weight.data = reference.head.clone()
    graph.draft_ids = torch.arange(config.vocabulary_size)
    return graph


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_module_equals_transformers_layer_in_one_pass_in_pieces_and_after_a_replaced_tail(
    family: str, tmp_path: Path
) -> None:
    """Flash-Next: 21 rows with a budget of 8 tokens, so that its sparse attention leaves some out."""
    tensors = random_mtp(make(family, tmp_path))
    reference = ReferenceMtp(tmp_path, tensors)
    ids = torch.randint(3, 300, (22,), generator=torch.Generator().manual_seed(1)).tolist()
    carried, embedding = reference.carried(ids[:-1]), reference.embedding[torch.tensor(ids[1:])]
    chained, head = reference.rows(embedding, carried)
    graph = graph_of(tmp_path, tensors, reference)
    assert graph.config.draft_width == carried.shape[1]

    def run(first: int, last: int, states: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        draft, embedded, row, _, new = graph(
            embedding[None, first:last], rows[None, first:last], torch.tensor([first]), torch.tensor([last]),
            torch.arange(32), states,
        )  # fmt: skip
        assert torch.equal(embedded[0, 0], reference.embedding[draft[0]])
        if rows is carried:
            assert (row[0, 0] - chained[last - 1]).norm() <= 1e-5 * chained[last - 1].norm()
            assert int(draft) == int((reference.head @ head[last - 1]).argmax())
        return new

    run(0, 21, graph.empty_states(1), carried)
    states = run(0, 9, graph.empty_states(1), carried)
    run(9, 21, states, carried)
    # a chain wrote rows 9 .. 15 with other rows; the pass over the verified ones replaces them
    states = run(9, 16, states, carried + 1.0)
    run(9, 21, states, carried)
