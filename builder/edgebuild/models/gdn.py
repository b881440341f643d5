"""Gated DeltaNet (arXiv 2412.06464): a recurrent layer whose state is one matrix a head, in standard operations.

One form serves decode and prefill, and rolls back without copies. With S the state before some rows, G_i the decay
summed up to row i and v'_i the correction that row i writes, the state after n of them is

    S_n = e^(G_n) S + Σ_{i<n} e^(G_n − G_i) k_i v'_iᵀ

and v'_i depends on no later row. So `forward` runs every row, drafts and padding too, forms the state after the forced
rows, and keeps k, v' and the decays of the R rows behind them; `commit` adds those that were accepted. Both are one
masked product, n = 0 gives S back, and no row needs a state of its own. Rows are solved in blocks of at most 64
(`ops.gated_delta`); states and everything that feeds them are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgebuild.models import ops, window
from edgebuild.models.hybrid_config import DeltaNetConfig
from edgebuild.models.parts import Kernel, State, Step, Weights, dtype_name

_L2_EPS = 1e-6  # of the reference's l2norm


class GatedNorm(nn.Module):
    """RMSNorm over a head with a plain weight, then the output gate's activation; float32 inside."""

    def __init__(self, size: int, eps: float, gate: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps, self.gate = eps, gate

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x float32, z in the model's precision, both [..., size] → in z's precision."""
        opened = z.float().sigmoid() if self.gate == "sigmoid" else F.silu(z.float())
        normed = F.rms_norm(x, (x.shape[-1],), self.weight.float(), self.eps)
        return (normed * opened).to(z.dtype)


class GatedDeltaNet(nn.Module):
    """The token mixer of a "linear_attention" layer. Hk key heads, Hv = r·Hk value heads."""

    def __init__(self, config: DeltaNetConfig, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.repeat = config.value_heads // config.key_heads

        def projection(rows: int) -> Weights:
            return Weights(rows, hidden, bias=False, dtype=dtype)

        if config.grouped:
            self.in_proj_qkvz = projection(config.channels + config.values)
            self.in_proj_ba = projection(2 * config.value_heads)
        else:
            self.in_proj_qkv = projection(config.channels)
            self.in_proj_z = projection(config.values)
            self.in_proj_b = projection(config.value_heads)
            self.in_proj_a = projection(config.value_heads)
        self.conv1d = Kernel(config.channels, config.kernel, dtype)
        # float32 whatever the precision: exp of a rounded A_log decays visibly differently over a long context
        self.A_log = nn.Parameter(torch.empty(config.value_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads, dtype=torch.float32), requires_grad=False)
        self.norm = GatedNorm(config.value_dim, eps, config.gate, dtype)
        self.out_proj = Weights(hidden, config.values, bias=False, dtype=dtype)

    def states(self, index: int, _cache_tokens: int) -> tuple[State, ...]:
        """The convolution's last kernel − 1 columns, and the state matrices."""
        size = self.config
        return (
            State(f"conv.{index}", "conv", (size.kernel - 1, size.channels), dtype_name(self.dtype)),
            State(f"delta.{index}", "recurrent", (size.value_heads, size.key_dim, size.value_dim), "float32"),
        )

    def forward(self, x: Tensor, step: Step, states: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [B·q, hidden] → (output [B·q, hidden], what `commit` needs)."""
        size, batch, rows = self.config, step.batch, step.rows
        columns, matrices = states
        qkv, z, beta, a = self._project(x, batch, rows)
        past = torch.cat((columns, qkv), dim=1)  # [B, kernel − 1 + q, channels]
        mixed = F.silu(self.conv1d(past, rows))
        query, key, value = torch.split(mixed, [size.keys, size.keys, size.values], dim=-1)
        query = _unit(query.view(batch, rows, size.key_heads, size.key_dim)) * size.key_dim**-0.5
        key = _unit(key.view(batch, rows, size.key_heads, size.key_dim))
        value = value.view(batch, rows, size.value_heads, size.value_dim)
        decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)  # [B, q, Hv], logarithm, below 0
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        decay, beta = decay.transpose(1, 2), beta.float().sigmoid().transpose(1, 2)
        out, written = ops.gated_delta(query, key, value, decay, beta, matrices, step.positions)
        normed = self.norm(out.transpose(1, 2), z)
        output = self.out_proj(normed.reshape(batch * rows, size.values))
        columns = window.keep(past, step, size.kernel - 1)
        matrices = self._after(matrices, key, written, decay, step.forced)
        key, written, decay = (window.rows(x, step.forced, step.offsets, 2) for x in (key, written, decay))
        return output, (columns, matrices, key, written, decay)

    def commit(self, kept: Sequence[Tensor], accepted: Tensor) -> tuple[Tensor, ...]:
        """The states after the forced rows and `accepted` [B] more."""
        columns, matrices, key, written, decay = kept
        columns = window.commit(columns, accepted, self.config.kernel - 1)
        return columns, self._after(matrices, key, written, decay, accepted)

    def _after(self, matrices: Tensor, key: Tensor, written: Tensor, decay: Tensor, count: Tensor) -> Tensor:
        """The matrices after the first `count` [B] of the rows [B, heads, rows, ...]."""
        size = self.config
        counts = (torch.arange(decay.shape[2], device=decay.device) < count[:, None])[:, None]  # [B, 1, rows]
        decay = torch.where(counts, decay, 0.0)
        # Σ of the decays after row i: summed from the end, so that no two large sums are subtracted
        suffix = decay.flip(2).cumsum(2).flip(2)  # [B, Hv, rows], row i included
        total = suffix[:, :, :1]
        behind = torch.cat((suffix[:, :, 1:], torch.zeros_like(total)), dim=2)
        weights = torch.where(counts, behind.exp(), 0.0)
        weighted = weights[..., None] * written  # [B, Hv, rows, Dv]
        weighted = weighted.view(-1, size.key_heads, self.repeat, decay.shape[2], size.value_dim)
        added = key.transpose(2, 3)[:, :, None] @ weighted  # [B, Hk, r, Dk, Dv]
        added = added.view(-1, size.value_heads, size.key_dim, size.value_dim)
        return matrices * total[..., None].exp() + added

    def _project(self, x: Tensor, batch: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[q|k|v] [B, q, channels], z [B, q, Hv, Dv], b and a [B, q, Hv]."""
        size, repeat = self.config, self.repeat
        if not size.grouped:
            z = self.in_proj_z(x).view(batch, rows, size.value_heads, size.value_dim)
            qkv = self.in_proj_qkv(x).view(batch, rows, size.channels)
            return qkv, z, self.in_proj_b(x).view(batch, rows, -1), self.in_proj_a(x).view(batch, rows, -1)
        width = repeat * size.value_dim
        heads = self.in_proj_qkvz(x).view(batch, rows, size.key_heads, 2 * (size.key_dim + width))
        query, key, value, z = torch.split(heads, [size.key_dim, size.key_dim, width, width], dim=-1)
        qkv = torch.cat([part.reshape(batch, rows, -1) for part in (query, key, value)], dim=-1)
        b, a = self.in_proj_ba(x).view(batch, rows, size.key_heads, 2 * repeat).split(repeat, dim=-1)
        z = z.reshape(batch, rows, size.value_heads, size.value_dim)
        return qkv, z, b.reshape(batch, rows, -1), a.reshape(batch, rows, -1)


def _unit(x: Tensor) -> Tensor:
    """Over the last dimension, as the reference's l2norm: the square root of the sum of squares plus eps."""
    return x * (x.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt()
