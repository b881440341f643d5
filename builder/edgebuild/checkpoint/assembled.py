"""Tensors that some files hold in parts, presented whole.

- Experts: published shards carry one tensor for each expert and projection (`mlp.experts.7.gate_proj.weight`);
  Transformers 5 also writes them stacked (`mlp.experts.gate_up_proj`), which is what the project reads.
- The n-gram table of Qwen3.8-Flash-Next: rows in shards (`ngram_embedding.shard_12.weight`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from edgebuild.checkpoint.base import Checkpoint, TokenizerFiles
from edgebuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(?P<owner>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_SHARD = re.compile(r"(?P<owner>.*\.ngram_embedding)\.(?P<part>shard)_(?P<index>\d+)\.weight")
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MORE = "fetch the missing shards"


def assembled(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint where every tensor is whole, else one that presents them so."""
    split = any(_EXPERT.fullmatch(name) or _SHARD.fullmatch(name) for name in checkpoint.names())
    return AssembledCheckpoint(checkpoint) if split else checkpoint


class AssembledCheckpoint(Checkpoint):
    """A checkpoint seen through assembly. Parts are read one at a time into the whole.

    Every assembled tensor is a list of entries; an entry is one or several parts joined by their rows. Experts: one
    entry each, stacked [E, rows, columns]. A table: a single entry, [rows, columns].
    """

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.path, self.config, self.files, self.skipped = inner.path, inner.config, inner.files, inner.skipped
        found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._plain = set()
        for name in inner.names():
            match = _EXPERT.fullmatch(name) or _SHARD.fullmatch(name)
            if match is None:
                self._plain.add(name)
            else:
                found[match["owner"]][match["part"]].add(int(match["index"]))
        self._entries: dict[str, tuple[tuple[str, ...], ...]] = {}
        for owner, parts in found.items():
            count = max(max(indices) for indices in parts.values()) + 1
            if "shard" in parts:
                _refuse_gaps(self.path.name, f"{owner}.shard_N.weight", parts["shard"], count)
                self._entries[f"{owner}.weight"] = (tuple(f"{owner}.shard_{i}.weight" for i in range(count)),)
                continue
            for stacked, names in _STACKED.items():
                for part in names:
                    _refuse_gaps(self.path.name, f"{owner}.N.{part}.weight", parts[part], count)
                self._entries[f"{owner}.{stacked}"] = tuple(
                    tuple(f"{owner}.{i}.{part}.weight" for part in names) for i in range(count)
                )

    def names(self) -> frozenset[str]:
        return frozenset(self._plain | self._entries.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            return self.inner.shape(name)
        shapes = [tuple(self.inner.shape(part) for part in entry) for entry in self._entries[name]]
        widths = {part[1:] for entry in shapes for part in entry}
        heights = {sum(part[0] for part in entry) for entry in shapes}
        if len(widths) > 1 or len(heights) > 1:
            raise CheckpointError(
                f"{self.path.name}: the parts of {name} differ in shape: {sorted(heights)} rows of {sorted(widths)}"
            )
        whole = (heights.pop(), *widths.pop())
        return whole if self._is_table(name) else (len(shapes), *whole)

    def dtype(self, name: str) -> str:
        return self.inner.dtype(self._entries[name][0][0] if name in self._entries else name)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            return self.inner.read(name)
        import torch

        first = self.inner.read(self._entries[name][0][0])
        whole = torch.empty(self.shape(name), dtype=first.dtype)
        places = whole[None] if self._is_table(name) else whole
        for place, entry in zip(places, self._entries[name], strict=True):
            row = 0
            for part in entry:
                tensor = self.inner.read(part)
                place[row : row + tensor.shape[0]] = tensor
                row += tensor.shape[0]
        return whole

    def load_tokenizer(self) -> TokenizerFiles:
        return self.inner.tokenizer

    def _is_table(self, name: str) -> bool:
        return name.endswith(".ngram_embedding.weight")


def _refuse_gaps(checkpoint: str, name: str, found: set[int], count: int) -> None:
    absent = sorted(set(range(count)) - found)
    if absent:
        raise CheckpointError(
            f"{checkpoint}: {name} is missing for {len(absent)} of {count}, for example N = {absent[0]}", hint=_MORE
        )
