"""The two graphs of a model that drafts: the decoder with what a drafter needs, and one pass of the MTP module.

docs/architecture.md ("Drafting") describes their inputs and outputs; this module is their one definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgebuild.models.config import ModelConfig
from edgebuild.models.decoder import Decoder
from edgebuild.models.mtp import make_mtp
from edgebuild.models.parts import State, Step, Weights
from edgebuild.models.rope import rope_tables


class DraftingDecoder(Decoder):
    """The decoder, which also returns its hidden rows and the embedding of the token after each of them."""

    def forward(  # type: ignore[override]
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
        following: Tensor,  # int64 [B]: the prompt's token after this chunk; -1 = the one that is sampled
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """As the decoder's, with hidden [B, q, W] and next_embedding [B, q, H] before the states."""
        batch, rows = tokens.shape
        sampled, accepted, next_token, new_length, logits, new_states = super().forward(
            tokens, length, valid, forced, kv_positions, uniform, temperature, top_k, top_p, states
        )
        taken = new_states.pop()
        # accepted drafts stand in `tokens`, so only the last committed row's next token is new
        last = torch.where(following >= 0, following, next_token)
        row = torch.arange(rows, device=tokens.device)
        shifted = tokens.gather(1, (row + 1).clamp(max=rows - 1)[None].expand(batch, -1))
        is_last = row == (forced + accepted - 1)[:, None]
        next_tokens = torch.where(is_last, last[:, None], shifted)
        embedding = F.embedding(next_tokens, self.model.embed_tokens.weight)
        return (
            *(sampled, accepted, next_token, new_length, logits),
            *(taken.view(batch, rows, self.config.draft_width), embedding, new_states),
        )

    def backbone(self, *arguments: Any) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """As the decoder's; the rows for the drafter go along to `commit`, which hands them out behind the states."""
        x, kept = self.stack(*arguments)
        hidden = self.model.finish(x)
        return hidden, [*kept, (hidden if self.config.flash is None else x,)]

    def commit(self, kept: Sequence[tuple[Tensor, ...]], accepted: Tensor) -> list[Tensor]:
        return [*super().commit(kept[:-1], accepted), kept[-1][0]]


class MtpGraph(nn.Module):
    """One draft pass: priming and the first draft over q committed rows, or a chained draft over one.

    draft_tokens  how many ids may be drafted; `draft_ids` says which. Only their embedding and head rows are held, once
                  where the model ties the two.
    """

    def __init__(
        self, config: ModelConfig, *, cache_tokens: int, draft_tokens: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config, self.cache_tokens, self.dtype = config, cache_tokens, dtype
        self.mtp = make_mtp(config, dtype)
        self.draft_embedding = Weights(draft_tokens, config.hidden_size, bias=False, dtype=dtype)
        self.draft_head = (
            None if config.tie_word_embeddings else Weights(draft_tokens, config.hidden_size, bias=False, dtype=dtype)
        )
        self.register_buffer("draft_ids", torch.zeros(draft_tokens, dtype=torch.int64), persistent=False)
        shape = (cache_tokens, config.rotary_dim // 2)
        self.register_buffer("rope_cos", torch.empty(shape, dtype=dtype), persistent=False)
        self.register_buffer("rope_sin", torch.empty(shape, dtype=dtype), persistent=False)
        self.draft_ids: Tensor
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    def states(self) -> tuple[State, ...]:
        return self.mtp.states(self.cache_tokens)

    def empty_states(self, batch: int) -> list[Tensor]:
        return [state.empty(batch) for state in self.states()]

    def constants(self) -> dict[str, Tensor]:
        """Tensors that are computed, not read from a file: name → value."""
        cos, sin = rope_tables(self.config.rope, self.config.rotary_dim, self.cache_tokens)
        return {"rope_cos": cos.to(self.dtype), "rope_sin": sin.to(self.dtype)}

    def forward(
        self,
        embedding: Tensor,  # [B, q, H] of the token after each row
        hidden: Tensor,  # [B, q, W] the model's row for the drafter, or the draft before's
        length: Tensor,  # int64 [B] position of row 0
        new_length: Tensor,  # int64 [B] length + rows that count; = length where idle
        kv_positions: Tensor,  # int64 [T] = 0..T-1
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """→ draft [B], its embedding [B, 1, H], the row that drafted it [B, 1, W], next_length [B], states.

        A chained pass takes new_length as its `length` and next_length as its `new_length`: no arithmetic in between.
        """
        batch, rows, width = hidden.shape
        committed = new_length - length
        positions = length[:, None] + torch.arange(rows, device=length.device)
        step = Step(
            batch=batch,
            rows=rows,
            length=length,
            positions=positions,
            kv_positions=kv_positions,
            cos=self.rope_cos[positions][:, None],
            sin=self.rope_sin[positions][:, None],
            forced=torch.full_like(length, rows),
            offsets=torch.zeros(1, dtype=torch.int64, device=length.device),
            tables=(self.rope_cos, self.rope_sin),
        )
        drafted_rows, written = self.mtp(embedding, hidden, step, states)
        row = (committed - 1).clamp(min=0)[:, None, None].expand(-1, -1, width)
        picked = drafted_rows.view(batch, rows, width).gather(1, row)  # [B, 1, W]
        best = self.logits(picked.view(batch, width)).argmax(-1)
        drafted = F.embedding(best, self.draft_embedding.weight)
        next_length = new_length + committed.clamp(max=1)
        return self.draft_ids[best], drafted[:, None], picked, next_length, list(written)

    def logits(self, row: Tensor) -> Tensor:
        """Of a row that drafts [B, W], over the tokens that may be drafted."""
        head = self.draft_embedding if self.draft_head is None else self.draft_head
        logits: Tensor = head(self.mtp.head_rows(row))
        return logits
