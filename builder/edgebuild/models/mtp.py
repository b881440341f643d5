"""The multi-token-prediction module, as the Qwen family defines it: it drafts the token after the next one.

x = fc(concat[pre_fc_norm_embedding(E[t_{p+1}]), pre_fc_norm_hidden(h_p)]) → one decoder layer of the model's own kind →
norm → the model's head. h_p is the model's hidden row after its final norm. Further drafts feed the normed output back
with the token just drafted, one position on. Parameter names are those of the published checkpoints, below `mtp.`.
Flash-Next has a module of its own (flash_mtp.py). Neither knows the model's embedding nor its head: rows come in, rows
go out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edgebuild.models.config import ModelConfig
from edgebuild.models.decoder import Layer
from edgebuild.models.flash_mtp import FlashMtp
from edgebuild.models.mtp_config import mtp_config
from edgebuild.models.parts import Norm, State, Step, Weights


class Mtp(nn.Module):
    """One draft pass over q rows. Its cache is its own; a row sits at the position of the hidden row that it takes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        own = mtp_config(config)
        self.config, self.dtype = own, dtype

        def norm() -> Norm:
            return Norm(own.hidden_size, own.rms_norm_eps, dtype, zero_centred=own.zero_centred_norms)

        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        self.fc = Weights(own.hidden_size, 2 * own.hidden_size, bias=False, dtype=dtype)
        self.layers = nn.ModuleList([Layer(own, 0, dtype)])
        self.norm = norm()

    @property
    def layer(self) -> Layer:
        layer: Layer = self.layers[0]  # type: ignore[assignment]
        return layer

    def states(self, cache_tokens: int) -> tuple[State, ...]:
        """The module's own keys and values, under names that no state of the decoder has."""
        return tuple(
            State(f"mtp.{state.name}", state.kind, state.shape, state.dtype)
            for state in self.layer.mixer.states(0, cache_tokens)
        )

    def entry(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What the layer takes: embedding of the next token [..., H] and hidden row [..., H] → [..., H]."""
        both = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1)
        mixed: Tensor = self.fc(both.reshape(-1, both.shape[-1]))
        return mixed.view(embedding.shape)

    def forward(
        self, embedding: Tensor, hidden: Tensor, step: Step, states: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """embedding, hidden [B, q, H] → (rows after `norm` [B·q, H], the module's new states)."""
        x = self.entry(embedding, hidden).reshape(step.batch * step.rows, self.config.hidden_size)
        x, written = self.layer(x, step, states)
        return self.norm(x), written

    def head_rows(self, rows: Tensor) -> Tensor:
        """What the model's head takes of rows that `forward` gave: they are normed already."""
        return rows


def make_mtp(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Mtp | FlashMtp:
    """The module that this model's checkpoints hold."""
    return Mtp(config, dtype) if config.flash is None else FlashMtp(config, dtype)
