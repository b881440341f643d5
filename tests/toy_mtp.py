"""Random MTP weights for the toys, and a second, naive implementation of what the module computes.

The naive one knows no cache, no chunks and no batches: numpy in float64 over whole sequences, from the formulas
(x = fc[norm(E[t+1]), norm(h)], one decoder layer, norm, head), written without a look at edgebuild.models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray


def mtp_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The published names of a dense model's MTP tensors."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * size, hidden), "self_attn.k_proj": (kv * size, hidden),
        "self_attn.v_proj": (kv * size, hidden), "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    shapes = {f"mtp.layers.0.{name}.weight": shape for name, shape in layer.items()}
    if config["model_type"] == "qwen2":
        shapes |= {f"mtp.layers.0.self_attn.{p}_proj.bias": layer[f"self_attn.{p}_proj"][:1] for p in "qkv"}
    top = {"fc": (hidden, 2 * hidden)} | dict.fromkeys(
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (hidden,)
    )
    return shapes | {f"mtp.{name}.weight": shape for name, shape in top.items()}


def random_mtp(checkpoint: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """MTP weights of a toy's shape."""
    config = json.loads((checkpoint / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in mtp_shapes(config).items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * drawn if "norm" in name else 0.12 * drawn
    return tensors


def write_sidecar(path: Path, tensors: Mapping[str, torch.Tensor], **extra: torch.Tensor) -> Path:
    save_file({**tensors, **extra}, str(path), metadata={"format": "pt"})
    return path


def add_to_checkpoint(checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the module into the checkpoint's own file, as published models have it."""
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), **tensors}, str(file), metadata={"format": "pt"})


class NaiveMtp:
    """The module over whole sequences, in float64."""

    def __init__(self, checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = json.loads((checkpoint / "config.json").read_text())
        model = load_file(checkpoint / "model.safetensors")
        self.w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self.embedding = model["model.embed_tokens.weight"].double().numpy()
        head = model.get("lm_head.weight")
        self.head = self.embedding if head is None else head.double().numpy()

    def drafts(self, ids: Sequence[int], hidden: Array, count: int, limit: int) -> list[int]:
        """`count` tokens that may follow `ids`. hidden [len(ids) - 1, H]: the model's rows for all ids but the last."""
        rows = [(self.embedding[token], row) for token, row in zip(ids[1:], hidden, strict=True)]
        found: list[int] = []
        for _ in range(count):
            normed = self.rows(rows)[-1]
            found.append(int((self.head[:limit] @ normed).argmax()))
            rows.append((self.embedding[found[-1]], normed))
        return found

    def rows(self, entries: Sequence[tuple[Array, Array]]) -> Array:
        """Normed outputs [n, H] for (embedding of the next token, hidden row) at positions 0 .. n - 1."""
        x = np.stack(
            [
                np.concatenate([self._norm(e, "pre_fc_norm_embedding"), self._norm(h, "pre_fc_norm_hidden")])
                for e, h in entries
            ]
        )
        x = x @ self.w["mtp.fc.weight"].T
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        y = self._norm(x, "layers.0.post_attention_layernorm")
        gate = y @ self.w["mtp.layers.0.mlp.gate_proj.weight"].T
        up = y @ self.w["mtp.layers.0.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w["mtp.layers.0.mlp.down_proj.weight"].T
        return self._norm(x, "norm")

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.w[f"mtp.{name}.weight"]

    def _attention(self, x: Array) -> Array:
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        part = "mtp.layers.0.self_attn."
        q, k, v = (x @ self.w[f"{part}{p}_proj.weight"].T + self.w.get(f"{part}{p}_proj.bias", 0.0) for p in "qkv")
        q, k, v = q.reshape(-1, heads, size), k.reshape(-1, kv, size), v.reshape(-1, kv, size)
        if f"{part}q_norm.weight" in self.w:
            q, k = self._norm(q, "layers.0.self_attn.q_norm"), self._norm(k, "layers.0.self_attn.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        out = np.zeros_like(q)
        for row in range(len(x)):
            for head in range(heads):
                keys, values = k[: row + 1, head * kv // heads], v[: row + 1, head * kv // heads]
                scores = keys @ q[row, head] / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values / weights.sum()
        return out.reshape(len(x), -1) @ self.w[f"{part}o_proj.weight"].T

    def _rotate(self, x: Array) -> Array:
        size = x.shape[-1]
        frequencies = 10_000.0 ** -(np.arange(0, size, 2) / size)
        angles = np.arange(len(x))[:, None] * frequencies
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
