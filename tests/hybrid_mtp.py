"""MTP modules of the Qwen hybrids for tests: random weights, an outside reference, and toys that always agree.

The reference's layer is Transformers' own decoder layer with the module's weights (a model of one full-attention layer
that is fed rows instead of tokens); what stands around it is written from the published description, without a look at
edgebuild.models. Transformers itself drops `mtp.*`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from edgebuild.models.config import ModelConfig
from edgebuild.models.mtp_config import expected_mtp_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

CLASSES = {
    "qwen3_5": "Qwen3_5TextModel",
    "qwen3_5_moe": "Qwen3_5MoeTextModel",
    "qwen3_next": "Qwen3NextModel",
    "qwen4_exp": "Qwen4ExpTextModel",
}
Weights = Mapping[str, Tensor]


def read_config(checkpoint: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return raw


def random_mtp(checkpoint: Path, seed: int = 0) -> dict[str, Tensor]:
    """Every `mtp.*` tensor in its published shape; the names and shapes are checked by hand in a test."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_mtp_tensors(ModelConfig.from_hf(read_config(checkpoint)))
    return {name: (0.2 if "norm" in name else 0.12) * torch.randn(s, generator=generator) for name, s in shapes.items()}


def add_to_checkpoint(checkpoint: Path, tensors: Weights) -> None:
    """Put the module into the checkpoint's own file, as published models have it, and say so in its config."""
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), **tensors}, str(file), metadata={"format": "pt"})
    config = read_config(checkpoint) | {"mtp_num_hidden_layers": 1}
    (checkpoint / "config.json").write_text(json.dumps(config))


class ReferenceMtp:
    """The module over whole sequences: no cache, no chunks, no batches."""

    def __init__(self, checkpoint: Path, tensors: Weights) -> None:
        raw = read_config(checkpoint)
        self.family = str(raw["model_type"]).removesuffix("_text")
        self.flash = self.family == "qwen4_exp"
        architecture = getattr(transformers, CLASSES[self.family])
        self.model = architecture.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        config = self.model.config
        head = load_file(checkpoint / "model.safetensors").get("lm_head.weight")
        self.embedding = self.model.embed_tokens.weight.detach()
        self.head = self.embedding if head is None else head
        self.w = dict(tensors)
        changed: dict[str, Any] = {
            "num_hidden_layers": 1,
            "layer_types": [config.layer_types[-1]],
            "pad_token_id": None,
        }
        own = type(config)(**config.to_dict() | changed | ({"ple_layer_ids": []} if self.flash else {}))
        if self.family == "qwen3_next":  # the module has experts where the model's last layer has them
            dense = config.num_hidden_layers - 1 in config.mlp_only_layers
            own.mlp_only_layers = [0] if dense else []
        own._attn_implementation = "eager"
        with torch.no_grad():
            self.layer = architecture(own).eval()
            below = {name.removeprefix("mtp."): value for name, value in tensors.items()}
            missing, unexpected = self.layer.load_state_dict(
                {name: value for name, value in below.items() if not name.startswith(("fc", "pre_fc"))}, strict=False
            )
        assert set(missing) == {"embed_tokens.weight"}, missing
        assert not unexpected, unexpected

    @torch.no_grad()
    def carried(self, ids: Sequence[int]) -> Tensor:
        """The model's rows that the module takes [n, W]: after the final norm, or the streams before the last mixer."""
        if not self.flash:
            rows: Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
            return rows
        kept: list[Tensor] = []
        hook = self.model.layers[-1].register_forward_hook(lambda _module, _given, out: kept.append(out))
        self.model(torch.tensor([list(ids)]), use_cache=False)
        hook.remove()
        return kept[0][0]

    @torch.no_grad()
    def rows(self, embedding: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """embedding [n, H] of the next tokens, carried [n, W] → (rows that chain [n, W], rows for the head [n, H])."""
        first = self._norm(embedding, "pre_fc_norm_embedding")
        second = self._norm(carried, "pre_fc_norm_hidden")
        if not self.flash:
            x = torch.cat((first, second), dim=-1) @ self.w["mtp.fc.weight"].T
            normed = self.layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            return normed, normed
        width = embedding.shape[-1]
        streams = second.view(len(second), -1, width) @ self.w["mtp.fc_hidden.weight"].T
        x = (streams + (first @ self.w["mtp.fc_embedding.weight"].T)[:, None]).reshape(1, len(second), -1)
        kept: list[Tensor] = []
        entering = self.layer.layers[0].register_forward_pre_hook(lambda _module, given: (x, *given[1:]))
        leaving = self.layer.layers[0].register_forward_hook(lambda _module, _given, out: kept.append(out))
        head = self.layer(inputs_embeds=embedding[None], use_cache=False).last_hidden_state[0]
        entering.remove(), leaving.remove()
        return kept[0][0], head

    def drafts(self, ids: Sequence[int], count: int, limit: int) -> list[int]:
        """`count` tokens that may follow `ids`, taken in a chain."""
        carried, entered = self.carried(ids[:-1]), self.embedding[torch.tensor(list(ids[1:]))]
        found: list[int] = []
        for _ in range(count):
            chained, head = self.rows(entered, carried)
            found.append(int((self.head[:limit] @ head[-1]).argmax()))
            entered = torch.cat((entered, self.embedding[found[-1]][None]))
            carried = torch.cat((carried, chained[-1:]))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.layer.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + self.w[f"mtp.{name}.weight"])


