"""A cell: one captured shape. What the plan chose, what the engine was built for, what the scheduler may launch.

This module knows shapes only: no device, no model, no queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, order=True)
class Cell:
    """One shape of the decoder graph. One cell = one optimization profile = one CUDA graph.

    kind        "prefill": `query_rows` is the chunk size and batch is 1. "decode": rows are 1 + drafts.
    batch       sequences in one launch; they lie in `batch` neighbouring slots
    query_rows  token rows per sequence in one launch
    kv_tier     cache positions that attention reads; every row's position must lie below it
    """

    kind: Kind
    batch: int
    query_rows: int
    kv_tier: int

    def __post_init__(self) -> None:
        if self.kind not in ("prefill", "decode"):
            raise ValueError(f"cell kind {self.kind!r}: expected 'prefill' or 'decode'")
        for name in ("batch", "query_rows", "kv_tier"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"cell {name} is {value!r}: expected a positive whole number")
        if self.kind == "prefill" and self.batch != 1:
            raise ValueError(f"a prefill cell has batch 1, got {self.batch}")
        if self.kv_tier < self.query_rows:
            raise ValueError(f"kv_tier {self.kv_tier} is smaller than query_rows {self.query_rows}")

    @property
    def logit_rows(self) -> int:
        """Rows per sequence that get logits: the last valid one in prefill, every row in decode."""
        return 1 if self.kind == "prefill" else self.query_rows

    @property
    def label(self) -> str:
        """Short and stable, for logs, metrics and file names: `prefill-128@1024`, `decode-2x4@512`."""
        shape = f"{self.query_rows}" if self.kind == "prefill" else f"{self.batch}x{self.query_rows}"
        return f"{self.kind}-{shape}@{self.kv_tier}"
