"""The decoder graph: embedding → layers → norm → logits → sampling → acceptance → commit, in one pass.

Inputs, outputs and their meaning are described in docs/architecture.md ("The graph"); this module is their one
definition. Parameter names equal the tensor names of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgebuild.models import ops
from edgebuild.models.attention import Attention
from edgebuild.models.config import ModelConfig
from edgebuild.models.flash import FlashLayer, GatedResidual
from edgebuild.models.gdn import GatedDeltaNet
from edgebuild.models.hybrid_config import DELTA_NET
from edgebuild.models.moe import SparseMlp
from edgebuild.models.parts import Mlp, Norm, State, Step, Weights
from edgebuild.models.rope import rope_tables


class Layer(nn.Module):
    """Pre-norm residual block: a token mixer (`self_attn` or `linear_attn`), then a feed-forward."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(hidden, eps, dtype, zero_centred=config.zero_centred_norms)
        if config.delta is not None and config.layer_kind(index) == DELTA_NET:
            self.linear_attn = GatedDeltaNet(config.delta, hidden, eps, dtype)
        else:
            self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = Norm(hidden, eps, dtype, zero_centred=config.zero_centred_norms)
        self.mlp = (
            SparseMlp(config.moe, hidden, dtype)
            if config.moe is not None and config.moe.layers[index]
            else Mlp(hidden, config.intermediate_size, bias=config.mlp_bias, dtype=dtype)
        )

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        mixer: Attention | GatedDeltaNet = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        return mixer

    def states(self, index: int, cache_tokens: int) -> tuple[State, ...]:
        """Per-sequence tensors, in the order of `forward`'s states."""
        return self.mixer.states(index, cache_tokens)

    def commit(self, kept: Sequence[Tensor], accepted: Tensor) -> tuple[Tensor, ...]:
        """The states after the forced rows and `accepted` [B] more."""
        return self.mixer.commit(kept, accepted)

    def forward(self, x: Tensor, step: Step, states: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [B·q, hidden] → (x, what `commit` turns into the new states once acceptance is known)."""
        mixed, kept = self.mixer(self.input_layernorm(x), step, states)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Backbone(nn.Module):
    """Embedding, layers and what follows the last one: the `model.` part of a checkpoint."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        flash, self.streams = config.flash, 1 if config.flash is None else config.flash.streams
        self.embed_tokens = Weights(config.vocabulary_size, config.hidden_size, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(config, index, dtype) if flash is None else FlashLayer(config, flash, index, dtype)
            for index in range(config.layers)
        )
        if flash is None:
            self.norm = Norm(config.hidden_size, config.rms_norm_eps, dtype, zero_centred=config.zero_centred_norms)
        else:
            self.hyper_connection_mixer = GatedResidual(
                flash, config.hidden_size, config.rms_norm_eps, dtype, combine=False
            )

    @property
    def last(self) -> str:
        """The part behind the layers."""
        return "norm" if self.streams == 1 else "hyper_connection_mixer"

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [N] → what the first layer takes [N, streams · hidden]."""
        found = F.embedding(tokens, self.embed_tokens.weight)
        return found if self.streams == 1 else found.repeat(1, self.streams)

    def finish(self, x: Tensor) -> Tensor:
        """What the last layer gives [N, streams · hidden] → what the head takes [N, hidden]."""
        hidden: Tensor = self.norm(x) if self.streams == 1 else self.hyper_connection_mixer(x)[0]
        return hidden


class Decoder(nn.Module):
    """The whole step as one module.

    cache_tokens   positions that a slot's cache holds; also the length of the rope tables
    token_limit    ids the tokenizer knows: vocabulary rows past it exist in the embedding but are never sampled
    """

    def __init__(
        self, config: ModelConfig, *, cache_tokens: int, token_limit: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config, self.cache_tokens, self.token_limit, self.dtype = config, cache_tokens, token_limit, dtype
        self.model = Backbone(config, dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Weights(config.vocabulary_size, config.hidden_size, bias=False, dtype=dtype)
        )
        shape = (cache_tokens, config.rotary_dim // 2)
        self.register_buffer("rope_cos", torch.empty(shape, dtype=dtype), persistent=False)
        self.register_buffer("rope_sin", torch.empty(shape, dtype=dtype), persistent=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    def states(self) -> tuple[State, ...]:
        """Every per-sequence tensor, in the order in which the graph takes and returns them."""
        return tuple(state for layer in self.layer_states() for state in layer)

    def layer_states(self) -> list[tuple[State, ...]]:
        """The same, layer by layer."""
        return [layer.states(index, self.cache_tokens) for index, layer in enumerate(self.layers)]

    @property
    def layers(self) -> list[Layer | FlashLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, Layer | FlashLayer)]

    def constants(self) -> dict[str, Tensor]:
        """Tensors that are computed, not read from the checkpoint: name → value."""
        cos, sin = rope_tables(self.config.rope, self.config.rotary_dim, self.cache_tokens)
        return {"rope_cos": cos.to(self.dtype), "rope_sin": sin.to(self.dtype)}

    def forward(
        self,
        tokens: Tensor,  # int64 [B, q]
        length: Tensor,  # int64 [B]
        valid: Tensor,  # int64 [B]
        forced: Tensor,  # int64 [B]
        kv_positions: Tensor,  # int64 [T] = 0..T-1
        uniform: Tensor,  # float32 [B, R]
        temperature: Tensor,  # float32 [B]
        top_k: Tensor,  # int64 [B]
        top_p: Tensor,  # float32 [B]
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """One step → sampled [B, R], accepted [B], next_token [B], new_length [B], logits [B, R, V'], states."""
        batch, rows = tokens.shape
        # logits are needed from the last given row on: row forced - 1 + j, j = 0 .. R - 1
        offsets = torch.arange(uniform.shape[1], device=tokens.device)
        hidden, kept = self.backbone(tokens, length, kv_positions, states, forced, offsets)
        index = forced[:, None] - 1 + offsets  # [B, R]
        last = rows - 1
        picked = hidden.view(batch, rows, -1).gather(
            1, index.clamp(min=0).clamp(max=last)[:, :, None].expand(-1, -1, self.config.hidden_size)
        )
        logits = self.head(picked.reshape(-1, self.config.hidden_size))
        logits = logits.view(batch, uniform.shape[1], -1)[:, :, : self.token_limit].float()
        sampled = ops.sample(logits, temperature, top_k, top_p, uniform)
        # row index + 1 holds the draft that guessed what row `index` would sample
        proposed = tokens.gather(1, (index + 1).clamp(max=last))
        agrees = (index + 1 < valid[:, None]) & (sampled == proposed)
        misses = (~agrees).to(torch.int64).cumsum(1)
        accepted = (misses == 0).to(torch.int64).sum(1)
        next_token = sampled.gather(1, accepted[:, None].clamp(max=uniform.shape[1] - 1))[:, 0]
        return sampled, accepted, next_token, length + forced + accepted, logits, self.commit(kept, accepted)

    def backbone(
        self,
        tokens: Tensor,
        length: Tensor,
        kv_positions: Tensor,
        states: Sequence[Tensor],
        forced: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Hidden rows after the final norm [B·q, hidden], and per layer what `commit` needs.

        forced [B], offsets [R]: see Step; left out, every row is forced and nothing is drafted.
        """
        x, kept = self.stack(tokens, length, kv_positions, states, forced, offsets)
        return self.model.finish(x), kept

    def stack(
        self,
        tokens: Tensor,
        length: Tensor,
        kv_positions: Tensor,
        states: Sequence[Tensor],
        forced: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """As `backbone`, but the rows that the last layer gives [B·q, streams · hidden]."""
        batch, rows = tokens.shape
        positions = length[:, None] + torch.arange(rows, device=tokens.device)
        step = Step(
            batch,
            rows,
            length,
            positions,
            kv_positions,
            self.rope_cos[positions][:, None],
            self.rope_sin[positions][:, None],
            torch.full_like(length, rows) if forced is None else forced,
            torch.zeros(1, dtype=torch.int64, device=tokens.device) if offsets is None else offsets,
            tokens,
            (self.rope_cos, self.rope_sin),
        )
        x = self.model.embed(tokens.reshape(batch * rows))
        kept: list[tuple[Tensor, ...]] = []
        for layer, part in zip(self.layers, self._by_layer(states), strict=True):
            x, pending = layer(x, step, part)
            kept.append(pending)
        return x, kept

    def commit(self, kept: Sequence[tuple[Tensor, ...]], accepted: Tensor) -> list[Tensor]:
        """The states after the forced rows and `accepted` [B] more; a sequence without any keeps what it had."""
        new_states: list[Tensor] = []
        for layer, pending in zip(self.layers, kept, strict=True):
            new_states += layer.commit(pending, accepted)
        return new_states

    def _by_layer(self, states: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        parts, start = [], 0
        for layer in self.layer_states():
            parts.append(states[start : start + len(layer)])
            start += len(layer)
        return parts

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of rows [N, hidden] → [N, vocabulary]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits: Tensor = head(hidden)
        return logits

    def empty_states(self, batch: int) -> list[Tensor]:
        """Zeroed states for `batch` sequences."""
        return [state.empty(batch) for state in self.states()]
