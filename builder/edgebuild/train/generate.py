"""Text that the model writes itself: prompts through its chat template, answers sampled in large batches.

Knows the model and its tokenizer; nothing of drafters. An answer ends with the first end-of-sequence token *after* the
prompt (chat prompts hold such tokens too), or after `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from edgert.text import TextCodec
from tokenizers import Tokenizer
from torch import Tensor

from edgebuild.checkpoint import Checkpoint
from edgebuild.models.decoder import Decoder
from edgebuild.train.forward import new_cache, one_more, whole
from edgebuild.train.prompts import Prompt

_WIDTH_STEP = 32  # cache positions read are a multiple of this


@dataclass(frozen=True)
class Sample:
    """Prompt and answer as one list of ids; the answer starts at `start`."""

    task: str
    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Encoded:
    task: str
    ids: tuple[int, ...]


def encode_prompts(checkpoint: Checkpoint, prompts: Sequence[Prompt], longest: int) -> list[Encoded]:
    """Prompts as ids, through the chat template where there is one; those longer than `longest` tokens are dropped."""
    files = checkpoint.tokenizer
    tokenizer = Tokenizer.from_str(files.tokenizer_json)

    def spelling(token: int | None) -> str:
        return "" if token is None else tokenizer.id_to_token(token) or ""

    codec = TextCodec(
        tokenizer,
        chat_template=files.chat_template,
        bos_token=spelling(files.bos_token_id),
        eos_token=spelling(files.eos_token_ids[0] if files.eos_token_ids else None),
    )
    encoded = []
    for prompt in prompts:
        if codec.has_chat_template:
            text = codec.render_chat([{"role": "user", "content": prompt.text}])
            ids = codec.encode(text, add_special=False)
        else:
            ids = codec.encode(prompt.text)
        if 0 < len(ids) <= longest:
            encoded.append(Encoded(prompt.task, tuple(ids)))
    return encoded


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompts: Sequence[Encoded],
    *,
    temperature: float,
    max_tokens: int,
    eos: Sequence[int],
    batch: int,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> list[Sample]:
    """One answer for each prompt, in order; fewer when `stop` says so after a batch. temperature 0 = greedy."""
    samples: list[Sample] = []
    for first in range(0, len(prompts), batch):
        if first and stop():
            break
        part = prompts[first : first + batch]
        answers = _answers(decoder, [each.ids for each in part], temperature, max_tokens, eos, seed + first)
        for prompt, answer in zip(part, answers, strict=True):
            samples.append(Sample(prompt.task, (*prompt.ids, *answer), len(prompt.ids)))
    return samples


def _answers(
    decoder: Decoder,
    prompts: Sequence[tuple[int, ...]],
    temperature: float,
    max_tokens: int,
    eos: Sequence[int],
    seed: int,
) -> list[list[int]]:
    device = decoder.model.embed_tokens.weight.device
    longest = max(len(ids) for ids in prompts)
    capacity = longest + max_tokens + _WIDTH_STEP
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    cache = new_cache(decoder, len(prompts), capacity)
    hidden = whole(decoder, tokens.to(device), cache)[torch.arange(len(prompts), device=device), lengths - 1]
    generator = torch.Generator(device=device).manual_seed(seed)
    ends = torch.tensor(sorted(eos), device=device, dtype=torch.int64)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    written: list[Tensor] = []
    for count in range(max_tokens):
        token = _pick(decoder, hidden, temperature, generator)
        written.append(token)
        alive = alive & ~torch.isin(token, ends)
        if count % 16 == 15 and not bool(alive.any()):
            break
        width = min(capacity, -(-(longest + count + 1) // _WIDTH_STEP) * _WIDTH_STEP)
        hidden = one_more(decoder, token, lengths + count, cache, width)
    answers = torch.stack(written, 1).tolist()
    return [_until_end(answer, set(eos)) for answer in answers]


def _pick(decoder: Decoder, hidden: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    logits = decoder.head(hidden)[:, : decoder.token_limit].float()
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits / temperature - noise.clamp_min(1e-20).log()).argmax(-1)  # Gumbel: -log of an exponential


def _until_end(answer: list[int], eos: set[int]) -> list[int]:
    for place, token in enumerate(answer):
        if token in eos:
            return answer[: place + 1]
    return answer
