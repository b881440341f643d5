"""The indexer of sparse attention: which of the visible tokens each query may attend to.

Tokens are taken in blocks of `ratio`. A block's key is the mean of its tokens' index keys; the blocks with the best
scores are chosen up to the budget, the tokens behind the last whole block always. Semantics as Transformers'
`qwen4_exp`; between blocks of equal score (all heads at 0) either may win, there and here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgebuild.models import ops
from edgebuild.models.flash_config import IndexerConfig
from edgebuild.models.parts import Norm, State, Step, Weights, dtype_name
from edgebuild.models.rope import rotate


class Indexer(nn.Module):
    """The `indexer.` part of an attention layer. Its state: one raw index key a position, not normed, not rotated."""

    def __init__(self, config: IndexerConfig, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.index_qk_proj = Weights((config.heads + 1) * config.head_dim, hidden, bias=False, dtype=dtype)
        self.q_layernorm = Norm(config.head_dim, eps, dtype, zero_centred=True)
        self.k_layernorm = Norm(config.head_dim, eps, dtype, zero_centred=True)

    def state(self, index: int, cache_tokens: int) -> State:
        return State(f"index.{index}", "kv", (1, cache_tokens, self.config.head_dim), dtype_name(self.dtype))

    def forward(self, x: Tensor, step: Step, keys: Tensor) -> tuple[Tensor, Tensor]:
        """x [B·q, hidden] → (bool [B, q, T]: chosen, whether visible or not; updated keys)."""
        size = self.config
        parts = self.index_qk_proj(x).view(step.batch, step.rows, size.heads + 1, size.head_dim).transpose(1, 2)
        query, key = parts[:, : size.heads], parts[:, size.heads :]
        keys = ops.cache_update(keys, key, step.length)
        query = rotate(self.q_layernorm(query), step.cos, step.sin)
        pooled = self.k_layernorm(ops.block_means(keys, step.kv_positions, size.ratio))  # [B, 1, blocks, D]
        starts = torch.arange(pooled.shape[2], device=x.device) * size.ratio
        cos, sin = (table[starts][None, None] for table in step.tables)
        pooled = rotate(pooled, cos, sin)
        scores = (query.float() @ pooled.float().transpose(-1, -2)).relu().sum(1) / size.head_dim**0.5
        count = size.budget // size.ratio
        return ops.choose_tokens(scores, step.positions, step.kv_positions, count, size.ratio), keys
