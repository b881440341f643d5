"""What a batch teaches, and how far a module is from it.

The model's own next-token distribution at every position of an answer, over the tokens that text uses, is computed once
a batch; every pass of the chain is held against it. Knows no optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgebuild.models.decoder import Decoder
from edgebuild.models.mtp import Mtp
from edgebuild.train.acceptance import walked
from edgebuild.train.unroll import Batch, unroll


@dataclass(frozen=True)
class Lesson:
    """M positions of a batch; where `counts`, the answer holds what follows them.

    places  [M] row · L + position, in the batch's [B, L]
    counts  [M] float, 1 or 0: M is fixed, and the answers may be shorter
    aim     [M, V'] what a pass should say there: the model's distribution, its best token stressed
    best    [M] the model's best token, an index into `table`
    table   [V', H] rows of the head: tokens that may be guessed
    """

    batch: Batch
    places: Tensor
    counts: Tensor
    aim: Tensor
    best: Tensor
    table: Tensor


@torch.no_grad()
def lesson(batch: Batch, table: Tensor, depth: int, hard: float, size: int | None = None) -> Lesson:
    """hard: how much the model's best token counts beside its distribution (0 = the distribution alone).

    size: M; positions of answers beyond it are left out. None: as many as the batch has, answers and all else.
    """
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    asked = (place >= batch.start.clamp_min(depth)[:, None]) & (place + 1 < batch.length[:, None])
    flat = asked.flatten()
    places = torch.argsort((~flat).to(torch.uint8), stable=True)[: flat.numel() if size is None else size]
    counts = flat[places].float()
    places = places.clamp_min(depth)  # rows that do not count may lie anywhere
    logits = batch.hidden.flatten(0, 1)[places].to(table.dtype) @ table.T
    best = logits.argmax(-1)
    aim = logits.softmax(-1) / (1 + hard)
    share = torch.full_like(best[:, None], hard / (1 + hard), dtype=aim.dtype)
    aim.scatter_add_(1, best[:, None], share)
    return Lesson(batch, places, counts, aim, best, table)


@dataclass(frozen=True)
class Loss:
    """total: what is minimised. agreement [depth]: how often the best guess of each pass is the model's best token."""

    total: Tensor
    agreement: Tensor


def chain_loss(mtp: Mtp, decoder: Decoder, learned: Lesson, depth: int, off_path: float | Tensor = 1.0) -> Loss:
    """Cross entropy over the passes of all chains.

    off_path: weight of guesses that greedy decoding with this module would not come to, because an earlier step
    skipped over the position or an earlier guess of the chain was wrong; 1 = all guesses count the same.
    """
    losses, right = [], []
    for turn, rows in enumerate(unroll(mtp, decoder, learned.batch, depth)):
        # the pass that guesses the token after place p was begun turn + 1 positions before it
        chosen = rows.flatten(0, 1).index_select(0, learned.places - (turn + 1)).to(learned.table.dtype)
        with torch.autocast(chosen.device.type, enabled=False):
            logits = chosen @ learned.table.T
        losses.append(_CrossEntropy.apply(logits, learned.aim))  # type: ignore[no-untyped-call]
        right.append(logits.detach().argmax(-1) == learned.best)
    correct = torch.stack(right) & (learned.counts > 0)  # [depth, M]
    with torch.no_grad():
        path = _on_path(learned, correct).float()
        weight = (off_path + (1 - off_path) * path) * learned.counts
    total = (torch.stack(losses) * weight).sum() / weight.sum()
    return Loss(total, correct.float().sum(1) / learned.counts.sum())


class _CrossEntropy(torch.autograd.Function):
    """−Σ aim · log softmax(logits) a row, float32; the gradient is made on the way: one [M, V'] tensor is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, aim: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        rows = -(aim * log_p).sum(-1, dtype=torch.float32)
        ctx.save_for_backward(log_p.exp_().sub_(aim))
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * grad[:, None].to(difference.dtype), None


def _on_path(learned: Lesson, correct: Tensor) -> Tensor:
    """bool [depth, M]: guesses that decoding would come to. correct [depth, M]."""
    batch, depth = learned.batch, correct.shape[0]
    begun = torch.stack([learned.places - (turn + 1) for turn in range(depth)])
    spread = torch.zeros(depth, batch.tokens.numel(), dtype=torch.int32, device=correct.device)
    spread.scatter_add_(1, begun, correct.int())  # rows that do not count add nothing
    reached = walked(spread.view(depth, *batch.tokens.shape) > 0, batch.start - 1).flatten(1)
    return reached.gather(1, begun)
