"""What a batch teaches, and how far a module is from it.

The model's own next-token distribution at every position of an answer, over the tokens that text uses, is computed once
a batch; every pass of the chain is held against it. Knows no optimiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgebuild.models.decoder import Decoder
from edgebuild.models.mtp import Mtp
from edgebuild.train.unroll import Batch, unroll


@dataclass(frozen=True)
class Lesson:
    """M positions whose next token the answer holds, in the order of the batch, and what follows each.

    places  [M] row · L + position, in the batch's [B, L]
    aim     [M, V'] what a pass should say there: the model's distribution, its best token stressed
    best    [M] the model's best token, an index into `table`
    table   [V', H] rows of the head: tokens that may be guessed
    """

    batch: Batch
    places: Tensor
    aim: Tensor
    best: Tensor
    table: Tensor


@torch.no_grad()
def lesson(batch: Batch, table: Tensor, depth: int, hard: float) -> Lesson:
    """hard: how much the model's best token counts beside its distribution (0 = the distribution alone)."""
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    asked = (place >= batch.start.clamp_min(depth)[:, None]) & (place + 1 < batch.length[:, None])
    places = asked.flatten().nonzero()[:, 0]
    logits = batch.hidden.flatten(0, 1)[places].to(table.dtype) @ table.T
    best = logits.argmax(-1)
    aim = logits.softmax(-1)
    if math.isinf(hard):
        aim.zero_()
        share = 1.0
    else:
        aim /= 1 + hard
        share = hard / (1 + hard)
    aim.scatter_add_(1, best[:, None], torch.full_like(best[:, None], share, dtype=aim.dtype))
    return Lesson(batch, places, aim, best, table)


@dataclass(frozen=True)
class Loss:
    """total: what is minimised. agreement [depth]: how often the best guess of each pass is the model's best token."""

    total: Tensor
    agreement: Tensor


def chain_loss(mtp: Mtp, decoder: Decoder, learned: Lesson, depth: int, off_path: float = 1.0) -> Loss:
    """Cross entropy over the passes of all chains.

    off_path: weight of guesses that greedy decoding with this module would not come to, because an earlier step
    skipped over the position or an earlier guess of the chain was wrong; 1 = all guesses count the same.
    """
    losses, right = [], []
    for turn, rows in enumerate(unroll(mtp, decoder, learned.batch, depth)):
        # the pass that guesses the token after place p was begun turn + 1 positions before it
        chosen = rows.flatten(0, 1)[learned.places - (turn + 1)].to(learned.table.dtype)
        with torch.autocast(chosen.device.type, enabled=False):
            logits = chosen @ learned.table.T
        losses.append(_CrossEntropy.apply(logits, learned.aim))
        right.append(logits.detach().argmax(-1) == learned.best)
    correct = torch.stack(right)  # [depth, M]
    rows_of_loss = torch.stack(losses)
    agreement = correct.float().mean(1)
    if off_path == 1:
        return Loss(rows_of_loss.mean(), agreement)
    with torch.no_grad():
        weight = off_path + (1 - off_path) * _on_path(learned, correct).float()
    return Loss((rows_of_loss * weight).sum() / weight.sum(), agreement)


class _CrossEntropy(torch.autograd.Function):
    """−Σ aim · log softmax(logits) a row, float32; the gradient is made on the way: one [M, V'] tensor is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, aim: Tensor) -> Tensor:  # type: ignore[override]
        log_p = logits.log_softmax(-1)
        rows = -(aim * log_p).sum(-1, dtype=torch.float32)
        ctx.save_for_backward(log_p.exp_().sub_(aim))
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (difference,) = ctx.saved_tensors
        return difference * grad[:, None].to(difference.dtype), None


def _on_path(learned: Lesson, correct: Tensor) -> Tensor:
    """bool [depth, M]: guesses that decoding would come to. correct [depth, M]."""
    batch, depth = learned.batch, correct.shape[0]
    spread = torch.zeros(depth, batch.tokens.numel(), dtype=torch.bool, device=correct.device)
    for turn in range(depth):
        spread[turn, learned.places - (turn + 1)] = correct[turn]
    reached = walked(spread.view(depth, *batch.tokens.shape), batch.start - 1).flatten(1)
    return torch.stack([reached[turn, learned.places - (turn + 1)] for turn in range(depth)])


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
