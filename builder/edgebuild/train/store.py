"""Sequences on the device, with the model's hidden rows, as batches of like length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgebuild.models.decoder import Decoder
from edgebuild.train.forward import whole
from edgebuild.train.generate import Sample
from edgebuild.train.unroll import Batch

_WIDTH_STEP = 64
_MEMORY_SHARE = 0.3  # of the device's free memory, for hidden rows


@dataclass(frozen=True)
class Shape:
    """Of a batch. width: positions; size: positions of answers that are learned from (what is above is left out)."""

    batch: int
    width: int
    size: int


class Order:
    """In which order sequences are learned from: batches of a few fixed shapes, every sequence once before any again.

    A sequence falls into the narrowest width that holds it; a width with less than a batch joins the next wider one.
    """

    def __init__(self, samples: Sequence[Sample], batch: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._queue: list[tuple[Shape, list[int]]] = []
        widths: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            widths.setdefault(-(-len(sample.ids) // _WIDTH_STEP) * _WIDTH_STEP, []).append(index)
        self._groups: list[tuple[Shape, list[int]]] = []
        waiting: list[int] = []
        for width in sorted(widths):
            waiting += widths[width]
            if len(waiting) >= batch or width == max(widths):
                answers = sum(len(samples[index].ids) - samples[index].start for index in waiting) / len(waiting)
                size = min(batch * width, -(-int(1.1 * batch * answers) // 64) * 64)
                self._groups.append((Shape(batch, width, size), waiting))
                waiting = []

    def next(self) -> tuple[Shape, list[int]]:
        """The next batch; the last of a width is filled up with sequences of that width."""
        if not self._queue:
            for shape, indices in self._groups:
                mixed = self._rng.sample(indices, len(indices))
                mixed += self._rng.choices(indices, k=-len(mixed) % shape.batch)
                parts = [mixed[first : first + shape.batch] for first in range(0, len(mixed), shape.batch)]
                self._queue += [(shape, part) for part in parts]
            self._rng.shuffle(self._queue)
        return self._queue.pop()


class Store:
    """All tokens in one row; hidden rows computed once where they fit (float16 or bfloat16), else batch by batch."""

    def __init__(self, decoder: Decoder, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self._decoder = decoder
        self._device = decoder.model.embed_tokens.weight.device
        lengths = torch.tensor([len(sample.ids) for sample in samples], dtype=torch.int64)
        self._lengths: list[int] = lengths.tolist()
        self._length = lengths.to(self._device)
        self._offset = (lengths.cumsum(0) - lengths).to(self._device)
        self._start = torch.tensor([sample.start for sample in samples], dtype=torch.int64).to(self._device)
        flat = [token for sample in samples for token in sample.ids]
        self._tokens = torch.tensor(flat, dtype=torch.int64).to(self._device)
        self._hidden: Tensor | None = None
        needed = len(flat) * decoder.config.hidden_size * decoder.model.embed_tokens.weight.element_size()
        if self._device.type == "cuda" and needed < _MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            self._hidden = self._precompute()

    @torch.no_grad()
    def take(self, indices: Sequence[int], width: int | None = None) -> Batch:
        """Those sequences, padded on the right to `width`, or to the longest."""
        longest = width or max(self._lengths[index] for index in indices)
        chosen = torch.tensor(indices, dtype=torch.int64).to(self._device, non_blocking=True)
        places = self._offset[chosen][:, None] + torch.arange(longest, device=self._device)
        length = self._length[chosen]
        outside = torch.arange(longest, device=self._device) >= length[:, None]
        places = places.clamp_max(len(self._tokens) - 1)
        tokens = self._tokens[places].masked_fill(outside, 0)
        hidden = whole(self._decoder, tokens) if self._hidden is None else self._hidden[places]
        return Batch(tokens, hidden, self._start[chosen], length)

    def _precompute(self) -> Tensor:
        weight = self._decoder.model.embed_tokens.weight
        hidden = torch.empty(len(self._tokens), weight.shape[1], dtype=weight.dtype, device=self._device)
        order = sorted(range(len(self.samples)), key=self._lengths.__getitem__)
        for first in range(0, len(order), 512):
            part = order[first : first + 512]
            batch = self.take(part)
            rows = torch.arange(batch.tokens.shape[1], device=self._device)
            inside = rows < batch.length[:, None]
            places = self._offset[torch.tensor(part, device=self._device)][:, None] + rows
            hidden[places[inside]] = batch.hidden[inside]
        return hidden
