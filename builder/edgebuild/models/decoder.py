"""The decoder graph: embedding → layers → norm → logits → sampling → acceptance → commit, in one pass.

Inputs, outputs and their meaning are described in docs/architecture.md ("The graph"); this module is their one
definition. Parameter names equal the tensor names of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgebuild.models import ops
from edgebuild.models.config import ModelConfig
from edgebuild.models.rope import rope_tables, rotate


@dataclass(frozen=True)
class State:
    """One per-sequence tensor that the graph reads and writes in place.

    name    graph input; the output is `name + ".out"`
    kind    "kv" (addressed by position, needs no rollback)
    shape   per slot, without the batch dimension
    """

    name: str
    kind: str
    shape: tuple[int, ...]


class Weights(nn.Module):
    """A weight and an optional bias under the names `weight` and `bias`, in the checkpoint's layout."""

    def __init__(self, rows: int, columns: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """RMSNorm over the last dimension, statistics in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True)
class Step:
    """What every layer needs to know of this launch. B sequences, q rows each, T cache positions read.

    length [B]; positions [B, q]; kv_positions [T]; cos, sin [B, 1, q, head_dim / 2]
    """

    batch: int
    rows: int
    length: Tensor
    positions: Tensor
    kv_positions: Tensor
    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    """Grouped-query attention over an in-place cache, with optional biases and q/k norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        hidden, query, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Weights(query, hidden, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Weights(kv, hidden, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Weights(kv, hidden, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Weights(hidden, query, bias=config.o_bias, dtype=dtype)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def forward(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B·q, hidden] → (output [B·q, hidden], updated keys, updated values)."""

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(step.batch, step.rows, heads, self.head_dim)

        query, key = split(self.q_proj(x), self.heads), split(self.k_proj(x), self.kv_heads)
        value = split(self.v_proj(x), self.kv_heads).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotate(query.transpose(1, 2), step.cos, step.sin)
        key = rotate(key.transpose(1, 2), step.cos, step.sin)
        keys = ops.cache_update(keys, key, step.length)
        values = ops.cache_update(values, value, step.length)
        scale = self.head_dim**-0.5
        mixed = ops.attention(query, keys, values, step.positions, step.kv_positions, scale)
        mixed = mixed.transpose(1, 2).reshape(step.batch * step.rows, self.heads * self.head_dim)
        return self.o_proj(mixed), keys, values


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Weights(inner, hidden, bias=bias, dtype=dtype)
        self.up_proj = Weights(inner, hidden, bias=bias, dtype=dtype)
        self.down_proj = Weights(hidden, inner, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = Mlp(config, dtype)

    def forward(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, keys, values = self.self_attn(self.input_layernorm(x), step, keys, values)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class Backbone(nn.Module):
    """Embedding, layers and final norm: the `model.` part of a checkpoint."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Weights(config.vocabulary_size, config.hidden_size, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, dtype) for _ in range(config.layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, dtype)


class Decoder(nn.Module):
    """The whole step as one module.

    cache_tokens   positions that a slot's cache holds; also the length of the rope tables
    token_limit    ids the tokenizer knows: vocabulary rows past it exist in the embedding but are never sampled
    """

    def __init__(
        self, config: ModelConfig, *, cache_tokens: int, token_limit: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config, self.cache_tokens, self.token_limit, self.dtype = config, cache_tokens, token_limit, dtype
        self.model = Backbone(config, dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Weights(config.vocabulary_size, config.hidden_size, bias=False, dtype=dtype)
        )
        shape = (cache_tokens, config.head_dim // 2)
        self.register_buffer("rope_cos", torch.empty(shape, dtype=dtype), persistent=False)
        self.register_buffer("rope_sin", torch.empty(shape, dtype=dtype), persistent=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    def states(self) -> tuple[State, ...]:
        """Every per-sequence tensor, in the order in which the graph takes and returns them."""
        shape = (self.config.kv_heads, self.cache_tokens, self.config.head_dim)
        return tuple(
            State(f"{name}.{layer}", "kv", shape) for layer in range(self.config.layers) for name in ("key", "value")
        )

    def constants(self) -> dict[str, Tensor]:
        """Tensors that are computed, not read from the checkpoint: name → value."""
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, self.cache_tokens)
        return {"rope_cos": cos.to(self.dtype), "rope_sin": sin.to(self.dtype)}

    def forward(
        self,
        tokens: Tensor,  # int64 [B, q]
        length: Tensor,  # int64 [B]
        valid: Tensor,  # int64 [B]
        forced: Tensor,  # int64 [B]
        kv_positions: Tensor,  # int64 [T] = 0..T-1
        uniform: Tensor,  # float32 [B, R]
        temperature: Tensor,  # float32 [B]
        top_k: Tensor,  # int64 [B]
        top_p: Tensor,  # float32 [B]
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """One step → sampled [B, R], accepted [B], next_token [B], new_length [B], logits [B, R, V'], states."""
        batch, rows = tokens.shape
        hidden, new_states = self.backbone(tokens, length, kv_positions, states)
        # logits are needed from the last given row on: row forced - 1 + j, j = 0 .. R - 1
        offsets = torch.arange(uniform.shape[1], device=tokens.device)
        index = forced[:, None] - 1 + offsets  # [B, R]
        last = rows - 1
        picked = hidden.view(batch, rows, -1).gather(
            1, index.clamp(min=0).clamp(max=last)[:, :, None].expand(-1, -1, self.config.hidden_size)
        )
        logits = self.head(picked.reshape(-1, self.config.hidden_size))
        logits = logits.view(batch, uniform.shape[1], -1)[:, :, : self.token_limit].float()
        sampled = ops.sample(logits, temperature, top_k, top_p, uniform)
        # row index + 1 holds the draft that guessed what row `index` would sample
        proposed = tokens.gather(1, (index + 1).clamp(max=last))
        agrees = (index + 1 < valid[:, None]) & (sampled == proposed)
        misses = (~agrees).to(torch.int64).cumsum(1)
        accepted = (misses == 0).to(torch.int64).sum(1)
        next_token = sampled.gather(1, accepted[:, None].clamp(max=uniform.shape[1] - 1))[:, 0]
        return sampled, accepted, next_token, length + forced + accepted, logits, new_states

    def backbone(
        self, tokens: Tensor, length: Tensor, kv_positions: Tensor, states: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden rows after the final norm [B·q, hidden], and the updated states."""
        batch, rows = tokens.shape
        positions = length[:, None] + torch.arange(rows, device=tokens.device)
        step = Step(
            batch,
            rows,
            length,
            positions,
            kv_positions,
            self.rope_cos[positions][:, None],
            self.rope_sin[positions][:, None],
        )
        x = F.embedding(tokens, self.model.embed_tokens.weight).view(batch * rows, self.config.hidden_size)
        new_states: list[Tensor] = []
        for index, layer in enumerate(self.model.layers):
            x, keys, values = layer(x, step, states[2 * index], states[2 * index + 1])
            new_states += [keys, values]
        return self.model.norm(x), new_states

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of rows [N, hidden] → [N, vocabulary]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits: Tensor = head(hidden)
        return logits

    def empty_states(self, batch: int) -> list[Tensor]:
        """Zeroed states for `batch` sequences."""
        return [torch.zeros(batch, *state.shape, dtype=self.dtype) for state in self.states()]
