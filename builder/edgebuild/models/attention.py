"""Full attention over an in-place cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edgebuild.models import ops
from edgebuild.models.config import ModelConfig
from edgebuild.models.indexer import Indexer
from edgebuild.models.parts import Norm, State, Step, Weights, dtype_name
from edgebuild.models.rope import rotate


class Attention(nn.Module):
    """Grouped-query attention, with optional biases, q/k norm, a sigmoid gate on its output, and an indexer.

    Its states need no commit: rows past the committed ones are overwritten by the next step before they are read.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.gated, self.dtype = config.gated_attention, dtype
        hidden, query, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Weights(2 * query if self.gated else query, hidden, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Weights(kv, hidden, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Weights(kv, hidden, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Weights(hidden, query, bias=config.o_bias, dtype=dtype)

        def norm() -> Norm | None:
            if not config.qk_norm:
                return None
            return Norm(config.head_dim, config.rms_norm_eps, dtype, zero_centred=config.zero_centred_norms)

        self.q_norm, self.k_norm = norm(), norm()
        sparse = config.flash.indexer if config.flash is not None else None
        self.indexer = None if sparse is None else Indexer(sparse, hidden, config.rms_norm_eps, dtype)

    def states(self, index: int, cache_tokens: int) -> tuple[State, ...]:
        """Keys and values of one sequence [kv_heads, cache_tokens, head_dim]."""
        shape = (self.kv_heads, cache_tokens, self.head_dim)
        own = tuple(State(f"{name}.{index}", "kv", shape, dtype_name(self.dtype)) for name in ("key", "value"))
        return own if self.indexer is None else (*own, self.indexer.state(index, cache_tokens))

    def forward(self, x: Tensor, step: Step, states: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [B·q, hidden] → (output [B·q, hidden], updated keys and values)."""
        keys, values = states[:2]

        def split(projected: Tensor, heads: int, width: int) -> Tensor:
            # no −1 here: TensorRT checks a cache update's head size before it infers shapes
            return projected.view(step.batch, step.rows, heads, width)

        query = split(self.q_proj(x), self.heads, 2 * self.head_dim if self.gated else self.head_dim)
        key = split(self.k_proj(x), self.kv_heads, self.head_dim)
        value = split(self.v_proj(x), self.kv_heads, self.head_dim).transpose(1, 2)
        gate = None
        if self.gated:
            query, gate = query[..., : self.head_dim], query[..., self.head_dim :]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotate(query.transpose(1, 2), step.cos, step.sin)
        key = rotate(key.transpose(1, 2), step.cos, step.sin)
        keys = ops.cache_update(keys, key, step.length)
        values = ops.cache_update(values, value, step.length)
        scale = self.head_dim**-0.5
        chosen, written = None, [keys, values]
        if self.indexer is not None:
            chosen, index_keys = self.indexer(x, step, states[2])
            written.append(index_keys)
        mixed = ops.attention(query, keys, values, step.positions, step.kv_positions, scale, chosen)
        mixed = mixed.transpose(1, 2)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        mixed = mixed.reshape(step.batch * step.rows, self.heads * self.head_dim)
        return self.o_proj(mixed), tuple(written)

    def commit(self, written: Sequence[Tensor], _accepted: Tensor) -> tuple[Tensor, ...]:
        """The states after this step: what `forward` wrote, whatever was accepted."""
        return tuple(written)
