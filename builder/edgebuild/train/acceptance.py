"""Which guesses decoding comes to, and how many of them it accepts: steps over whole sequences, all at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Per draft position: how often it was reached and accepted; `tokens` committed in `steps`, bonus included."""

    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens: int
    steps: int

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            tuple(a + b for a, b in zip(self.reached, other.reached, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
            self.tokens + other.tokens,
            self.steps + other.steps,
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """Accepted ÷ reached, given that the position before was accepted."""
        return tuple(a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True))

    @property
    def mean_length(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0


def walked(correct: Tensor, first: Tensor) -> Tensor:
    """correct bool [depth, B, L], first step at `first` [B] → bool [depth, B, L]: passes that decoding comes to.

    A step at p leads to p + its accepted guesses + 1. All steps at once: reachable places by doubling jumps.
    """
    depth, batch, rows = correct.shape
    run = correct.int().cumprod(0)
    place = torch.arange(rows, device=correct.device)
    jump = torch.cat([(place + run.sum(0) + 1).clamp_max(rows), first.new_full((batch, 1), rows)], 1)
    reached = torch.zeros(batch, rows + 1, dtype=torch.int32, device=correct.device)
    reached.scatter_(1, first[:, None], 1)
    for _ in range(max(1, math.ceil(math.log2(rows + 1)))):
        reached = (reached + torch.zeros_like(reached).scatter_add_(1, jump, reached)).clamp_max_(1)
        jump = jump.gather(1, jump)
    steps = reached[:, :rows].bool()
    before = torch.cat([torch.ones_like(run[:1]), run[: depth - 1]]).bool()
    return steps & before


def count_steps(correct: Tensor, start: Tensor, length: Tensor) -> list[Acceptance]:
    """Steps as at run time over each sequence: a step commits its accepted drafts and one more token.

    correct bool [depth, B, L]; start, length [B]. Only steps whose whole chain lies before the end are counted.
    """
    depth, _, rows = correct.shape
    inside = torch.arange(rows, device=correct.device) + depth + 1 < length[:, None]
    reached = walked(correct, start - 1) & inside
    tried, right = reached.sum(-1).T.tolist(), (reached & correct).sum(-1).T.tolist()
    return [Acceptance(tuple(t), tuple(r), sum(r) + t[0], t[0]) for t, r in zip(tried, right, strict=True)]
