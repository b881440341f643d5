"""What the reference drafter drafts after each position of a golden sequence, in float32, teacher-forced.

The drafter is run as the runtime runs it: a pass over the prompt's rows, a pass over each further one, and a chain from
each that leaves no trace. Knows the module, not the file golden.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgebuild.drafter import DrafterWeights, load_mtp
from edgebuild.models.config import ModelConfig
from edgebuild.models.drafting import MtpGraph
from edgebuild.models.loading import Sequence1


@dataclass(frozen=True)
class Drafts:
    """A chain: the tokens, and by how much each led, (first − second) ÷ the larger of |first| and the row's RMS."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


class ReferenceDrafter:
    """Of the model's embedding and head only the rows that are needed are held. draft_tokens: ids, ascending."""

    def __init__(self, config: ModelConfig, drafter: DrafterWeights, draft_tokens: Sequence[int]) -> None:
        self._config, self._drafter, self._draft_tokens = config, drafter, tuple(draft_tokens)

    @torch.no_grad()
    def drafts(self, sequences: Sequence[Sequence1], hidden: Sequence[Tensor], length: int) -> list[tuple[Drafts, ...]]:
        """For each sequence the chains of `length` tokens after positions first .. len(ids) − 2.

        hidden [len(ids), W]: the model's rows for the drafter. The token after a position is the sequence's own.
        """
        rows = torch.tensor(self._draft_tokens)
        with torch.device("meta"):
            reach = max(len(sequence.ids) for sequence in sequences) + length
            reach = -(-reach // self._config.block_tokens) * self._config.block_tokens  # a cache holds whole blocks
            graph = MtpGraph(self._config, cache_tokens=reach, draft_tokens=len(rows))
        graph.mtp = load_mtp(self._drafter, self._config, torch.float32)
        for name, value in graph.constants().items():
            setattr(graph, name, value)
        graph.draft_ids = rows
        table = self._drafter.read("model.embed_tokens.weight")
        graph.draft_embedding.weight = torch.nn.Parameter(table[rows].float(), requires_grad=False)
        following = [table[torch.tensor(sequence.ids[1:])].float() for sequence in sequences]
        del table
        if graph.draft_head is not None:
            head = self._drafter.read("lm_head.weight")[rows].float()
            graph.draft_head.weight = torch.nn.Parameter(head, requires_grad=False)
        return [
            _chains(graph, sequence, own[None], embedding[None], length)
            for sequence, own, embedding in zip(sequences, hidden, following, strict=True)
        ]


def _chains(graph: MtpGraph, sequence: Sequence1, hidden: Tensor, embedding: Tensor, length: int) -> tuple[Drafts, ...]:
    """hidden, embedding [1, n, H]: a row of the model, and the embedding of the token after it."""
    positions = torch.arange(graph.cache_tokens)
    states: Sequence[Tensor] = graph.empty_states(1)
    found = []
    start = 0
    for end in range(sequence.first + 1, len(sequence.ids)):
        rows = (embedding[:, start:end], hidden[:, start:end])
        before, after = torch.tensor([start]), torch.tensor([end])
        tokens: list[int] = []
        margins: list[float] = []
        chain, kept = states, None
        for _ in range(length):
            draft, drafted, row, following, written = graph(*rows, before, after, positions, chain)
            tokens.append(int(draft))
            margins.append(_margin(graph, row[0]))
            rows, before, after, chain = (drafted, row), after, following, written
            kept = kept or written
        found.append(Drafts(tuple(tokens), tuple(margins)))
        states, start = kept or states, end
    return tuple(found)


def _margin(graph: MtpGraph, row: Tensor) -> float:
    """By how much the best token leads after a row that drafts [1, W]."""
    logits = graph.logits(row)[0]
    if len(logits) == 1:
        return 1.0
    first, second = logits.topk(2).values.tolist()
    rms = float(logits.square().mean().sqrt())
    return float((first - second) / max(abs(first), rms, 1e-30))
