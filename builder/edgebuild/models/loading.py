"""A checkpoint's weights in the torch module: for the golden vectors and for tests, never for the export.

`load_decoder` holds the whole model. `reference_logits` streams it: one layer's weights in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgebuild.checkpoint import Checkpoint
from edgebuild.models.config import ModelConfig
from edgebuild.models.decoder import Decoder
from edgebuild.models.parts import Step

_GRANULARITY = 64  # positions of a cache, as the plan rounds them: whole blocks of a sparse attention


@dataclass(frozen=True)
class Sequence1:
    """Token ids of one sequence, and the first position whose logits are wanted."""

    ids: tuple[int, ...]
    first: int


def load_decoder(checkpoint: Checkpoint, *, cache_tokens: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder with real weights, in evaluation mode. Holds one copy of the weights in `dtype`."""
    decoder = _empty_decoder(checkpoint, cache_tokens, dtype)
    _fill(decoder, "", checkpoint)
    return decoder.eval()


@torch.no_grad()
def reference_logits(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence1],
    *,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[float], None] = lambda _fraction: None,
    hidden: list[Tensor] | None = None,
) -> list[Tensor]:
    """Teacher-forced logits, float32 [len(ids) - first, V'] for each sequence, computed in `dtype`.

    hidden: is given the rows that a drafter takes, [len(ids), W] for each sequence.
    One pass over the layers for all sequences: peak memory is the largest layer or the embedding, not the model.
    """
    longest = max(len(sequence.ids) for sequence in sequences)
    decoder = _empty_decoder(checkpoint, -(-longest // _GRANULARITY) * _GRANULARITY, dtype)
    embedding = decoder.model.embed_tokens
    with _filled(embedding, "model.embed_tokens.", checkpoint):
        rows = [decoder.model.embed(torch.tensor(sequence.ids)) for sequence in sequences]
    steps = [_whole_sequence(decoder, sequence.ids) for sequence in sequences]
    for index, (layer, states) in enumerate(zip(decoder.layers, decoder.layer_states(), strict=True)):
        with _filled(layer, f"model.layers.{index}.", checkpoint):
            for place, step in enumerate(steps):
                rows[place] = layer(rows[place], step, [state.empty(1) for state in states])[0]
        progress((index + 1) / len(decoder.layers))
    last = decoder.model.last
    with _filled(decoder.model.get_submodule(last), f"model.{last}.", checkpoint):
        finished = [decoder.model.finish(x) for x in rows]
    if hidden is not None:
        hidden.extend(finished if decoder.config.flash is None else rows)
    rows = finished
    name = "model.embed_tokens." if decoder.lm_head is None else "lm_head."
    head = decoder.model.embed_tokens if decoder.lm_head is None else decoder.lm_head
    with _filled(head, name, checkpoint):
        return [
            decoder.head(x[sequence.first :])[:, : decoder.token_limit].float()
            for x, sequence in zip(rows, sequences, strict=True)
        ]


def _empty_decoder(checkpoint: Checkpoint, cache_tokens: int, dtype: torch.dtype) -> Decoder:
    config = ModelConfig.from_hf(checkpoint.config)
    limit = min(checkpoint.tokenizer.token_limit, config.vocabulary_size)
    with torch.device("meta"):
        decoder = Decoder(config, cache_tokens=cache_tokens, token_limit=limit, dtype=dtype)
    for name, value in decoder.constants().items():
        setattr(decoder, name, value)
    return decoder


def _whole_sequence(decoder: Decoder, ids: Sequence[int]) -> Step:
    tokens = len(ids)
    positions = torch.arange(tokens)
    cos, sin = decoder.rope_cos[positions][None, None], decoder.rope_sin[positions][None, None]
    none = torch.zeros(1, dtype=torch.int64)
    return Step(1, tokens, none, positions[None], positions, cos, sin, torch.full_like(none, tokens), none,
                torch.tensor(ids)[None], (decoder.rope_cos, decoder.rope_sin))  # fmt: skip


@contextmanager
def _filled(module: nn.Module, prefix: str, checkpoint: Checkpoint) -> Iterator[nn.Module]:
    """`module` with its weights for the length of a `with` block; afterwards it holds no memory."""
    _fill(module, prefix, checkpoint)
    try:
        yield module
    finally:
        module.to_empty(device="meta")


def _fill(module: nn.Module, prefix: str, checkpoint: Checkpoint) -> None:
    for name, empty in list(module.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        value = nn.Parameter(checkpoint.read(prefix + name).to(empty.dtype), requires_grad=False)
        setattr(module.get_submodule(owner), attribute, value)
