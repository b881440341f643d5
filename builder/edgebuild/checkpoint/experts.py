"""Experts as stacked tensors, whichever way the files hold them.

Published shards carry one tensor for each expert and projection (`mlp.experts.7.gate_proj.weight`); Transformers 5 also
writes them stacked (`mlp.experts.gate_up_proj`). The project reads the second: here the first is presented as it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from edgebuild.checkpoint.base import Checkpoint, TokenizerFiles
from edgebuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def with_stacked_experts(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint where no tensor belongs to a single expert, else one whose experts are stacked."""
    return StackedExperts(checkpoint) if any(_EXPERT.fullmatch(name) for name in checkpoint.names()) else checkpoint


class StackedExperts(Checkpoint):
    """A checkpoint seen through stacking. A stacked tensor [E, rows, columns] is read one expert at a time."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.path, self.config, self.files, self.skipped = inner.path, inner.config, inner.files, inner.skipped
        found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._plain = set()
        for name in inner.names():
            match = _EXPERT.fullmatch(name)
            if match is None:
                self._plain.add(name)
            else:
                found[match["layer"]][match["part"]].add(int(match["index"]))
        self._sources: dict[str, tuple[tuple[str, ...], ...]] = {}
        for layer, parts in found.items():
            experts = max(max(indices) for indices in parts.values()) + 1
            for stacked, names in _STACKED.items():
                _refuse_gaps(self.path.name, layer, parts, names, experts)
                self._sources[f"{layer}.{stacked}"] = tuple(
                    tuple(f"{layer}.{index}.{part}.weight" for part in names) for index in range(experts)
                )

    def names(self) -> frozenset[str]:
        return frozenset(self._plain | self._sources.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._sources:
            return self.inner.shape(name)
        shapes = {tuple(self.inner.shape(part) for part in expert) for expert in self._sources[name]}
        if len(shapes) > 1:
            raise CheckpointError(f"{self.path.name}: the experts of {name} differ in shape: {sorted(shapes)[:2]}")
        parts = next(iter(shapes))
        return (len(self._sources[name]), sum(part[0] for part in parts), *parts[0][1:])

    def dtype(self, name: str) -> str:
        return self.inner.dtype(self._sources[name][0][0] if name in self._sources else name)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._sources:
            return self.inner.read(name)
        import torch

        first = self.inner.read(self._sources[name][0][0])
        whole = torch.empty(self.shape(name), dtype=first.dtype)
        for place, expert in zip(whole, self._sources[name], strict=True):
            row = 0
            for part in expert:
                tensor = self.inner.read(part)
                place[row : row + tensor.shape[0]] = tensor
                row += tensor.shape[0]
        return whole

    def load_tokenizer(self) -> TokenizerFiles:
        return self.inner.tokenizer


def _refuse_gaps(checkpoint: str, layer: str, parts: dict[str, set[int]], names: tuple[str, ...], experts: int) -> None:
    for part in names:
        absent = sorted(set(range(experts)) - parts[part])
        if absent:
            raise CheckpointError(
                f"{checkpoint}: {layer}.N.{part}.weight is missing for {len(absent)} of {experts} experts, "
                f"for example N = {absent[0]}",
                hint="fetch the missing shards",
            )
