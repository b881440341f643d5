"""The residual path of Qwen3.8-Flash-Next: several streams that every block reads as a mixture and writes with weights.

Semantics as Transformers' `qwen4_exp`. Token mixers and experts are those of the other hybrids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgebuild.models.attention import Attention
from edgebuild.models.config import ModelConfig
from edgebuild.models.flash_config import FlashConfig
from edgebuild.models.gdn import GatedDeltaNet
from edgebuild.models.hybrid_config import DELTA_NET
from edgebuild.models.moe import SparseMlp
from edgebuild.models.ngram import NgramEmbedding
from edgebuild.models.parts import Mlp, Norm, State, Step, Weights


class GatedResidual(nn.Module):
    """Reads one hidden vector out of the streams; `combine`: also says how much of a block's output each takes."""

    def __init__(
        self, config: FlashConfig, hidden: int, eps: float, dtype: torch.dtype, *, combine: bool = True
    ) -> None:
        super().__init__()
        wide = config.streams * hidden
        self.streams, self.hidden = config.streams, hidden
        self.hc_norm = Norm(wide, eps, dtype, zero_centred=True, groups=config.streams)
        self.input_mix_weight_down = Weights(config.lowrank, wide, bias=False, dtype=dtype)
        self.input_mix_weight_up = Weights(wide, config.lowrank, bias=False, dtype=dtype)
        self.block_inject_weight = Weights(config.streams, wide, bias=False, dtype=dtype) if combine else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, streams · hidden] → (mixed [N, hidden], normed streams, which `inject` takes)."""
        normed = self.hc_norm(x)
        mix: Tensor = self.input_mix_weight_up(F.silu(self.input_mix_weight_down(normed) / self.streams)).sigmoid()
        return (mix * normed).view(-1, self.streams, self.hidden).mean(1), normed

    def inject(self, x: Tensor, normed: Tensor, out: Tensor) -> Tensor:
        """Streams x plus the block's output [N, hidden], weighted for each stream by its normed self."""
        if self.block_inject_weight is None:
            raise ValueError("the last mixer injects nothing")
        weights = 2 * (self.block_inject_weight(normed) / self.streams).sigmoid()
        added: Tensor = (out[:, None] * weights[:, :, None]).view(-1, self.streams * self.hidden)
        return x + added


class FlashLayer(nn.Module):
    """A decoder layer between two mixtures of the streams; some layers add an n-gram embedding to the streams first."""

    def __init__(self, config: ModelConfig, flash: FlashConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.delta is not None and config.layer_kind(index) == DELTA_NET:
            self.linear_attn = GatedDeltaNet(config.delta, hidden, eps, dtype)
        else:
            self.self_attn = Attention(config, dtype)
        self.mlp = (
            SparseMlp(config.moe, hidden, dtype)
            if config.moe is not None and config.moe.layers[index]
            else Mlp(hidden, config.intermediate_size, bias=config.mlp_bias, dtype=dtype)
        )
        self.attn_hyper_connection = GatedResidual(flash, hidden, eps, dtype)
        self.mlp_hyper_connection = GatedResidual(flash, hidden, eps, dtype)
        ngram = flash.ngram
        self.ple = (
            NgramEmbedding(ngram, index, hidden, flash.streams, config.vocabulary_size, eps, dtype)
            if ngram is not None and index in ngram.layers
            else None
        )

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        mixer: Attention | GatedDeltaNet = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        return mixer

    def states(self, index: int, cache_tokens: int) -> tuple[State, ...]:
        own = self.mixer.states(index, cache_tokens)
        return own if self.ple is None else (*own, *self.ple.states(index))

    def forward(self, x: Tensor, step: Step, states: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [B·q, streams · hidden] → (streams, what `commit` needs)."""
        later: tuple[Tensor, ...] = ()
        if self.ple is not None:
            states, own = states[:-2], states[-2:]
            added, later = self.ple(x, step, own)
            x = x + added
        mixed, normed = self.attn_hyper_connection(x)
        out, kept = self.mixer(mixed, step, states)
        x = self.attn_hyper_connection.inject(x, normed, out)
        mixed, normed = self.mlp_hyper_connection(x)
        return self.mlp_hyper_connection.inject(x, normed, self.mlp(mixed)), (*kept, *later)

    def commit(self, kept: Sequence[Tensor], accepted: Tensor) -> tuple[Tensor, ...]:
        if self.ple is None:
            return self.mixer.commit(kept, accepted)
        return (*self.mixer.commit(kept[:-2], accepted), *self.ple.commit(kept[-2:], accepted))
