"""Text that the model writes itself: prompts through its chat template, answers sampled in large batches.

Knows the model and its tokenizer; nothing of drafters. An answer ends with the first end-of-sequence token *after* the
prompt (chat prompts hold such tokens too), or after `max_tokens`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from edgert.text import TextCodec
from tokenizers import Tokenizer
from torch import Tensor

from edgebuild.checkpoint import Checkpoint
from edgebuild.models.decoder import Decoder
from edgebuild.train.forward import new_cache, one_more, whole
from edgebuild.train.prompts import Prompt

_WIDTH_STEP = 32  # cache positions read are a multiple of this
_LOOK_EVERY = 16  # tokens between two looks at which answers have ended
_NOTHING = -1
_CACHE_SHARE = 0.6
_CPU_CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class Sample:
    """Prompt and answer as one list of ids; the answer starts at `start`."""

    task: str
    ids: tuple[int, ...]
    start: int


def pack(samples: Sequence[Sample]) -> dict[str, Any]:
    """Samples as a few tensors, for a file: millions of numbers one by one take minutes to read."""
    return {
        "tasks": [sample.task for sample in samples],
        "ids": torch.tensor([token for sample in samples for token in sample.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(sample.ids) for sample in samples], dtype=torch.int32),
        "starts": torch.tensor([sample.start for sample in samples], dtype=torch.int32),
    }


def unpack(packed: Mapping[str, Any]) -> list[Sample]:
    """What `pack` was given."""
    ids, samples, first = packed["ids"].tolist(), [], 0
    for task, length, start in zip(packed["tasks"], packed["lengths"].tolist(), packed["starts"].tolist(), strict=True):
        samples.append(Sample(task, tuple(ids[first : first + length]), start))
        first += length
    return samples


@dataclass(frozen=True)
class Encoded:
    task: str
    ids: tuple[int, ...]


def encode_prompts(checkpoint: Checkpoint, prompts: Sequence[Prompt], longest: int) -> list[Encoded]:
    """Prompts as ids, through the chat template where there is one; those longer than `longest` tokens are dropped."""
    codec = _codec(checkpoint)
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


def go_on(
    checkpoint: Checkpoint,
    decoder: Decoder,
    openings: Sequence[Prompt],
    *,
    max_tokens: int,
    batch: int,
    seed: int,
) -> list[Prompt]:
    """Prompts whose ends the model writes, at temperature 1, inside the user's turn; what does not end is left out.

    What a user may ask is wider than any list of fillings, and a chat model has seen it.
    """
    codec = _codec(checkpoint)
    if not codec.has_chat_template:
        return []
    encoded = []
    for opening in openings:
        text = codec.render_chat([{"role": "user", "content": opening.text}], add_generation_prompt=False)
        before = text[: text.rindex(opening.text) + len(opening.text)]
        encoded.append(Encoded(opening.task, tuple(codec.encode(before, add_special=False))))
    eos = set(checkpoint.tokenizer.eos_token_ids)
    written = generate(decoder, encoded, temperature=1.0, max_tokens=max_tokens, eos=tuple(eos), batch=batch, seed=seed)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
    prompts = []
    for opening, sample in zip(openings, written, strict=True):
        answer = sample.ids[sample.start :]
        if len(answer) > 1 and answer[-1] in eos:
            prompts.append(Prompt(opening.task, opening.text + tokenizer.decode(list(answer[:-1])).rstrip()))
    return list(dict.fromkeys(prompts))


def _codec(checkpoint: Checkpoint) -> TextCodec:
    files = checkpoint.tokenizer
    tokenizer = Tokenizer.from_str(files.tokenizer_json)

    def spelling(token: int | None) -> str:
        return "" if token is None else tokenizer.id_to_token(token) or ""

    return TextCodec(
        tokenizer,
        chat_template=files.chat_template,
        bos_token=spelling(files.bos_token_id),
        eos_token=spelling(files.eos_token_ids[0] if files.eos_token_ids else None),
    )


def together(decoder: Decoder, positions: int, most: int) -> int:
    """How many sequences of so many positions can be written at once: their caches take at most _CACHE_SHARE of the
    device's free memory, on a CPU _CPU_CACHE_BYTES."""
    cache = new_cache(decoder, 0, 1)
    one = cache.keys[0]
    each_bytes = 2 * len(cache.keys) * one.shape[1] * one.shape[3] * one.element_size() * positions
    free_bytes = _CPU_CACHE_BYTES
    if one.is_cuda:
        kept_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by PyTorch, for whoever asks
        free_bytes = int(_CACHE_SHARE * (torch.cuda.mem_get_info()[0] + kept_bytes))
    return max(1, min(most, free_bytes // each_bytes))


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
    """One answer for each prompt, in order; when `stop` says so after a batch, only what was answered by then.

    `batch` at most, fewer where memory is short. A batch holds prompts of like length; batches come in random order.
    temperature 0 = greedy.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    if prompts:
        batch = together(decoder, len(prompts[order[-1]].ids) + max_tokens + _WIDTH_STEP, batch)
    parts = [order[first : first + batch] for first in range(0, len(order), batch)]
    random.Random(seed).shuffle(parts)
    samples: dict[int, Sample] = {}
    for number, part in enumerate(parts):
        if number and stop():
            break
        ids = [prompts[index].ids for index in part]
        answers = _answers(decoder, ids, temperature, max_tokens, eos, seed + number)
        for index, answer in zip(part, answers, strict=True):
            prompt = prompts[index]
            samples[index] = Sample(prompt.task, (*prompt.ids, *answer), len(prompt.ids))
    return [samples[index] for index in sorted(samples)]


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
    answers = torch.full((len(prompts), max_tokens), _NOTHING, dtype=torch.int64, device=device)
    rows = torch.arange(len(prompts), device=device)  # the answers still being written
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for count in range(max_tokens):
        token = _pick(decoder, hidden, temperature, generator)
        answers[rows, count] = token
        alive &= ~torch.isin(token, ends)
        if count % _LOOK_EVERY == _LOOK_EVERY - 1:
            left = int(alive.sum())
            if left == 0:
                break
            if left < 0.75 * len(rows):
                kept = alive.nonzero()[:, 0]
                cache.keep(kept)
                rows, token, alive, lengths = rows[kept], token[kept], alive[kept], lengths[kept]
        width = min(capacity, -(-(longest + count + 1) // _WIDTH_STEP) * _WIDTH_STEP)
        hidden = one_more(decoder, token, lengths + count, cache, width)
    return [_until_end(answer, set(eos)) for answer in answers.tolist()]


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
        if token == _NOTHING:
            return answer[:place]
    return answer
