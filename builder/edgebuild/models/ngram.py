"""Hashed n-gram embedding of Qwen3.8-Flash-Next: lexical context, added to every residual stream of some layers.

The last tokens are hashed, once for each n-gram length and head, into one large table; keys and values made of what is
found there are gated by the streams and pass a dilated causal convolution. Semantics as Transformers' `qwen4_exp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgebuild.models import window
from edgebuild.models.flash_config import NgramConfig
from edgebuild.models.parts import Kernel, Norm, State, Step, Weights, dtype_name

_SMALLEST = 1e-6  # a gate below it has no square root's slope


class Table(nn.Module):
    """The rows of all heads, one behind the other."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ngram_embedding = Weights(rows, width, bias=False, dtype=dtype)


class NgramEmbedding(nn.Module):
    """The `ple.` part of a layer. Its states: the convolution's past, and the last tokens."""

    def __init__(
        self,
        config: NgramConfig,
        index: int,
        hidden: int,
        streams: int,
        vocabulary: int,
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.hidden, self.streams, self.dtype = config, hidden, streams, dtype
        place = config.layers.index(index)
        self.factors = config.multipliers(vocabulary, place)
        self.sizes = config.head_sizes(place)
        wide = streams * hidden
        self.ple_embedding = Table(config.table_rows(place), config.head_width, dtype)
        self.key_proj = Weights(wide, config.width, bias=False, dtype=dtype)
        self.value_proj = Weights(hidden, config.width, bias=False, dtype=dtype)
        self.norm_key, self.norm_query, self.norm_conv = (
            Norm(wide, eps, dtype, zero_centred=True, groups=streams) for _ in range(3)
        )
        self.conv1d = Kernel(wide, config.kernel, dtype, dilation=config.size)

    def states(self, index: int) -> tuple[State, ...]:
        """Token ids are kept plus one, so that the zeros of a new sequence mean "none"; float32 holds them exactly."""
        wide = self.streams * self.hidden
        return (
            State(f"ngram_conv.{index}", "conv", (self.config.window, wide), dtype_name(self.dtype)),
            State(f"ngram_tokens.{index}", "recurrent", (self.config.size - 1, 1), "float32"),
        )

    def forward(self, x: Tensor, step: Step, states: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [B·q, streams · hidden] → (what is added to them, what `commit` needs)."""
        columns, before = states
        batch, rows = step.batch, step.rows
        history = torch.cat((before, (step.tokens + 1).to(torch.float32)[:, :, None]), dim=1)
        found = F.embedding(self._places(history[:, :, 0], rows), self.ple_embedding.ngram_embedding.weight)
        found = found.view(batch * rows, self.config.width)
        split = (-1, self.streams, self.hidden)
        keys = self.norm_key(self.key_proj(found)).view(split)
        gate = (keys * self.norm_query(x).view(split)).sum(-1, keepdim=True) / self.hidden**0.5
        gate = gate.abs().clamp(min=_SMALLEST).sqrt() * gate.sign()
        gated = (gate.sigmoid() * self.value_proj(found)[:, None]).view(-1, self.streams * self.hidden)
        past = torch.cat((columns, self.norm_conv(gated).view(batch, rows, -1)), dim=1)
        local = F.silu(self.conv1d(past, rows)).to(x.dtype).view(gated.shape)
        kept = (window.keep(past, step, self.config.window), window.keep(history, step, self.config.size - 1))
        return gated + local, kept

    def commit(self, kept: Sequence[Tensor], accepted: Tensor) -> tuple[Tensor, ...]:
        columns, history = kept
        sizes = (self.config.window, self.config.size - 1)
        return window.commit(columns, accepted, sizes[0]), window.commit(history, accepted, sizes[1])

    def _places(self, history: Tensor, rows: int) -> Tensor:
        """Rows of the table, int64 [B, q, heads]: one for each length 2 .. size and each of its heads."""
        size, boundary = self.config.size, self.config.boundary
        tokens = history.to(torch.int64) - 1
        tokens = torch.where(tokens < 0, boundary, tokens)
        back = tokens[:, size - 1 : size - 1 + rows]
        mixed, chosen, offset = back * self.factors[0], [], 0
        for shift in range(1, size):
            # nothing is seen through a boundary
            token = tokens[:, size - 1 - shift : size - 1 - shift + rows]
            back = token if shift == 1 else torch.where(back == boundary, boundary, token)
            mixed = torch.bitwise_xor(mixed, back * self.factors[shift])
            for head in range((shift - 1) * self.config.heads, shift * self.config.heads):
                chosen.append(mixed % self.sizes[head] + offset)
                offset += self.sizes[head]
        return torch.stack(chosen, dim=-1)
