"""Sequences on the device, with the model's hidden rows, as batches of like length."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgebuild.models.decoder import Decoder
from edgebuild.train.forward import whole
from edgebuild.train.generate import Sample
from edgebuild.train.unroll import Batch

_MEMORY_SHARE = 0.3  # of the device's free memory, for hidden rows


class Order:
    """In which order some sequences are learned from: batches of like length, every sequence once before any again."""

    def __init__(self, lengths: Mapping[int, int], seed: int) -> None:
        self._lengths = lengths  # of each sequence, by its index
        self._rng = random.Random(seed)
        self._queue: list[list[int]] = []

    def next(self, batch: int) -> list[int]:
        """Indices of the next batch."""
        if not self._queue:
            order = sorted(self._lengths, key=lambda index: self._lengths[index] + self._rng.random() * 16)
            self._queue = [order[first : first + batch] for first in range(0, len(order), batch)]
            self._rng.shuffle(self._queue)
        return self._queue.pop()


class Store:
    """All tokens in one row; hidden rows computed once where they fit (float16 or bfloat16), else batch by batch."""

    def __init__(self, decoder: Decoder, samples: Sequence[Sample], seed: int) -> None:
        self.samples = samples
        self._decoder = decoder
        self._device = decoder.model.embed_tokens.weight.device
        lengths = torch.tensor([len(sample.ids) for sample in samples], dtype=torch.int64)
        self._lengths: list[int] = lengths.tolist()
        self._order = Order(dict(enumerate(self._lengths)), seed)
        self._length = lengths.to(self._device)
        self._offset = (lengths.cumsum(0) - lengths).to(self._device)
        self._start = torch.tensor([sample.start for sample in samples], dtype=torch.int64).to(self._device)
        flat = [token for sample in samples for token in sample.ids]
        self._tokens = torch.tensor(flat, dtype=torch.int64).to(self._device)
        self._hidden: Tensor | None = None
        needed = len(flat) * decoder.config.hidden_size * decoder.model.embed_tokens.weight.element_size()
        if self._device.type == "cuda" and needed < _MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            self._hidden = self._precompute()

    def next(self, batch: int) -> Batch:
        """The next batch of sequences of like length."""
        return self.take(self._order.next(batch))

    @torch.no_grad()
    def take(self, indices: Sequence[int]) -> Batch:
        """Those sequences, padded on the right."""
        longest = max(self._lengths[index] for index in indices)
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