def make_agreeing(checkpoint: Path, seed: int = 0) -> dict[str, Tensor]:
    """Change an untied toy so that every token has one successor, and return a module that knows it: drafts never fail.

    Blocks add nothing to the residual stream, the head's row of a token's successor is the token's own embedding, and
    the module passes the embedding of the newest token on. Its attention is random and loud, but its gate is shut:
    dimension 0 is the same in every embedding, and the gate's weights for it are very negative.
    """
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    table = tensors["model.embed_tokens.weight"]
    tokens, hidden = table.shape
    directions = torch.randn(tokens, hidden, generator=generator)
    directions[:, 0] = 0
    directions /= directions.norm(dim=-1, keepdim=True)
    successor = torch.roll(torch.randperm(tokens, generator=generator), 1)
    order = torch.randperm(300, generator=generator)  # of ids that the tokenizer knows, in one ring
    successor[order] = order.roll(-1)
    head = torch.zeros(tokens, hidden)
    head[successor] = directions
    directions[:, 0] = 1.0
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "ple.value_proj.weight",
              "input_mix_weight_up.weight")  # fmt: skip
    for name, value in tensors.items():
        if name.endswith((*silent, "model.norm.weight", "hc_norm.weight")):
            tensors[name] = torch.zeros_like(value)
    tensors |= {"model.embed_tokens.weight": directions, "lm_head.weight": head}
    save_file(tensors, str(file), metadata={"format": "pt"})
    mtp = random_mtp(checkpoint, seed)
    config = ModelConfig.from_hf(read_config(checkpoint))
    for name, value in mtp.items():
        plain = "norm" in name and "self_attn" not in name
        if plain or "down_proj" in name or name.endswith(("input_mix_weight_up.weight", "mtp.fc_hidden.weight")):
            mtp[name] = torch.zeros_like(value)
    if config.flash is None:
        mtp["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    else:
        mtp["mtp.fc_embedding.weight"] = torch.eye(hidden)
    attention = "mtp.layers.0.self_attn."
    query = mtp[f"{attention}q_proj.weight"].view(config.heads, 2, config.head_dim, hidden)
    query[:, 1] = 0
    query[:, 1, :, 0] = -40.0
    mtp[f"{attention}o_proj.weight"] *= 20
    return mtp
