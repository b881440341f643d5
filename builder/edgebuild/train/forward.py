"""A dense model over whole batches, for training: many sequences at once, a cache that is written in place.

The same modules as `edgebuild.models` with another attention, so that PyTorch's fused kernel runs. Hybrid models
publish their own MTP weights and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from edgebuild.checkpoint import Checkpoint
from edgebuild.errors import CheckpointError
from edgebuild.models.attention import Attention
from edgebuild.models.config import ModelConfig
from edgebuild.models.decoder import Decoder, Layer
from edgebuild.models.loading import load_decoder
from edgebuild.models.rope import rotate


@dataclass
class Cache:
    """Keys and values per layer, [B, kv_heads, positions, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]

    def keep(self, rows: Tensor) -> None:
        """Drop every sequence but `rows` [n]."""
        for tensors in (self.keys, self.values):
            for index, tensor in enumerate(tensors):
                tensors[index] = tensor[rows]


def load_frozen(checkpoint: Checkpoint, positions: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The model on `device`, for `positions` tokens a sequence. Raises CheckpointError for a model not all dense."""
    config = ModelConfig.from_hf(checkpoint.config)
    if config.delta is not None or config.moe is not None or config.gated_attention or config.flash is not None:
        raise CheckpointError(
            f"training is for dense models, {config.family} is a hybrid",
            hint="its published checkpoints carry mtp.* tensors of their own",
        )
    return load_decoder(checkpoint, cache_tokens=positions, dtype=dtype).to(device)


def split_heads(attention: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, q, H] → query [B, heads, q, D], key and value [B, kv_heads, q, D], rotated. cos, sin [B, 1, q, D / 2]."""
    batch, rows, _ = x.shape
    flat = x.reshape(batch * rows, -1)

    def heads(projected: Tensor, count: int) -> Tensor:
        return projected.view(batch, rows, count, attention.head_dim)

    query, key = heads(attention.q_proj(flat), attention.heads), heads(attention.k_proj(flat), attention.kv_heads)
    value = heads(attention.v_proj(flat), attention.kv_heads).transpose(1, 2)
    if attention.q_norm is not None and attention.k_norm is not None:
        query, key = attention.q_norm(query), attention.k_norm(key)
    return rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin), value


def join_heads(attention: Attention, mixed: Tensor) -> Tensor:
    """[B, heads, q, D] → [B, q, H] through o_proj."""
    batch, _, rows, _ = mixed.shape
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(batch * rows, -1))
    return out.view(batch, rows, -1)


def feed_forward(layer: Layer, x: Tensor) -> Tensor:
    """The second half of a block, residual included. x [B, q, H]."""
    out: Tensor = layer.mlp(layer.post_attention_layernorm(x).reshape(-1, x.shape[-1]))
    return x + out.view(x.shape)


def new_cache(decoder: Decoder, batch: int, positions: int) -> Cache:
    config = decoder.config
    shape = (batch, config.kv_heads, positions, config.head_dim)
    like = decoder.model.embed_tokens.weight

    def tensors() -> list[Tensor]:
        return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(config.layers)]

    return Cache(tensors(), tensors())


def whole(decoder: Decoder, tokens: Tensor, cache: Cache | None = None) -> Tensor:
    """Hidden rows after the final norm [B, q, H] of sequences that start at position 0; fills `cache` when given."""
    rows = tokens.shape[1]
    cos, sin = decoder.rope_cos[None, None, :rows], decoder.rope_sin[None, None, :rows]
    x = F.embedding(tokens, decoder.model.embed_tokens.weight)
    for index, layer in enumerate(dense_layers(decoder)):
        attention = _attention(layer)
        query, key, value = split_heads(attention, layer.input_layernorm(x), cos, sin)
        if cache is not None:
            cache.keys[index][:, :, :rows], cache.values[index][:, :, :rows] = key, value
        group = attention.heads // attention.kv_heads
        mixed = F.scaled_dot_product_attention(
            query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=True
        )
        x = feed_forward(layer, x + join_heads(attention, mixed))
    normed: Tensor = decoder.model.norm(x)
    return normed


def one_more(decoder: Decoder, tokens: Tensor, positions: Tensor, cache: Cache, width: int) -> Tensor:
    """One token for each sequence, at its own position [B]; reads the first `width` cache positions. Hidden [B, H]."""
    batch = tokens.shape[0]
    cos, sin = decoder.rope_cos[positions][:, None, None], decoder.rope_sin[positions][:, None, None]
    future = (torch.arange(width, device=tokens.device) > positions[:, None])[:, None, None]
    at = torch.arange(batch, device=tokens.device)
    x = F.embedding(tokens, decoder.model.embed_tokens.weight)[:, None]
    for index, layer in enumerate(dense_layers(decoder)):
        attention = _attention(layer)
        query, key, value = split_heads(attention, layer.input_layernorm(x), cos, sin)
        cache.keys[index][at, :, positions] = key[:, :, 0]
        cache.values[index][at, :, positions] = value[:, :, 0]
        # the query heads that share a KV head become rows of one product; written out, because the fused kernel is
        # several times slower with a mask over thousands of short caches
        folded = query.view(batch, attention.kv_heads, -1, attention.head_dim) * attention.head_dim**-0.5
        scores = folded @ cache.keys[index][:, :, :width].transpose(-1, -2)
        weights = scores.masked_fill_(future, float("-inf")).softmax(-1)
        mixed = weights @ cache.values[index][:, :, :width]
        x = feed_forward(layer, x + join_heads(attention, mixed.reshape(query.shape)))
    normed: Tensor = decoder.model.norm(x)
    return normed[:, 0]


def dense_layers(decoder: Decoder) -> list[Layer]:
    """The decoder's layers, all of the plain kind."""
    layers = [layer for layer in decoder.layers if isinstance(layer, Layer)]
    if len(layers) < len(decoder.layers):
        raise CheckpointError("a layer of several streams cannot be trained through")
    return layers


def _attention(layer: Layer) -> Attention:
    mixer = layer.mixer
    if not isinstance(mixer, Attention):
        raise CheckpointError("a layer without full attention cannot be trained through")
    return mixer
