"""A module that learns: where it starts, its optimisers, and one step over one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from edgebuild.models.decoder import Decoder
from edgebuild.models.mtp import Mtp
from edgebuild.train.lesson import Lesson, Loss, chain_loss

_FRESH_DEVIATION = 0.02


@dataclass(frozen=True)
class Recipe:
    """How a module is trained.

    depth          chain length in training, and the draft length that acceptance is measured at
    start          "copy": the layer is the model's last; "fresh": random, adding nothing to the residual stream yet
    optimiser      of the matrices: "adamw", or "muon" (steps made orthogonal, of AdamW's size; arXiv 2502.16982);
                   vectors always take AdamW
    learning_rate  the highest, after the warm-up
    hard           weight of the model's best token beside its distribution; inf = the best token alone
    off_path       weight of guesses that decoding would not come to (edgebuild.train.lesson)
    off_path_end   the same at the end of training: it moves there from `off_path` in a straight line
    """

    depth: int = 3
    start: Literal["copy", "fresh"] = "copy"
    optimiser: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    hard: float = 0.5
    off_path: float = 1.0
    off_path_end: float = 1.0
    weight_decay: float = 0.01


class Learner:
    """The module (float32), beside a frozen model."""

    def __init__(self, decoder: Decoder, recipe: Recipe, seed: int) -> None:
        device = decoder.model.embed_tokens.weight.device
        self.recipe = recipe
        self.mtp = start_module(decoder, recipe.start, seed).to(device)
        self._decoder = decoder
        self._mixed = decoder.dtype == torch.bfloat16
        matrices = [p for p in self.mtp.parameters() if p.ndim == 2]
        others = [p for p in self.mtp.parameters() if p.ndim != 2]
        rest = others if recipe.optimiser == "muon" else [*matrices, *others]
        decay = recipe.weight_decay
        self._optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=decay)
        ]
        if recipe.optimiser == "muon":
            self._optimisers.append(
                torch.optim.Muon(matrices, lr=recipe.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )

    def learn(self, learned: Lesson, share: float, step: int) -> Loss:
        """One step. share: of the whole training, what has passed; step: number of steps taken before."""
        recipe = self.recipe
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate * rate(share, step)
        off_path = recipe.off_path + (recipe.off_path_end - recipe.off_path) * min(1.0, share)
        with self.mixed():
            loss = chain_loss(self.mtp, self._decoder, learned, recipe.depth, off_path)
        self.mtp.zero_grad(set_to_none=True)
        loss.total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.mtp.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
        return loss

    def mixed(self) -> torch.autocast:
        """bfloat16 arithmetic around the float32 module, where the model itself is in bfloat16."""
        return torch.autocast(self._decoder.model.embed_tokens.weight.device.type, torch.bfloat16, enabled=self._mixed)

    def state(self) -> dict[str, Any]:
        """For a state file."""
        return {"mtp": self.mtp.state_dict(), "optimisers": [each.state_dict() for each in self._optimisers]}

    def take_up(self, state: dict[str, Any]) -> None:
        """What `state` gave."""
        self.mtp.load_state_dict(state["mtp"])
        for optimiser, each in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(each)


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
