"""The shape that each cell gives to each graph input: pure arithmetic, no TensorRT.

One cell = one optimization profile with min = opt = max, so that the compiler specialises every kernel. A cell of one
query row and batch 1 is built with two rows: TensorRT stores the weights a second time for one-row matrix products
(measured: 21.4 MB + 11.5 MB on a 19.2 MB model). The second row costs 9 % of a 0.6B step on an H200, and four rows cost
what two do. The runtime reads the rows of a profile back from the engine and pads with an invalid row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgert.cells import Cell

from edgebuild.errors import EngineError

# graph input -> its symbolic dimensions, "width" as the graph has it; every other input is a state: [batch, fixed ...]
INPUT_DIMS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("batch", "rows"),
    "length": ("batch",),
    "valid": ("batch",),
    "forced": ("batch",),
    "kv_positions": ("tier",),
    "uniform": ("batch", "logit_rows"),
    "temperature": ("batch",),
    "top_k": ("batch",),
    "top_p": ("batch",),
    "following": ("batch",),
    "embedding": ("batch", "rows", "width"),
    "hidden": ("batch", "rows", "width"),
    "new_length": ("batch",),
}
DECODER_NEEDS = ("tokens", "length", "kv_positions")
DRAFTER_NEEDS = ("embedding", "hidden", "length", "new_length", "kv_positions")
MIN_MATRIX_ROWS = 2


@dataclass(frozen=True)
class EngineShape:
    """What an optimization profile is built for; `rows` and `logit_rows` are per sequence."""

    batch: int
    rows: int
    logit_rows: int
    tier: int

    def dim(self, symbol: str) -> int:
        """The size of one symbolic dimension: batch, rows, logit_rows or tier."""
        return int(getattr(self, symbol))


def engine_shape(cell: Cell, *, min_matrix_rows: int = MIN_MATRIX_ROWS) -> EngineShape:
    """The profile of a cell. `min_matrix_rows` is the fewest rows (batch × rows) a matrix product may have."""
    rows = max(cell.query_rows, -(-min_matrix_rows // cell.batch))
    logit_rows = 1 if cell.kind == "prefill" else rows
    return EngineShape(batch=cell.batch, rows=rows, logit_rows=logit_rows, tier=max(cell.kv_tier, rows))


def draft_shapes(
    cells: Sequence[Cell], *, draft_length: int, cache_tokens: int, min_matrix_rows: int = MIN_MATRIX_ROWS
) -> tuple[EngineShape, ...]:
    """The drafter's profiles: the pass over each cell's rows, and a chained row after it; each shape once.

    A tier reaches `draft_length` positions further than the cell's, as far as the cache goes. A chunk's chain takes a
    decode chain's profile where one reaches as far.
    """
    passes: list[EngineShape] = []
    chained: list[EngineShape] = []
    for cell in sorted(cells, key=lambda cell: cell.kind):  # decode before prefill, else in the order given
        shape = engine_shape(cell, min_matrix_rows=min_matrix_rows)
        tier = max(shape.tier, min(shape.tier + draft_length, cache_tokens))
        passes.append(EngineShape(cell.batch, shape.rows, 1, tier))
        # what a pass leaves is one row a sequence, side by side: only a single sequence can be padded
        chain = EngineShape(cell.batch, min_matrix_rows if cell.batch == 1 else 1, 1, tier)
        reaches = any(each.batch == chain.batch and each.tier >= chain.tier for each in chained)
        if draft_length > 1 and not (cell.kind == "prefill" and reaches):
            chained.append(chain)
    return tuple(dict.fromkeys((*passes, *chained)))


def input_shapes(
    shape: EngineShape, declared: Mapping[str, Sequence[int]], needs: Sequence[str] = DECODER_NEEDS
) -> dict[str, tuple[int, ...]]:
    """Concrete shapes of every graph input. `declared` holds the network's own shapes, −1 where dynamic.

    Raises EngineError when the network lacks an input, has one of another rank, or a state has a dynamic dimension
    other than the batch.
    """
    missing = [name for name in needs if name not in declared]
    if missing:
        raise EngineError(
            f"the ONNX graph has no input named {', '.join(missing)} (it has {', '.join(declared)})",
            hint="export it with this version of edgebuild",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name, dims in declared.items():
        if name in INPUT_DIMS:
            symbols = INPUT_DIMS[name]
            if len(symbols) != len(dims):
                raise EngineError(f"graph input {name} has {len(dims)} dimensions, expected {list(symbols)}")
            wanted = tuple(
                int(have) if symbol == "width" else shape.dim(symbol)
                for symbol, have in zip(symbols, dims, strict=True)
            )
        else:
            wanted = (shape.batch, *(int(dim) for dim in dims[1:]))
        for axis, (have, want) in enumerate(zip(dims, wanted, strict=True)):
            if want < 0:
                raise EngineError(f"input {name}{list(dims)}: dimension {axis} is dynamic; only the batch may be")
            if have not in (-1, want):
                raise EngineError(f"graph input {name}{list(dims)}: dimension {axis} is {have}, the cell needs {want}")
        shapes[name] = wanted
    return shapes
