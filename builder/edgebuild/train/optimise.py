"""AdamW and Muon over the module's few tensors. Every number that changes is a tensor, so that a step can be captured.

AdamW: arXiv 1711.05101. Muon, for matrices: momentum made orthogonal by Newton-Schulz steps and scaled to the size of
AdamW's (Jordan 2024; arXiv 2502.16982). Vectors always take AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BETAS, _EPS = (0.9, 0.95), 1e-8
_MOMENTUM, _NEWTON_SCHULZ = 0.95, (3.4445, -4.7750, 2.0315)


class Optimiser:
    """Moves `parameters` against their gradients, of which the norm is cut at 1."""

    def __init__(self, parameters: Sequence[Tensor], *, muon: bool, weight_decay: float) -> None:
        self._parameters = list(parameters)
        self._muon = [muon and p.ndim == 2 for p in self._parameters]
        self._decay = weight_decay
        device = self._parameters[0].device
        self.rate = torch.zeros((), device=device)  # the learning rate
        self._count = torch.zeros((), device=device)
        self._first = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]
        self._second = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._count += 1
        for place, parameter in enumerate(self._parameters):
            grad, first = parameter.grad, self._first[place]
            if grad is None:
                continue
            if self._muon[place]:
                first.lerp_(grad, 1 - _MOMENTUM)
                change = orthogonal(grad.lerp(first, _MOMENTUM)) * (0.2 * max(parameter.shape) ** 0.5)
            else:
                first.lerp_(grad, 1 - _BETAS[0])
                second = self._second[place]
                second.lerp_(grad * grad, 1 - _BETAS[1])
                mean = first / (1 - _BETAS[0] ** self._count)
                change = mean / ((second / (1 - _BETAS[1] ** self._count)).sqrt() + _EPS)
            if self._decay:
                change = change + self._decay * parameter
            parameter.sub_(change * self.rate)

    def tensors(self) -> list[Tensor]:
        """All that the optimiser remembers, in a fixed order."""
        return [self._count, *self._first, *self._second]


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrix, roughly: singular values end between 0.7 and 1.2."""
    a, b, c = _NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.T if tall else x).to(matrix.dtype)
    return result
