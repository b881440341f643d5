"""A module that learns: where it starts, its optimisers, and one step over one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from edgebuild.models.decoder import Decoder
from edgebuild.models.mtp import Mtp
from edgebuild.train.lesson import chain_loss, lesson
from edgebuild.train.optimise import Optimiser
from edgebuild.train.unroll import Batch

_FRESH_DEVIATION = 0.02


@dataclass(frozen=True)
class Recipe:
    """How a module is trained.

    depth          chain length in training, and the draft length that acceptance is measured at
    start          "copy": the layer is the model's last; "fresh": random, adding nothing to the residual stream yet
    optimiser      of the matrices: "adamw", or "muon" (steps made orthogonal, of AdamW's size; arXiv 2502.16982);
                   vectors always take AdamW
    learning_rate  the highest, after the warm-up
    hard           weight of the model's best token beside its distribution
    off_path       weight of guesses that decoding would not come to (edgebuild.train.lesson)
    off_path_end   the same at the end of training: it moves there from `off_path` in a straight line
    """

    depth: int = 3
    start: Literal["copy", "fresh"] = "copy"
    optimiser: Literal["adamw", "muon"] = "muon"
    learning_rate: float = 2e-3
    hard: float = 0.5
    off_path: float = 0.3
    off_path_end: float = 0.1
    weight_decay: float = 0.01


class Learner:
    """The module (float32), beside a frozen model.

    table: rows [V', H] of the model's head, tokens that may be guessed. On a GPU a step is captured once for each shape
    of batch and then replayed: launched one by one, its kernels take three times as long.
    """

    def __init__(self, decoder: Decoder, recipe: Recipe, table: Tensor, seed: int) -> None:
        self.recipe = recipe
        self._device = decoder.model.embed_tokens.weight.device
        self.mtp = start_module(decoder, recipe.start, seed).to(self._device)
        self._decoder, self._table = decoder, table
        self._low = decoder.dtype == torch.bfloat16
        self._optimiser = Optimiser(
            list(self.mtp.parameters()), muon=recipe.optimiser == "muon", weight_decay=recipe.weight_decay
        )
        self._off_path = torch.ones((), device=self._device)
        self._loss = torch.zeros((), device=self._device)
        self._agreement = torch.zeros(recipe.depth, device=self._device)
        self._captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Batch]] = {}

    def learn(self, batch: Batch, size: int, share: float, step: int) -> None:
        """One step. size: positions of answers to learn from; share: of the whole training, what has passed."""
        recipe = self.recipe
        self._optimiser.rate.fill_(recipe.learning_rate * rate(share, step))
        self._off_path.fill_(recipe.off_path + (recipe.off_path_end - recipe.off_path) * min(1.0, share))
        if self._device.type != "cuda":
            self._step(batch, size)
            return
        key = (*batch.tokens.shape, size)
        if key not in self._captured:
            self._captured[key] = self._capture(batch, size)
        graph, own = self._captured[key]
        for name in ("tokens", "hidden", "start", "length"):
            getattr(own, name).copy_(getattr(batch, name))
        graph.replay()

    @property
    def last(self) -> tuple[float, list[float]]:
        """Loss and agreement by pass of the last step; waits for it."""
        return float(self._loss), self._agreement.tolist()

    def mixed(self) -> torch.autocast:
        """bfloat16 arithmetic around the float32 module, where the model itself is in bfloat16."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._low)

    def state(self) -> dict[str, Any]:
        """For a state file."""
        return {"mtp": self.mtp.state_dict(), "optimiser": self._optimiser.tensors()}

    def take_up(self, state: dict[str, Any]) -> None:
        """What `state` gave."""
        self.mtp.load_state_dict(state["mtp"])
        for own, kept in zip(self._optimiser.tensors(), state["optimiser"], strict=True):
            own.copy_(kept)

    def _step(self, batch: Batch, size: int) -> None:
        recipe = self.recipe
        learned = lesson(batch, self._table, recipe.depth, recipe.hard, size)
        with self.mixed():
            loss = chain_loss(self.mtp, self._decoder, learned, recipe.depth, self._off_path)
        self._optimiser.clear()
        loss.total.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        self._loss.copy_(loss.total.detach())
        self._agreement.copy_(loss.agreement)

    def _capture(self, batch: Batch, size: int) -> tuple[torch.cuda.CUDAGraph, Batch]:
        """Two steps to warm up, of which nothing is kept; then the capture, which computes nothing."""
        own = Batch(batch.tokens.clone(), batch.hidden.clone(), batch.start.clone(), batch.length.clone())
        changing = [*self.mtp.parameters(), *self._optimiser.tensors()]
        kept = [tensor.detach().clone() for tensor in changing]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(own, size)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for tensor, before in zip(changing, kept, strict=True):
                tensor.copy_(before)
        self._optimiser.clear()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._captured.values()))[0].pool() if self._captured else None
        with torch.cuda.graph(graph, pool=pool):
            self._step(own, size)
        return graph, own


def start_module(decoder: Decoder, start: Literal["copy", "fresh"] = "copy", seed: int = 0) -> Mtp:
    """Where training starts, float32: fc the mean of its two halves, the norm the model's last, the layer as asked."""
    mtp = Mtp(decoder.config, torch.float32)
    hidden = decoder.config.hidden_size
    half = 0.5 * torch.eye(hidden)
    values: dict[str, Tensor] = {"fc.weight": torch.cat([half, half], dim=1), "norm.weight": decoder.model.norm.weight}
    neutral = torch.full((hidden,), 0.0 if decoder.config.zero_centred_norms else 1.0)
    values |= {f"pre_fc_norm_{name}.weight": neutral for name in ("embedding", "hidden")}
    values |= {f"layers.0.{name}": value for name, value in decoder.layers[-1].named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            if start == "fresh" and name.startswith("layers."):
                if name.endswith("norm.weight"):
                    parameter.fill_(neutral[0])
                elif name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                    parameter.zero_()
                else:
                    parameter.copy_(_FRESH_DEVIATION * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(values[name].float())
            parameter.requires_grad_(True)
    return mtp


def rate(share: float, step: int) -> float:
    """Warm-up over 50 steps, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
