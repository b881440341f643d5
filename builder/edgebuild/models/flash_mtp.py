"""The multi-token-prediction module of Qwen3.8-Flash-Next. Its state is the cache and index keys of one sparse layer.

Each residual stream s of the model's row before its final mixer, R [streams, H], enters with the next token's
embedding:

    x_s = fc_embedding(pre_fc_norm_embedding(E[t_{p+1}])) + fc_hidden(pre_fc_norm_hidden(R)_s)

pre_fc_norm_hidden being one norm over all streams together. One decoder layer of the model's kind (sparse attention and
experts between two mixtures, no n-gram embedding) gives the streams that a chained pass takes as its R; a mixer of the
module's own reads from them the row for the model's head.

Transformers 5.17 lists these tensors and drops them: the reference has no forward for them. This one was derived from
their names and shapes and from public re-implementations that agree (SGLang's `qwen4_exp_mtp`, as ports of it describe
it, and llama.cpp's conversion of its `nextn` block); tests compare with a naive one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edgebuild.models.config import ModelConfig
from edgebuild.models.flash import FlashLayer, GatedResidual
from edgebuild.models.mtp_config import mtp_config
from edgebuild.models.parts import Norm, State, Step, Weights


class FlashMtp(nn.Module):
    """One draft pass over q rows, with the interface of `models.mtp.Mtp`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        own = mtp_config(config)
        if own.flash is None:
            raise ValueError(f"{own.family} has no residual streams")
        self.config, self.dtype, self.streams = own, dtype, own.flash.streams
        hidden, eps = own.hidden_size, own.rms_norm_eps
        self.pre_fc_norm_embedding = Norm(hidden, eps, dtype, zero_centred=True)
        self.pre_fc_norm_hidden = Norm(self.streams * hidden, eps, dtype, zero_centred=True)
        self.fc_embedding = Weights(hidden, hidden, bias=False, dtype=dtype)
        self.fc_hidden = Weights(hidden, hidden, bias=False, dtype=dtype)
        self.layers = nn.ModuleList([FlashLayer(own, own.flash, 0, dtype)])
        self.hyper_connection_mixer = GatedResidual(own.flash, hidden, eps, dtype, combine=False)

    @property
    def layer(self) -> FlashLayer:
        layer: FlashLayer = self.layers[0]  # type: ignore[assignment]
        return layer

    def states(self, cache_tokens: int) -> tuple[State, ...]:
        """Keys, values and index keys of the module's own."""
        return tuple(
            State(f"mtp.{state.name}", state.kind, state.shape, state.dtype)
            for state in self.layer.mixer.states(0, cache_tokens)
        )

    def entry(self, embedding: Tensor, streams: Tensor) -> Tensor:
        """Embedding of the next token [..., H] and streams [..., S·H] → what the layer takes [N, S·H]."""
        hidden = self.config.hidden_size
        shared = self.fc_embedding(self.pre_fc_norm_embedding(embedding).reshape(-1, hidden))
        own = self.fc_hidden(self.pre_fc_norm_hidden(streams).reshape(-1, hidden))
        mixed: Tensor = own.view(-1, self.streams, hidden) + shared[:, None]
        return mixed.reshape(-1, self.streams * hidden)

    def forward(
        self, embedding: Tensor, streams: Tensor, step: Step, states: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """embedding [B, q, H], streams [B, q, S·H] → (streams behind the layer [B·q, S·H], the module's new states)."""
        x, written = self.layer(self.entry(embedding, streams), step, states)
        return x, written

    def head_rows(self, streams: Tensor) -> Tensor:
        """What the model's head takes [N, H] of rows that `forward` gave [N, S·H]."""
        rows: Tensor = self.hyper_connection_mixer(streams)[0]
        return rows
