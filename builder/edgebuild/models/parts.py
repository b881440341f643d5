"""What every layer is made of: weights, norms, the feed-forward, and the records of states and of one step.

Knows nothing of families. Parameter names equal those of the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgebuild.models import ops


@dataclass(frozen=True)
class State:
    """One per-sequence tensor that the graph reads and replaces.

    name    graph input; the output is `name + ".out"`
    kind    "kv": addressed by position, written in place, needs no rollback. "conv", "recurrent": what the committed
            rows left behind, zero at a sequence's start, replaced as a whole
    shape   per slot, without the batch dimension
    dtype   "float32", "float16" or "bfloat16"
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str

    def empty(self, batch: int) -> Tensor:
        """Zeros for `batch` sequences."""
        return torch.zeros(batch, *self.shape, dtype=getattr(torch, self.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests spell it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Step:
    """What every layer needs to know of this launch. B sequences, q rows each, T cache positions read.

    length [B]; positions [B, q]; kv_positions [T]; cos, sin [B, 1, q, rotary_dim / 2]; forced [B] rows that count
    whatever is accepted; offsets [R] = 0..R-1: at most R - 1 rows after those may count too; tokens [B, q]; tables: cos
    and sin of every position [C, rotary_dim / 2]; the last two are for layers of Flash-Next alone
    """

    batch: int
    rows: int
    length: Tensor
    positions: Tensor
    kv_positions: Tensor
    cos: Tensor
    sin: Tensor
    forced: Tensor
    offsets: Tensor
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    tables: tuple[Tensor, ...] = ()


class Weights(nn.Module):
    """A weight and an optional bias under the names `weight` and `bias`, in the checkpoint's layout."""

    def __init__(self, rows: int, columns: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """RMSNorm over the last dimension, statistics in float32 (arXiv 1910.07467).

    zero_centred: the factor is 1 + weight, and the product is rounded once, after it (Qwen3-Next and later).
    groups: parts of the dimension that are normed each for itself.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, *, zero_centred: bool = False, groups: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps, self.zero_centred, self.groups = eps, zero_centred, groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups > 1:
            part = x.shape[-1] // self.groups
            normed = F.rms_norm(x.float().view(-1, self.groups, part), (part,), eps=self.eps)
            factor = self.weight.float().view(self.groups, part) + (1.0 if self.zero_centred else 0.0)
            return (normed * factor).view(x.shape).to(x.dtype)
        if self.zero_centred:
            return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, hidden: int, inner: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Weights(inner, hidden, bias=bias, dtype=dtype)
        self.up_proj = Weights(inner, hidden, bias=bias, dtype=dtype)
        self.down_proj = Weights(hidden, inner, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Kernel(nn.Module):
    """The taps of a depthwise causal convolution [channels, 1, kernel], `dilation` columns apart."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype, *, dilation: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=dtype), requires_grad=False)
        self.dilation = dilation

    def forward(self, past: Tensor, rows: int) -> Tensor:
        """past [B, (kernel − 1) · dilation + q, channels] → float32 [B, q, channels], as shifted products."""
        taps = self.weight.float()
        wide = past.float()
        total = wide[:, :rows] * taps[:, 0, 0]
        for tap in range(1, taps.shape[-1]):
            start = tap * self.dilation
            total = total + wide[:, start : start + rows] * taps[:, 0, tap]
        return total
