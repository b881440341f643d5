"""The MTP module unrolled over whole sequences: every position drafts a chain, all positions at once.

Pass c of position p takes the embedding of token p + c and the hidden row of pass c − 1 (the model's own in the first),
sits at position p + c − 1 and guesses token p + c + 1. It attends, as at run time, to what the first pass wrote up to p
and to the chain's own rows. Knows no optimiser and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from edgebuild.models.attention import Attention
from edgebuild.models.decoder import Decoder, Layer
from edgebuild.models.mtp import Mtp
from edgebuild.train.forward import feed_forward, join_heads, split_heads


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right. tokens [B, L]; hidden [B, L, H]; start, length [B]: answer and end."""

    tokens: Tensor
    hidden: Tensor
    start: Tensor
    length: Tensor


def unroll(mtp: Mtp, decoder: Decoder, batch: Batch, depth: int) -> list[Tensor]:
    """Rows after the module's norm [B, L, H], one tensor for each of `depth` passes."""
    layer = mtp.layers[0]
    if not isinstance(layer, Layer) or not isinstance(layer.mixer, Attention):
        raise TypeError("the MTP layer is not full attention")
    attention = layer.mixer
    _, rows = batch.tokens.shape
    group = attention.heads // attention.kv_heads
    own = mtp.fc.weight.dtype  # the module's precision, which may be above the model's
    hidden = batch.hidden.to(own)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for turn in range(depth):
        following = F.pad(batch.tokens[:, turn + 1 :], (0, turn + 1))
        x = mtp.entry(F.embedding(following, decoder.model.embed_tokens.weight).to(own), hidden).to(own)
        cos = decoder.rope_cos[None, None, turn : turn + rows]
        sin = decoder.rope_sin[None, None, turn : turn + rows]
        query, key, value = split_heads(attention, layer.input_layernorm(x), cos, sin)
        keys.append(key.repeat_interleave(group, 1))
        values.append(value.repeat_interleave(group, 1))
        x = feed_forward(layer, x + join_heads(attention, _mix(query, keys, values)))
        hidden = mtp.norm(x)
        outputs.append(hidden)
    return outputs


def _mix(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Causal attention over the first pass, and over the own row of every later one. All [B, heads, L, D]."""
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    rows = query.shape[2]
    scores = (query @ keys[0].transpose(-1, -2)).float()
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    own = [(query * key).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = (torch.cat([scores, *own], dim=-1) * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
    mixed: Tensor = weights[..., :rows] @ values[0]
    for place, value in enumerate(values[1:]):
        mixed = mixed + weights[..., rows + place, None] * value
    return mixed


def drafting_rows(batch: Batch, turn: int) -> Tensor:
    """bool [B, L]: positions from which pass `turn` guesses a token of the answer."""
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return (place >= batch.start[:, None] - 1) & (place + turn + 2 < batch.length[:, None])


@torch.no_grad()
def correct_guesses(
    mtp: Mtp, decoder: Decoder, batch: Batch, depth: int, allowed: Sequence[Tensor | None] = (None,)
) -> list[Tensor]:
    """Whether each pass, fed the true tokens before, guesses the token that came: bool [depth, B, L].

    One tensor for each entry of `allowed`, the ids that may be guessed; None: every one.
    """
    found: list[list[Tensor]] = [[] for _ in allowed]
    for turn, rows in enumerate(unroll(mtp, decoder, batch, depth)):
        logits = decoder.head(rows)[..., : decoder.token_limit]
        truth = F.pad(batch.tokens[:, turn + 2 :], (0, turn + 2), value=-1)
        for passes, ids in zip(found, allowed, strict=True):
            guess = logits.argmax(-1) if ids is None else ids[logits[..., ids].argmax(-1)]
            passes.append((guess == truth) & drafting_rows(batch, turn))
    return [torch.stack(passes) for passes in found]
