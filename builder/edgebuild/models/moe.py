"""Mixture of experts: softmax router in float32, top-k, and one shared expert behind a sigmoid gate.

The experts are stacked tensors [E, ...], so that the graph holds one constant a projection; how their rows are grouped
and read is an operator whose ONNX form a backend chooses (`ops.experts`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgebuild.models import ops
from edgebuild.models.hybrid_config import MoeConfig
from edgebuild.models.parts import Mlp, Weights


class Experts(nn.Module):
    """E SwiGLU feed-forwards: gate_up_proj [E, 2·inner, hidden], down_proj [E, hidden, inner]."""

    def __init__(self, config: MoeConfig, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        inner = config.intermediate_size

        def stacked(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(config.experts, *shape, dtype=dtype), requires_grad=False)

        self.gate_up_proj = stacked(2 * inner, hidden)
        self.down_proj = stacked(hidden, inner)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(x, chosen, weights, self.gate_up_proj, self.down_proj)


class SparseMlp(nn.Module):
    """The feed-forward of a layer with experts."""

    def __init__(self, config: MoeConfig, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.renormalise = config.experts_per_token, config.renormalise
        self.gate = Weights(config.experts, hidden, bias=False, dtype=dtype)
        self.experts = Experts(config, hidden, dtype)
        self.shared_expert = Mlp(hidden, config.shared_intermediate_size, bias=False, dtype=dtype)
        self.shared_expert_gate = Weights(1, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, hidden] → [N, hidden]."""
        probabilities = self.gate(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed: Tensor = self.experts(x, chosen, weights.to(x.dtype))
        shared: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return mixed + shared
